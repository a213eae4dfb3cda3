"""What the linear-attention layers keep of a batch of requests: one state of each prompt, and a short record of every beam's every token.

No beam has a state of its own, whatever the width: beams go on from their prompt's through ``beam_linear_attention`` and the index that leads to their keys
and values too. Only where more tokens lie behind beams than pay (``flush_depth``), they get states of their own, from which later beams go on in turn.
A prompt of a user who may return leaves marks, at its end, before its last item, before its last two, four and so on, from which a prompt that begins alike is read on;
a state is not cut at any place as keys and values are. Others leave none but the end.
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

from semantide.kernels.attention import packed_offsets
from semantide.kernels.beam_linear_attention import break_even_depth, materialise
from semantide.shared.decoding.ancestry import Ancestry
from semantide.shared.models.generator import GeneratorConfig
from semantide.shared.models.generator_layers import Layer
from semantide.shared.models.linear_layer import FORMS, LinearState
from semantide.shared.models.linear_records import TokenRecords

Records = Literal["float32", "bfloat16", "float16"]
RECORD_TYPES: dict[Records, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""What tokens of beams may be recorded as."""

MOST_OWN_BYTES = 1 << 28
"""Of one request's states of beams' own: where they would take more, their tokens are replayed however many these are."""


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
    """Bytes of one request's parts, over all linear layers of a model; ``records`` is the type of what is kept of beams' tokens, but the decay.

    ``snapshots`` marks are kept of the prompt of a user who may return; ``most_own`` bounds the states of beams' own.
    """

    mark: int
    row: int
    own_state: int
    flush_depth: int
    records: torch.dtype
    snapshots: int
    most_own: int

    @classmethod
    def of(
        cls, config: GeneratorConfig, dtype: torch.dtype, records: torch.dtype | None = None, flush_depth: int | None = None, snapshots: int = 2
    ) -> LinearSize:
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
        depth = flush_depth or break_even_depth(shape.key_head_dim, shape.value_head_dim)
        return cls(mark, row, own_state, depth, records, snapshots, MOST_OWN_BYTES)


@dataclass
class _Layer:
    """One layer's part; ``states_MHde`` are those of ``end`` until beams get their own. ``before_J`` are snapshots before it, of the prompts that leave some."""

    before_J: list[LinearState]
    end: LinearState
    records: TokenRecords
    states_MHde: Tensor


@dataclass(frozen=True)
class Reading:
    """Which of the places that are read belong to which request and part: until each snapshot, and from the last one on.

    Of a prompt that an earlier request has too, only the last place is read, and the earlier one's answers for it: ``copies`` has the rows of both,
    ``twins`` the requests. ``parts`` has rows and offsets; ``kept`` the requests whose states stay between two parts.
    """

    parts: list[tuple[Tensor, Tensor]]
    kept: list[int]
    copies: tuple[list[int], list[int]]
    twins: tuple[list[int], list[int]]
    whole: bool

    @classmethod
    def of(cls, bounds_RP: Sequence[Sequence[int]], kept: Sequence[int], twin_R: Sequence[int], device: torch.device) -> Reading:
        """Of requests each of whose parts begins and ends at these places; ``twin_R`` is the earlier request of the same prompt, or the request itself."""
        begins = [0, *accumulate(bounds[-1] - bounds[0] for bounds in bounds_RP)]
        parts = []
        for part in range(len(bounds_RP[0]) - 1):
            rows, lengths = [torch.empty(0, dtype=torch.long)], list[int]()
            for request, (bounds, twin) in enumerate(zip(bounds_RP, twin_R, strict=True)):
                first, last = (begins[request] + bounds[at] - bounds[0] for at in (part, part + 1))
                rows.append(torch.arange(first, last if twin == request else first))
                lengths.append(len(rows[-1]))
            parts.append((torch.cat(rows).to(device), packed_offsets(lengths, device)))
        twins = [request for request, twin in enumerate(twin_R) if twin != request]
        return cls(
            parts,
            list(kept),
            ([begins[request + 1] - 1 for request in twins], [begins[twin_R[request] + 1] - 1 for request in twins]),
            (twins, [twin_R[request] for request in twins]),
            len(bounds_RP) == 1,
        )


class LinearBeams(NamedTuple):
    """Of each live beam its request, the state it goes on from, which knows of the first ``since`` ancestors, and the rows of all of these and its own.

    Shapes: ``requests_B``, ``bases_B``, ``rows_BS`` with -1 before the oldest where beams differ in depth, and last where nothing is recorded.
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

    ``wanted_R`` are the places of a request's marks, the end first; ``row_R`` says which of the prompts that leave snapshots is its own (None: none), and ``cuts_J``
    where these were made.

    Shapes: ``bases_B`` which state each live beam goes on from, with ``since`` the steps that this state knows of.
    """

    def __init__(self, config: GeneratorConfig, requests: int, like: Tensor, size: LinearSize) -> None:
        self.size = size
        self.bases_B = torch.arange(requests, device=like.device)
        self.since = 0
        self.wanted_R: list[list[int]] = [[]] * requests
        self.row_R: list[int | None] = [None] * requests
        self.cuts_J: list[list[int]] = []
        self.earlier_R: list[tuple[Mark, ...]] = [()] * requests
        self._layers: list[_Layer] = []
        shape, wide = config.linear, torch.promote_types(like.dtype, torch.float32)
        for kind in config.types:
            if kind in FORMS:
                states_RHde = like.new_zeros(requests, shape.num_value_heads, shape.key_head_dim, shape.value_head_dim, dtype=wide)
                nothing = LinearState(like.new_zeros(requests, shape.conv_kernel - 1, shape.channels), states_RHde)
                records = TokenRecords.empty(0, shape, FORMS[kind], like, size.records)
                self._layers.append(_Layer([], nothing, records, states_RHde))

    @property
    def num_bytes(self) -> int:
        """What it occupies now."""
        total = 0
        for layer in self._layers:
            own = 0 if layer.states_MHde is layer.end.state_BHde else layer.states_MHde.nbytes
            total += sum(x.nbytes for state in (*layer.before_J, layer.end) for x in state) + layer.records.num_bytes + own
        return total

    def __bool__(self) -> bool:
        return bool(self._layers)

    def fits(self, marks: Sequence[Mark]) -> bool:
        """Whether they are of the same layers; without linear layers a prompt has none, and with them at least one."""
        if bool(marks) != bool(self._layers):
            return False
        mine = [(*(x.shape[1:] for x in layer.end), *(x.dtype for x in layer.end)) for layer in self._layers]
        return all([(*(x.shape[1:] for x in state), *(x.dtype for x in state)) for state in mark.states_L] == mine for mark in marks)

    def resume(self, request: int, marks: Sequence[Mark], places: int) -> None:
        """Let a prompt be read on from the mark at that place; those before it stay what they are for its first places."""
        self.earlier_R[request] = tuple(mark for mark in marks if mark.places <= places)
        for mark in self.earlier_R[request]:
            if mark.places == places:
                for layer, known in zip(self._layers, mark.states_L, strict=True):
                    for kept, old in zip(layer.end, known, strict=True):
                        kept[request] = old[0]

    def reading(self, known_R: Sequence[int], places_R: Sequence[int], places_per_item: int, twin_R: Sequence[int], remembered_R: Sequence[bool]) -> Reading:
        """How prompts of so many places are read, of which the first ``known_R`` are not; snapshots come before items, of those that are ``remembered_R``."""
        backs = [0, *(places_per_item << step for step in range(self.size.snapshots - 1))]
        kept = sorted({twin for twin, remembered in zip(twin_R, remembered_R, strict=True) if remembered} if len(backs) > 1 else ())
        self.row_R = [kept.index(twin) if remembered and kept else None for twin, remembered in zip(twin_R, remembered_R, strict=True)]
        self.wanted_R = [[max(0, places - back) for back in backs] for places in places_R]
        self.earlier_R = [self.earlier_R[twin] for twin in twin_R]
        bounds_RP = []
        for request, (known, places) in enumerate(zip(known_R, places_R, strict=True)):
            inner = [max(known, self.wanted_R[request][at] if request in kept else known) for at in range(len(backs) - 1, 0, -1)] if kept else []
            bounds_RP.append([known, *inner, places])
        self.cuts_J = [[bounds_RP[request][1 + part] for request in kept] for part in range(len(backs) - 1)] if kept else []
        return Reading.of(bounds_RP, kept, twin_R, self.bases_B.device)

    def read(self, index: int, layer: Layer, x_ND: Tensor, reading: Reading) -> Tensor:
        """What the places that are read read of the prompts, [N, H, e]; the layer's states go on to the prompts' ends."""
        kept, mixer = self._layers[index], layer.linear_attn
        x_ND = layer.input_layernorm(x_ND)
        state, kept.before_J = kept.end, []
        outputs, done = list[Tensor](), 0
        for place, (rows_N, offsets_R1) in enumerate(reading.parts):
            if place:
                kept.before_J.append(LinearState(*(x[reading.kept] for x in state)))
            part_ND = x_ND[done : done + len(rows_N)] if reading.whole else x_ND[rows_N]
            done += len(rows_N)
            o_nHe, state = mixer.read(part_ND, offsets_R1, state)
            outputs.append(o_nHe)
        kept.end = state
        o_NHe = torch.cat(outputs)
        if not reading.whole:
            both_NHe, o_NHe = o_NHe, o_NHe.new_empty(len(x_ND), *o_NHe.shape[1:])
            o_NHe[torch.cat([rows_N for rows_N, _ in reading.parts])] = both_NHe
        if reading.twins[0]:
            o_NHe[reading.copies[0]] = o_NHe[reading.copies[1]]
            for x in kept.end:
                x[reading.twins[0]] = x[reading.twins[1]]
        kept.states_MHde = kept.end.state_BHde
        return o_NHe

    def marks(self, request: int) -> tuple[Mark, ...]:
        """Where a prompt that begins as this one can be read on; they stay as they are whatever becomes of the memory."""
        if not self._layers:
            return ()
        row, (end, *others) = self.row_R[request], self.wanted_R[request]
        found = {mark.places: mark for mark in self.earlier_R[request]}
        if row is not None:
            for part, cuts in enumerate(self.cuts_J):
                found[cuts[row]] = self._mark(cuts[row], [layer.before_J[part] for layer in self._layers], row)
        found[end] = self._mark(end, [layer.end for layer in self._layers], request)
        chosen = {max((place for place in found if place <= wanted), default=0) for wanted in (end, *(others if row is not None else ()))}
        return tuple(found[place] for place in sorted(chosen - {0}))

    @staticmethod
    def _mark(places: int, states_L: Sequence[LinearState], row: int) -> Mark:
        return Mark(places, tuple(LinearState(*(x[row : row + 1].clone() for x in state)) for state in states_L))

    def extend(self, parents_B: Tensor, ancestry: Ancestry, whole: bool = False) -> list[int]:
        """Let new beams go on from what their parents do, or from states of their parents' own where too much lies behind; how many each request got.

        ``whole``: the parents are computed together with the new beams, so nothing is known of them yet.
        """
        behind = ancestry.steps - 1 - self.since
        self.bases_B = self.bases_B[parents_B]
        most = self.size.most_own // max(1, self.size.own_state)
        if whole or not self._layers or behind < self.size.flush_depth or max(ancestry.counts) > most:
            return [0] * len(ancestry.counts)
        # Beams of one parent go on from one state.
        parents_M, children_B = torch.unique(parents_B, return_inverse=True)
        first_M = torch.full_like(parents_M, len(parents_B)).scatter_reduce_(0, children_B, torch.arange(len(parents_B), device=parents_B.device), "amin")
        rows_MS, bases_M = ancestry.rows_BS[first_M, self.since : -1], self.bases_B[first_M]
        for layer in self._layers:
            layer.states_MHde = materialise(layer.states_MHde, bases_M, layer.records.steps, rows_MS)
        self.bases_B, self.since = children_B, ancestry.steps - 1
        return [len(torch.unique(each)) for each in children_B.split(list(ancestry.counts))]

    def beams(self, ancestry: Ancestry, last: bool) -> LinearBeams:
        """Where the live beams find what they go on from; of the ``last`` tokens nothing is recorded, since none follows them."""
        counts_R = torch.tensor(ancestry.counts, device=self.bases_B.device)
        requests_B = torch.arange(len(counts_R), device=self.bases_B.device).repeat_interleave(counts_R)
        rows_BS = F.pad(ancestry.rows_BS[:, :-1], (0, 1), value=-1) if last else ancestry.rows_BS
        return LinearBeams(requests_B, self.bases_B, rows_BS, self.since)

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
        rows_R = [self.row_R[request] for request in requests]
        kept = sorted({row for row in rows_R if row is not None})
        self.row_R = [None if row is None else kept.index(row) for row in rows_R]
        self.cuts_J = [[cuts[row] for row in kept] for cuts in self.cuts_J]
        self.wanted_R = [self.wanted_R[request] for request in requests]
        self.earlier_R = [self.earlier_R[request] for request in requests]
        if self.since:
            used_M, self.bases_B = torch.unique(self.bases_B[beams_B], return_inverse=True)
        else:
            used_M, self.bases_B = chosen_R, torch.searchsorted(chosen_R, self.bases_B[beams_B])
        for layer in self._layers:
            layer.before_J = [LinearState(*(x[kept] for x in state)) for state in layer.before_J]
            layer.end = LinearState(*(x[chosen_R] for x in layer.end))
            layer.states_MHde = layer.states_MHde[used_M] if self.since else layer.end.state_BHde
            layer.records = layer.records.rows(rows_N[rows_N < len(layer.records.steps)])  # those of the last tokens are none
