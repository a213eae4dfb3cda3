"""Decoding steps of a generator: prompts are read once per request, beams append keys and values and never move them.

Prompts that a user brought before can be given back (``cached``): only what follows the common beginning is then read. Of the last layer a prompt needs
every key and value, but the output of its last place alone. With a merger a prompt has fewer places than tokens; beams go on token by token all the same.
Layers of linear attention keep a state of each prompt and a record of each token of a beam, by the same index (``linear_memory.py``).
Legend: R requests, W beams of the widest request, B live beams of all requests, T packed prompt tokens, P their places, N new ones among them, D hidden size,
H query heads, G key/value heads, d head size, K codes of a level, L softmax layers, C capacity of the beams' stores, t tokens and p places of one prompt,
b some of the live beams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from semantide.kernels.attention import beam_attention, packed_offsets
from semantide.kernels.prefix_attention import prefix_attention
from semantide.shared.decoding.ancestry import Ancestry, Run
from semantide.shared.decoding.kv_pool import KVLease
from semantide.shared.decoding.protocol import Extension, LogitRows
from semantide.shared.models.footprint import Footprint
from semantide.shared.models.generator import Generator
from semantide.shared.models.linear_memory import LinearBeams, LinearMemory, LinearSize, Mark
from semantide.shared.models.seen_bias import SeenItems

_LOGITS_AT_ONCE = 1 << 24  # of a tree: the logits of many given items would need more memory than all else


@dataclass(frozen=True)
class PromptKV:
    """Keys and values of one prompt, and its tokens, which say for what other prompts they are good.

    With layers of linear attention a prompt is read on from one of the ``marks`` only.

    Shapes: ``tokens_t`` [t], ``kv_L2pGd`` [L, 2, p, G, d] (keys, then values).
    """

    tokens_t: Tensor
    kv_L2pGd: Tensor
    marks: tuple[Mark, ...] = ()

    @property
    def num_bytes(self) -> int:
        """What it occupies."""
        return self.kv_L2pGd.nbytes + self.tokens_t.nbytes + sum(mark.num_bytes for mark in self.marks)

    @property
    def num_places(self) -> int:
        """Places that it knows."""
        return self.kv_L2pGd.shape[2]

    def common_tokens(self, tokens_t: Tensor) -> int:
        """How many tokens another prompt begins with as this one does."""
        shorter = min(len(tokens_t), len(self.tokens_t))
        differ = (tokens_t[:shorter] != self.tokens_t[:shorter]).nonzero()
        return int(differ[0]) if len(differ) else shorter

    def known_places(self, common: int) -> int:
        """Of so many first places that another prompt shares, those that need not be read again."""
        return max((mark.places for mark in self.marks if mark.places <= common), default=0) if self.marks else common


class DecodingState:
    """Keys and values of a batch of requests: of each prompt once, and of every beam of every step so far.

    ``tokens_R`` are the tokens of each prompt, ``bounds`` where the places of each begin, ``read_R`` how many of them were read, the rest having been cached.

    Shapes: ``prompt_L2PGd`` [L, 2, P, G, d], ``own_L2CGd`` [L, 2, C, G, d].
    """

    def __init__(
        self,
        tokens_R: Sequence[Tensor],
        bounds: list[int],
        prompt_L2PGd: Tensor,
        linear: LinearMemory,
        footprint: Footprint,
        remembered_R: Sequence[bool],
        leases: Sequence[KVLease] | None,
    ) -> None:
        self.tokens_R, self.bounds, self.prompt_L2PGd, self.linear = list(tokens_R), bounds, prompt_L2PGd, linear
        self.own_L2CGd = prompt_L2PGd[:, :, :0]
        self.ancestry = Ancestry(len(bounds) - 1, prompt_L2PGd.device)
        self.seen: SeenItems | None = None
        self.read_R: tuple[int, ...] = ()
        self._footprint, self._remembered_R, self._leases = footprint, list(remembered_R), None if leases is None else list(leases)
        self._own_states_R = [0] * (len(bounds) - 1)  # beams with a state of their own, at most so far
        self._recorded = 0  # rows that linear layers have room for
        self._draw(self._prompt_bytes())

    def _prompt_bytes(self) -> list[int]:
        return [self._footprint.prompt(end - begin, kept) for (begin, end), kept in zip(pairwise(self.bounds), self._remembered_R, strict=True)]

    def _draw(self, bytes_R: Sequence[int]) -> None:
        if self._leases is not None:
            for lease, size in zip(self._leases, bytes_R, strict=True):
                lease.draw(size)

    def append(self, parents_RW: Tensor, counts: Sequence[int] | None, steps_left: int, whole: bool = False) -> tuple[Tensor, int, int]:
        """Let new beams follow the given parents and make room for their rows: which live beams they follow, and the rows [begin, end) of the stores.

        ``whole``: the parents' own rows are not written yet, for several levels are computed together.

        With leases the stores have room for all that is reserved from the first step on: to grow them later would hold their rows twice meanwhile.
        """
        begin = self.ancestry.num_rows
        parents_B = self.ancestry.extend(parents_RW, counts)
        counts, each = self.ancestry.counts, self._footprint.row_bytes(self.ancestry.steps)
        states_R = self.linear.extend(parents_B, self.ancestry, whole)
        more_R = [max(0, now - before) for now, before in zip(states_R, self._own_states_R, strict=True)]
        self._own_states_R = [before + more for before, more in zip(self._own_states_R, more_R, strict=True)]
        self._draw([count * each + more * self.linear.size.own_state for count, more in zip(counts, more_R, strict=True)])
        end = self.ancestry.num_rows
        if end > self.own_L2CGd.shape[2] or (steps_left and end > self._recorded):
            more = end - begin
            self._make_room(*((end + more * steps_left, begin + more * steps_left) if self._leases is None else self._reserved_rows()), begin)
        return parents_B, begin, end

    def _reserved_rows(self) -> tuple[int, int]:
        """Own rows that the leases have room for beside the prompts, and those of them of which records are kept."""
        footprint = self._footprint
        # The width that was reserved for follows from the bytes as these do from it in ``kv_bytes``.
        free = (lease.num_bytes - prompt for lease, prompt in zip(self._leases or (), self._prompt_bytes(), strict=True))
        widths = [footprint.width_within(num_bytes) for num_bytes in free]
        return sum(map(footprint.rows, widths)), sum(map(footprint.recorded, widths))

    def _make_room(self, rows: int, recorded: int, used: int) -> None:
        self._recorded = recorded
        self.linear.make_room(recorded, used)
        old_L2CGd = self.own_L2CGd
        self.own_L2CGd = old_L2CGd.new_empty(*old_L2CGd.shape[:2], rows, *old_L2CGd.shape[3:])
        self.own_L2CGd[:, :, :used] = old_L2CGd[:, :, :used]

    def prompt_kv(self, request: int) -> PromptKV:
        """Keys and values of one prompt, to be given back to ``begin`` another time; they stay as they are whatever becomes of the state."""
        begin, end = self.bounds[request : request + 2]
        marks = self.linear.marks(request)
        if len(self.bounds) == 2:
            return PromptKV(self.tokens_R[0], self.prompt_L2PGd, marks)
        return PromptKV(self.tokens_R[request].clone(), self.prompt_L2PGd[:, :, begin:end].clone(), marks)

    def keep(self, requests: Sequence[int]) -> None:
        """Go on with these requests only; the memory of the others is freed.

        Raises: ValueError where they do not ascend within the batch.
        """
        chosen, many = list(requests), len(self.bounds) - 1
        if chosen != sorted(set(chosen)) or any(not 0 <= request < many for request in chosen):
            raise ValueError(f"requests {chosen} of a batch of {many}: give each at most once, in ascending order, from 0 to {many - 1}")
        if len(chosen) == many:
            return
        spans = [slice(self.bounds[request], self.bounds[request + 1]) for request in chosen]
        self.tokens_R = [self.tokens_R[request].clone() for request in chosen]
        self.prompt_L2PGd = torch.cat([self.prompt_L2PGd[:, :, :0], *(self.prompt_L2PGd[:, :, span] for span in spans)], 2)
        self.bounds = [0, *accumulate(span.stop - span.start for span in spans)]
        beams_B, rows_N = self.ancestry.keep(chosen)
        self.own_L2CGd = self.own_L2CGd[:, :, rows_N]
        self.linear.keep(chosen, beams_B, rows_N)
        self._own_states_R = [self._own_states_R[request] for request in chosen]
        if self.seen is not None:
            self.seen.keep(beams_B)
        self._remembered_R = [self._remembered_R[request] for request in chosen]
        if self._leases is not None:
            self._leases = [self._leases[request] for request in chosen]
            if 0 < self.ancestry.steps < self._footprint.steps:
                self._make_room(*self._reserved_rows(), len(rows_N))
        self.read_R = tuple(self.read_R[request] for request in chosen)


class _Grown(NamedTuple):
    """New beams of one level: where they stand among all that are computed together, the requests that attend together with their offsets, and what else is asked of them."""

    begin: int
    end: int
    runs: list[tuple[Run, Tensor]]
    beams: LinearBeams
    seen_BK: Tensor | None


class GeneratorDecoder:
    """What beam search needs of a generator: logits of level 0 from prompts, then of each level from the chosen codes."""

    def __init__(self, generator: Generator, records: torch.dtype | None = None, flush_depth: int | None = None, snapshots: int = 2) -> None:
        """What linear layers record of beams' tokens may be of a shorter type than the weights.

        Without ``flush_depth`` beams get linear states of their own where replaying their tokens takes more arithmetic than that. ``snapshots`` of what
        linear layers know are kept of a prompt.
        """
        if snapshots < 1:
            raise ValueError(f"snapshots is {snapshots}: give at least 1, which is the end of a prompt")
        self.generator, config = generator.eval(), generator.config
        self.level_sizes = config.level_sizes
        dtype = generator.model.embed_tokens.weight.dtype
        kinds = [layer.linear for layer in generator.layers]
        self._num_softmax = kinds.count(False)
        self._index_of = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]  # among the layers of its kind
        size = LinearSize.of(config, dtype, records, flush_depth, snapshots)
        self.footprint = Footprint(2 * self._num_softmax * config.num_kv_heads * config.head_dim * dtype.itemsize, size, self.level_sizes)

    def kv_bytes(self, prompt_tokens: int, width: int, remembered: bool = True) -> int:
        """Bytes of keys and values, and of linear states and records, that a request of a prompt of so many tokens and of this width holds at most.

        ``remembered``: its prompt will be asked for by ``prompt_kv``.
        """
        return self.footprint.prompt(self.places(prompt_tokens), remembered) + self.footprint.beams(width)

    def places(self, prompt_tokens: int) -> int:
        """Places of a prompt of so many tokens, or those that such a beginning of one decides: what is read and kept."""
        return self.generator.prompt_shape.places(prompt_tokens)

    @torch.inference_mode()
    def begin(
        self,
        tokens_T: Tensor,
        offsets_R1: Tensor,
        cached: Sequence[PromptKV | None] | None = None,
        leases: Sequence[KVLease] | None = None,
        remembered: Sequence[bool] | None = None,
    ) -> tuple[Tensor, DecodingState]:
        """Read the prompts of R requests and return the logits [R, K] of level 0.

        What a prompt has in common with the beginning of ``cached[r]`` is not read again, nor is a prompt that an earlier request has as well; the result is the
        same. ``leases[r]`` is what request r reserved: ``kv_bytes`` of its prompt and width. Of requests that are not ``remembered`` (by default all are) no
        snapshots are made.

        Shapes: ``tokens_T`` packs prompts of at least one token each.
        Raises: ValueError for an empty prompt, keys and values of another model, or a lease that is too small.
        """
        generator, device = self.generator, tokens_T.device
        config, layers, shape = generator.config, generator.layers, generator.prompt_shape
        spans = list(pairwise(offsets_R1.tolist()))
        for request, (begin, end) in enumerate(spans):
            if end <= begin:
                raise ValueError(f"prompt {request} is empty: a prompt begins with token 0")
            if (end - begin - 1) % shape.tokens_per_unit:
                raise ValueError(f"prompt {request} has {end - begin} tokens: this model reads a begin token and {shape.tokens_per_unit} numbers of each item")
        bounds = [0, *accumulate(shape.places(end - begin) for begin, end in spans)]
        store = torch.empty(
            (self._num_softmax, 2, bounds[-1], config.num_kv_heads, config.head_dim), dtype=generator.model.embed_tokens.weight.dtype, device=device
        )
        linear, remembered = LinearMemory(config, len(spans), store, self.footprint.linear), [True] * len(spans) if remembered is None else remembered
        state = DecodingState([tokens_T[begin:end] for begin, end in spans], bounds, store, linear, self.footprint, remembered, leases)
        known_R, twin_R = [0] * len(spans), list(range(len(spans)))
        twins = []  # places of a prompt but its last, and those of the earlier request that has the same
        first_with: dict[bytes, int] = {}
        tokens = tokens_T.cpu().numpy()
        for request, ((begin, end), (first, last)) in enumerate(zip(spans, pairwise(bounds), strict=True)):
            twin = first_with.setdefault(tokens[begin:end].tobytes(), request)
            if twin < request and last - first > 1:
                known_R[request], twin_R[request] = last - first - 1, twin
                twins.append((slice(first, last - 1), slice(bounds[twin], bounds[twin + 1] - 1)))
            elif cached is not None and (prompt := cached[request]) is not None:
                known_R[request] = self._reuse(prompt, state, request)
        state.read_R = tuple(last - first - known for (first, last), known in zip(pairwise(bounds), known_R, strict=True))
        place_offsets_R1 = packed_offsets([end - begin for begin, end in pairwise(bounds)], device)
        lengths_R = place_offsets_R1.diff()
        positions_N = torch.arange(bounds[-1], device=device) - place_offsets_R1[:-1].repeat_interleave(lengths_R)
        new_N: Tensor | slice = slice(None)
        asked_N, new_offsets_R1 = None, place_offsets_R1
        if any(known_R):
            new_N = asked_N = (positions_N >= torch.tensor(known_R, device=device).repeat_interleave(lengths_R)).nonzero().squeeze(1)
            positions_N = positions_N[new_N]
            new_offsets_R1 = packed_offsets(state.read_R, device)
        cos_N1d, sin_N1d = generator.rotation(positions_N)
        x_ND, _ = generator.prompt_vectors(tokens_T, offsets_R1, asked_N)
        reading = linear.reading(known_R, [last - first for first, last in pairwise(bounds)], shape.places_per_item, twin_R, remembered) if linear else None
        last_R = new_offsets_R1[1:] - 1
        for place, layer in enumerate(layers):
            index, final = self._index_of[place], place == len(layers) - 1
            if reading is not None and layer.linear:
                o_NHe = linear.read(index, layer, x_ND, reading)
                x_ND = layer.finish(x_ND[last_R], o_NHe[last_R]) if final else layer.finish(x_ND, o_NHe)
                continue
            k_PGd, v_PGd = state.prompt_L2PGd[index]
            if final:
                k_PGd[new_N], v_PGd[new_N] = layer.keys_values(x_ND, cos_N1d, sin_N1d)
                x_ND = x_ND[last_R]
                q_NHd = layer.queries(x_ND, cos_N1d[last_R], sin_N1d[last_R])
            else:
                q_NHd, k_PGd[new_N], v_PGd[new_N] = layer.project(x_ND, cos_N1d, sin_N1d)
            for mine, theirs in twins:
                k_PGd[mine], v_PGd[mine] = k_PGd[theirs], v_PGd[theirs]
            if final:
                no_rows = state.ancestry.rows_BS.view(len(spans), 1, 0)
                o_NHd = beam_attention(q_NHd.unsqueeze(1), k_PGd, v_PGd, place_offsets_R1, k_PGd[:0], v_PGd[:0], no_rows).squeeze(1)
            else:
                o_NHd = prefix_attention(q_NHd, new_offsets_R1, k_PGd, v_PGd, place_offsets_R1)
            x_ND = layer.finish(x_ND, o_NHd)
        counts_RK = None
        if config.seen_bias:
            state.seen = SeenItems(tokens_T, offsets_R1, generator.vocabulary, shape.tokens_per_item)
            counts_RK = state.seen.counts(0)
        return generator.logits(generator.model.norm(x_ND), 0, counts_RK), state

    def _reuse(self, prompt: PromptKV, state: DecodingState, request: int) -> int:
        """Copy what is known of a request's prompt, and answer how many places that is.

        The last place is always read, for its output; that both begin with token 0 is no reason to copy.
        """
        begin, end = state.bounds[request : request + 2]
        store, kept = state.prompt_L2PGd, prompt.kv_L2pGd
        fits = (kept.shape[:2], kept.shape[3:], kept.dtype, kept.device) == (store.shape[:2], store.shape[3:], store.dtype, store.device)
        if not fits or not state.linear.fits(prompt.marks) or prompt.num_places != self.places(len(prompt.tokens_t)):
            raise ValueError(
                f"keys and values of shape {tuple(kept.shape)}, {kept.dtype}, for {len(prompt.tokens_t)} tokens do not fit this model's {tuple(store.shape)}, "
                f"{store.dtype}: give back those that the same model made"
            )
        known = prompt.known_places(min(self.places(prompt.common_tokens(state.tokens_R[request])), end - begin - 1))
        if known < 2:
            return 0
        state.linear.resume(request, prompt.marks, known)
        store[:, :, begin : begin + known] = kept[:, :, :known]
        return known

    @torch.inference_mode()
    def step(self, state: DecodingState, level: int, parents_RW: Tensor, codes_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """Let beam w of request r extend beam ``parents_RW[r, w]`` by a code of level - 1; return the logits of ``level``.

        Shapes: [R, W, K], or with ``counts`` [B, K]: request r's first ``counts[r]`` beams only.
        Raises: ValueError when levels are not taken in order.
        """
        taken = state.ancestry.steps
        if level != taken + 1 or level >= len(self.level_sizes):
            raise ValueError(f"level {level} after {taken} steps: levels follow one another, from 1 to {len(self.level_sizes) - 1}")
        hidden_BD, (grown,) = self._grow(state, [Extension(parents_RW, codes_RW, counts)])
        logits_BK = self.generator.logits(hidden_BD, level, grown.seen_BK)
        return logits_BK if counts is not None else logits_BK.unflatten(0, tuple(parents_RW.shape))

    @torch.inference_mode()
    def follow(self, state: DecodingState, levels: Sequence[Extension]) -> Iterator[LogitRows]:
        """See ``ScoringModel``: the same numbers as steps one after another, at one reading of the weights and of the prompts.

        Raises: ValueError where beams are under way already, or there are more levels than codes to come.
        """
        if state.ancestry.steps or len(levels) >= len(self.level_sizes):
            raise ValueError(
                f"{len(levels)} levels after {state.ancestry.steps} steps: a tree of at most {len(self.level_sizes) - 1} levels follows prompts that were just read"
            )
        hidden_BD, grown = self._grow(state, levels)
        for level, each in enumerate(grown, 1):
            rows = max(1, _LOGITS_AT_ONCE // self.level_sizes[level])
            for begin in range(each.begin, each.end, rows):
                end = min(begin + rows, each.end)
                seen_bK = None if each.seen_BK is None else each.seen_BK[begin - each.begin : end - each.begin]
                yield LogitRows(level, begin - each.begin, self.generator.logits(hidden_BD[begin:end], level, seen_bK))

    def _grow(self, state: DecodingState, levels: Sequence[Extension]) -> tuple[Tensor, list[_Grown]]:
        """Hidden states of the new beams of one level, or of several of which each follows the one before, [B, D]."""
        generator, ancestry, bounds = self.generator, state.ancestry, state.bounds
        level, first_row, grown, codes, positions = ancestry.steps, ancestry.num_rows, list[_Grown](), list[Tensor](), list[int]()
        for each in levels:
            level += 1
            parents_B, begin, end = state.append(each.parents_RW, each.counts, len(self.level_sizes) - 1 - level, len(levels) > 1)
            codes.append(ancestry.pack(each.codes_RW, ancestry.counts) + generator.vocabulary.first(level - 1))
            lengths = [last - first for first, last in pairwise(bounds)]
            positions += [place for length, count in zip(lengths, ancestry.counts, strict=True) for place in [length + level - 1] * count]
            seen_BK = None
            if state.seen is not None:
                state.seen.extend(level - 1, parents_B, codes[-1] - generator.vocabulary.first(level - 1))
                seen_BK = state.seen.counts(level)
            runs = [(run, packed_offsets(lengths[run.first : run.last], parents_B.device)) for run in ancestry.runs() if run.width]
            grown.append(_Grown(begin - first_row, end - first_row, runs, state.linear.beams(ancestry, level == self.footprint.steps), seen_BK))
        rows = slice(first_row, ancestry.num_rows)
        tokens_B = torch.cat(codes)
        cos_B1d, sin_B1d = generator.rotation(torch.tensor(positions, device=tokens_B.device))
        x_BD = generator.embed(tokens_B)
        beams = LinearBeams.joined([each.beams for each in grown]) if state.linear else None
        for layer, index in zip(generator.layers, self._index_of, strict=True):
            if beams is not None and layer.linear:
                x_BD = layer.finish(x_BD, state.linear.step(index, layer, x_BD, beams))
                continue
            (prompt_k, prompt_v), (own_k, own_v) = state.prompt_L2PGd[index], state.own_L2CGd[index]
            q_BHd, own_k[rows], own_v[rows] = layer.project(x_BD, cos_B1d, sin_B1d)
            outputs = [q_BHd[:0]]
            for new in grown:
                for run, offsets_R1 in new.runs:
                    tokens = slice(bounds[run.first], bounds[run.last])
                    q_RWHd = q_BHd[new.begin + run.begin : new.begin + run.end].unflatten(0, (-1, run.width))
                    outputs.append(beam_attention(q_RWHd, prompt_k[tokens], prompt_v[tokens], offsets_R1, own_k, own_v, run.rows_RWS).flatten(0, 1))
            x_BD = layer.finish(x_BD, torch.cat(outputs) if len(outputs) != 2 else outputs[1])
        hidden_BD: Tensor = generator.model.norm(x_BD)
        return hidden_BD, grown

    def keep(self, state: DecodingState, requests: Sequence[int]) -> None:
        """See ``NarrowingModel``."""
        with torch.inference_mode():
            state.keep(requests)
