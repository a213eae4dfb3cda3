"""What serving draws on purpose is enough for the training room to say what another model would have earned."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.services.ingestion.schema import INTERACTION_SCHEMA
from semantide.services.serving.engine import Recommendation
from semantide.services.serving.exploration import Mixed
from semantide.services.serving.randomisation import randomise
from semantide.services.training.logged_choices import LoggedPages, Question, choices, earned
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict
from semantide.shared.feedback import Feedback

PEOPLE, ITEMS, PLACES = 8000, 6, 3
CLICKS = np.array([0.15, 0.5, 0.2, 0.6, 0.1, 0.3])
OTHER = [3, 0, 5, 1, 4, 2]
"""The order of the model that was never live; that of the live one is 0, 1, 2 and so on."""


class Never:
    """The model that was never live."""

    num_unknown = 0

    def rank(self, histories: Sequence[Any], n: int, exclude_seen: bool, times: Sequence[Any] = (), actions: Sequence[Any] = ()) -> np.ndarray:
        return np.array([OTHER[:n]] * len(histories))


@pytest.fixture(scope="module")
def log() -> tuple[Dataset, Feedback]:
    hits = [Recommendation(str(item), -float(item), "", (), ()) for item in range(ITEMS)]
    live = Mixed(tuple(hits[:PLACES]), frozenset(), (1.0,) * PLACES)
    lists = [randomise(live, hits[:PLACES], hits[PLACES:], 0.5, seed) for seed in range(PEOPLE)]
    shown = np.array([int(one.item) for drawn in lists for one in drawn.items], dtype=np.int32)
    count, people = len(shown), np.repeat(np.arange(PEOPLE), PLACES)
    clicked = np.random.default_rng(5).random(count) < CLICKS[shown]
    feedback = Feedback(
        people.astype(np.int32), shown, np.full(count, 10**9), people, np.full(count, -1, np.int16), np.tile(np.arange(PLACES), PEOPLE).astype(np.int32), clicked[:, None],
        np.full(count, np.nan, np.float32), np.array([chance for drawn in lists for chance in drawn.propensities], np.float32), np.full(count, 2, np.int8), ("click",),
    )  # fmt: skip
    ids = tuple(map(str, range(ITEMS)))
    dataset = Dataset(
        tuple(map(str, range(PEOPLE))), ids, np.zeros(PEOPLE, np.int32), np.zeros(PEOPLE, np.int64), np.arange(PEOPLE + 1), np.ones(PEOPLE, np.int32), np.ones(PEOPLE, np.int32),
        pa.table({"item": list(ids)}), {"config": {"actions": {"click": 1.0}}, "valid_time": 1, "test_time": 2},
    )  # fmt: skip
    return dataset, feedback


@pytest.mark.parametrize("question", ["places", "pages"])
def test_another_order_is_judged_from_the_draws_of_the_live_one(log: tuple[Dataset, Feedback], question: Question) -> None:
    pages = LoggedPages.of(*log, "test", question)
    chosen = choices(pages, Never(), question, ITEMS, False)
    truth = float(CLICKS[chosen].mean())
    found = earned(pages, chosen, question)
    assert found["covered"] and found["tells"]
    for name in ("ips", "snips", "doubly_robust"):
        one = found["clicks"][name]
        reach = (one["high"] - one["low"]) / 2
        assert abs(one["value"] - truth) < 1.7 * reach and reach < 0.15, (name, one, truth)
    assert abs(found["clicks"]["log"]["value"] - truth) > 0.03 and found["clicks"]["snips"]["lift"]["value"] > 0


def test_the_asked_pages_of_a_stored_log_are_a_fair_sample_of_what_was_shown(tmp_path: Path) -> None:
    """Answers come later than what was shown, also those of pages that stand at the ends of the parts; few places are answered, as in most logs."""
    rng = np.random.default_rng(3)
    rows: list[dict[str, Any]] = []
    for number in range(6000):
        user, begin = f"u{number % 300:03}", number * 10_000
        for place, item in enumerate(rng.permutation(40)[:5].tolist()):
            shown = {"user": user, "item": f"i{item:02}", "page": f"p{number}"}
            rows.append({**shown, "time": begin, "action": "exposure", "position": place, "propensity": 1 / (40 - place)})
            if rng.random() < 0.08:
                rows.append({**shown, "time": begin + int(rng.exponential(600_000)) + 1, "action": "click"})
    log = pa.Table.from_pylist(rows, schema=INTERACTION_SCHEMA)
    pq.write_table(log.append_column("event", pa.array(event_hashes(log), pa.binary())), tmp_path / "events.parquet")
    opened = {(row["user"], row["page"], row["item"]) for row in rows if row["action"] == "click"}
    for split in ("temporal", "leave-one-out", "last-page"):
        folder = tmp_path / split
        config = DatasetConfig.parse({"split": split, "valid_fraction": 0.3, "test_fraction": 0.3}, session_gap_seconds=1800)
        write_dataset(
            [[tmp_path / "events.parquet"]],
            len(rows),
            ARTIFACT_SCHEMA.empty_table(),
            {"exposure": 0.0, "click": 1.0},
            config,
            folder,
            workdir=tmp_path / "steps" / split,
        )
        dataset, feedback = Dataset.load(folder), Feedback.load(folder)
        if split != "temporal":
            with pytest.raises(Conflict, match="split=temporal"):
                LoggedPages.of(dataset, feedback, "test", "places")
            continue
        bounds = [dataset.header["valid_time"], dataset.header["test_time"], np.inf]
        for part, since, until in (("valid", *bounds[:2]), ("test", *bounds[1:])):
            pages = LoggedPages.of(dataset, feedback, part, "places")  # type: ignore[arg-type]
            liked_before = {
                user: int(dataset.times[begin])
                for user, begin in zip(dataset.user_ids, dataset.offsets[:-1].tolist(), strict=True)
                if begin < len(dataset.times)
            }
            asked = [
                row for row in rows if row["action"] == "exposure" and since <= row["time"] < until and liked_before.get(row["user"], np.inf) < row["time"]
            ]
            # All pages that began in the part, each whole, with all of its answers whenever they came.
            assert len(pages.cases) == len(asked) / 5 > 1000
            assert pages.rewards["clicks"].sum() == sum((row["user"], row["page"], row["item"]) in opened for row in asked)
