"""Log-probabilities of given items, all of them behind their prompts in one pass: what a beam search would give them, had it come by them.

Items of a request that begin with the same codes share those: they are the leaves of a tree of prefixes, of which each prefix is computed once.
Legend: R requests, W prefixes of the request with most, T prompt tokens, I items of all requests, L levels, K codes of a level, N prefixes of one length of all
requests, n some of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semantide.shared.decoding.beam_search import Normalisation
from semantide.shared.decoding.protocol import Extension, ScoringModel
from semantide.shared.decoding.sampling import Policy
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import PermanentError


@dataclass(frozen=True)
class GivenItems:
    """Items of R requests and the tree of their prefixes.

    ``extensions`` are its levels as a model takes them. ``prefix_I[l]`` is the prefix of l codes of each item, among those of all requests; that of no code is the request.

    Shapes: ``codes_IL``; ``prefix_I`` L of [I].
    """

    codes_IL: Tensor
    prefix_I: tuple[Tensor, ...]
    extensions: tuple[Extension, ...]

    @classmethod
    def of(cls, codes_IL: Tensor, requests_I: Tensor, num_requests: int) -> GivenItems:
        """The tree of items in any order, each of a request; a request may have none.

        Raises: ValueError for requests that do not exist.
        """
        if len(requests_I) != len(codes_IL) or (len(requests_I) and not 0 <= int(requests_I.min()) <= int(requests_I.max()) < num_requests):
            raise ValueError(f"{len(codes_IL)} items of {len(requests_I)} requests, {num_requests} of which exist: say of each item whose it is")
        prefixes, extensions = [requests_I], []
        owner_N = torch.arange(num_requests, device=codes_IL.device)
        for level in range(codes_IL.shape[1] - 1):
            size = int(codes_IL[:, level].max()) + 1 if len(codes_IL) else 1
            keys_N, prefix_I = torch.unique(prefixes[-1] * size + codes_IL[:, level], return_inverse=True)
            parents_N, codes_N = keys_N // size, keys_N % size
            # Prefixes ascend by their parents, so those of a request stand together.
            first_R = torch.searchsorted(owner_N, torch.arange(num_requests, device=owner_N.device))
            new_owner_N = owner_N[parents_N]
            counts = torch.bincount(new_owner_N, minlength=num_requests).tolist()
            table = torch.arange(max(counts, default=0), device=owner_N.device) < torch.tensor(counts, device=owner_N.device)[:, None]
            parents_RW, codes_RW = torch.zeros_like(table, dtype=torch.int64), torch.zeros_like(table, dtype=torch.int64)
            parents_RW[table], codes_RW[table] = parents_N - first_R[new_owner_N], codes_N
            extensions.append(Extension(parents_RW, codes_RW, tuple(counts)))
            prefixes.append(prefix_I)
            owner_N = new_owner_N
        return cls(codes_IL, tuple(prefixes), tuple(extensions))


class ItemScores:
    """Gathers log-probabilities of the codes of given items from logits behind their prefixes.

    ``normalisation`` is that of ``Search``; for "children" the items' rows in the ``trie`` must be said.
    """

    def __init__(self, given: GivenItems, trie: SearchTrie | None = None, rows_I: Tensor | None = None, normalisation: Normalisation = "row") -> None:
        self._given, self._trie, self._leaves_I = given, trie, None
        if normalisation == "children":
            assert trie is not None and rows_I is not None, "children are those of a trie"
            self._leaves_I = trie.leaf_of[rows_I]
        self.scores_IL = torch.zeros(given.codes_IL.shape, dtype=torch.float64, device=given.codes_IL.device)

    def take(self, level: int, begin: int, logits_nK: Tensor) -> None:
        """Take the logits of a level behind the prefixes [begin, begin + n).

        Raises: PermanentError where they are not numbers, ValueError for a code that the model does not have.
        """
        prefix_I, codes_I = self._given.prefix_I[level], self._given.codes_IL[:, level]
        mine_I = ((prefix_I >= begin) & (prefix_I < begin + len(logits_nK))).nonzero().squeeze(1)
        own_I, codes_I = prefix_I[mine_I] - begin, codes_I[mine_I]
        if len(codes_I) and int(codes_I.max()) >= logits_nK.shape[1]:
            raise ValueError(
                f"the model has {logits_nK.shape[1]} codes at level {level} and an item has code {int(codes_I.max())}: use the model's own catalog"
            )
        wide_nK = logits_nK.to(torch.promote_types(logits_nK.dtype, torch.float32))
        chosen_I = wide_nK[own_I, codes_I]
        sums_n = self._among_children(level, wide_nK, mine_I, own_I) if self._leaves_I is not None else wide_nK.logsumexp(1)
        scores_I = chosen_I.double() - sums_n.double()[own_I]
        if not bool(scores_I.isfinite().all()) or not bool(wide_nK.isfinite().all()):
            raise PermanentError(
                f"the model's logits of level {level} are not finite numbers: its weights are damaged or overflow their type; promote another model"
            )
        self.scores_IL[mine_I, level] = scores_I

    def _among_children(self, level: int, logits_nK: Tensor, mine_I: Tensor, own_I: Tensor) -> Tensor:
        assert self._trie is not None and self._leaves_I is not None
        nodes_n = torch.zeros(len(logits_nK), dtype=torch.int64, device=logits_nK.device)
        nodes_n[own_I] = torch.searchsorted(self._trie.leaf_bounds[level], self._leaves_I[mine_I], right=True) - 1
        children_nK = Policy(self._trie).children(level, nodes_n, torch.zeros_like(nodes_n), logits_nK.shape[1])
        return logits_nK.masked_fill(children_nK < 0, -torch.inf).logsumexp(1)


@torch.inference_mode()
def score_items(
    model: ScoringModel,
    tokens_T: Tensor,
    offsets_R1: Tensor,
    codes_IL: Tensor,
    requests_I: Tensor,
    trie: SearchTrie | None = None,
    rows_I: Tensor | None = None,
    normalisation: Normalisation = "row",
) -> Tensor:
    """Log-probability of each code of each item behind its request's prompt, [I, L], float64.

    Shapes: ``tokens_T`` [T], ``offsets_R1`` [R + 1] as in ``StepModel.begin``; ``requests_I`` whose item each is.
    Raises: PermanentError where the model's logits are not numbers.
    """
    requests = len(offsets_R1) - 1
    given = GivenItems.of(codes_IL, requests_I, requests)
    scores = ItemScores(given, trie, rows_I, normalisation)
    logits_RK, state = model.begin(tokens_T, offsets_R1)
    scores.take(0, 0, logits_RK)
    follow(model, state, given.extensions, scores)
    return scores.scores_IL


def follow(model: ScoringModel, state: object, extensions: Sequence[Extension], scores: ItemScores) -> None:
    """The pass over all prefixes behind the prompts."""
    if extensions and any(any(extension.counts or ()) for extension in extensions):
        for rows in model.follow(state, extensions):
            scores.take(*rows)
