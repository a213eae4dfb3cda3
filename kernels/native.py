"""The C++ kernels of the CPU, called through plain pointers; where they were not built, the torch references run, and the log says so once."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from functools import cache
from pathlib import Path
from struct import Struct

import torch

VERSION = 1  # of the structures' layout; the library names its own

_logger = logging.getLogger(__name__)
_REBUILD = "build it with `make native`, or install the package again with a C++ compiler present"


# Arguments travel as one packed structure: its layout is that of the structure of the same name in native.cpp (q a number, P an address, f a factor).
BEAM_ATTENTION = Struct("8q P3q 2P4q 3P4q 2P f")
BEAM_SELECT = Struct("5q 10P q 3P q 10P")


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
    for name in ("semantide_beam_attention", "semantide_beam_select"):
        function = getattr(loaded, name)
        function.restype, function.argtypes = ctypes.c_int64, [ctypes.c_char_p, ctypes.c_int64]
    loaded.semantide_limit.restype, loaded.semantide_limit.argtypes = ctypes.c_int64, [ctypes.c_int64]
    loaded.semantide_instructions.restype = ctypes.c_char_p
    return loaded


def instructions() -> str | None:
    """Which instruction set the kernels use, or None without them."""
    loaded = library()
    return None if loaded is None else loaded.semantide_instructions().decode()


def call(loaded: ctypes.CDLL, name: str, arguments: bytes) -> int:
    """Run one kernel on as many threads as torch would use; the caller keeps the tensors behind the addresses alive."""
    return int(getattr(loaded, name)(arguments, torch.get_num_threads()))
