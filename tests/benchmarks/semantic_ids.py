"""Semantic ids of Amazon Beauty: collisions, utilisation, and how much of the vectors the ids keep.

The baseline is the plain residual quantiser of the same run: the same vectors and codebooks, no resolver.
Usage: python tests/benchmarks/semantic_ids.py [--data DIR] [--json] [--quick]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from machine import machine

from semantide.services.tokenization.recipes import RECIPES, recipe
from semantide.services.tokenization.spelling import Spelled, build
from semantide.shared.dataset import Dataset
from semantide.shared.version import code_version


def beauty(folder: Path, first_items: int = 0) -> Dataset:
    """The data set of ``beauty.seq``: last item test, last but one validation; the given MiniLM vectors as embeddings."""
    sequences = [[int(item) - 1 for item in line.split()[1:]] for line in (folder / "beauty.seq").read_text().splitlines()]
    rows = [json.loads(line) for line in (folder / "beauty.items.jsonl").read_text().splitlines()]
    vectors = np.load(folder / "beauty.minilm.f16.npy").astype(np.float32)
    count = first_items or len(vectors)
    sequences = [kept for sequence in sequences if len(kept := [item for item in sequence if item < count]) >= 3]
    described = {row["id"] - 1: row for row in rows}
    training = np.bincount([item for sequence in sequences for item in sequence[:-2]], minlength=count)
    items = [described.get(item, {}) for item in range(count)]
    table = pa.table(
        {
            "item": [str(item + 1) for item in range(count)],
            "count": training,
            "title": [row.get("title") or "" for row in items],
            "text": [row.get("keywords") or "" for row in items],
            "categories": pa.array([[" > ".join(path) for path in row.get("categories") or []] for row in items], pa.list_(pa.string())),
            "attributes": [json.dumps({f"attribute{i}": value for i, value in enumerate(row.get("attributes") or [])}) for row in items],
            "available": [True] * count,
            "embedding": pa.array(list(vectors[:count]), pa.list_(pa.float32())),
        }
    )
    lengths = np.array([len(sequence) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return Dataset(
        user_ids=tuple(str(user) for user in range(len(sequences))),
        item_ids=tuple(table["item"].to_pylist()),
        items=np.concatenate(sequences).astype(np.int32),
        times=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        offsets=offsets.astype(np.int64),
        train_end=(lengths - 2).astype(np.int32),
        valid_end=(lengths - 1).astype(np.int32),
        item_table=table,
        header={},
    )


def check(spelled: Spelled, dataset: Dataset) -> list[str]:
    """What is wrong with the ids: the way item -> id -> item must lead back for the whole catalog, from the files too."""
    with tempfile.TemporaryDirectory() as scratch:
        spelled.save(Path(scratch))
        read = Spelled.load(Path(scratch)).catalog
        kept = pq.read_table(Path(scratch) / "item_info.parquet")["item"].to_pylist()
    problems = []
    if read.item_ids != dataset.item_ids or kept != list(dataset.item_ids):
        problems.append("the catalog does not hold the data set's items in their order")
    by_id = {tuple(codes): item for item, codes in zip(read.item_ids, read.codes.tolist(), strict=True)}
    back = [by_id[tuple(read.codes[read.row_of[item]].tolist())] for item in dataset.item_ids]
    if back != list(dataset.item_ids):
        problems.append("item -> id -> item does not lead back")
    if len(read.trie.leaf_items) != len(read):
        problems.append("the trie lacks items")
    return problems


def main() -> int:
    """Measure, print, and say with the exit code whether the ids are right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=Path(__file__).resolve().parents[2].parent / "shared" / "data", help="folder that holds amazon/, or amazon itself"
    )
    parser.add_argument("--recipe", default="default", choices=list(RECIPES))
    parser.add_argument("--config", default="{}", help="JSON of TokenizerConfig fields to override")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the first 3,000 items alone")
    options = parser.parse_args()
    folder = options.data / "amazon" if (options.data / "amazon").is_dir() else options.data
    if not (folder / "beauty.seq").is_file():
        print(f"no beauty.seq in {folder}: give the folder with --data", file=sys.stderr)
        return 2
    dataset = beauty(folder, 3000 if options.quick else 0)
    config = recipe(options.recipe).overridden(json.loads(options.config))
    begin = time.perf_counter()
    spelled = build(dataset, config, options.seed)
    seconds = time.perf_counter() - begin
    problems = check(spelled, dataset)
    again = build(dataset, config, options.seed)
    if again.tokenizer.digest != spelled.tokenizer.digest or not np.array_equal(again.catalog.codes, spelled.catalog.codes):
        problems.append("a second run with the same seed gave other ids")
    report = spelled.report
    levels, error = report["levels"], report["reconstruction"]
    measures = {
        "collisions": {"value": report["collisions"]["after"]["items"], "unit": "items", "better": "lower", "at_least": 0},
        "first_level_used": {"value": levels[0]["utilisation"], "unit": "share", "better": "higher", "at_least": 0.95},
        "collisions_before": {"value": report["collisions"]["before"]["items"], "unit": "items", "better": "lower"},
        "left_over_variance": {
            "value": error["after"]["share_of_variance"], "unit": "share", "better": "lower", "baseline": f"plain residual codes: {error['before']['share_of_variance']}",
        },
        "largest_first_level_group": {"value": levels[0]["largest_prefix_group"], "unit": "items", "better": "lower"},
        "seconds": {"value": round(seconds, 2), "unit": "s", "better": "lower"},
    }  # fmt: skip
    for row in levels:
        measures[f"level{row['level'] + 1}_entropy"] = {"value": row["normalised_entropy"], "unit": "share of the largest possible", "better": "higher"}
    if options.json:
        print(
            json.dumps(
                {
                    "benchmark": "semantic_ids",
                    "commit": code_version(),
                    "machine": machine(),
                    "recipe": options.recipe,
                    "measures": measures,
                    "problems": problems,
                }
            )
        )
    else:
        print("\n".join([*report["summary"], f"seconds {seconds:.1f}", *(f"WRONG: {problem}" for problem in problems)]))
    return 1 if problems or report["collisions"]["after"]["items"] else 0


if __name__ == "__main__":
    sys.exit(main())
