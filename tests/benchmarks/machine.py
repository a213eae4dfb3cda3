"""What a benchmark's numbers were taken on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from semantide.kernels import native


def machine() -> dict[str, Any]:
    """Processor, cores, torch, and the C++ kernels' instruction set."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return {"cpu": cpu, "cores": os.cpu_count(), "torch": torch.__version__, "native": native.instructions()}
