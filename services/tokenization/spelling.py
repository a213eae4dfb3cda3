"""From a data set to a catalog, and from a catalog to a larger one.

A catalog's folder: ``items.parquet`` and ``catalog.json`` (ids), ``item_info.parquet`` (what an item is, row by row as in the
catalog), ``tokenizer.json`` and ``tokenizer.safetensors``, ``report.json``.
Legend: N items, L levels, D dimensions.
"""

from __future__ import annotations

import json
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from threadpoolctl import threadpool_limits

from semantide.services.tokenization import quality
from semantide.services.tokenization.clusters import fit
from semantide.services.tokenization.collaborative import collaborative_vectors
from semantide.services.tokenization.content import content_vectors
from semantide.services.tokenization.quality import QualityLimits
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset, StoredDataset
from semantide.shared.errors import BadData
from semantide.shared.executors import Executor, LocalExecutor, Steps
from semantide.shared.models.linear_map import FloatArray, LinearMap, unit_rows
from semantide.shared.models.residual_codes import IntArray
from semantide.shared.models.tokenizer import Tick, Tokenizer, TokenizerConfig, embedding_problems, join, silent
from semantide.shared.stored_files import CATALOG_AGAIN, whole

INFO = pa.schema([("item", pa.string()), ("title", pa.string()), ("categories", pa.list_(pa.string())), ("available", pa.bool_())])
PART_ROWS = 1_000_000
_FEW = 16  # items with a collaborative vector, below which nothing is fitted on them


@dataclass(frozen=True)
class Spelled:
    """A catalog with all that belongs to it. ``header`` is what ``catalog.json`` says besides the ids."""

    catalog: Catalog
    tokenizer: Tokenizer
    info: pa.Table
    report: dict[str, Any]
    header: dict[str, Any]

    def save(self, folder: Path) -> None:
        """Write the catalog's folder."""
        self.catalog.save(folder, **self.header)
        self.tokenizer.save(folder)
        pq.write_table(self.info, folder / "item_info.parquet")
        (folder / "report.json").write_text(json.dumps(self.report, indent=1, sort_keys=True))

    @classmethod
    def load(cls, folder: Path) -> Spelled:
        """Read what ``save`` wrote.

        Raises: Corrupt.
        """
        with whole(folder, "catalog", CATALOG_AGAIN):
            header = json.loads((folder / "catalog.json").read_text())
            own = {name: value for name, value in header.items() if name not in ("level_sizes", "tokenizer_digest")}
            report = json.loads((folder / "report.json").read_text())
            return cls(Catalog.load(folder), Tokenizer.load(folder), pq.read_table(folder / "item_info.parquet"), report, own)


def read_vectors(path: Path, item_ids: tuple[str, ...]) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Unit vectors [N, G] of a trained model (columns item, vector), and which items have one [N].

    Raises: BadData.
    """
    table = pq.read_table(path)
    if not {"item", "vector"} <= set(table.column_names):
        raise BadData(f"{path.name} has columns {', '.join(table.column_names)}: give item (text) and vector (list of numbers)")
    row_of = {item: row for row, item in enumerate(item_ids)}
    rows = [(row_of[item], vector) for item, vector in zip(table["item"].to_pylist(), table["vector"].to_pylist(), strict=True) if vector and item in row_of]
    if not rows:
        raise BadData(f"{path.name} has no vector of any of the {len(item_ids)} items of the data set: its column item must hold the same item ids")
    width = len(rows[0][1])
    vectors, seen = np.zeros((len(item_ids), width), np.float32), np.zeros(len(item_ids), bool)
    for row, vector in rows:
        if len(vector) != width or not np.isfinite(vector).all():
            raise BadData(f"{path.name}, item {item_ids[row]!r}, field vector: {len(vector)} numbers, or not finite, where the first has {width}: correct it")
        vectors[row], seen[row] = vector, True
    return unit_rows(vectors), seen


def build(
    dataset: Dataset | StoredDataset,
    config: TokenizerConfig,
    seed: int,
    *,
    limits: QualityLimits | None = None,
    header: dict[str, Any] | None = None,
    vectors: Path | None = None,
    tick: Tick = silent,
    executor: Executor | None = None,
    workdir: Path | None = None,
    part_rows: int = PART_ROWS,
) -> Spelled:
    """Fit a tokenizer on a data set and spell all of its items.

    What is under way is kept below ``workdir``, so that a second call goes on where the first was broken off; a part has about ``part_rows`` pairs of items.
    Raises: BadData when there are no items, or the codebook collapsed; the text has the figures.
    """
    # One thread a matrix product: sums then do not depend on the number of cores, and distances run on all cores by chunks.
    with (
        threadpool_limits(1, user_api="blas"),
        tempfile.TemporaryDirectory(prefix="semantide-tokenize-") if workdir is None else nullcontext(workdir) as folder,
    ):
        steps = Steps(executor or LocalExecutor(), Path(folder), lambda done, total, name: tick(f"item vectors: {name}", done, total))
        return _build(dataset, config, seed, limits or QualityLimits(), header or {}, vectors, tick, steps, part_rows)


def _build(
    dataset: Dataset | StoredDataset,
    config: TokenizerConfig,
    seed: int,
    limits: QualityLimits,
    header: dict[str, Any],
    vectors: Path | None,
    tick: Tick,
    steps: Steps,
    part_rows: int,
) -> Spelled:
    table = dataset.item_table
    if not table.num_rows:
        raise BadData("the data set has no items: import items or interactions first, then make the data set again")
    content = content_vectors(table, config, seed, steps)
    collaborative, seen = np.zeros((table.num_rows, 0), np.float32), np.zeros(table.num_rows, bool)
    if config.collaborative_weight:
        collaborative, seen = read_vectors(vectors, dataset.item_ids) if vectors else collaborative_vectors(dataset, config, seed, steps, part_rows=part_rows)
    predict = None
    if seen.sum() >= _FEW:
        predict = LinearMap.fit(content.vectors[seen], collaborative[seen], config.ridge)
        collaborative[~seen] = unit_rows(predict(content.vectors[~seen]))
    joined = join(config, content.vectors, collaborative if predict else None)
    finite = np.isfinite(joined).all(axis=1)
    if not finite.all():
        raise BadData(
            f"{int((~finite).sum())} of {len(joined)} item vectors hold NaN or infinity, first item {dataset.item_ids[int(np.argmin(finite))]!r}: correct its embedding"
        )
    rank = quality.effective_rank(joined)
    _refuse_constant(joined, rank, limits)
    spelling = fit(joined, config, seed, tick)
    report = {
        **quality.describe(joined, spelling, rank),
        "content": {
            "source": content.source,
            "counts": content.counts,
            "width": int(content.vectors.shape[1]),
            "effective_rank": round(quality.effective_rank(content.vectors), 4),
        },
        "collaborative": {
            "source": ("vectors" if vectors else "histories") if predict else "none",
            "seen": int(seen.sum()) if predict else 0,
            "predicted": int((~seen).sum()) if predict else 0,
        },
        "resolver": {"kind": config.resolver, "assignment": config.assignment, "fill": config.fill, "balance": config.balance},
    }
    report["verdict"] = quality.judge(report, limits)
    if not predict and config.collaborative_weight:
        report["verdict"]["warnings"].append(f"only {int(seen.sum())} items share histories (at least {_FEW}): ids come from content alone")
    if content.counts.get("predicted from text"):
        report["verdict"]["warnings"].append(f"{content.counts['predicted from text']} items have no embedding: predicted from their text")
    report["summary"] = quality.summary(report)
    if not report["verdict"]["passed"]:
        raise BadData("the tokenizer is not good enough, no catalog was written. " + "; ".join(report["verdict"]["reasons"]))
    tokenizer = Tokenizer(config, seed, content.source, int(content.vectors.shape[1]), spelling.codes, content.text, content.fallback, predict)
    catalog = Catalog(dataset.item_ids, spelling.placed, spelling.codes.level_sizes, tokenizer.digest)
    return Spelled(catalog, tokenizer, _info(table), report, {**header, "items": []})


def _refuse_constant(vectors: FloatArray, rank: float, limits: QualityLimits) -> None:
    # Before clustering: hundreds of thousands of equal vectors would first keep the resolver busy for an hour.
    if len(vectors) >= limits.min_items and rank == 0.0 and limits.min_effective_rank > 0:
        distinct = len({row.tobytes() for row in vectors})
        raise BadData(
            f"the tokenizer is not good enough, no catalog was written. All {len(vectors)} item vectors are the same (effective rank 0, {distinct} distinct): "
            "the items say nothing that tells them apart, and no history does; give title, text, categories or embeddings that differ"
        )


def _info(table: pa.Table) -> pa.Table:
    return pa.table([table[field.name].cast(field.type).combine_chunks() for field in INFO], schema=INFO)


@dataclass(frozen=True)
class Extended:
    """What became of a catalog: ``spelled`` is the old one where nothing changed. ``rejected`` says which items were left out and why."""

    spelled: Spelled
    added: int
    updated: int
    rejected: tuple[str, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether there is anything new to write."""
        return bool(self.added or self.updated)


def extend(spelled: Spelled, items: pa.Table, header: dict[str, Any] | None = None) -> Extended:
    """Spell the items that the catalog does not have, and renew what it says of those that it has.

    Ids and rows of known items stay; new items are appended in the order of their ids. Of a deleted unknown item nothing is kept.
    Raises: BadData when the catalog is full.
    """
    last = {item: row for row, item in enumerate(items["item"].to_pylist())}  # the last row of an item is its current state
    deleted = items["deleted"].to_pylist() if "deleted" in items.column_names else [False] * items.num_rows
    known = spelled.catalog.row_of
    new = [last[item] for item in sorted(item for item in last if item not in known and not deleted[last[item]])]
    problems: dict[int, str] = {}
    if spelled.tokenizer.source == "embedding":
        problems = embedding_problems(items, spelled.tokenizer.content_width)
    rejected = tuple(problems[row] for row in new if row in problems)
    new = [row for row in new if row not in problems]
    changed = _updated_info(spelled, items, sorted(last[item] for item in last if item in known))
    if not new and changed is None:
        return Extended(spelled, 0, 0, rejected)
    info, updated = changed if changed is not None else (spelled.info, 0)
    catalog, report = spelled.catalog, dict(spelled.report)
    if new:
        table = items.take(pa.array(new))
        codes = np.concatenate([catalog.codes, spelled.tokenizer.spell(table, catalog.codes)])
        catalog = Catalog((*catalog.item_ids, *table["item"].to_pylist()), codes, catalog.level_sizes, catalog.tokenizer_digest)
        info = pa.concat_tables([info, _info(table)]).combine_chunks()
    past = report.get("extended", {}).get("added", 0)
    report["extended"] = {"items": len(catalog), "added": past + len(new), "ids_left": spelled.tokenizer.codes.capacity - len(catalog)}
    return Extended(Spelled(catalog, spelled.tokenizer, info, report, {**spelled.header, **(header or {})}), len(new), updated, rejected)


def _updated_info(spelled: Spelled, items: pa.Table, rows: list[int]) -> tuple[pa.Table, int] | None:
    if not rows:
        return None
    fresh = _info(items.take(pa.array(rows))).to_pylist()
    positions = [spelled.catalog.row_of[row["item"]] for row in fresh]
    stale = spelled.info.take(pa.array(positions)).to_pylist()
    # Availability has a way of its own to serving: stock that comes and goes must not make a catalog, and a swap, each time.
    differing = {position: new for position, new, old in zip(positions, fresh, stale, strict=True) if {**new, "available": old["available"]} != old}
    if not differing:
        return None
    everything = spelled.info.to_pylist()
    for position, row in differing.items():
        everything[position] = row
    return pa.Table.from_pylist(everything, schema=INFO), len(differing)


def prefix_rows(catalog: Catalog, prefix: list[int]) -> IntArray:
    """Rows of the items whose id begins with a prefix, in the order of their ids; none where no id does."""
    node = catalog.trie.find(prefix)
    if node is None:
        return np.zeros(0, np.int64)
    bounds = catalog.trie.leaf_ranges(len(prefix))
    return catalog.trie.leaf_items[bounds[node] : bounds[node + 1]]


def branch_rows(catalog: Catalog, prefix: list[int]) -> list[tuple[int, IntArray]]:
    """Each code that may follow a prefix, and the rows of the items below it; none below a whole id, or where no id begins so."""
    node, depth = catalog.trie.find(prefix), len(prefix)
    if node is None or depth == catalog.trie.levels:
        return []
    codes, children = catalog.trie.children(depth, node)
    bounds = catalog.trie.leaf_ranges(depth + 1)
    return [(int(code), catalog.trie.leaf_items[bounds[child] : bounds[child + 1]]) for code, child in zip(codes, children, strict=True)]
