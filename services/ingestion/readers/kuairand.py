"""KuaiRand: the original CSV logs and video features, and the processed Parquet files with the same columns.

Source: Gao et al., KuaiRand: An Unbiased Sequential Recommendation Dataset with Randomly Exposed Videos, CIKM 2022 (https://kuairand.com).
A row is one exposure with its feedback signals; it becomes one interaction whose action is the strongest signal and whose ``signals`` are all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

LOG = frozenset({"user_id", "video_id", "time_ms", "is_click"})
VIDEOS = frozenset({"video_id", "author_id", "video_type"})

# Weakest first; a later one that is set takes the row. Dislike outweighs everything.
SIGNALS = (
    ("is_click", "click"),
    ("long_view", "long_view"),
    ("is_like", "like"),
    ("is_comment", "comment"),
    ("is_follow", "follow"),
    ("is_forward", "forward"),
    ("is_hate", "hate"),
)
LOG_COLUMNS = ("user_id", "video_id", "date", "tab", "time_ms", *(column for column, _ in SIGNALS), "play_time_ms", "duration_ms", "is_rand")
# Videos of which those of random exposures (is_rand) were drawn, each as likely as the others.
RANDOM_POOL = 7583

_UPLOADS = {"LongImport": "imported long video", "ShortImport": "imported short video", "ShortCamera": "camera clip", "LongCamera": "long camera clip"}


def _text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(pa.string())


def _is_set(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.fill_null(pc.not_equal(pc.if_else(pc.equal(_text(column), ""), "0", _text(column)), "0"), False)


def log(table: pa.Table) -> pa.Table:
    """Exposures as interactions; page = user, date and tab, value = share of the video that was played, propensity where the video was drawn at random."""
    action = pa.chunked_array([pa.array(["exposure"] * table.num_rows, pa.string())])
    signals = [pa.chunked_array([pa.array([""] * table.num_rows, pa.string())])]
    for column, name in SIGNALS:
        if column in table.column_names:
            is_set = _is_set(table[column])
            action = pc.if_else(is_set, name, action)
            signals.append(pc.if_else(is_set, name, ""))
    said = pc.binary_join_element_wise(*signals, " ")
    columns = {"user": table["user_id"], "item": table["video_id"], "time": table["time_ms"], "action": action, "signals": said}
    if "tab" in table.column_names:
        columns["tab"] = table["tab"]
    if "is_rand" in table.column_names:
        columns["propensity"] = pc.if_else(_is_set(table["is_rand"]), pa.scalar(1 / RANDOM_POOL), pa.scalar(None, pa.float64()))
    if {"date", "tab"} <= set(table.column_names):
        columns["page"] = pc.binary_join_element_wise(_text(table["user_id"]), _text(table["date"]), _text(table["tab"]), "/")
    if {"play_time_ms", "duration_ms"} <= set(table.column_names):
        try:
            duration = table["duration_ms"].cast(pa.string()).cast(pa.float64())
            share = pc.divide(
                table["play_time_ms"].cast(pa.string()).cast(pa.float64()), pc.if_else(pc.greater(duration, 0), duration, pa.scalar(None, pa.float64()))
            )
            columns["value"] = pc.round(share, 4)
        except pa.ArrowInvalid:
            # A malformed number costs the value of this chunk, which is a convenience, not the rows.
            pass
    return pa.table(columns)


def is_videos(columns: Collection[str]) -> bool:
    """Whether a table with these columns describes videos."""
    return set(columns) >= VIDEOS and "user_id" not in columns


def _whole(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if value is None or value == "" or value != value:
        return ""
    try:
        return str(int(float(value)))
    except ValueError:
        return str(value)


def _plain(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value if value is not None else "")


def video(record: Mapping[str, Any]) -> dict[str, Any]:
    """A row of video features as an item with a title that a person can read: the data set has none."""
    tags = [tag for tag in _plain(record.get("tag")).split(",") if tag and tag != "unknown"]
    upload = _plain(record.get("upload_type"))
    milliseconds = _whole(record.get("video_duration"))
    seconds = int(milliseconds) // 1000 if milliseconds.isdigit() else None
    author, music = _whole(record.get("author_id")), _whole(record.get("music_id"))
    length = "" if seconds is None else f"{seconds} s " if seconds < 120 else f"{seconds // 60} min "
    about = f" on topic {', '.join(tags)}" if tags else ""
    bucket = "" if seconds is None else "under 15 s" if seconds < 15 else "15 to 60 s" if seconds < 60 else "1 to 3 min" if seconds < 180 else "over 3 min"
    kind = _UPLOADS.get(upload, f"{upload or 'plain'} video")
    attributes = {"author": author, "music": music, "upload": upload, "uploaded": _plain(record.get("upload_dt")), "type": _plain(record.get("video_type"))}
    return {
        "id": _whole(record.get("video_id")),
        "title": f"{length}{kind}{about} by creator {author}".strip(),
        "text": " ".join(part for part in (kind, bucket, *(f"topic {tag}" for tag in tags), f"creator {author}", f"music {music}" if music else "") if part),
        "categories": [*(f"topic {tag}" for tag in tags), *([bucket] if bucket else []), *([upload] if upload else [])],
        "attributes": {key: value for key, value in attributes.items() if value},
    }
