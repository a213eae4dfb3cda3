"""What a log says of a model that was never live, against worlds small enough to know the truth."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.training.evaluate import EvaluateConfig
from semantide.services.training.job import run
from semantide.services.training.logged_choices import LoggedPages, Question, choices, earned
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.feedback import Feedback

from .conftest import NUM_ITEMS, write_dataset

ITEMS, PLACES, PEOPLE = 5, 3, 16000
WEIGHTS = np.array([[0.4, 0.3, 0.15, 0.1, 0.05], [0.1, 0.1, 0.2, 0.3, 0.3]])
LISTS = np.array([[1, 0, 2, 3, 4], [4, 0, 3, 2, 1]])
"""What the log's policy weighs, and what the model ranks, for people whose history ends with item 0 and with item 1."""


HEADER = {"config": {"actions": {"click": 1.0, "order": 3.0}}, "valid_time": 10**9, "test_time": 2 * 10**9}
MOMENTS = np.array([10**8, 10**9, 2 * 10**9])
"""One of each part."""


def later(feedback: Feedback, **changes: Any) -> Feedback:
    """All pages in the test part."""
    return replace(feedback, **{"times": np.full(len(feedback), MOMENTS[2]), "parts": np.full(len(feedback), 2, np.int8), **changes})


class Fixed:
    """Ranks by the last item of a history."""

    num_unknown = 0

    def rank(self, histories: Sequence[Any], n: int, exclude_seen: bool, times: Sequence[Any] = (), actions: Sequence[Any] = ()) -> np.ndarray:
        return np.stack([LISTS[int(history[-1]) % 2][:n] for history in histories])


def opens(kind: int, shown: Sequence[int]) -> float:
    """The chance of a click at the last place; what stood before it matters, which is why the two questions differ."""
    tired = sum(1 for item in shown[:-1] if item % 2 == shown[-1] % 2)
    return 0.1 + 0.12 * ((shown[-1] + kind) % 5) - 0.08 * tired * (shown[-1] in (1, 4)) + 0.05 * tired


def truth(question: Question) -> float:
    """What the model earns at a place, by enumeration."""
    total = 0.0
    for kind in (0, 1):
        if question == "pages":
            total += sum(opens(kind, LISTS[kind, : place + 1].tolist()) for place in range(PLACES))
            continue
        for place in range(PLACES):
            for before in itertools.permutations(range(ITEMS), place):
                chance = np.prod([WEIGHTS[kind, item] / (1 - WEIGHTS[kind, list(before[:at])].sum()) for at, item in enumerate(before)])
                choice = next(item for item in LISTS[kind].tolist() if item not in before)
                total += float(chance) * opens(kind, [*before, choice])
    return total / (2 * PLACES)


def world(seed: int, people: int = PEOPLE) -> tuple[Dataset, Feedback]:
    rng = np.random.default_rng(seed)
    noise = rng.gumbel(size=(people, ITEMS)) + np.log(WEIGHTS[np.arange(people) % 2])
    shown = np.argsort(-noise, axis=1)[:, :PLACES]
    weights = np.take_along_axis(WEIGHTS[np.arange(people) % 2], shown, 1)
    propensities = weights / (1 - (weights.cumsum(1) - weights))
    chances = np.array([[opens(user % 2, shown[user, : place + 1].tolist()) for place in range(PLACES)] for user in range(people)])
    clicked = rng.random((people, PLACES)) < chances
    dataset = Dataset(
        tuple(map(str, range(people))), tuple(map(str, range(ITEMS))), (np.arange(people) % 2).astype(np.int32), np.zeros(people, np.int64), np.arange(people + 1),
        np.ones(people, np.int32), np.ones(people, np.int32), pa.table({"item": list(map(str, range(ITEMS)))}), HEADER,
    )  # fmt: skip
    count, parts = people * PLACES, np.repeat(np.where(np.arange(people) < people // 4, 0, 2), PLACES).astype(np.int8)
    return dataset, Feedback(
        np.repeat(np.arange(people), PLACES).astype(np.int32), shown.reshape(-1).astype(np.int32), MOMENTS[parts], np.repeat(np.arange(people), PLACES), np.full(count, -1, np.int16),
        np.tile(np.arange(PLACES), people).astype(np.int32), clicked.reshape(-1, 1), np.full(count, np.nan, np.float32), propensities.reshape(-1).astype(np.float32), parts, ("click",),
    )  # fmt: skip


@pytest.mark.parametrize("question", ["places", "pages"])
def test_estimates_find_what_the_model_would_earn(question: Question) -> None:
    pages = LoggedPages.of(*world(1), "test", question)
    found = earned(pages, choices(pages, Fixed(), question, 5, False), question)
    # There is something to tell apart: the two questions, and the model from the log.
    assert abs(truth("places") - truth("pages")) > 0.025 and abs(found["clicks"]["log"]["value"] - truth(question)) > 0.025
    for name in ("ips", "snips", "doubly_robust"):
        one = found["clicks"][name]
        reach = (one["high"] - one["low"]) / 2
        assert abs(one["value"] - truth(question)) < 1.5 * reach and reach < 0.035, (name, one, truth(question))
    assert found["covered"] and found["tells"] and found["clicks"]["snips"]["lift"]["beyond_noise"]
    assert found["mean_weight"]["low"] < 1 < found["mean_weight"]["high"] and found["orders"]["snips"]["value"] == 0
    asked = PEOPLE * 3 // 4
    assert (found["users"], found["pages"], found["places"]) == (asked, asked, asked * PLACES)
    assert found["effective"] < asked * PLACES and 0 < found["agrees"] < 1
    # Expectations learned of the training part take luck away from the logged ones.
    assert found["clicks"]["doubly_robust"]["high"] - found["clicks"]["doubly_robust"]["low"] < found["clicks"]["ips"]["high"] - found["clicks"]["ips"]["low"]
    json.dumps(found, allow_nan=False)


def test_what_the_log_cannot_tell_is_not_said_to_be_beyond_noise() -> None:
    dataset, feedback = world(1, 4000)
    certain = replace(feedback, propensities=np.ones(len(feedback), np.float32))  # of a log that left nothing to chance
    for log, covered in ((certain, False), (replace(feedback, times=MOMENTS[np.where(feedback.users < 3980, 0, 2)]), True)):
        pages = LoggedPages.of(dataset, log, "test", "places")
        found = earned(pages, choices(pages, Fixed(), "places", 5, False), "places")
        assert found["covered"] == covered and not found["tells"]
        assert not any(found["clicks"][name]["lift"]["beyond_noise"] for name in ("ips", "snips", "doubly_robust"))


def test_a_place_counts_only_where_what_stood_before_it_is_known() -> None:
    dataset, feedback = world(2, 8)
    feedback = later(feedback)
    positions, propensities, users, times = (
        getattr(feedback, name).copy() for name in ("positions", "propensities", "users", "times")
    )  # page p has rows 3 p to 3 p + 2
    positions[4] = 7  # page 1: a gap behind the first place
    propensities[7] = np.nan  # page 2: a place in the middle whose chance nobody knows
    users[9:12] = -1  # page 3: of nobody
    times[12] = MOMENTS[1]  # page 4: began in another part
    feedback = replace(feedback, positions=positions, propensities=propensities, users=users, times=times)
    moments = dataset.times.copy()
    moments[5] = MOMENTS[2]  # page 5: before all history
    dataset = replace(dataset, times=moments)
    rows = {
        question: [
            (case.user, place)
            for page, place, chance in zip(pages.page_C, pages.place_C, pages.propensity_C, strict=True)
            if not np.isnan(chance) and (case := pages.cases[page])
        ]
        for question in ("places", "pages")
        for pages in [LoggedPages.of(dataset, feedback, "test", question)]
    }
    whole = [(user, place) for user in (0, 6, 7) for place in range(3)]
    assert rows["places"] == sorted([*whole, (1, 0), (2, 0), (2, 2)]) and rows["pages"] == sorted([*whole, (1, 0), (2, 0)])
    pages = LoggedPages.of(dataset, feedback, "test", "places")
    chosen = choices(pages, Fixed(), "places", 5, False)
    shown = feedback.items[6:9].tolist()
    # What was shown at a place of unknown chance was shown: the model does not show it again behind it.
    assert chosen[pages.page_C == 2][2] == next(item for item in LISTS[0].tolist() if item not in shown[:2])
    drawn = LoggedPages.of(dataset, feedback, "test", "places", max_users=2, seed=3)
    assert len({case.user for case in drawn.cases}) == 2
    hidden = replace(feedback, propensities=np.full(len(feedback), np.nan, np.float32))
    for question in ("places", "pages"):
        with pytest.raises(BadData, match="no place of the test part's pages has a chance that is known"):
            LoggedPages.of(dataset, hidden, "test", question)  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="how strong its actions are"):
        LoggedPages.of(replace(dataset, header={**HEADER, "config": {}}), feedback, "test", "places")
    for split in ("leave-one-out", "last-page"):
        header = {"config": {**HEADER["config"], "split": split}, "valid_time": 0, "test_time": 0}
        with pytest.raises(Conflict, match=rf"is {split}, whose parts begin at what was liked: .*split=temporal"):
            LoggedPages.of(replace(dataset, header=header), feedback, "test", "places")


def test_a_list_goes_on_behind_what_the_session_has_shown() -> None:
    dataset, feedback = world(4, 4)
    # Page 2 comes ten minutes behind page 0 of the same person, page 3 an hour behind page 1.
    feedback = later(feedback)
    times, users = feedback.times.copy(), feedback.users.copy()
    users[6:9], users[9:12] = 0, 1
    times[6:9] += 600_000
    times[9:12] += 3_600_000
    pages = LoggedPages.of(dataset, replace(feedback, times=times, users=users), "test", "pages")
    assert pages.before == [frozenset(), frozenset(), frozenset(feedback.items[:3].tolist()), frozenset()]
    chosen = choices(pages, Fixed(), "pages", 5, False)
    rest = [item for item in LISTS[0].tolist() if item not in pages.before[2]]
    assert chosen[pages.page_C == 2].tolist() == [*rest, -1] and chosen[pages.page_C == 3].tolist() == LISTS[1, :3].tolist()


def test_a_job_judges_stored_models_by_a_log(make_job: Any, inputs: dict[str, str], store: ArtifactStore, tmp_path: Path) -> None:
    folder = write_dataset(tmp_path / "logged")
    header = {"config": {"actions": {"click": 1.0, "like": 2.0, "order": 3.0, "exposure": 0.0}}, "valid_time": 10**8, "test_time": 10**9}
    (folder / "dataset.json").write_text(json.dumps(header))
    rng = np.random.default_rng(0)
    shown = rng.permuted(np.tile(np.arange(NUM_ITEMS), (160, 1)), axis=1)[:, :4]
    count = shown.size
    table = {
        "user": pa.array(np.repeat(np.arange(160) % 80, 4), pa.int32()),
        "item": pa.array(shown.reshape(-1), pa.int32()),
        "time": pa.array(np.repeat(np.arange(160) // 80 * 10**9 + 10**6, 4)),
        "page": pa.array(np.repeat(np.arange(160), 4)),
        "tab": pa.array([None] * count, pa.string()),
        "position": pa.array(np.tile(np.arange(4), 160), pa.int32()),
        "signals": pa.array([["click"] if luck < 0.4 else [] for luck in rng.random(count)], pa.list_(pa.string())),
        "value": pa.array([None] * count, pa.float32()),
        "propensity": pa.array(np.tile(1 / np.arange(NUM_ITEMS, NUM_ITEMS - 4, -1), 160), pa.float32()),
        "part": pa.array(np.repeat(np.arange(160) // 80 * 2, 4), pa.int8()),
    }
    pq.write_table(pa.table(table), folder / "feedback.parquet")
    given = {**inputs, "dataset": store.put("datasets", folder)}
    model = run(make_job("train", recipe="tiny", config={"epochs": 1, "items_per_batch": 64, "valid_beam_width": 20}, inputs=given)).artifacts["model"]
    outcome = run(make_job("evaluate", config={"logged": "places", "beam_width": 20}, inputs={**given, "model": model}))
    result = outcome.result
    assert json.loads((store.get(outcome.artifacts["evaluation"]) / "evaluation.json").read_text()) == result
    assert [(row["model"], row["exclude_seen"]) for row in result["estimates"]] == [
        (name, seen) for name in ("popularity", "generator") for seen in (False, True)
    ]
    for row in result["estimates"]:
        assert (row["users"], row["places"]) == (80, 320) and row["mean_weight"]["value"] >= 0
        assert {"ips", "snips", "doubly_robust", "log"} <= set(row["clicks"]) and row["clicks"]["log"]["value"] == pytest.approx(0.4, abs=0.1)
    with pytest.raises(BadData, match="no place of the valid part's pages"):
        run(make_job("evaluate", config={"logged": "pages", "part": "valid"}, inputs={**given, "model": model}))
    with pytest.raises(ValueError, match="logged is 'lists'"):
        EvaluateConfig.of({"logged": "lists"})
    with pytest.raises(ValueError, match="logged is set with bounds"):
        EvaluateConfig.of({"logged": "pages", "bounds": {"hr@50": 0.1}})
