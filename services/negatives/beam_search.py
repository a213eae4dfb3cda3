"""What a generator's beams hold at some places of every user's training history: the wrong items that it takes for the next one.

Legend: U users, C cuts, W beams, N items of the data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from semantide.services.negatives.cuts import Cuts
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.beam_search import beam_search
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.errors import Conflict
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.prompt_cache import history_window
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.negative_sampling import IntArray, Rows
from semantide.shared.negative_source import TrainingEvents


@dataclass(frozen=True)
class BeamConfig:
    """Where beams are searched, and how many."""

    width: int = 20
    points: int = 4
    """Places in each user's training history, evenly spread; a target takes the beams of the last place before it."""
    batch: int = 32
    """Histories searched together."""

    def __post_init__(self) -> None:
        for name, high in (("width", 4096), ("points", 100_000), ("batch", 4096)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ValueError(f"{name} is {value!r}: give a whole number from 1 to {high}")

    @classmethod
    def of(cls, values: dict[str, Any]) -> BeamConfig:
        """From a job's ``config``.

        Raises: ValueError that names the field.
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"config field {name!r} is unknown: known are {', '.join(known)}")
        return cls(**values)


class BeamSearcher:
    """The beams of a generator, in the rows of a data set; what a user has taken before does not come up."""

    def __init__(self, model: Generator, catalog: Catalog, dataset: Dataset, events: TrainingEvents, max_items: int, width: int) -> None:
        """``max_items`` is the longest history that the model reads.

        Raises: Conflict for a data set of which the catalog has nothing.
        """
        self._cuts, self._max_items, self._width = Cuts(events), max_items, width
        self._decoder = GeneratorDecoder(model.eval())
        self._device = model.head_VD.device
        self._trie = SearchTrie.build(catalog.trie, self._device)
        self._spelling = PromptSpelling.of(model, catalog.codes)
        self._catalog_rows = np.array([catalog.row_of.get(item, -1) for item in dataset.item_ids], dtype=np.int64)
        self._item_of = np.full(len(catalog), -1, dtype=np.int64)
        known = self._catalog_rows >= 0
        if not known.any():
            raise Conflict(f"none of the data set's {len(known)} items is in the catalog: take the catalog that was made of this data set")
        self._item_of[self._catalog_rows[known]] = np.flatnonzero(known)
        self._mask = self._trie.prefix_counts(self._item_of >= 0)

    @torch.inference_mode()
    def search(self, cuts: Rows) -> Rows:
        """Beams of the histories before some events [C, W], best first, -1 past the end."""
        histories = [self._before(int(cut)) for cut in cuts]
        # A history of which the catalog has nothing says nothing: it gets no beams.
        able = [index for index, rows in enumerate(histories) if len(rows)]
        found = np.full((len(cuts), self._width), -1, dtype=np.int32)
        if not able:
            return found
        hits = self._hits([histories[index] for index in able])
        found[able, : hits.shape[1]] = np.where(hits >= 0, self._item_of[hits], -1)
        return found

    def _hits(self, histories: Sequence[IntArray]) -> Rows:
        prompts = Jagged.from_sequences(self._spelling.prompt(history_window(rows, self._max_items)) for rows in histories)
        node_filter = ItemFilter.build(self._trie, [self._mask], [0] * len(histories), list(histories))
        prompts = prompts.to(self._device)
        hits = beam_search(self._decoder, self._trie, prompts.values, prompts.offsets_B1, self._width, node_filter=node_filter)
        rows: Rows = hits.rows_RW[:, : self._width].cpu().numpy()
        return rows

    def _before(self, cut: int) -> IntArray:
        rows = self._catalog_rows[self._cuts.before(cut)]
        return rows[rows >= 0]
