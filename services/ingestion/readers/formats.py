"""What a file is, told from its name and its first bytes, and how its rows become ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.batches import from_records
from semantide.services.ingestion.readers import amazon, columns, delimited, jsonlines, kuairand, movielens, parquetfile, sequences, textlines
from semantide.services.ingestion.readers.chunk import Chunk
from semantide.services.ingestion.schema import Kind, Rejection, shown
from semantide.shared.errors import BadData

FORMATS = (
    "csv", "jsonl", "parquet", "sequences", "movielens-100k-ratings", "movielens-100k-items", "movielens-1m-ratings", "movielens-1m-items",
    "amazon-2014-reviews", "amazon-2023-reviews", "amazon-items", "kuairand-log", "kuairand-items",
)  # fmt: skip
DATA_SUFFIXES = (".csv", ".tsv", ".inter", ".item", ".jsonl", ".json", ".ndjson", ".parquet", ".seq", ".dat", ".data")


@dataclass(frozen=True)
class ReadOptions:
    """What the caller knows about the files; all of it may be left out."""

    format: str = ""
    kind: Kind | None = None
    mapping: Mapping[str, str] = field(default_factory=dict)
    time_unit: str = ""
    delimiter: str = ""
    encoding: str = "utf-8"


@dataclass(frozen=True)
class Format:
    """How to read one file. ``read(path, start)`` gives chunks whose columns or keys are our fields."""

    name: str
    kind: Kind
    read: Callable[[Path, str], Iterator[Chunk]]
    time_unit: str = "ms"
    ordinal_time: bool = False


def is_data(path: Path) -> bool:
    """Whether a file in a folder is worth looking at."""
    name = path.name.removesuffix(".gz")
    return not name.startswith((".", "_")) and (name.endswith(DATA_SUFFIXES) or name in ("u.data", "u.item"))


def detect(path: Path, options: ReadOptions) -> Format:
    """The format of one file.

    Raises: BadData where it is empty, unreadable, or neither interactions nor items.
    """
    if path.stat().st_size == 0:
        raise BadData(f"{path.name} is empty: export it again, or leave it out of the folder")
    name = options.format or _by_name(path)
    if name and name not in FORMATS:
        raise BadData(f"format {name!r} is not known: use one of {', '.join(FORMATS)}, or leave it out")
    if name in _LINES:
        found = _LINES[name]
        if textlines.first_line(path, _line_encoding(name)) is None:
            raise BadData(f"{path.name} has no rows: export it again, or leave it out of the folder")
        return replace(found, time_unit=options.time_unit or found.time_unit)
    if name == "parquet" or path.suffix == ".parquet":
        return _parquet(path, options, name)
    if name.startswith("amazon") or name == "jsonl":
        return _json(path, options, name)
    return _csv(path, options, name)


def _by_name(path: Path) -> str:
    name = path.name.removesuffix(".gz")
    fixed = {"u.data": "movielens-100k-ratings", "u.item": "movielens-100k-items", "ratings.dat": "movielens-1m-ratings", "movies.dat": "movielens-1m-items"}
    if name in fixed:
        return fixed[name]
    suffixes = {".seq": "sequences", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
    return next((kind for suffix, kind in suffixes.items() if name.endswith(suffix)), "")


def _line_encoding(name: str) -> str:
    return "latin-1" if name.startswith("movielens") else "utf-8"


def _wrong_lines(chunk: Chunk, right: pa.Array, expected: str) -> list[Rejection]:
    """Rejections of the lines that are not ``right``."""
    wrong = np.flatnonzero(~np.asarray(right.to_numpy(zero_copy_only=False), dtype=np.bool_))
    lines = chunk.records["line"]  # type: ignore[call-overload]
    return [Rejection(int(chunk.rows[at]), "row", shown(lines[int(at)].as_py()), f"not {expected}", f"write each row as {expected}") for at in wrong]


def _ratings(convert: Callable[[pa.Table], tuple[pa.Table, pa.Array]], expected: str) -> Callable[[Path, str], Iterator[Chunk]]:
    def read(path: Path, start: str) -> Iterator[Chunk]:
        for chunk in textlines.line_chunks(path, start, encoding="latin-1"):
            table, right = convert(chunk.records)
            rejections = [*chunk.rejections, *_wrong_lines(chunk, right, expected)]
            yield replace(
                chunk, records=table.filter(right), rows=chunk.rows[np.asarray(right.to_numpy(zero_copy_only=False), dtype=np.bool_)], rejections=rejections
            )

    return read


def _movies(convert: Callable[[str], dict[str, object] | None], expected: str) -> Callable[[Path, str], Iterator[Chunk]]:
    def read(path: Path, start: str) -> Iterator[Chunk]:
        for chunk in textlines.line_chunks(path, start, encoding="latin-1"):
            records = [convert(line) for line in chunk.records["line"].to_pylist()]  # type: ignore[call-overload]
            right = pa.array([record is not None for record in records], pa.bool_())
            rows = chunk.rows[np.asarray(right.to_numpy(zero_copy_only=False), dtype=np.bool_)]
            yield replace(
                chunk,
                records=[record for record in records if record is not None],
                rows=rows,
                rejections=[*chunk.rejections, *_wrong_lines(chunk, right, expected)],
            )

    return read


def _sequences(path: Path, start: str) -> Iterator[Chunk]:
    for chunk in textlines.line_chunks(path, start):
        table, lines, good = sequences.events(chunk.records)
        yield replace(
            chunk, records=table, rows=chunk.rows[lines.to_numpy()], rejections=[*chunk.rejections, *_wrong_lines(chunk, good, "`user item item ...`")]
        )


_LINES = {
    "movielens-1m-ratings": Format("movielens-1m-ratings", "interactions", _ratings(movielens.ratings, "UserID::MovieID::Rating::Timestamp"), time_unit="s"),
    "movielens-100k-ratings": Format(
        "movielens-100k-ratings", "interactions", _ratings(movielens.ratings_100k, "user, item, rating, timestamp between tabs"), time_unit="s"
    ),
    "movielens-1m-items": Format("movielens-1m-items", "items", _movies(movielens.movie, "MovieID::Title::Genres")),
    "movielens-100k-items": Format("movielens-100k-items", "items", _movies(movielens.movie_100k, "the 24 columns of u.item between bars")),
    "sequences": Format("sequences", "interactions", _sequences, ordinal_time=True),
}


def _need_kind(path: Path, names: list[str], options: ReadOptions) -> Kind:
    kind = options.kind or columns.kind_of(names, options.mapping)
    if kind is None:
        raise BadData(
            f"{path.name} has the columns {', '.join(names)}: neither a user and an item (interactions) nor an id (items) is among them; name them in the mapping, as in user=COLUMN"
        )
    return kind


def _renamed(chunk: Chunk, matched: Mapping[str, str]) -> Chunk:
    table = chunk.records
    assert isinstance(table, pa.Table)
    kept = {name: table[column] for name, column in matched.items() if column in table.column_names}
    return replace(chunk, records=pa.table(kept) if kept else pa.table({"user": pa.nulls(table.num_rows, pa.string())}))


def _decoded(value: Any) -> Any:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value


def _item_records(chunk: Chunk, matched: Mapping[str, str]) -> Chunk:
    """Records with our fields; columns that no field takes become attributes, where the file has no attributes of its own."""
    raw = chunk.records.to_pylist() if isinstance(chunk.records, pa.Table) else chunk.records
    taken = set(matched.values())
    spaced = matched.get("categories", "").endswith(":token_seq")
    records = []
    for record in raw:
        item = {name: _decoded(record.get(column)) for name, column in matched.items()}
        if spaced and item["categories"]:
            item["categories"] = item["categories"].split()
        if "attributes" not in matched:
            item["attributes"] = {
                key.split(":")[0]: _decoded(value) for key, value in record.items() if key not in taken and value is not None and value == value
            } or None
        records.append(item)
    return replace(chunk, records=records)


def _generic(path: Path, kind: Kind, names: list[str], options: ReadOptions, name: str, read: Callable[[Path, str, list[str]], Iterator[Chunk]]) -> Format:
    matched = columns.match(names, kind, options.mapping)
    if kind == "interactions":
        wanted = list(dict.fromkeys(matched.values()))
        return Format(
            name,
            kind,
            lambda path, start: (_renamed(chunk, matched) for chunk in read(path, start, wanted)),
            time_unit=options.time_unit or ("s" if columns.typed(names) else "ms"),
        )
    return Format(name, kind, lambda path, start: (_item_records(chunk, matched) for chunk in read(path, start, names)))


def _parquet(path: Path, options: ReadOptions, name: str) -> Format:
    with parquetfile.opened(path) as file:
        names, count = list(file.schema_arrow.names), file.metadata.num_rows
    if count == 0:
        raise BadData(f"{path.name} has columns but no rows: export it again, or leave it out of the folder")
    return _kuairand(path, names, options, parquetfile.chunks) or _generic(
        path, _need_kind(path, names, options), names, options, name or "parquet", parquetfile.chunks
    )


def _csv(path: Path, options: ReadOptions, name: str) -> Format:
    names, delimiter = delimited.header(path, options.delimiter, options.encoding)

    def read(path: Path, start: str, wanted: list[str]) -> Iterator[Chunk]:
        return delimited.chunks(path, start, delimiter=delimiter, columns=wanted, encoding=options.encoding)

    found = _kuairand(path, names, options, read) or _generic(path, _need_kind(path, names, options), names, options, name or "csv", read)
    rows = textlines.blocks(path, "", encoding=options.encoding, block_bytes=64 * 1024)
    block = next(rows, None)
    if block is not None and len(block.lines) + len(block.rejections) == 1 and next(rows, None) is None:
        raise BadData(f"{path.name} has a header but no rows: export it again, or leave it out of the folder")
    return found


def _kuairand(path: Path, names: list[str], options: ReadOptions, read: Callable[[Path, str, list[str]], Iterator[Chunk]]) -> Format | None:
    if options.mapping or options.kind:
        return None
    if set(names) >= kuairand.LOG:
        wanted = [column for column in kuairand.LOG_COLUMNS if column in names]
        return Format(
            "kuairand-log", "interactions", lambda path, start: (replace(chunk, records=kuairand.log(chunk.records)) for chunk in read(path, start, wanted))
        )
    if kuairand.is_videos(names):
        wanted = [
            column for column in ("video_id", "author_id", "video_type", "upload_dt", "upload_type", "video_duration", "music_id", "tag") if column in names
        ]

        def videos(path: Path, start: str) -> Iterator[Chunk]:
            for chunk in read(path, start, wanted):
                yield replace(chunk, records=[kuairand.video(record) for record in chunk.records.to_pylist()])  # type: ignore[union-attr]

        return Format("kuairand-items", "items", videos)
    return None


def _json(path: Path, options: ReadOptions, name: str) -> Format:
    line = textlines.first_line(path)
    if line is None:
        raise BadData(f"{path.name} has no rows: export it again, or leave it out of the folder")
    if line.lstrip().startswith("["):
        raise BadData(f"{path.name} is one JSON array: write one JSON object a line (jq -c '.[]' turns one into the other)")
    keys = _first_keys(path)
    if not options.mapping and not options.kind:
        if name == "amazon-2014-reviews" or keys >= amazon.OLD_REVIEW:
            matched = {"user": "reviewerID", "item": "asin", "time": "unixReviewTime", "value": "overall"}
            return _reviews("amazon-2014-reviews", matched, "s")
        if name == "amazon-2023-reviews" or keys >= amazon.NEW_REVIEW:
            matched = {"user": "user_id", "item": "parent_asin", "time": "timestamp", "value": "rating"}
            return _reviews("amazon-2023-reviews", matched, "ms")
        if name == "amazon-items" or keys >= amazon.NEW_META or ("id" not in keys and amazon.is_old_meta(keys)):

            def products(path: Path, start: str) -> Iterator[Chunk]:
                for chunk in textlines.json_chunks(path, start, python_literals=True):
                    yield replace(chunk, records=[amazon.product(record) for record in chunk.records])

            return Format("amazon-items", "items", products)
    kind = _need_kind(path, sorted(keys), options)
    columns.match(sorted(keys), kind, options.mapping)

    def matching(names: Iterable[str]) -> dict[str, str]:
        # A field may appear in later rows only.
        return columns.match(sorted(keys.union(names)), kind, options.mapping)

    if kind == "interactions":
        return Format("jsonl", kind, lambda path, start: _json_events(path, start, matching), time_unit=options.time_unit or "ms")

    def items(path: Path, start: str) -> Iterator[Chunk]:
        for chunk in textlines.json_chunks(path, start):
            yield _item_records(chunk, matching({key for record in chunk.records for key in record}))

    return Format("jsonl", kind, items)


def _first_keys(path: Path) -> set[str]:
    """The keys that any of the first records has: optional fields may be missing from the very first."""
    keys: set[str] = set()
    for block in textlines.blocks(path, "", block_bytes=256 * 1024):
        for line in block.lines[:1000]:
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                record = textlines._literal(line) if line.lstrip().startswith("{") else None
            if isinstance(record, dict):
                keys |= set(record)
        break
    if not keys:
        raise BadData(f"{path.name}: none of its first rows is a JSON object: write one JSON object a line")
    return keys


def _json_events(path: Path, start: str, matched: Callable[[Iterable[str]], Mapping[str, str]]) -> Iterator[Chunk]:
    def usable(table: pa.Table) -> bool:
        # "2024-01-01" as a user id would come back as a timestamp, and an object is no id at all.
        fields = {name: table[column].type for name, column in matched(table.column_names).items() if column in table.column_names}
        return not any(
            (pa.types.is_nested(kind) and (name != "signals" or not pa.types.is_list(kind))) or (name != "time" and pa.types.is_temporal(kind))
            for name, kind in fields.items()
        )

    for chunk in jsonlines.table_chunks(path, start, usable):
        if isinstance(chunk.records, pa.Table):
            yield _renamed(chunk, matched(chunk.records.column_names))
        else:
            names = matched({key for record in chunk.records for key in record})
            yield _renamed(_scalars(chunk, names), names)


def _scalars(chunk: Chunk, matched: Mapping[str, str]) -> Chunk:
    """The records whose fields are texts and numbers, as columns of text; rejections for the others."""
    records, rows, rejections = [], [], list(chunk.rejections)
    signals = matched.get("signals", "")
    for row, record in zip(chunk.rows.tolist(), chunk.records, strict=True):
        if isinstance(said := record.get(signals), list):
            record = {**record, signals: " ".join(str(word) for word in said)}
        wrong = next((name for name, column in matched.items() if isinstance(record.get(column), (dict, list, bool))), None)
        if wrong is None:
            records.append(record)
            rows.append(row)
        else:
            rejections.append(Rejection(row, wrong, shown(record[matched[wrong]]), f"{wrong} is neither text nor a number", "send text or a number"))
    return replace(chunk, records=from_records(records, list(matched.values())), rows=np.array(rows, dtype=np.int64), rejections=rejections)


def _reviews(name: str, matched: Mapping[str, str], unit: str) -> Format:
    def read(path: Path, start: str) -> Iterator[Chunk]:
        for chunk in _json_events(path, start, lambda _: matched):
            table = chunk.records
            assert isinstance(table, pa.Table)
            yield replace(chunk, records=table.append_column("action", pc.if_else(pa.array([True] * table.num_rows, pa.bool_()), "review", "review")))

    return Format(name, "interactions", read, time_unit=unit)
