"""Memory that a long-running process of ours gets back from its tensors stays with it.

glibc hands large blocks back to the system at once, and each of their pages is made and zeroed anew at the next allocation of the same size: in virtual
machines that costs more than the work on it. A training step asks for the same sizes again and again, so keeping them costs no more than its peak.
"""

from __future__ import annotations

import ctypes
import sys

import torch

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # of malloc.h
_KEPT_BYTES = (1 << 31) - 1
_STEP_BYTES = 64 << 20


def keep_freed_memory(keep: bool = True) -> bool:
    """Keep it from now on, or (for comparisons) hand it back again; whether this system's allocator can be told."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    if not keep:
        return bool(mallopt(_MMAP_THRESHOLD, 128 << 10) and mallopt(_TRIM_THRESHOLD, 128 << 10) and mallopt(_TOP_PAD, 128 << 10))
    # One arena: those of other threads cannot hold large blocks.
    return bool(mallopt(_MMAP_THRESHOLD, 1 << 30) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_TOP_PAD, _STEP_BYTES) and mallopt(_ARENA_MAX, 1))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory that this process held so far, on CUDA that of its device; 0 where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
