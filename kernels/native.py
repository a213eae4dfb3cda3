"""The C++ kernels of the CPU, called through plain pointers; where they were not built, the torch references run, and the log says so once."""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch

VERSION = 1  # of the structures below; the library names its own

_logger = logging.getLogger(__name__)
_REBUILD = "build it with `make native`, or install the package again with a C++ compiler present"


def _fields(*groups: tuple[Any, str]) -> list[tuple[str, Any]]:
    return [(name, kind) for kind, names in groups for name in names.split()]


_I, _P = ctypes.c_int64, ctypes.c_void_p


class BeamAttention(ctypes.Structure):
    """Arguments of ``semantide_beam_attention``: ``struct BeamAttention`` of native.cpp."""

    _fields_ = _fields(
        (_I, "requests width heads groups share size steps own_rows"),
        (_P, "q"),
        (_I, "q_request q_beam q_head"),
        (_P, "prompt_k prompt_v"),
        (_I, "prompt_k_row prompt_k_head prompt_v_row prompt_v_head"),
        (_P, "offsets own_k own_v"),
        (_I, "own_k_row own_k_head own_v_row own_v_head"),
        (_P, "ancestors out"),
        (ctypes.c_float, "scale"),
    )


class BeamSelect(ctypes.Structure):
    """Arguments of ``semantide_beam_select``: ``struct BeamSelect`` of native.cpp."""

    _fields_ = _fields(
        (_I, "requests width room num_codes among_children"),
        (_P, "logits nodes live scores widths offsets codes leaf_bounds child_bounds counts"),
        (_I, "num_leaves"),
        (_P, "mask_of owners excluded"),
        (_I, "num_excluded"),
        (_P, "out_parents out_codes out_nodes out_scores out_steps kept dead_ends children visited dropped"),
    )


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
        loaded.semantide_version.restype = _I
        version = int(loaded.semantide_version())
    except (OSError, AttributeError) as error:
        _logger.warning("the C++ kernels in %s cannot be loaded (%s), so the slower torch references run: %s", found[0], error, _REBUILD)
        return None
    if version != VERSION:
        _logger.warning("the C++ kernels in %s are of version %d, not %d, so the slower torch references run: %s", found[0], version, VERSION, _REBUILD)
        return None
    for name in ("semantide_beam_attention", "semantide_beam_select"):
        function = getattr(loaded, name)
        function.restype, function.argtypes = _I, [_P, _I]
    loaded.semantide_limit.restype, loaded.semantide_limit.argtypes = _I, [_I]
    loaded.semantide_instructions.restype = ctypes.c_char_p
    return loaded


def instructions() -> str | None:
    """Which instruction set the kernels use, or None without them."""
    loaded = library()
    return None if loaded is None else loaded.semantide_instructions().decode()


def call(loaded: ctypes.CDLL, name: str, arguments: ctypes.Structure) -> int:
    """Run one kernel on as many threads as torch would use; the caller keeps the tensors behind the pointers alive."""
    return int(getattr(loaded, name)(ctypes.addressof(arguments), torch.get_num_threads()))


