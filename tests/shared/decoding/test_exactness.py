"""A thousand random searches against brute force: every item, and every beam of every level, enumerated in float64."""

import numpy as np
import pytest
import torch

from semantide.shared.decoding.beam_search import Search, beam_search
from semantide.shared.decoding.brute_force import best_items, score_every_item
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.trie import Trie

from .table_model import TableModel, prompts, random_codes

SHAPES = [(7,), (1, 9), (5, 6), (2, 2, 2, 2, 2), (1, 1, 30), (30, 1, 1), (4, 5, 6), (9, 1, 7), (3, 4, 3, 5), (40, 3)]


class Case:
    """A catalog, a model, prompts, a filter and widths from one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.level_sizes = SHAPES[seed % len(SHAPES)]
        generator = torch.Generator().manual_seed(seed)
        self.codes = random_codes(generator, int(rng.integers(1, 61)), self.level_sizes).numpy()
        if seed % 7 == 0:  # a long chain beside a bush: one item per first code but for one
            _, first = np.unique(self.codes[:, 0], return_index=True)
            self.codes = self.codes[np.unique(np.concatenate([first, np.flatnonzero(self.codes[:, 0] == self.codes[0, 0])]))]
        self.items = len(self.codes)
        self.trie = SearchTrie.build(Trie.build(self.codes))
        self.model = TableModel(self.level_sizes, seed, spread=0.0 if seed % 11 == 0 else 2.0)
        self.requests = int(rng.integers(1, 4))
        self.tokens, self.offsets = prompts(generator, self.requests)
        masks = [rng.random(self.items) < share for share in rng.choice([0.0, 0.2, 0.7, 1.0], 2)]
        mask_of = rng.integers(0, 2, self.requests).tolist()
        excluded = [rng.integers(0, self.items, rng.integers(0, self.items + 2)).tolist() if rng.random() < 0.7 else [] for _ in range(self.requests)]
        self.allowed = np.stack([masks[mask] for mask in mask_of])
        self.filter = None
        if seed % 3:
            self.filter = ItemFilter.build(self.trie, [self.trie.prefix_counts(mask) for mask in masks], mask_of, excluded)
            for request, rows in enumerate(excluded):
                self.allowed[request, rows] = False
        else:
            self.allowed[:] = True
        self.widths = rng.integers(1, self.items + 2, self.requests).tolist()

    def naive(self, request: int) -> tuple[list[int], list[float]]:
        """Beam search by enumeration: rows and scores, best first."""
        begin, end = int(self.offsets[request]), int(self.offsets[request + 1])
        logits, state = self.model.begin(self.tokens[begin:end], torch.tensor([0, end - begin]))
        beams: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        alive = [{tuple(row[: level + 1]) for row in self.codes[self.allowed[request]].tolist()} for level in range(len(self.level_sizes))]
        for level in range(len(self.level_sizes)):
            table = torch.log_softmax(logits.double().reshape(len(beams), -1), -1).tolist()
            candidates = [
                (-score - table[beam][code], (*prefix, code), beam)
                for beam, (prefix, score) in enumerate(beams)
                for code in range(self.level_sizes[level])
                if (*prefix, code) in alive[level]
            ]
            chosen = sorted(sorted(candidates)[: self.widths[request]], key=lambda candidate: candidate[1])
            beams = [(codes, -negative) for negative, codes, _ in chosen]
            if not beams:
                return [], []
            if level + 1 < len(self.level_sizes):
                parents, last = torch.tensor([[beam for _, _, beam in chosen]]), torch.tensor([[codes[-1] for codes, _ in beams]])
                logits = self.model.step(state, level + 1, parents, last)
        row_of = {tuple(row): number for number, row in enumerate(self.codes.tolist())}
        beams.sort(key=lambda beam: (-beam[1], beam[0]))
        return [row_of[codes] for codes, _ in beams], [score for _, score in beams]


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_searches_equal_brute_force(part):
    for seed in range(part * 100, part * 100 + 100):
        case = Case(seed)
        hits = beam_search(case.model, case.trie, case.tokens, case.offsets, case.widths, node_filter=case.filter)
        whole = score_every_item(case.model, case.codes, case.tokens, case.offsets)
        for request in range(case.requests):
            count = int(hits.counts_R[request])
            rows, scores = hits.rows_RW[request, :count].tolist(), hits.scores_RW[request, :count].numpy()
            expected_rows, expected_scores = case.naive(request)
            assert rows == expected_rows, seed
            np.testing.assert_allclose(scores, expected_scores, atol=1e-5)
            np.testing.assert_allclose(scores, whole[request, rows], atol=1e-5)
            if len(case.level_sizes) == 1 or case.widths[request] >= case.items or hits.complete(request, count):
                assert rows == best_items(whole[request], case.codes, case.allowed[request], case.widths[request]).tolist(), seed


@pytest.mark.parametrize("narrow_after", [1, 2, 3])
def test_a_search_goes_on_with_some_of_its_requests(narrow_after):
    for seed in (6, 16, 26, 8, 18, 28):  # three and four levels
        case = Case(seed)
        search = Search(case.trie, case.widths, case.filter)
        kept = [case.requests - 1, 0][: case.requests]
        logits, state = case.model.begin(case.tokens, case.offsets)
        extension = search.select(logits)
        while extension is not None:
            if search.level == narrow_after:
                search.keep(kept)
                state["hashes"], extension = state["hashes"][kept], (extension[0][kept], extension[1][kept])
            extension = search.select(case.model.step(state, search.level, *extension))
        whole = beam_search(case.model, case.trie, case.tokens, case.offsets, case.widths, node_filter=case.filter)
        if search.level < narrow_after or int(whole.counts_R.max()) == 0:
            continue
        if narrow_after == 3 and len(case.level_sizes) == 3:
            search.keep(kept)
        some = search.hits()
        for place, request in enumerate(kept):
            count = int(whole.counts_R[request])
            assert int(some.counts_R[place]) == count
            assert some.rows_RW[place, :count].tolist() == whole.rows_RW[request, :count].tolist()
            torch.testing.assert_close(some.level_scores_RWL[place, :count], whole.level_scores_RWL[request, :count])
