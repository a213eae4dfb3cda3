"""The original files of MovieLens 100K (``u.data``, ``u.item``) and 1M (``ratings.dat``, ``movies.dat``).

Source: https://grouplens.org/datasets/movielens/ (formats: its README files). Times are seconds; a rating is a ``rate`` with its stars as value.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

GENRES_100K = (
    "unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy",
    "Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western",
)  # fmt: skip


def split_lines(table: pa.Table, mark: str, fields: Sequence[str]) -> tuple[pa.Table, pa.Array]:
    """The lines' columns, and which lines had the right number of them; the others have nulls."""
    parts = pc.split_pattern(table["line"].combine_chunks(), mark)
    if isinstance(parts, pa.ChunkedArray):
        parts = parts.combine_chunks()
    right = pc.equal(pc.list_value_length(parts), len(fields))
    parts = pc.if_else(right, parts, pa.scalar(None, parts.type))
    good = parts.filter(right)
    columns = {}
    positions = pc.if_else(right, pc.subtract(pc.cumulative_sum(right.cast(pa.int64())), 1), pa.scalar(None, pa.int64()))
    for index, name in enumerate(fields):
        columns[name] = pc.list_element(good, index).take(positions) if len(good) else pa.nulls(table.num_rows, pa.string())
    return pa.table(columns), right


def ratings(table: pa.Table) -> tuple[pa.Table, pa.Array]:
    """``UserID::MovieID::Rating::Timestamp`` as interactions."""
    columns, right = split_lines(table, "::", ("user", "item", "value", "time"))
    return columns.append_column("action", pa.array(["rate"] * table.num_rows, pa.string())), right


def ratings_100k(table: pa.Table) -> tuple[pa.Table, pa.Array]:
    """``user<TAB>item<TAB>rating<TAB>timestamp`` as interactions; what was rated in one second was one page of the site."""
    columns, right = split_lines(table, "\t", ("user", "item", "value", "time"))
    page = pc.binary_join_element_wise(columns["user"], columns["time"], "@")
    return columns.append_column("action", pa.array(["rate"] * table.num_rows, pa.string())).append_column("page", page), right


def movie(line: str) -> dict[str, object] | None:
    """``MovieID::Title::Genres`` as an item; None where the line is none."""
    parts = line.split("::")
    return {"id": parts[0], "title": parts[1], "categories": parts[2].split("|")} if len(parts) == 3 else None


def movie_100k(line: str) -> dict[str, object] | None:
    """A line of ``u.item`` as an item; None where the line is none."""
    parts = line.split("|")
    if len(parts) != 5 + len(GENRES_100K):
        return None
    genres = [name for name, flag in zip(GENRES_100K, parts[5:], strict=True) if flag == "1"]
    return {"id": parts[0], "title": parts[1], "categories": genres, "attributes": {"released": parts[2]} if parts[2] else {}}
