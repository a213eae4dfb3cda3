"""Which column of a stranger's file is which field of ours: by a given mapping, else by the names in common use."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from semantide.services.ingestion.schema import SCHEMAS, Kind
from semantide.shared.errors import BadData

_ITEM_IDS = ("item", "itemid", "iid", "asin", "parentasin", "productid", "movieid", "videoid", "articleid", "newsid", "trackid", "contentid", "goodsid", "sku")
_ALIASES: dict[Kind, dict[str, tuple[str, ...]]] = {
    "interactions": {
        "user": ("user", "userid", "uid", "reviewerid", "customerid", "visitorid"),
        "item": _ITEM_IDS,
        "time": ("time", "timems", "timestamp", "ts", "timestampms", "eventtime", "unixreviewtime", "createdat", "datetime", "date"),
        "action": ("action", "event", "eventtype", "behavior", "behaviour", "behaviortype", "actiontype", "feedback"),
        "page": ("page", "pageid", "impressionid", "sessionid"),
        "value": ("value", "rating", "score", "overall"),
        "event_id": ("eventid", "uuid"),
        "tab": ("tab", "placement", "surface"),
        "position": ("position", "slot"),
        "propensity": ("propensity",),
        "signals": ("signals",),
        "request_id": ("requestid",),
        "variant": ("experimentvariant",),
        "variant_share": ("variantshare",),
    },
    "items": {
        "id": ("id", *_ITEM_IDS),
        "title": ("title", "name", "productname", "itemname", "movietitle"),
        "text": ("text", "description", "overview", "content", "abstract"),
        "categories": ("categories", "category", "genres", "genre", "tags", "class"),
        "attributes": ("attributes", "features"),
        "available": ("available", "instock"),
        "deleted": ("deleted",),
        "embedding": ("embedding", "vector"),
    },
}


_TYPES = ("token", "token_seq", "float", "float_seq")


def typed(names: Sequence[str]) -> bool:
    """Whether column names carry their types, as in ``user_id:token``: the atomic files of a well-known library, whose times are seconds."""
    return all(name.rpartition(":")[2] in _TYPES and ":" in name for name in names)


def _plain(name: str) -> str:
    # Some exports write the type behind the name: `user_id:token`.
    return re.sub(r"[^a-z0-9]", "", name.split(":")[0].lower())


def kind_of(names: Sequence[str], mapping: Mapping[str, str] | None = None) -> Kind | None:
    """Whether columns of these names are interactions or items; None where they are neither."""
    mapping = mapping or {}
    plain = {_plain(name) for name in names}

    def has(kind: Kind, field: str) -> bool:
        return field in mapping or bool(plain & set(_ALIASES[kind][field]))

    if has("interactions", "user") and has("interactions", "item"):
        return "interactions"
    return "items" if has("items", "id") else None


def match(names: Sequence[str], kind: Kind, mapping: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our field -> the file's column.

    Raises: BadData where a mapped column is not there or a needed one is not found.
    """
    mapping = mapping or {}
    fields = SCHEMAS[kind].names
    result: dict[str, str] = {}
    for field, column in mapping.items():
        if field not in fields:
            raise BadData(f"mapping names the field {field!r}, and {kind} have none of that name: use some of {', '.join(fields)}")
        if column not in names:
            raise BadData(f"mapping says {field} is in the column {column!r}, and there is none: the columns are {', '.join(names)}")
        result[field] = column
    taken = set(result.values())
    for field, aliases in _ALIASES[kind].items():
        if field in result:
            continue
        for alias in aliases:
            found = next((name for name in names if _plain(name) == alias and name not in taken), None)
            if found is not None:
                result[field] = found
                taken.add(found)
                break
    needed = ("user", "item", "time") if kind == "interactions" else ("id",)
    for field in needed:
        if field not in result:
            raise BadData(f"no column for {field} among {', '.join(names)}: name it in the mapping, as in {field}=COLUMN")
    return result
