"""Batches of histories with the pages that came behind them: as functions of seed, epoch and place, like ``batches.py``.

A page is predicted from the last items before it. All pages of a user share one reading of the history, of which each sees the part before it; a history longer
than ``max_items`` is read in stretches that overlap by half, so that a page sees at least half as many items as it may, where it has them. Which histories share a
batch does not depend on the form of the targets: point-wise, sequential and parallel runs see the same prompts in the same order.
Legend: P pieces (stretches of histories), G pages, S items of pages, T items of a batch, U users.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from semantide.services.training.batches import Epoch, HistoryBatch, IntArray, ranges
from semantide.services.training.page_targets import PageTargets
from semantide.services.training.recipes import TrainConfig
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.page_report import PageCounts
from semantide.shared.pages import CLICKED, EXPOSED, Pages


@dataclass(frozen=True)
class ChosenItems:
    """Targets of all pages in an epoch.

    Shapes: ``rows_S``, ``weights_S``, ``exposed_S``; ``offsets_G1`` [G + 1] into them, in the order of the pages.
    """

    rows_S: IntArray
    weights_S: npt.NDArray[np.float32]
    exposed_S: npt.NDArray[np.bool_]
    offsets_G1: IntArray


@dataclass(frozen=True, kw_only=True)
class PageEpoch(Epoch):
    """One pass over the pages. Pages of a piece lie together.

    Shapes: ``page_starts_P``, ``page_counts_P``; ``seen_G`` within the piece's stretch.
    """

    page_starts_P: IntArray
    page_counts_P: IntArray
    seen_G: IntArray
    chosen: ChosenItems
    together: bool
    """Whether the items of a page are one block."""

    @property
    def sizes_P(self) -> IntArray:
        """Items of the history and targets."""
        offsets_G1, last_P = self.chosen.offsets_G1, self.page_starts_P + self.page_counts_P
        return np.asarray(self.lengths_P + offsets_G1[last_P] - offsets_G1[self.page_starts_P])

    def gather(self, pieces: IntArray) -> HistoryBatch:
        """See ``Epoch.gather``."""
        histories = super().gather(pieces)
        pieces = histories.samples_B.numpy()
        pages_G, offsets = ranges(self.page_starts_P[pieces], self.page_counts_P[pieces])
        chosen = self.chosen
        lengths_G = np.diff(chosen.offsets_G1)[pages_G]
        items_S, item_offsets = ranges(chosen.offsets_G1[:-1][pages_G], lengths_G)
        history_G = np.repeat(np.arange(len(pieces)), np.diff(offsets))
        filled = lengths_G > 0
        if self.together:
            blocks, block_offsets = np.flatnonzero(filled), np.append(item_offsets[:-1][filled], item_offsets[-1])
        else:
            blocks, block_offsets = np.repeat(np.arange(len(pages_G)), lengths_G), np.arange(len(items_S) + 1)
        targets = PageTargets(
            torch.from_numpy(chosen.rows_S[items_S]),
            torch.from_numpy(chosen.weights_S[items_S]),
            torch.from_numpy(chosen.exposed_S[items_S]),
            torch.from_numpy(block_offsets.astype(np.int64)),
            torch.from_numpy(history_G[blocks].astype(np.int64)),
            torch.from_numpy(self.seen_G[pages_G][blocks].astype(np.int64)),
            torch.from_numpy(blocks.astype(np.int64)),
        )
        return HistoryBatch(histories.items, histories.times_T, histories.samples_B, histories.events_T, histories.epoch, targets)


class PageSampler:
    """Makes the epochs of a run by pages. Every rank holds all histories and pages."""

    def __init__(self, dataset: Dataset, pages: Pages, config: TrainConfig, seed: int) -> None:
        self._config, self._seed = config, seed
        asked = config.pages
        training, seen_G = pages.training(dataset)
        answers_S = training.answers(asked.clicked_from, asked.ordered_from)
        # Places are not kept with pages, and without what was held out of them they would mislead: the data set's report has them.
        report = PageCounts.of(training.offsets_P1, answers_S, np.full(len(answers_S), -1)).report()
        self._report = {name: value for name, value in report.items() if name not in ("positions", "verdict")}
        self._positive_S, self._exposed_S = answers_S >= CLICKED, answers_S == EXPOSED
        if not self._positive_S.any():
            raise BadData(
                f"no item on the {len(training)} pages of the training part has an action of intensity {asked.clicked_from} or more: there is nothing to learn from; "
                "`semantide pages` shows what there is, and pages.clicked_from says what counts"
            )
        wanted_S = self._positive_S | (self._exposed_S & (asked.exposed == "weak"))
        page_of_S = np.repeat(np.arange(len(training)), np.diff(training.offsets_P1))
        kept_G = np.bincount(page_of_S[wanted_S], minlength=len(training)) > 0
        if config.crop == "last":
            stretch_G = self._stretches(seen_G)
            # The last one with anything to train on: what was only shown since must not take a user's positives away.
            with_positive_G = np.bincount(page_of_S[self._positive_S], minlength=len(training)) > 0
            last_U = np.full(len(dataset.user_ids), -1, dtype=np.int64)
            np.maximum.at(last_U, training.users_P[with_positive_G], stretch_G[with_positive_G])
            without_G = kept_G & (last_U[training.users_P] < 0)
            np.maximum.at(last_U, training.users_P[without_G], stretch_G[without_G])
            kept_G &= stretch_G == last_U[training.users_P]
        inside_S = kept_G[page_of_S]
        self._pages, self._seen_G = training.take(inside_S), seen_G[kept_G]
        self._answers_S, self._positive_S, self._exposed_S = answers_S[inside_S], self._positive_S[inside_S], self._exposed_S[inside_S]
        self._page_of_S = np.repeat(np.arange(len(self._pages)), np.diff(self._pages.offsets_P1))
        weights = np.array([asked.clicked_weight, asked.ordered_weight], dtype=np.float32)
        self._weights_S = np.where(self._positive_S, weights[np.maximum(self._answers_S - CLICKED, 0)], asked.exposed_weight).astype(np.float32)
        if not self._weights_S[self._positive_S].any():
            raise BadData(f"all positives have weight 0 (pages.ordered_weight {asked.ordered_weight}, pages.clicked_weight {asked.clicked_weight}): raise one")
        lengths_U = dataset.train_end.astype(np.int64)
        places, offsets_U1 = ranges(dataset.offsets[:-1], lengths_U)
        self._rows, self._times, self._starts_U = dataset.items[places].astype(np.int64), dataset.times[places] // 1000, offsets_U1[:-1]
        self._cut()

    @property
    def figures(self) -> dict[str, Any]:
        """What the training part's pages are like, and how many of them, with how many positives, are trained on."""
        return {**self._report, "trained_pages": len(self._pages), "trained_positives": int(self._positive_S.sum())}

    @property
    def _stride(self) -> int:
        return max(1, self._config.max_items // 2)

    def _stretches(self, seen_G: IntArray) -> IntArray:
        """Which stretch of its history each page reads."""
        return np.asarray(np.maximum(0, -((self._config.max_items - seen_G) // self._stride)))

    def _cut(self) -> None:
        """Which pages share a reading, and of what."""
        stretch_G = self._stretches(self._seen_G)
        users_G = self._pages.users_P
        new_G = np.append(True, (users_G[1:] != users_G[:-1]) | (stretch_G[1:] != stretch_G[:-1]))[: len(users_G)]
        self._page_starts_P = np.flatnonzero(new_G)
        self._page_counts_P = np.diff(np.append(self._page_starts_P, len(users_G)))
        skipped_P = stretch_G[self._page_starts_P] * self._stride
        piece_G = np.cumsum(new_G) - 1
        self._local_G = self._seen_G - skipped_P[piece_G]
        self._begins_P = self._starts_U[users_G[self._page_starts_P]] + skipped_P
        self._lengths_P = np.maximum.reduceat(self._local_G, self._page_starts_P)
        self._piece_G = piece_G

    def epoch(self, number: int) -> PageEpoch:
        """Batches of one pass, each time the same for the same number."""
        config, rng = self._config, np.random.default_rng([self._seed, number])
        draw_S = rng.random(len(self._answers_S))
        chosen = self._choose(draw_S)
        rows, times, starts, lengths, seen_G = self._rows, self._times, self._begins_P, self._lengths_P, self._local_G
        places, offsets = ranges(starts, lengths)
        events: IntArray | None = None
        if config.skip_rate:
            keep = rng.random(len(places)) >= config.skip_rate
            kept_before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int64)
            seen_G = kept_before[offsets[:-1][self._piece_G] + seen_G] - kept_before[offsets[:-1][self._piece_G]]
            lengths = kept_before[offsets[1:]] - kept_before[offsets[:-1]]
            events = places[keep]
            rows, times, starts = rows[events], times[events], kept_before[offsets[:-1]]
        cost_P = self._lengths_P + self._positives_P() + 1
        noise = rng.random((2, len(cost_P)))
        if config.batching == "mixed":
            order = rng.permutation(len(cost_P))
        else:
            order = np.argsort(self._lengths_P * (1 + 0.05 * noise[0]) + 1.5 * noise[1], kind="stable")
        batch_of = (np.cumsum(cost_P[order]) - cost_P[order]) // config.items_per_batch
        batches = np.split(order, np.flatnonzero(np.diff(batch_of)) + 1)
        batched = tuple(batches[index] for index in rng.permutation(len(batches)))
        return PageEpoch(
            rows, times, starts, lengths, batched, None, events, number,
            page_starts_P=self._page_starts_P, page_counts_P=self._page_counts_P, seen_G=seen_G, chosen=chosen, together=config.pages.targets == "sequential",
        )  # fmt: skip

    def _positives_P(self) -> IntArray:
        """Positives of each piece's pages, whatever of them is asked for."""
        many_G = np.minimum(np.bincount(self._page_of_S[self._positive_S], minlength=len(self._pages)), self._config.pages.page_cap)
        return np.add.reduceat(many_G, self._page_starts_P)

    def _choose(self, draw_S: npt.NDArray[np.float64]) -> ChosenItems:
        """The targets of an epoch: of each page the strongest first, then what was only shown."""
        asked, page_of_S = self._config.pages, self._page_of_S
        place_S = draw_S if asked.shuffle else np.arange(len(draw_S), dtype=np.float64)
        by_strength = np.lexsort((place_S, -self._answers_S, page_of_S))
        rank_S = np.empty(len(draw_S), dtype=np.int64)
        rank_S[by_strength] = self._ranks(page_of_S[by_strength])
        if asked.targets == "point":
            drawn = np.lexsort((draw_S, ~self._positive_S, page_of_S))
            first_S = np.zeros(len(draw_S), bool)
            first_S[drawn] = self._ranks(page_of_S[drawn]) == 0
            taken_S = first_S & self._positive_S
        else:
            taken_S = self._positive_S & (rank_S < asked.page_cap)
        if asked.exposed != "out":
            among = np.lexsort((draw_S, ~self._exposed_S, page_of_S))
            few_S = np.zeros(len(draw_S), bool)
            few_S[among] = self._ranks(page_of_S[among]) < asked.exposed_cap
            taken_S |= few_S & self._exposed_S
        taken = by_strength[taken_S[by_strength]]
        exposed_S = self._exposed_S[taken]
        weights_S = np.where(exposed_S & (asked.exposed == "contrast"), np.float32(0), self._weights_S[taken])
        counts_G = np.bincount(page_of_S[taken], minlength=len(self._pages))
        return ChosenItems(self._pages.items_S[taken], weights_S, exposed_S, np.concatenate([[0], np.cumsum(counts_G)]).astype(np.int64))

    @staticmethod
    def _ranks(pages: IntArray) -> IntArray:
        """Place of each within its page, of pages that lie together."""
        new = np.append(True, pages[1:] != pages[:-1])[: len(pages)]
        begins = np.flatnonzero(new)
        return np.arange(len(pages)) - np.repeat(begins, np.diff(np.append(begins, len(pages))))
