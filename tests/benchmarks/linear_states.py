"""The baselines of linear attention: a state of each beam's own, and states rebuilt from records; in C++ as ours is, built where it runs.

``OwnStatesDecoder`` is a whole decoder whose beams have states of their own, gathered when they are reordered.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from struct import Struct

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.beam_linear_attention import BeamRecords
from semantide.shared.decoding.ancestry import Ancestry
from semantide.shared.decoding.kv_pool import KVLease
from semantide.shared.models.generator_decoder import DecodingState, GeneratorDecoder, PromptKV
from semantide.shared.models.generator_layers import Layer
from semantide.shared.models.linear_memory import LinearBeams, LinearMemory

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
    assert len(fresh) == len(bases_B) == len(rows_BS) == beams
    addresses = [x.data_ptr() for x in (q, k, v, g, beta, states_MHdd)]
    after = [bases_B.data_ptr(), *(x.data_ptr() for x in kept[:3]), rows_BS.data_ptr(), *(x.data_ptr() for x in kept[3:]), out.data_ptr()]
    _library().linear_states_step(_STEP.pack(beams, heads, size, rows_BS.shape[1], *addresses, 0, *after), torch.get_num_threads())
    return out


class OwnStates(LinearMemory):
    """A state and last inputs of each beam's own, gathered when beams are reordered."""

    def __init__(self, memory: LinearMemory) -> None:
        self.__dict__.update(memory.__dict__)
        self.inputs = [layer.end.inputs_BQC for layer in self._layers]
        self.states = [layer.end.state_BHde for layer in self._layers]

    def extend(self, parents_B: Tensor, ancestry: Ancestry, whole: bool = False) -> list[int]:
        """Gather."""
        self.inputs = [x[parents_B] for x in self.inputs]
        self.states = [x.index_select(0, parents_B) for x in self.states]
        return [0] * len(ancestry.counts)

    def make_room(self, rows: int, used: int) -> None:
        """It keeps no records."""

    def step(self, index: int, layer: Layer, x_BD: Tensor, beams: LinearBeams) -> Tensor:
        """Turn every beam's state."""
        mixer = layer.linear_attn
        x_BD = layer.input_layernorm(x_BD)
        seen = torch.cat([self.inputs[index], mixer.in_proj_qkv(x_BD)[:, None]], 1)
        self.inputs[index] = seen[:, 1:]
        given = mixer.operands(x_BD, F.silu(torch.einsum("bqc,cq->bc", seen, mixer.taps_CK)))
        tokens = tuple(x.float().contiguous() for x in given[:5] if x is not None)
        states = self.states[index]
        return given.result(own_states_step(tokens, states, torch.arange(len(x_BD)), states).to(x_BD.dtype))

    def keep(self, requests: Sequence[int], beams_B: Tensor, rows_N: Tensor) -> None:
        """Go on with these beams only."""
        self.inputs, self.states = [x[beams_B] for x in self.inputs], [x[beams_B] for x in self.states]


class OwnStatesDecoder(GeneratorDecoder):
    """Beams of softmax layers share their prompt as ours do; those of linear ones have states of their own."""

    def kv_bytes(self, prompt_tokens: int, width: int, remembered: bool = True) -> int:
        """With twice the states of one layer, which is gathered."""
        size, rows = self.footprint.linear, super().kv_bytes(prompt_tokens, width, remembered)
        layers = [layer for layer in self.generator.layers if layer.linear]
        return rows + width * size.own_state * (len(layers) + 1) // max(1, len(layers))

    @torch.inference_mode()
    def begin(
        self,
        tokens_T: Tensor,
        offsets_R1: Tensor,
        cached: Sequence[PromptKV | None] | None = None,
        leases: Sequence[KVLease] | None = None,
        remembered: Sequence[bool] | None = None,
    ) -> tuple[Tensor, DecodingState]:
        """Read the prompts as ours does; what is reserved is not drawn."""
        logits, state = super().begin(tokens_T, offsets_R1, cached, None, remembered)
        state.linear = OwnStates(state.linear)
        return logits, state
