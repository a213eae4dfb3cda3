"""The baselines of linear_decode.py: a state of each beam's own, and states rebuilt from records; in C++ as ours is, built where it runs."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from struct import Struct

import torch
from torch import Tensor

from semantide.kernels.beam_linear_attention import BeamRecords

_STEP = Struct("4q 5P P P P 3P P 3P P")


@cache
def _library() -> ctypes.CDLL:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        sys.exit("the baselines are C++: install a compiler, or name one with CXX")
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "linear_states.so"
        flags = ["-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-w"]
        subprocess.run([compiler, *flags, f"-I{here.parents[1] / 'kernels'}", str(here / "linear_states.cpp"), "-o", str(built)], check=True)
        loaded = ctypes.CDLL(str(built))
    loaded.linear_states_step.restype, loaded.linear_states_step.argtypes = None, [ctypes.c_char_p, ctypes.c_int64]
    return loaded


def own_states_step(tokens: tuple[Tensor, ...], states_MHdd: Tensor, parents_B: Tensor, into_BHdd: Tensor) -> Tensor:
    """Beams with a state of their own each: those of ``parents_B`` are turned by the tokens into the new beams', in place where they are the same tensor."""
    q, k, v, g, beta = tokens
    out = torch.empty_like(v)
    beams, heads, size = v.shape
    assert size % 64 == 0 and all(x.is_contiguous() for x in (*tokens, states_MHdd, into_BHdd, parents_B))
    addresses = [x.data_ptr() for x in (q, k, v, g, beta, states_MHdd, into_BHdd, parents_B)]
    _library().linear_states_step(_STEP.pack(beams, heads, size, 0, *addresses, *(0,) * 7, out.data_ptr()), torch.get_num_threads())
    return out


def replayed_step(tokens: tuple[Tensor, ...], states_MHdd: Tensor, bases_B: Tensor, records: BeamRecords, rows_BS: Tensor, fresh: BeamRecords) -> Tensor:
    """Each beam's state is rebuilt from its base and its records, row by row in registers, and then read; the new records go to ``fresh``."""
    q, k, v, g, beta = tokens
    out = torch.empty_like(v)
    beams, heads, size = v.shape
    kept = [x for each in (records, fresh) for x in (each.k_NGd, each.delta_NHe, each.decay_NH1)]
    assert size % 64 == 0 and rows_BS.shape[1] < 64 and all(x.is_contiguous() for x in (*tokens, states_MHdd, bases_B, rows_BS, *kept))
    addresses = [x.data_ptr() for x in (q, k, v, g, beta, states_MHdd)]
    after = [bases_B.data_ptr(), *(x.data_ptr() for x in kept[:3]), rows_BS.data_ptr(), *(x.data_ptr() for x in kept[3:]), out.data_ptr()]
    _library().linear_states_step(_STEP.pack(beams, heads, size, rows_BS.shape[1], *addresses, 0, *after), torch.get_num_threads())
    return out
