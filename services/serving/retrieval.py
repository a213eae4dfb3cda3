"""The retriever as a source of candidates: every item's score after a history, of which the best allowed ones are the answer, exactly.

It needs no generator and no catalog, so it answers where there is none yet, where the generator cannot keep up, or where a request asks for it; or both
give candidates, and places in the two lists decide.
Legend: V items of the retriever.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semantide.kernels.device import best_device
from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.services.serving.poller import seconds_until_next
from semantide.services.serving.profile import Reading, TimedEvent, profile_of, reading_of
from semantide.services.serving.registry import Registry
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.errors import Corrupt
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.retriever_search import ExactSearch
from semantide.shared.table_snapshots import TableSnapshot
from semantide.shared.telemetry import logger

TimedEvents = Sequence[TimedEvent]

_FUSION = 60  # places from the top that count about alike when lists are joined; Cormack et al., Reciprocal rank fusion, SIGIR 2009


@dataclass(frozen=True)
class Hit:
    """One item and its log-probability among all items of the retriever."""

    item: str
    score: float


@dataclass(frozen=True)
class Retrieved:
    """What a retriever answers, best first."""

    hits: tuple[Hit, ...]
    model: str
    history_items: int
    unknown_history_items: int
    short_reason: str | None
    seconds: float


@dataclass(frozen=True)
class Asking:
    """A request for candidates; times may be unknown, then all are. ``among`` is what filters leave, None: everything."""

    events: TimedEvents
    n: int
    exclude_ids: tuple[str, ...] = ()
    exclude_seen: bool = False
    among: Callable[[str], bool] | None = None


@dataclass(frozen=True, repr=False)
class LoadedRetriever:
    """A retriever with its table, ready to answer; it never changes."""

    ref: str
    search: ExactSearch
    table: TableSnapshot
    reading: Reading
    action_numbers: Callable[[Iterable[str]], list[int]]

    @property
    def item_ids(self) -> tuple[str, ...]:
        """The items that it can rank."""
        return self.table.item_ids

    @property
    def row_of(self) -> Mapping[str, int]:
        """Row of each of them."""
        return self.table.row_of

    @classmethod
    def load(cls, store: ArtifactStore, ref: str, known: LoadedRetriever | None = None) -> LoadedRetriever:
        """Read and verify a stored retriever, and let it answer once; of one that follows ``known`` only what has changed is read.

        Raises: NotFound, Corrupt, Conflict.
        """
        folder = store.get(ref)
        device = best_device()
        model = Retriever.from_pretrained(folder).to(device).requires_grad_(False)
        table = TableSnapshot.load(store.get, ref, None if known is None else known.table)
        card = _card(folder)
        vectors = table.vectors_ND.to(device)
        search = ExactSearch(model, lambda: vectors, int(card.get("max_items") or model.config.max_items))
        if not bool(torch.isfinite(search.scores([np.zeros(0, dtype=np.int64)])).all()):
            raise Corrupt(f"{ref}: the retriever's scores are not numbers: train it again with a smaller learning_rate")
        assert len(table.row_of) == len(table.item_ids)  # made here and not while the first request waits
        return cls(ref, search, table, reading_of(card), model.action_numbers)

    @torch.inference_mode()
    def answer(self, asking: Asking, actions: Mapping[str, float], unavailable: Unavailable) -> Retrieved:
        """The best allowed items."""
        begin = time.perf_counter()
        profile = profile_of(((item, action) for item, action, _ in asking.events), actions, self.reading)
        known = [(self.row_of[item], *asking.events[place][1:]) for item, place in zip(profile.history, profile.places, strict=True) if item in self.row_of]
        timed = all(moment is not None for _, _, moment in known)
        times = np.array([moment or 0 for _, _, moment in known], dtype=np.int64) // 1000 if timed and known else None
        done = np.array(self.action_numbers(action for _, action, _ in known), dtype=np.int64)
        scores_V = self.search.scores([np.array([row for row, _, _ in known], dtype=np.int64)], [times], [done])[0].log_softmax(-1)
        out = {*asking.exclude_ids, *profile.blocked, *(profile.seen if asking.exclude_seen else ()), *unavailable.items}
        rows = [self.row_of[item] for item in out if item in self.row_of]
        scores_V[torch.tensor(rows, dtype=torch.int64, device=scores_V.device)] = -torch.inf
        hits = self._best(scores_V, asking)
        total = len(self.item_ids)
        reason = (
            None if len(hits) == asking.n else f"no more than {len(hits)} of the retriever's {total} items are available, not excluded, and in the categories"
        )
        return Retrieved(hits, self.ref, len(known), len(profile.history) - len(known), reason, time.perf_counter() - begin)

    def _best(self, scores_V: torch.Tensor, asking: Asking) -> tuple[Hit, ...]:
        """The n best, looked for among ever more of the top while filters leave too few."""
        wanted = asking.n if asking.among is None else 4 * asking.n
        while True:
            best = scores_V.topk(min(wanted, len(scores_V)))
            found = [
                Hit(self.item_ids[row], score)
                for row, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
                if score > -np.inf and (asking.among is None or asking.among(self.item_ids[row]))
            ]
            if len(found) >= asking.n or wanted >= len(scores_V):
                return tuple(found[: asking.n])
            wanted *= 4


def in_categories(bundle: Bundle, categories_any: Sequence[str], categories_all: Sequence[str]) -> Callable[[str], bool] | None:
    """Whether an item is in these categories, as the catalog has them; None without categories."""
    if not categories_any and not categories_all:
        return None
    rows = bundle.rows_of_category
    some = {row for name in categories_any for row in rows.get(name, np.zeros(0, dtype=np.int64)).tolist()}
    every = [set(rows.get(name, np.zeros(0, dtype=np.int64)).tolist()) for name in categories_all]
    row_of = bundle.catalog.row_of

    def among(item: str) -> bool:
        row = row_of.get(item, -1)
        return (not categories_any or row in some) and all(row in members for members in every)

    return among


def fused(first: Sequence[str], second: Sequence[str], n: int) -> list[str]:
    """The n best of two rankings: each place counts by its distance from the top; ties go to the first."""
    points: dict[str, float] = {}
    for ranking in (first, second):
        for place, item in enumerate(ranking):
            points[item] = points.get(item, 0.0) + 1 / (_FUSION + place)
    return sorted(points, key=lambda item: -points[item])[:n]


class RetrieverWatch:
    """Follows the registry: holds the retriever that it wants, loaded in the background; one that cannot be loaded leaves the present one."""

    def __init__(self, registry: Registry, store: ArtifactStore, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._store, self._clock = registry, store, clock
        self._lock = threading.Lock()
        self._current: LoadedRetriever | None = None
        self._prepared: LoadedRetriever | None = None
        self._seen_version: int | None = None
        self._retry_at = 0.0
        self.error: str | None = None

    @property
    def current(self) -> LoadedRetriever | None:
        """What answers now; take it once per request."""
        return self._current

    def prepare(self, ref: str) -> None:
        """Load one that is about to be wanted, so that a broken one is refused before anything changes.

        Raises: NotFound, Corrupt, Conflict.
        """
        with self._lock:
            self._prepared = LoadedRetriever.load(self._store, ref)

    def poll(self) -> None:
        """Do what the registry wants, if it changed since the last look or a passing fault may have passed."""
        version = self._registry.version()
        if version == self._seen_version and not (self._retry_at and self._clock() >= self._retry_at):
            return
        with self._lock:
            wanted, self._retry_at = self._registry.read().retriever, 0.0
            held = self._current.ref if self._current else None
            if wanted is None:
                self._current, self.error = None, None
            elif wanted != held:
                try:
                    prepared = self._prepared
                    self._current = prepared if prepared is not None and prepared.ref == wanted else LoadedRetriever.load(self._store, wanted, self._current)
                    self.error = None
                except Exception as error:
                    if (pause := seconds_until_next(error)) is not None:
                        self._retry_at = self._clock() + pause
                    self.error = f"{type(error).__name__}: {error}"
                    logger("serving").error("retriever cannot be loaded, the present one goes on", model=wanted, error=str(error), exc_info=True)
            self._prepared, self._seen_version = None, version


def _card(folder: Path) -> dict[str, Any]:
    try:
        card: dict[str, Any] = json.loads((folder / "semantide.json").read_text())
        return card
    except (OSError, ValueError) as error:
        raise Corrupt(f"{folder.name}: semantide.json is missing or unreadable ({error}): train the model again") from error
