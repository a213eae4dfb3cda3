"""Which code made an artifact."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def code_version() -> str:
    """Package version and a digest of the installed source, as in ``0.2.0+src.1f2e3d4c5b6a``."""
    try:
        number = version("semantide")
    except PackageNotFoundError:
        number = "0"
    sha = hashlib.sha256()
    rooms = Path(__file__).resolve().parent.parent
    for room in ("kernels", "shared", "services"):
        for path in sorted((rooms / room).rglob("*.py")):
            sha.update(path.relative_to(rooms).as_posix().encode())
            sha.update(path.read_bytes())
    return f"{number}+src.{sha.hexdigest()[:12]}"
