"""The engine that others build, as a baseline: flattened beams with a copy of the prompt's keys and values each, a dense mask, a full top-k.

Every beam is a sequence of its own, so the cache holds the prompt once per beam, a reorder copies the whole cache, attention reads every copy, the head
covers all tokens of the vocabulary, and each step makes a mask over all beams and codes and ranks all of them. Nothing is slower than it has to be within
that design: prompts are read once per request and packed, the cache has its final size from the start, grouped heads are read once, masks are made from the
trie's tensors. The answers are those of ``beam_search``.
Legend: R requests, W beams (of the widest request), T prompt tokens, S tokens of the longest sequence, L levels, H query heads, G key/value heads,
d head size, K codes of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.attention import jagged_attention
from semantide.shared.decoding.beam_search import Hits, Normalisation
from semantide.shared.decoding.search_trie import NodeFilter, SearchTrie
from semantide.shared.models.generator import Generator


@dataclass
class ClassicState:
    """Keys and values of every beam's whole sequence: per layer [R * W, G, S, d]. Own tokens stand after the ``longest`` prompt."""

    lengths_R: Tensor
    prompts: list[tuple[Tensor, Tensor]]
    offsets_R1: Tensor
    caches: list[tuple[Tensor, Tensor]]
    visible_RS: Tensor | None
    longest: int
    steps: int = 0


class ClassicDecoder:
    """A step model whose beams are sequences of their own."""

    def __init__(self, generator: Generator) -> None:
        if generator.config.level_scales or generator.config.seen_bias:
            raise ValueError("the classic engine knows logits of a plain decoder only: give a model without level_scales and seen_bias")
        self.generator = generator.eval()
        self.level_sizes = generator.config.level_sizes

    def kv_bytes(self, prompt_tokens: int, width: int, remembered: bool = False) -> int:
        """Bytes of one request's cache, and of the copy of one layer while it is reordered."""
        config = self.generator.config
        layer = 2 * config.num_kv_heads * config.head_dim * self.generator.head_VD.element_size()
        return layer * (config.num_layers + 1) * (prompt_tokens + len(self.level_sizes) - 1) * width

    def places(self, prompt_tokens: int) -> int:
        """Every token is one."""
        return prompt_tokens

    @torch.inference_mode()
    def begin(self, tokens_T: Tensor, offsets_R1: Tensor) -> tuple[Tensor, ClassicState]:
        """Read the prompts; see ``StepModel``."""
        generator, lengths_R = self.generator, offsets_R1.diff()
        positions_T = torch.arange(len(tokens_T)) - offsets_R1[:-1].repeat_interleave(lengths_R)
        rotation = generator.rotation(positions_T)
        x_TD = generator.embed(tokens_T)
        prompts = []
        for layer in generator.layers:
            q_THd, k_TGd, v_TGd = layer.project(x_TD, *rotation)
            prompts.append((k_TGd, v_TGd))
            x_TD = layer.finish(x_TD, jagged_attention(q_THd, k_TGd, v_TGd, offsets_R1))
        return self._logits(x_TD[offsets_R1[1:] - 1], 0), ClassicState(lengths_R, prompts, offsets_R1, [], None, int(lengths_R.max()))

    @torch.inference_mode()
    def step(self, state: ClassicState, level: int, parents_RW: Tensor, codes_RW: Tensor) -> Tensor:
        """Copy every beam's cache to its children and run one token of each; see ``StepModel``."""
        generator, (requests, width) = self.generator, parents_RW.shape
        if not state.caches:
            self._spread(state, width)
        else:
            old = state.caches[0][0].shape[0] // requests
            rows_N = (parents_RW + old * torch.arange(requests)[:, None]).flatten()
            for index, (k, v) in enumerate(state.caches):
                state.caches[index] = (k.index_select(0, rows_N), v.index_select(0, rows_N))
        end = state.longest + state.steps + 1
        mask_N11S = None
        if state.visible_RS is not None:
            mask_N11S = state.visible_RS[:, :end].repeat_interleave(width, 0)[:, None, None, :]
        rotation = generator.rotation((state.lengths_R + level - 1).repeat_interleave(width))
        x_ND = generator.embed((codes_RW + generator.vocabulary.first(level - 1)).flatten())
        for layer, (k_NGSd, v_NGSd) in zip(generator.layers, state.caches, strict=True):
            q_NHd, k_NGd, v_NGd = layer.project(x_ND, *rotation)
            k_NGSd[:, :, end - 1], v_NGSd[:, :, end - 1] = k_NGd, v_NGd
            # Query heads that share keys are rows of one product, so that nothing is repeated for them.
            q_NGgd = q_NHd.unflatten(1, (k_NGd.shape[1], -1))
            o_NGgd = F.scaled_dot_product_attention(q_NGgd, k_NGSd[:, :, :end], v_NGSd[:, :, :end], attn_mask=mask_N11S)
            x_ND = layer.finish(x_ND, o_NGgd.flatten(1, 2))
        state.steps += 1
        return self._logits(x_ND, level).unflatten(0, (requests, width))

    def _spread(self, state: ClassicState, width: int) -> None:
        """Give each beam its copy of the prompt; shorter prompts leave a gap that the mask hides."""
        longest, requests = state.longest, len(state.lengths_R)
        size = longest + len(self.level_sizes) - 1
        bounds = list(pairwise(state.offsets_R1.tolist()))
        for pair in state.prompts:
            tables = []
            for x_TGd in pair:
                table = x_TGd.new_zeros(requests * width, x_TGd.shape[1], size, x_TGd.shape[2])
                for request, (begin, end) in enumerate(bounds):
                    table[request * width : (request + 1) * width, :, : end - begin] = x_TGd[begin:end].transpose(0, 1)
                tables.append(table)
            state.caches.append((tables[0], tables[1]))
        state.prompts = []
        if int(state.lengths_R.min()) < longest:
            places_S = torch.arange(size)
            state.visible_RS = (places_S < state.lengths_R[:, None]) | (places_S >= longest)

    def _logits(self, x_ND: Tensor, level: int) -> Tensor:
        return self.generator.all_logits(self.generator.model.norm(x_ND))[:, self.generator.vocabulary.row(level)]


class ClassicSearch:
    """Beam search by a dense mask and one top-k over all beams and codes, with the outward behaviour of ``Search``."""

    def __init__(self, trie: SearchTrie, widths: Sequence[int], node_filter: NodeFilter | None = None, normalisation: Normalisation = "row") -> None:
        self._trie, self._filter, self._normalisation = trie, node_filter, normalisation
        self.level, self.candidates = 0, 0
        self._widths_R = torch.tensor([min(width, len(trie)) for width in widths])
        self._owners_R = torch.arange(len(widths))  # the filter's numbers of the requests
        self._nodes_RW = torch.zeros(len(widths), 1, dtype=torch.int64)
        self._live_RW = torch.ones(len(widths), 1, dtype=torch.bool)
        self._scores_RW = torch.zeros(len(widths), 1)
        self._paths_RWL = torch.zeros(len(widths), 1, trie.levels)

    def select(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rank every code of every beam; see ``Search.select``."""
        logits_RWK = logits[:, None, :] if logits.dim() == 2 else logits
        requests, width, num_codes = logits_RWK.shape
        trie, level = self._trie, self.level
        self.candidates += requests * width * num_codes
        nodes_N = self._nodes_RW.flatten()
        first_N = trie.offsets[level][nodes_N]
        many_N = torch.where(self._live_RW.flatten(), trie.offsets[level][nodes_N + 1] - first_N, 0)
        rows_C = torch.arange(len(nodes_N)).repeat_interleave(many_N)
        children_C = torch.arange(len(rows_C)) + (first_N - many_N.cumsum(0) + many_N)[rows_C]
        codes_C = trie.tokens[level][children_C]
        every_NK = torch.full((len(nodes_N), num_codes), -1, dtype=torch.int64)
        every_NK[rows_C, codes_C] = children_C
        if self._normalisation == "children":
            inner_RWK = torch.log_softmax(logits_RWK.masked_fill(every_NK.view(logits_RWK.shape) < 0, -torch.inf), -1)
            steps_RWK = inner_RWK.masked_fill_(inner_RWK.isnan(), -torch.inf)  # beams that a request does not use have no children
        else:
            steps_RWK = torch.log_softmax(logits_RWK, -1)
        if self._filter is not None:
            leaves = self._filter.at(level + 1).leaves(level + 1, self._owners_R)
            alive_C = leaves.alive(leaves.child_bounds_C1, rows_C // width, children_C)
            every_NK[rows_C[~alive_C], codes_C[~alive_C]] = -1
        mask_NK = torch.zeros_like(every_NK, dtype=logits.dtype).masked_fill_(every_NK < 0, -torch.inf)
        scores_RM = (self._scores_RW[:, :, None] + steps_RWK + mask_NK.view(steps_RWK.shape)).flatten(1)
        best = torch.topk(scores_RM, min(int(self._widths_R.max()), scores_RM.shape[1]), dim=1)
        live_RW = (best.values > -torch.inf) & (torch.arange(best.values.shape[1]) < self._widths_R[:, None])
        picked_RW = torch.where(live_RW, best.indices, 0)
        parents_RW, codes_RW = picked_RW // num_codes, picked_RW % num_codes
        self._nodes_RW = every_NK.view(requests, -1).gather(1, picked_RW).clamp_(min=0)
        self._scores_RW = torch.where(live_RW, best.values, -torch.inf)
        self._live_RW = live_RW
        self._paths_RWL = self._paths_RWL.gather(1, parents_RW[:, :, None].expand(-1, -1, trie.levels))
        self._paths_RWL[:, :, level] = steps_RWK.flatten(1).gather(1, picked_RW)
        self.level += 1
        if self.level == trie.levels or not bool(live_RW.any()):
            return None
        return parents_RW, codes_RW

    def hits(self, seconds: dict[str, float] | None = None) -> Hits:
        """The results; scores come in descending order out of the last top-k."""
        live_RW = self._live_RW if self.level == self._trie.levels else torch.zeros_like(self._live_RW)
        nothing_R = torch.zeros(len(live_RW), dtype=torch.int64)
        return Hits(
            rows_RW=self._trie.leaf_items[self._nodes_RW.masked_fill(~live_RW, 0)].masked_fill(~live_RW, -1),
            scores_RW=self._scores_RW.double().masked_fill(~live_RW, -torch.inf),
            level_scores_RWL=self._paths_RWL.double(),
            counts_R=live_RW.sum(1),
            dead_ends_R=nothing_R,
            dropped_R=torch.zeros(len(live_RW), dtype=torch.float64),
            candidates=self.candidates,
            visited=self.candidates,
            seconds=seconds or {},
        )


@torch.inference_mode()
def classic_search(
    model: ClassicDecoder,
    trie: SearchTrie,
    tokens_T: Tensor,
    offsets_R1: Tensor,
    widths: int | Sequence[int],
    *,
    node_filter: NodeFilter | None = None,
    normalisation: Normalisation = "row",
    clock: Callable[[], float] | None = None,
) -> Hits:
    """``beam_search`` with the same arguments, done the classic way."""
    now = clock or (lambda: 0.0)
    seconds = {"prefill": 0.0, "step": 0.0, "select": 0.0}
    search = ClassicSearch(trie, [widths] * (len(offsets_R1) - 1) if isinstance(widths, int) else widths, node_filter, normalisation)
    start = now()
    logits, state = model.begin(tokens_T, offsets_R1)
    seconds["prefill"] = now() - start
    while True:
        start = now()
        extension = search.select(logits)
        seconds["select"] += now() - start
        if extension is None:
            return search.hits(seconds)
        start = now()
        logits = model.step(state, search.level, *extension)
        seconds["step"] += now() - start
