"""What the linear-attention layers keep of a batch of requests: one state of each prompt, and a short record of every beam's every token.

No beam has a state of its own, whatever the width: beams go on from their prompt's through ``beam_linear_attention`` and the index that leads to their keys
and values too. Only where more tokens lie behind beams than pay (``flush_depth``), they get states of their own, from which later beams go on in turn.
A prompt leaves two marks, at its end and before its last item, from which a prompt that begins alike is read on; a state is not cut at any place as keys and values are.
Legend: R requests, B live beams of all requests, N places that are read, L linear layers, C channels of the convolution, Q inputs before, G key heads,
H value heads, d size of a key, e size of a value, M states that beams go on from, S steps so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.beam_linear_attention import break_even_depth, materialise
from semantide.shared.decoding.ancestry import Ancestry
from semantide.shared.models.generator import GeneratorConfig
from semantide.shared.models.generator_layers import Layer
from semantide.shared.models.linear_layer import FORMS, LinearState
from semantide.shared.models.linear_records import TokenRecords

Records = Literal["float32", "bfloat16", "float16"]
RECORD_TYPES: dict[Records, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What tokens of beams may be recorded as."""


@dataclass(frozen=True)
class Mark:
    """What all linear layers know after the first ``places`` of a prompt; as large however many these are."""

    places: int
    states_L: tuple[LinearState, ...]

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return sum(state.inputs_BQC.nbytes + state.state_BHde.nbytes for state in self.states_L)


@dataclass(frozen=True)
class LinearSize:
    """Bytes of one request's parts, over all linear layers of a model; ``records`` is the type of what is kept of beams' tokens, but the decay."""

    mark: int
    row: int
    own_state: int
    flush_depth: int
    records: torch.dtype

    @classmethod
    def of(cls, config: GeneratorConfig, dtype: torch.dtype, records: torch.dtype | None = None, flush_depth: int | None = None) -> LinearSize:
        """Those of a model whose weights have this type, as records have unless another is given."""
        shape, each, wide, records = config.linear, dtype.itemsize, max(dtype.itemsize, 4), records or dtype
        mark = row = own_state = 0
        for kind in config.types:
            if kind in FORMS:
                decays = shape.num_value_heads * (shape.key_head_dim if FORMS[kind].rule.per_channel else 1)
                state = shape.num_value_heads * shape.key_head_dim * shape.value_head_dim * wide
                mark += state + (shape.conv_kernel - 1) * shape.channels * each
                kept = shape.num_key_heads * shape.key_head_dim + shape.num_value_heads * shape.value_head_dim
                row += (kept + shape.channels) * records.itemsize + decays * wide
                own_state += state
        return cls(mark, row, own_state, flush_depth or break_even_depth(shape.key_head_dim, shape.value_head_dim), records)

    def fixed(self, width: int, steps: int) -> int:
        """Beside the rows: both marks, and states of the beams' own where so many steps are worth them."""
        return 2 * self.mark + (width * self.own_state if steps > self.flush_depth else 0)


@dataclass
class _Layer:
    """One layer's part; ``states_MHde`` are those of ``end`` until beams get their own."""

    middle: LinearState
    end: LinearState
    records: TokenRecords
    states_MHde: Tensor


@dataclass(frozen=True)
class Reading:
    """Which of the places that are read belong to which request and part: before its last item, and from there on.

    Of a prompt that an earlier request has too, only the last place is read, and the earlier one's answers for it: ``copies`` has the rows of both,
    ``twins`` the requests.
    """

    first_N: Tensor
    first_offsets_R1: Tensor
    second_N: Tensor
    second_offsets_R1: Tensor
    copies: tuple[list[int], list[int]]
    twins: tuple[list[int], list[int]]
    whole: bool

    @classmethod
    def of(cls, known_R: Sequence[int], middle_R: Sequence[int], places_R: Sequence[int], twin_R: Sequence[int], device: torch.device) -> Reading:
        """Of requests whose first ``known_R`` places are not read; ``twin_R`` is the earlier request of the same prompt, or the request itself."""
        begins = [0, *accumulate(places - known for places, known in zip(places_R, known_R, strict=True))]
        first: list[Tensor] = [torch.empty(0, dtype=torch.long)]
        second, lengths = list(first), [(0, 0)] * len(known_R)
        for request, (known, middle, places, twin) in enumerate(zip(known_R, middle_R, places_R, twin_R, strict=True)):
            if twin == request:
                cut = begins[request] + middle - known
                first.append(torch.arange(begins[request], cut))
                second.append(torch.arange(cut, begins[request + 1]))
                lengths[request] = middle - known, places - middle
        offsets = [torch.tensor([0, *accumulate(length[part] for length in lengths)], device=device) for part in (0, 1)]
        twins = [request for request, twin in enumerate(twin_R) if twin != request]
        return cls(
            *(torch.cat(first).to(device), offsets[0], torch.cat(second).to(device), offsets[1]),
            ([begins[request + 1] - 1 for request in twins], [begins[twin_R[request] + 1] - 1 for request in twins]),
            (twins, [twin_R[request] for request in twins]),
            len(known_R) == 1,
        )


class LinearBeams(NamedTuple):
    """Of each live beam its request, the state it goes on from, which knows of the first ``since`` ancestors, and the rows of all of these and its own.

    Shapes: ``requests_B``, ``bases_B``, ``rows_BS`` with -1 before the oldest where beams differ in depth.
    """

    requests_B: Tensor
    bases_B: Tensor
    rows_BS: Tensor
    since: int

    @classmethod
    def joined(cls, levels: Sequence[LinearBeams]) -> LinearBeams:
        """Beams of several levels, of which each follows the one before, to be computed together."""
        if len(levels) == 1:
            return levels[0]
        deepest = levels[-1].rows_BS.shape[1]
        rows = [F.pad(each.rows_BS, (deepest - each.rows_BS.shape[1], 0), value=-1) for each in levels]
        return cls(torch.cat([each.requests_B for each in levels]), torch.cat([each.bases_B for each in levels]), torch.cat(rows), 0)


class LinearMemory:
    """All linear layers' part of a decoding state.

    Shapes: ``bases_B`` which state each live beam goes on from, with ``since`` the steps that this state knows of.
    """

    def __init__(self, config: GeneratorConfig, requests: int, like: Tensor, size: LinearSize) -> None:
        self.size = size
        self.bases_B = torch.arange(requests, device=like.device)
        self.since = 0
        self.middle_R: list[int] = [0] * requests
        self._layers: list[_Layer] = []
        shape, wide = config.linear, torch.promote_types(like.dtype, torch.float32)
        for kind in config.types:
            if kind in FORMS:
                states_RHde = like.new_zeros(requests, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, dtype=wide)
                nothing = LinearState(like.new_zeros(requests, shape.conv_kernel - 1, shape.channels), states_RHde)
                records = TokenRecords.empty(0, shape, FORMS[kind], like, size.records)
                self._layers.append(_Layer(nothing, LinearState(*(x.clone() for x in nothing)), records, states_RHde))

    @property
    def num_bytes(self) -> int:
        """What it occupies now."""
        total = 0
        for layer in self._layers:
            own = 0 if layer.states_MHde is layer.end.state_BHde else layer.states_MHde.nbytes
            total += sum(x.nbytes for x in (*layer.middle, *layer.end)) + layer.records.num_bytes + own
        return total

    def __bool__(self) -> bool:
        return bool(self._layers)

    def fits(self, marks: Sequence[Mark]) -> bool:
        """Whether they are of the same layers; without linear layers a prompt has none, and with them at least one."""
        if bool(marks) != bool(self._layers):
            return False
        mine = [(*(x.shape[1:] for x in layer.end), *(x.dtype for x in layer.end)) for layer in self._layers]
        return all([(*(x.shape[1:] for x in state), *(x.dtype for x in state)) for state in mark.states_L] == mine for mark in marks)

    def resume(self, request: int, mark: Mark) -> None:
        """Let a prompt be read on from a mark."""
        for layer, known in zip(self._layers, mark.states_L, strict=True):
            for kept, old in zip(layer.end, known, strict=True):
                kept[request] = old[0]

    def reading(self, known_R: Sequence[int], places_R: Sequence[int], places_per_item: int, twin_R: Sequence[int]) -> Reading:
        """How prompts of so many places are read, of which the first ``known_R`` are not; the middle mark comes before the last item that is read."""
        middle_R = [max(0, known, places - places_per_item) for known, places in zip(known_R, places_R, strict=True)]
        self.middle_R = [middle_R[twin] for twin in twin_R]
        return Reading.of(known_R, self.middle_R, places_R, twin_R, self.bases_B.device)

    def read(self, index: int, layer: Layer, x_ND: Tensor, reading: Reading) -> Tensor:
        """What the places that are read read of the prompts, [N, H, e]; the layer's states go on to the prompts' ends."""
        kept, mixer = self._layers[index], layer.linear_attn
        x_ND = layer.input_layernorm(x_ND)
        if reading.whole:
            cut = len(reading.first_N)
            parts = [x_ND[:cut], x_ND[cut:]]
        else:
            parts = [x_ND[reading.first_N], x_ND[reading.second_N]]
        first_NHe, kept.middle = mixer.read(parts[0], reading.first_offsets_R1, kept.end)
        second_NHe, kept.end = mixer.read(parts[1], reading.second_offsets_R1, kept.middle)
        o_NHe = torch.cat([first_NHe, second_NHe])
        if not reading.whole:
            both_NHe, o_NHe = o_NHe, o_NHe.new_empty(len(x_ND), *o_NHe.shape[1:])
            o_NHe[torch.cat([reading.first_N, reading.second_N])] = both_NHe
        if reading.twins[0]:
            o_NHe[reading.copies[0]] = o_NHe[reading.copies[1]]
            for state in (*kept.middle, *kept.end):
                state[reading.twins[0]] = state[reading.twins[1]]
        kept.states_MHde = kept.end.state_BHde
        return o_NHe

    def marks(self, request: int, places: int) -> tuple[Mark, ...]:
        """Where a prompt that begins as this one of so many places can be read on; they stay as they are whatever becomes of the memory."""
        if not self._layers:
            return ()
        ends = ((self.middle_R[request], [layer.middle for layer in self._layers]), (places, [layer.end for layer in self._layers]))
        return tuple(Mark(place, tuple(LinearState(*(x[request : request + 1].clone() for x in state)) for state in states)) for place, states in ends if place)

    def extend(self, parents_B: Tensor, ancestry: Ancestry, whole: bool = False) -> list[int]:
        """Let new beams go on from what their parents do, or from states of their parents' own where too much lies behind; how many each request got.

        ``whole``: the parents are computed together with the new beams, so nothing is known of them yet.
        """
        behind = ancestry.steps - 1 - self.since
        self.bases_B = self.bases_B[parents_B]
        if whole or not self._layers or behind < self.size.flush_depth:
            return [0] * len(ancestry.counts)
        # Beams of one parent go on from one state.
        parents_M, children_B = torch.unique(parents_B, return_inverse=True)
        first_M = torch.full_like(parents_M, len(parents_B)).scatter_reduce_(0, children_B, torch.arange(len(parents_B), device=parents_B.device), "amin")
        rows_MS, bases_M = ancestry.rows_BS[first_M, self.since : -1], self.bases_B[first_M]
        for layer in self._layers:
            layer.states_MHde = materialise(layer.states_MHde, bases_M, layer.records.steps, rows_MS)
        self.bases_B, self.since = children_B, ancestry.steps - 1
        return [len(torch.unique(each)) for each in children_B.split(list(ancestry.counts))]

    def beams(self, ancestry: Ancestry) -> LinearBeams:
        """Where the live beams find what they go on from."""
        counts_R = torch.tensor(ancestry.counts, device=self.bases_B.device)
        requests_B = torch.arange(len(counts_R), device=self.bases_B.device).repeat_interleave(counts_R)
        return LinearBeams(requests_B, self.bases_B, ancestry.rows_BS, self.since)

    def step(self, index: int, layer: Layer, x_BD: Tensor, beams: LinearBeams) -> Tensor:
        """What the beams' new tokens read, [B, H, e]; their records are kept in the rows that the index names last."""
        kept = self._layers[index]
        behind = kept.end.inputs_BQC, beams.requests_B, kept.states_MHde, beams.bases_B, beams.rows_BS, beams.since
        return kept.records.read(layer.linear_attn, layer.input_layernorm(x_BD), *behind)

    def make_room(self, rows: int, used: int) -> None:
        """Room for so many rows, the first ``used`` of which stay."""
        for layer in self._layers:
            layer.records = layer.records.grown(rows, used)

    def keep(self, requests: Sequence[int], beams_B: Tensor, rows_N: Tensor) -> None:
        """Go on with these requests only, and with these live beams and rows."""
        chosen_R = torch.tensor(list(requests), dtype=torch.long, device=self.bases_B.device)
        self.middle_R = [self.middle_R[request] for request in requests]
        if self.since:
            used_M, self.bases_B = torch.unique(self.bases_B[beams_B], return_inverse=True)
        else:
            used_M, self.bases_B = chosen_R, torch.searchsorted(chosen_R, self.bases_B[beams_B])
        for layer in self._layers:
            layer.middle, layer.end = (LinearState(*(x[chosen_R] for x in state)) for state in (layer.middle, layer.end))
            layer.states_MHde = layer.states_MHde[used_M] if self.since else layer.end.state_BHde
            layer.records = layer.records.rows(rows_N)
