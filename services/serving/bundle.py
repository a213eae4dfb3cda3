"""Everything that one (model, catalog) needs to answer, loaded and checked: it never changes, so a swap is one assignment.

Legend: N items, L levels.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import torch
from torch import Tensor

from semantide.kernels.device import best_device
from semantide.services.serving.profile import Reading, reading_of
from semantide.services.serving.registry_state import Pair
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.decoding.beam_search import Search
from semantide.shared.decoding.kv_pool import KVLease
from semantide.shared.decoding.protocol import Extension, LogitRows, NarrowingModel
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.errors import Corrupt, NotFound
from semantide.shared.models.generator import Generator
from semantide.shared.models.generator_decoder import GeneratorDecoder, PromptKV
from semantide.shared.models.linear_memory import RECORD_TYPES, Records
from semantide.shared.models.prompt_cache import PromptCache
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.models.quantised import Weights, shorten
from semantide.shared.models.vocabulary import Vocabulary
from semantide.shared.telemetry import logger
from semantide.shared.trie import IntArray

DEFAULT_HISTORY_ITEMS = 200
_MASKS_KEPT = 32

MaskKey = tuple[int, tuple[str, ...], tuple[str, ...], bool]  # version of availability, any category, all categories, only new items


@dataclass(frozen=True)
class Unavailable:
    """Items that may not be recommended now; ``version`` changes with the set."""

    version: int = 0
    items: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Mask:
    """What availability and categories allow, in the form that the search takes. ``counts`` is None where everything is allowed."""

    counts: Tensor | None
    num_allowed: int


class MaskCache:
    """The masks in recent use; the only part of a bundle that moves, and it never changes an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._masks: OrderedDict[MaskKey, Mask] = OrderedDict()

    def get(self, key: MaskKey) -> Mask | None:
        """A mask that was made before."""
        with self._lock:
            if mask := self._masks.get(key):
                self._masks.move_to_end(key)
            return mask

    def put(self, key: MaskKey, mask: Mask) -> None:
        """Keep a mask, forget the one used longest ago."""
        with self._lock:
            self._masks[key] = mask
            while len(self._masks) > _MASKS_KEPT:
                self._masks.popitem(last=False)


class ServingModel(NarrowingModel, Protocol):
    """What serving needs of a model beyond the search: what it will hold is known in advance, and prompts that were read before can be given back."""

    def kv_bytes(self, prompt_tokens: int, width: int, remembered: bool) -> int:
        """Bytes of keys and values that a request of a prompt of so many tokens and of this width holds at most; ``remembered`` if its prompt will be kept."""
        ...

    def places(self, prompt_tokens: int) -> int:
        """Places that are read for a prompt of so many tokens, or for such a beginning of one: fewer than tokens where the model merges them."""
        ...

    def begin(
        self,
        tokens_T: Tensor,
        offsets_R1: Tensor,
        cached: Sequence[PromptKV | None] | None = None,
        leases: Sequence[KVLease] | None = None,
        remembered: Sequence[bool] | None = None,
    ) -> tuple[Tensor, Any]:
        """See ``StepModel``; the state has ``prompt_kv`` and ``read_R`` as that of ``GeneratorDecoder``."""
        ...

    def follow(self, state: Any, levels: Sequence[Extension]) -> Iterator[LogitRows]:
        """See ``ScoringModel``."""
        ...


@dataclass(frozen=True, repr=False)  # a log of it would list the whole catalog
class Bundle:
    """A model, its catalog, and what is known of the items. ``prompts`` are kept of its users, and go with it.

    ``trained_items`` is how many items, the first rows, the model's own catalog had: the rows after them are younger than the model.
    ``spelling`` makes prompts of rows; ``item_vectors`` gives the model's vectors of items from the tokens of their codes.
    """

    pair: Pair
    model: ServingModel
    vocabulary: Vocabulary
    catalog: Catalog
    trie: SearchTrie
    titles: tuple[str, ...]
    rows_of_category: Mapping[str, IntArray]
    spelling: PromptSpelling
    max_history_items: int
    trained_items: int
    item_vectors: Callable[[Tensor], Tensor]
    reading: Reading = field(default_factory=Reading)
    masks: MaskCache = field(default_factory=MaskCache, repr=False, compare=False)
    prompts: PromptCache = field(default_factory=lambda: PromptCache(0), repr=False, compare=False)
    search: Callable[..., Search] = Search

    @property
    def new_items(self) -> int:
        """Items that came after the model was trained."""
        return max(0, len(self.catalog) - self.trained_items)

    def mask(self, unavailable: Unavailable, categories_any: tuple[str, ...], categories_all: tuple[str, ...], only_new: bool = False) -> Mask:
        """Which items availability and categories allow, of all or of those younger than the model."""
        key = (unavailable.version, categories_any, categories_all, only_new)
        if (mask := self.masks.get(key)) is not None:
            return mask
        allowed = np.ones(len(self.catalog), dtype=bool)
        if only_new:
            allowed[: self.trained_items] = False
        row_of = self.catalog.row_of
        allowed[[row_of[item] for item in unavailable.items if item in row_of]] = False
        if categories_any:
            some = np.zeros(len(self.catalog), dtype=bool)
            for category in categories_any:
                some[self.rows_of_category.get(category, [])] = True
            allowed &= some
        for category in categories_all:
            has = np.zeros(len(self.catalog), dtype=bool)
            has[self.rows_of_category.get(category, [])] = True
            allowed &= has
        mask = Mask(None if allowed.all() else self.trie.prefix_counts(allowed), int(allowed.sum()))
        self.masks.put(key, mask)
        return mask

    def vectors(self, rows: IntArray) -> npt.NDArray[np.float32]:
        """The model's own vectors of items: what it reads of their codes.

        Shapes: [n] -> [n, D].
        """
        tokens_nL = torch.as_tensor(self.spelling.item_tokens_NL[rows], device=self.trie.device)
        with torch.inference_mode():
            return np.asarray(self.item_vectors(tokens_nL).float().cpu().numpy())

    def all_rows(self, items: tuple[str, ...]) -> IntArray:
        """Catalog rows of items, in the same order.

        Raises: ValueError for items that the catalog does not have.
        """
        if unknown := [item for item in dict.fromkeys(items) if item not in self.catalog.row_of]:
            shown = ", ".join(repr(item[:80]) for item in unknown[:5]) + (", ..." if len(unknown) > 5 else "")
            raise ValueError(
                f"`items` has {len(unknown)} that catalog {self.pair.catalog[:26]}... does not have ({shown}): leave them out, or send them to ingestion first"
            )
        return self.rows(items)

    def rows(self, items: tuple[str, ...]) -> IntArray:
        """Catalog rows of the items that the catalog has, in the same order."""
        row_of = self.catalog.row_of
        return np.array([row_of[item] for item in items if item in row_of], dtype=np.int64)


def read_card(folder: Path) -> dict[str, Any]:
    """What ``semantide.json`` in a model's folder says, of whatever kind the model is.

    Raises: Corrupt.
    """
    try:
        return dict(json.loads((folder / "semantide.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise Corrupt(f"{folder.name}: semantide.json is missing or unreadable ({type(error).__name__}: {error}): train the model again") from error


def read_header(folder: Path) -> dict[str, Any]:
    """What a generator says of itself.

    Raises: Corrupt.
    """
    header = read_card(folder)
    try:
        str(header["tokenizer_digest"]), tuple(header["level_sizes"])
    except (KeyError, TypeError) as error:
        raise Corrupt(f"{folder.name}: semantide.json is unreadable ({type(error).__name__}: {error}): train the model again") from error
    return header


def _trained_items(store: ArtifactStore, ref: object, pair: Pair, catalog: Catalog) -> int:
    """Size of the catalog that the model was trained on, which a later one only adds to; all of this one where that is not known."""
    if ref == pair.catalog:
        return len(catalog)
    try:
        known = pq.read_table(store.get(str(ref or ""), files=("items.parquet",)) / "items.parquet", columns=["item"])["item"].to_pylist()
    except (NotFound, Corrupt, OSError):
        logger("serving").info("the catalog that the model was trained on is not there, so no item counts as new", model=pair.model, catalog=ref)
        return len(catalog)
    return len(known) if tuple(known) == catalog.item_ids[: len(known)] else len(catalog)


def _item_info(folder: Path, catalog: Catalog) -> tuple[tuple[str, ...], Mapping[str, IntArray]]:
    path = folder / "item_info.parquet"
    if not path.exists():
        return ("",) * len(catalog), {}
    table = pq.read_table(path, columns=["item", "title", "categories"])
    if tuple(table["item"].to_pylist()) != catalog.item_ids:
        raise Corrupt(f"{folder.name}: item_info.parquet has other items than items.parquet: run the tokenize job again")
    rows: dict[str, list[int]] = {}
    for row, categories in enumerate(table["categories"].to_pylist()):
        for category in set(categories or ()):
            rows.setdefault(category, []).append(row)
    return tuple(title or "" for title in table["title"].to_pylist()), {name: np.array(members, dtype=np.int64) for name, members in rows.items()}


def load_bundle(
    store: ArtifactStore,
    pair: Pair,
    prompt_cache_bytes: int = 0,
    loaded: Sequence[Bundle] = (),
    weights: Weights = "float32",
    records: Records = "float32",
    snapshots: int = 2,
) -> Bundle:
    """Read, verify and check a model against a catalog. Of its users' prompts it keeps what fits into ``prompt_cache_bytes``.

    What it needs of a catalog it shares with one of the ``loaded`` bundles that has the same. ``weights`` is the form in which a CPU keeps the layers' weights,
    ``records`` that of what layers of linear attention keep of beams; ``snapshots`` is how many of their states are kept of a user's prompt.

    Raises: NotFound, Corrupt; Conflict where the model was not trained for this catalog.
    """
    model_folder = store.get(pair.model)
    header = read_header(model_folder)
    device = best_device()
    same = next((bundle for bundle in loaded if bundle.pair.catalog == pair.catalog), None)
    if same is None:
        catalog_folder = store.get(pair.catalog)
        catalog = Catalog.load(catalog_folder)
        titles, rows_of_category = _item_info(catalog_folder, catalog)
        trie = SearchTrie.build(catalog.trie, device)
        catalog.row_of  # noqa: B018  (cached now, not under the first request)
    else:
        catalog, titles, rows_of_category, trie = same.catalog, same.titles, same.rows_of_category, same.trie
    catalog.check_model(header["tokenizer_digest"], tuple(header["level_sizes"]))
    generator = Generator.from_pretrained(model_folder, catalog.level_sizes)
    generator = shorten(generator.to(device).eval().requires_grad_(False), weights, time.perf_counter)
    vocabulary = generator.vocabulary
    return Bundle(
        pair=pair,
        model=GeneratorDecoder(generator, RECORD_TYPES[records], snapshots=snapshots),
        vocabulary=vocabulary,
        catalog=catalog,
        trie=trie,
        titles=titles,
        rows_of_category=rows_of_category,
        spelling=PromptSpelling.of(generator, catalog.codes),
        max_history_items=int(header.get("max_items") or DEFAULT_HISTORY_ITEMS),
        trained_items=_trained_items(store, header.get("catalog"), pair, catalog),
        item_vectors=generator.item_vectors,
        reading=reading_of(header),
        prompts=PromptCache(prompt_cache_bytes),
    )
