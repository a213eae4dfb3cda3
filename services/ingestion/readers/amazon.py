"""The original JSON Lines of Amazon reviews: 2014, 2018 and 2023, reviews and product metadata.

Source: https://amazon-reviews-2023.github.io, https://nijianmo.github.io/amazon, https://jmcauley.ucsd.edu/data/amazon.
2014 and 2018 name products by ``asin`` and count seconds; 2023 names them by ``parent_asin`` and counts milliseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

OLD_REVIEW = frozenset({"reviewerID", "asin", "unixReviewTime"})
NEW_REVIEW = frozenset({"user_id", "parent_asin", "timestamp"})
NEW_META = frozenset({"parent_asin", "title", "main_category"})
_TEXT_LENGTH = 20_000


def is_old_meta(keys: Collection[str]) -> bool:
    """Whether a record with these keys is a product of 2014 or 2018."""
    return "asin" in keys and "reviewerID" not in keys and bool({"title", "categories", "category", "imUrl", "imageURL", "salesRank", "rank"} & set(keys))


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "\n".join(str(part) for part in value if part)
    return str(value) if value else ""


def _categories(record: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    main = record.get("main_category") or record.get("main_cat")
    for path in [main, *(record.get("categories") or []), *(record.get("category") or [])]:
        for name in path if isinstance(path, (list, tuple)) else [path]:
            # Some pages leaked whole sentences of markup into the category path.
            if isinstance(name, str) and name and len(name) <= 200 and "<" not in name:
                found.append(name)
    return list(dict.fromkeys(found))


def product(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line of metadata, of any of the three years, as an item."""
    text = "\n".join(part for part in (_text(record.get("description")), _text(record.get("features") or record.get("feature"))) if part)
    attributes = {
        name: str(record[source])
        for name, source in (
            ("brand", "brand"),
            ("store", "store"),
            ("price", "price"),
            ("rating_count", "rating_number"),
            ("average_rating", "average_rating"),
        )
        if record.get(source) not in (None, "", "None")
    }
    return {
        "id": record.get("parent_asin") or record.get("asin"),
        "title": str(record.get("title") or "")[:10_000],
        "text": text[:_TEXT_LENGTH],
        "categories": _categories(record),
        "attributes": attributes,
    }
