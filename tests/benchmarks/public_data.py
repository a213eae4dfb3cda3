"""Public benchmark data in memory, by leave-one-out: the last item of a user is the test, the last but one the validation, the rest trains."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from semantide.shared.dataset import Dataset


def read_sequences(path: Path) -> list[list[int]]:
    """Items of each line ``user item item ...``, chronological."""
    return [[int(item) for item in line.split()[1:]] for line in path.read_text().splitlines()]


def leave_one_out(sequences: Sequence[Sequence[int]], columns: dict[str, Any]) -> Dataset:
    """The data set of item rows, with an item table of the given columns."""
    lengths = np.array([len(sequence) for sequence in sequences])
    training = np.bincount([item for sequence in sequences for item in sequence[:-2]], minlength=len(columns["item"]))
    count = len(columns["item"])
    defaults = {"title": [""] * count, "text": [""] * count, "categories": pa.array([[]] * count, pa.list_(pa.string())), "attributes": ["{}"] * count}
    table = pa.table({**defaults, "available": [True] * count, **columns, "count": training})
    return Dataset(
        user_ids=tuple(str(user) for user in range(len(sequences))),
        item_ids=tuple(columns["item"]),
        items=np.concatenate([np.asarray(sequence) for sequence in sequences]).astype(np.int32),
        times=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        train_end=(lengths - 2).astype(np.int32),
        valid_end=(lengths - 1).astype(np.int32),
        item_table=table,
        header={},
    )


def beauty(folder: Path, max_users: int | None = None) -> Dataset:
    """Amazon 2014 Beauty with the given MiniLM vectors as embeddings; row = id - 1."""
    rows = {row["id"] - 1: row for row in (json.loads(line) for line in (folder / "beauty.items.jsonl").read_text().splitlines())}
    vectors = np.load(folder / "beauty.minilm.f16.npy").astype(np.float32)
    items = [rows.get(item, {}) for item in range(len(vectors))]
    sequences = [[item - 1 for item in sequence] for sequence in read_sequences(folder / "beauty.seq")[:max_users]]
    return leave_one_out(
        sequences,
        {
            "item": [str(item + 1) for item in range(len(vectors))],
            "title": [row.get("title") or "" for row in items],
            "categories": pa.array([[" > ".join(path) for path in row.get("categories") or []] for row in items], pa.list_(pa.string())),
            "embedding": pa.array(list(vectors), pa.list_(pa.float32())),
        },
    )


def letter_ids(folder: Path, dataset: Dataset) -> npt.NDArray[np.int64]:
    """The semantic ids that LETTER's authors published for Beauty: four levels of 256 codes.

    24 of the 12,101 items share 11 published ids; all but the first of each take the next free last code, since here an id is one item.
    """
    published = json.loads((folder / "beauty.letter_sids.json").read_text())
    codes = np.array([[int(token[3:-1]) for token in published[str(int(item) - 1)]] for item in dataset.item_ids], dtype=np.int64)
    taken = {tuple(row) for row in codes.tolist()}
    seen: set[tuple[int, ...]] = set()
    for row in codes:
        if tuple(row.tolist()) in seen:
            row[-1] = next(code for code in range(256) if (*row[:-1].tolist(), code) not in taken)
            taken.add(tuple(row.tolist()))
        seen.add(tuple(row.tolist()))
    return codes


def ml_1m(folder: Path, max_users: int | None = None) -> Dataset:
    """MovieLens 1M with titles and genres."""
    sequences = read_sequences(folder / "ml-1m.seq")[:max_users]
    movies = sorted({item for sequence in sequences for item in sequence})
    row_of = {movie: row for row, movie in enumerate(movies)}
    described = dict(_movies(folder / "movies.dat"))
    return leave_one_out(
        [[row_of[item] for item in sequence] for sequence in sequences],
        {
            "item": [str(movie) for movie in movies],
            "title": [described.get(movie, ("", []))[0] for movie in movies],
            "categories": pa.array([described.get(movie, ("", []))[1] for movie in movies], pa.list_(pa.string())),
        },
    )


def _movies(path: Path) -> list[tuple[int, tuple[str, list[str]]]]:
    rows = [line.split("::") for line in path.read_text(encoding="latin-1").splitlines()]
    return [(int(movie), (title, genres.split("|"))) for movie, title, genres in rows]
