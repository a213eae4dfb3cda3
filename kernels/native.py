"""The C++ kernels of the CPU, called through plain pointers; where they were not built, the torch references run, and the log says so once."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from functools import cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

VERSION = 10  # of the structures' layout; the library names its own

_KERNELS = tuple(
    f"semantide_{name}"
    for name in (
        "beam_attention",
        "prefix_attention",
        "normalise_rows",
        "turn_rows",
        "gate_rows",
        "beam_select",
        "sampled_sums",
        "sampled_gradients",
        "jagged_fusion",
        "unique_ids",
        "segment_order",
        "gather_rows",
        "segment_sums",
        "step_rows",
        "beam_linear",
        "linear_attention",
        "short_convolution",
        "beam_convolution",
    )
)

_logger = logging.getLogger(__name__)
_REBUILD = "build it with `make native`, or install the package again with a C++ compiler present"


# Arguments travel as one packed structure: its layout is that of the structure of the same name in arguments.h (q a number, P an address, f a factor).
BEAM_ATTENTION = Struct("8q P3q 2P4q 3P4q 2P f")
PREFIX_ATTENTION = Struct("5q P2q 3P4q 2P f")
NORMALISE_ROWS = Struct("3q 3P f")
TURN_ROWS = Struct("5q 5P f")
GATE_ROWS = Struct("q 3P")
BEAM_SELECT = Struct("6q 10P q 3P q 10P")
SAMPLED_SOFTMAX = Struct("9q 15P 2f")
UNIQUE_IDS = Struct("2q P P 3P")
SEGMENT_ORDER = Struct("2q P 2P")
GATHER_ROWS = Struct("2q 3P")
SEGMENT_SUMS = Struct("2q 4P")
STEP_ROWS = Struct("2q 4P q P 5P 4f")
BEAM_CONVOLUTION = Struct("7q P q 2P 2P P P")
BEAM_LINEAR = Struct("9q 3P 6q 2P 2P 2q 3P 2P")
LINEAR_ATTENTION = Struct("7q P2q P2q P2q 3P 2P 4P 4P 6P")
SHORT_CONVOLUTION = Struct("3q Pq 2P P P P 3P")
JAGGED_FUSION = Struct("8q 3P 6q 3P 2P 2P P 2q 5P 2P f")


@cache
def library() -> ctypes.CDLL | None:
    """The loaded library, or None where there is none that fits."""
    folder = Path(__file__).parent
    found = [path for suffix in importlib.machinery.EXTENSION_SUFFIXES if (path := folder / f"_native{suffix}").exists()]
    if not found:
        _logger.warning("the C++ kernels are not built, so the slower torch references run: %s", _REBUILD)
        return None
    try:
        loaded = ctypes.CDLL(str(found[0]))
        loaded.semantide_version.restype = ctypes.c_int64
        version = int(loaded.semantide_version())
    except (OSError, AttributeError) as error:
        _logger.warning("the C++ kernels in %s cannot be loaded (%s), so the slower torch references run: %s", found[0], error, _REBUILD)
        return None
    if version != VERSION:
        _logger.warning("the C++ kernels in %s are of version %d, not %d, so the slower torch references run: %s", found[0], version, VERSION, _REBUILD)
        return None
    for name in _KERNELS:
        function = getattr(loaded, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64]
    loaded.semantide_limit.restype, loaded.semantide_limit.argtypes = ctypes.c_int64, [ctypes.c_int64]
    loaded.semantide_instructions.restype = ctypes.c_char_p
    return loaded


def instructions() -> str | None:
    """Which instruction set the kernels use, or None without them."""
    loaded = library()
    return None if loaded is None else loaded.semantide_instructions().decode()


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The library where it can take these tensors: float32 in this machine's memory, and no gradient is asked for."""
    if any(x.dtype != torch.float32 or not x.is_cpu for x in tensors) or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    return library()


def call(loaded: ctypes.CDLL, name: str, arguments: bytes) -> int:
    """Run one kernel on as many threads as torch would use; the caller keeps the tensors behind the addresses alive."""
    return int(getattr(loaded, name)(arguments, torch.get_num_threads()))
