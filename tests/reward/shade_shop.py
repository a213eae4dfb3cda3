"""A shop with taste: users like items of their own colour, click more at the top of the page, and are shown what is popular."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

NUM_ITEMS, NUM_USERS, COLOURS = 40, 60, 4
PLACES = 4


def write_shop(
    folder: Path, *, seed: int = 0, num_users: int = NUM_USERS, pages: int = 12, first_item: int = 0, described: bool = True, propensities: bool = False
) -> Path:
    """A data set with exposures; item ``n`` has colour ``n % COLOURS``, and so has user ``n``."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, object]] = []
    histories: list[list[tuple[int, int, str]]] = [[] for _ in range(num_users)]
    for page in range(pages):
        for user in range(num_users):
            time = 1_000_000 * (page + 1) + user
            popular = 1 / (1 + np.arange(NUM_ITEMS))
            items = rng.choice(NUM_ITEMS, PLACES, replace=False, p=popular / popular.sum())
            for place, item in enumerate(items.tolist()):
                liked = 0.75 if item % COLOURS == user % COLOURS else 0.15
                clicked = rng.random() < liked * (1.0, 0.7, 0.5, 0.35)[place]
                signals = (["click"] + (["order"] if rng.random() < 0.4 else [])) if clicked else []
                rows.append({
                    "user": user, "item": item, "time": time, "page": page * num_users + user, "tab": "home" if user % 2 else "search", "position": place, "signals": signals,
                    "value": None, "propensity": float(popular[item] / popular.sum() * PLACES) if propensities and PLACES * popular[item] / popular.sum() < 1 else None, "part": 0,
                })  # fmt: skip
                if clicked:
                    histories[user].append((item, time, "order" if "order" in signals else "click"))
    folder.mkdir(parents=True)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    schema = pa.schema([
        ("user", pa.int32()), ("item", pa.int32()), ("time", pa.int64()), ("page", pa.int64()), ("tab", pa.string()), ("position", pa.int32()),
        ("signals", pa.list_(pa.string())), ("value", pa.float32()), ("propensity", pa.float32()), ("part", pa.int8()),
    ])  # fmt: skip
    pq.write_table(pa.table(columns, schema=schema), folder / "feedback.parquet")
    names = [f"item-{first_item + row}" for row in range(NUM_ITEMS)]
    counts = np.bincount([item for history in histories for item, *_ in history], minlength=NUM_ITEMS)
    text = {"title": [f"thing in shade {row % COLOURS}" for row in range(NUM_ITEMS)], "categories": [[f"shade {row % COLOURS}"] for row in range(NUM_ITEMS)]}
    pq.write_table(pa.table({"item": names, "count": counts, **(text if described else {})}), folder / "items.parquet")
    lengths = [len(history) for history in histories]
    pq.write_table(
        pa.table({
            "user": [f"user-{row}" for row in range(num_users)],
            "items": pa.array([[event[0] for event in history] for history in histories], pa.list_(pa.int32())),
            "times": pa.array([[event[1] for event in history] for history in histories], pa.list_(pa.int64())),
            "actions": pa.array([[event[2] for event in history] for history in histories], pa.list_(pa.string())),
            "train_end": pa.array(lengths, pa.int32()), "valid_end": pa.array(lengths, pa.int32()),
        }),
        folder / "users.parquet",
    )  # fmt: skip
    (folder / "dataset.json").write_text(json.dumps({"name": "shades", "seed": seed, "config": {"positive_intensity": 1.0, "deduplicate": "none"}}))
    return folder
