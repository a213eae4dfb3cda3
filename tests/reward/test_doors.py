"""The room's doors: scorers of rollouts, the queue's worker, jobs, REST."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fastapi.testclient import TestClient

from semantide.services.reward import api, job, tasks
from semantide.services.reward.newest_rewards import NewestRewards
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import Interaction, JobSpec, RolloutsToScore
from semantide.shared.errands import Errands
from semantide.shared.errors import BadData, Conflict, Corrupt
from semantide.shared.history import Histories as OnlineHistories
from semantide.shared.http import build_app
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.relevance_gate import RelevanceGate
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.rollout_scores import QueuedScorer, store_rollouts
from semantide.shared.rollouts import Rollouts, Scores, rollouts_of
from semantide.shared.room import Room

from .shade_shop import NUM_ITEMS, write_shop

REWARD = "rewards/sha256-" + "e" * 64


@pytest.fixture
def room(make_room: Callable[[str], Room]) -> Room:
    tasks.scorer_of.cache_clear()
    api.loaded.cache_clear()
    return make_room("reward")


@pytest.fixture
def dataset(store: ArtifactStore, shop: Path) -> str:
    return store.put("datasets", shop)


@pytest.fixture
def reward(store: ArtifactStore, trained: Path) -> str:
    return store.put("rewards", trained)


def some(dataset: str, seed: int = 0, groups: int = 5, size: int = 6) -> Rollouts:
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, NUM_ITEMS, rng.integers(0, 9)) for _ in range(groups)]
    actions = [rng.integers(-1, 2, len(history)) for history in histories]
    times = [np.arange(len(history)) for history in histories]
    items_BG = np.where(rng.random((groups, size)) < 0.2, -1, rng.integers(0, NUM_ITEMS, (groups, size)))
    return rollouts_of(dataset, [-1, *range(groups - 1)], histories, times, items_BG, actions, ("order", "unheard"))


def equal(one: Scores, other: Scores) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("preference_BG", "relevance_BG", "gate_BG", "valid_BG"))


def test_what_is_no_item_gets_nothing_and_threads_change_nothing(shop: Path, trained: Path) -> None:
    scorer = RewardScorer(REWARD, PreferenceModel.load(trained), "d", shop)
    rollouts = some("d", groups=9)
    scores = scorer.score(rollouts)
    nothing = rollouts.items_BG < 0
    assert nothing.any() and (scores.preference_BG[nothing] == 0).all() and not scores.gate_BG[nothing].any() and np.array_equal(scores.valid_BG, ~nothing)
    assert ((scores.preference_BG >= 0) & (scores.preference_BG <= 1)).all() and np.isfinite(scores.relevance_BG).all()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert equal(scores, RewardScorer(REWARD, PreferenceModel.load(trained), "d", shop).score(rollouts))
    finally:
        torch.set_num_threads(threads)
    one = Rollouts("d", rollouts.users_B[3:4], np.array([0, len(rollouts.history(3))]), rollouts.history(3), rollouts.times_E[: len(rollouts.history(3))],
                   rollouts.actions_E[rollouts.offsets_B1[3] : rollouts.offsets_B1[4]], rollouts.items_BG[3:4], rollouts.actions)  # fmt: skip
    assert np.allclose(scorer.score(one).preference_BG[0], scores.preference_BG[3], atol=1e-6)


def grown_shop(shop: Path, folder: Path, order: np.ndarray) -> Path:
    """The shop's data set with two new items before those that it has, which lie in another order; all else as it was."""
    shutil.copytree(shop, folder)
    table = pq.read_table(shop / "items.parquet")
    later = pa.table({"item": ["new-red", "new-dumb"], "count": [0, 0], "title": ["thing in shade 1", ""], "categories": [["shade 1"], []]})
    pq.write_table(pa.concat_tables([later.cast(table.schema), table.take(order)]), folder / "items.parquet")
    return folder


def test_rows_are_matched_by_id_and_later_items_are_known_by_what_they_are(shop: Path, trained: Path, tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(NUM_ITEMS)
    folder = grown_shop(shop, tmp_path / "grown", order)
    users = pq.read_table(shop / "users.parquet")
    pq.write_table(users.take(np.arange(users.num_rows)[::-1]), folder / "users.parquet")
    place = np.append(np.argsort(order) + 2, -1)
    feedback = pq.read_table(shop / "feedback.parquet")
    for name, rows in (("user", users.num_rows - 1 - feedback["user"].to_numpy()), ("item", place[feedback["item"].to_numpy()])):
        feedback = feedback.set_column(feedback.column_names.index(name), name, pa.array(rows, pa.int32()))
    pq.write_table(feedback, folder / "feedback.parquet")
    model = PreferenceModel.load(trained)
    plain, grown = RewardScorer(REWARD, model, "d", shop), RewardScorer(REWARD, model, "g", folder)
    before = some("d")
    users_B = np.where(before.users_B >= 0, users.num_rows - 1 - before.users_B, -1)
    after = Rollouts("g", users_B, before.offsets_B1, place[before.histories_E], before.times_E, before.actions_E, place[before.items_BG], before.actions)
    first, second = plain.score(before), grown.score(after)
    assert np.array_equal(first.valid_BG, second.valid_BG) and np.array_equal(first.gate_BG, second.gate_BG)
    # Rows lie elsewhere, and a product over other rows may be summed in another order.
    assert np.allclose(first.preference_BG, second.preference_BG, atol=1e-6) and np.allclose(first.relevance_BG, second.relevance_BG, atol=1e-6)
    red = rollouts_of("g", [-1], [place[[1, 5, 9, 13]]], [np.arange(4)], np.array([[0, 1, place[0], place[17]]]))
    scores = grown.score(red)
    assert scores.valid_BG[0].tolist() == [True, False, True, True] and scores.preference_BG[0, 0] > scores.preference_BG[0, 2]
    assert scores.relevance_BG[0, 0] > scores.relevance_BG[0, 2]


def test_a_reward_model_of_another_catalog_is_refused_by_name(trained: Path, tmp_path: Path, shop: Path) -> None:
    other = write_shop(tmp_path / "other", first_item=NUM_ITEMS - 5, pages=1)
    with pytest.raises(Conflict, match=rf"{REWARD} knows 5 of the {NUM_ITEMS} items of data set datasets/other"):
        RewardScorer(REWARD, PreferenceModel.load(trained), "datasets/other", other)
    scorer = RewardScorer(REWARD, PreferenceModel.load(trained), "d", shop)
    with pytest.raises(Conflict, match="were given to a scorer of d"):
        scorer.score(some("elsewhere"))
    with pytest.raises(Conflict, match="name item row 4000"):
        scorer.score(rollouts_of("d", [0], [np.array([], np.int64)], [np.array([])], np.array([[4000]])))


def test_rewards_that_are_no_numbers_are_found_out(shop: Path, trained: Path) -> None:
    model = PreferenceModel.load(trained)
    with torch.no_grad():
        model.network.heads.weight[0] = torch.nan
    with pytest.raises(Corrupt, match="rewards that are no numbers"):
        RewardScorer(REWARD, model, "d", shop).score(some("d"))


def test_the_worker_scores_what_a_run_would_score_itself_once(room: Room, dataset: str, reward: str, trained: Path, shop: Path) -> None:
    sent: list[RolloutsToScore] = []
    here = RewardScorer(reward, PreferenceModel.load(trained), dataset, shop)
    passed = [0.0]

    def pause(seconds: float) -> None:
        passed[0] += seconds
        while sent:
            wanted = sent.pop()
            # Delivery is at least once, and the worker may have been killed in between.
            for _ in range(2):
                tasks.score_rollouts(wanted, room)

    asking = QueuedScorer(
        reward, "align-1", room.store, room.broker, sent.append, lambda: here, clock=lambda: time.time() + passed[0], pause=pause, wait_seconds=600
    )
    assert equal(asking.score(some(dataset)), here.score(some(dataset))) and asking.from_room == 1
    assert room.store.list("scores") == []
    # Rollouts of a run that did not wait are no work, and no failure.
    gone = RolloutsToScore(reward=reward, rollouts="rollouts/sha256-" + "0" * 64)
    tasks.score_rollouts(gone, room)
    assert Errands(RolloutsToScore, room.broker, room.store).find(gone) is None


def test_a_worker_that_cannot_score_says_so_to_who_waits(room: Room, store: ArtifactStore, reward: str, tmp_path: Path) -> None:
    other = store.put("datasets", write_shop(tmp_path / "other", first_item=1000, pages=1))
    wanted = RolloutsToScore(reward=reward, rollouts=store_rollouts(some(other), "align-1", store))
    with pytest.raises(Conflict, match="another catalog"):
        tasks.score_rollouts(wanted, room)
    with pytest.raises(Conflict, match="another catalog"):
        Errands(RolloutsToScore, room.broker, room.store).find(wanted)


def context(room: Room, spec: JobSpec) -> JobContext:
    return JobContext(Jobs(room.broker, room.queues).submit(spec), room.settings, room.store, room.broker, room.queues)


def test_a_job_trains_and_another_weighs_anew(room: Room, dataset: str) -> None:
    spec = JobSpec(kind="reward", recipe="tiny", config={"epochs": 1, "preference": {"click": 1}}, inputs={"dataset": dataset}, seed=3)
    first = job.run(context(room, spec))
    assert first.artifacts == job.run(context(room, spec)).artifacts
    assert first.result["preference"] == {"click": 1.0, "order": 0.0} and set(first.result["signals"]) == {"click", "order"}
    json.dumps(first.result, allow_nan=False)
    ref = first.artifacts["reward"]
    again = job.run(context(room, JobSpec(kind="reward", config={"preference": {"order": 2}}, inputs={"reward": ref})))
    weighed = again.artifacts["reward"]
    assert weighed != ref and NewestRewards(room.broker).newest(room.store.exists) in (ref, weighed)
    one, other = (PreferenceModel.load(room.store.get(each)) for each in (ref, weighed))
    assert other.weights == {"order": 2.0} and other.header["inputs"]["dataset"] == dataset and other.header["seed"] == 3
    assert all(torch.equal(tensor, other.network.state_dict()[name]) for name, tensor in one.network.state_dict().items())


@pytest.mark.parametrize(
    ("inputs", "config", "words"),
    [
        (("dataset",), {"epoch": 3}, "'epoch' is unknown"),
        ((), {}, "got inputs none"),
        (("reward",), {"epochs": 3, "preference": {"click": 1}}, "takes config preference alone, and got epochs, preference"),
        (("reward",), {"preference": {"hate": 1}}, "weighs hate, and the model foresees click, order"),
        (("reward",), {"preference": {"click": -1}}, "positive weight"),
    ],
)
def test_a_wrong_job_is_refused(room: Room, dataset: str, reward: str, inputs: tuple[str, ...], config: dict[str, Any], words: str) -> None:
    refs = {"dataset": dataset, "reward": reward}
    with pytest.raises(BadData, match=words):
        job.run(context(room, JobSpec(kind="reward", recipe="tiny", config=config, inputs={name: refs[name] for name in inputs})))


def test_only_a_retriever_of_these_items_is_a_backbone(room: Room, dataset: str, store: ArtifactStore, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "semantide.json").write_text(json.dumps({"model_type": "generator"}))
    spec = JobSpec(kind="reward", recipe="tiny", inputs={"dataset": dataset, "retriever": store.put("models", folder)})
    with pytest.raises(Conflict, match="is a generator: name a retriever"):
        job.run(context(room, spec))


@pytest.fixture
def client(room: Room) -> TestClient:
    return TestClient(build_app([room], [api.build(room)]), headers={"Authorization": "Bearer test-key"})


def test_items_are_scored_by_rest(room: Room, client: TestClient, reward: str) -> None:
    assert client.post("/v1/reward/scores", json={"users": [{"items": ["item-1"]}]}).status_code == 404
    NewestRewards(room.broker).put(reward, 1)
    listed = client.get("/v1/reward").json()["rewards"]
    assert [entry["reward"] for entry in listed] == [reward] and listed[0]["metrics"]["signals"]["click"]["auc"] > 0.5
    assert client.get(f"/v1/reward/{reward}").json() == client.get(f"/v1/reward/{reward.removeprefix('rewards/')}").json() == listed[0]
    likes = [{"item": f"item-{number}", "action": "order"} for number in (2, 6, 10, 14)]
    wanted = {"users": [{"user": "user-2", "history": likes, "items": ["item-18", "item-17", "never-heard"]}, {"user": "nobody", "items": ["item-3"]}]}
    answer = client.post("/v1/reward/scores", json=wanted).json()
    first, second, unheard = answer["users"][0]["items"]
    assert first["preference"] > second["preference"] and first["relevance"] > second["relevance"] and first["known"]
    assert (unheard["known"], unheard["gate"], unheard["preference"]) == (False, False, 0)
    assert answer["users"][1]["items"][0]["gate"] and set(first["signals"]) == {"click", "order"}
    weighed = client.post("/v1/reward/scores", json={**wanted, "preference": {"order": 1}}).json()["users"][0]["items"][0]
    assert weighed["preference"] == pytest.approx(first["signals"]["order"], abs=1e-6)


def test_the_newest_reward_model_that_is_still_stored_answers(room: Room, client: TestClient, reward: str) -> None:
    body = {"users": [{"items": ["item-1"]}]}
    gone = [f"rewards/sha256-{digit * 64}" for digit in "ab"]
    NewestRewards(room.broker).put(gone[0], 3)
    assert client.post("/v1/reward/scores", json=body).status_code == 404
    NewestRewards(room.broker).put(reward, 1)
    NewestRewards(room.broker).put(gone[1], 2)
    assert client.post("/v1/reward/scores", json=body).json()["reward"] == reward
    assert [entry["reward"] for entry in client.get("/v1/reward").json()["rewards"]] == [reward]


def test_items_newer_than_the_model_are_known_by_what_a_data_set_says_of_them(
    room: Room, client: TestClient, store: ArtifactStore, reward: str, shop: Path, tmp_path: Path
) -> None:
    """As the queue's worker knows them, and as the one that was there is known."""
    NewestRewards(room.broker).put(reward, 1)
    order = np.random.default_rng(1).permutation(NUM_ITEMS)
    folder = grown_shop(shop, tmp_path / "grown", order)
    users = [{"history": [{"item": f"item-{row}"} for row in (1, 5, 9, 13)], "items": ["new-red", "new-dumb", "item-0", "item-17"]},
             {"history": [{"item": "new-red"}], "items": ["item-17", "item-0"]}]  # fmt: skip
    before, after = (
        client.post("/v1/reward/scores", json={"users": users, **named}).json()["users"] for named in ({}, {"dataset": store.put("datasets", folder)})
    )
    assert [entry["known"] for entry in before[0]["items"]] == [False, False, True, True]
    new, dumb, other, same = after[0]["items"]
    assert (new["known"], dumb["known"]) == (True, False) and new["gate"] and new["preference"] > other["preference"] and not dumb["gate"]
    # What the model knew is judged as before, now that the new one may be in a history, too.
    assert [other, same] == before[0]["items"][2:] and after[1]["items"][0]["relevance"] > after[1]["items"][1]["relevance"]
    place = np.append(np.argsort(order) + 2, -1)
    scores = RewardScorer(reward, PreferenceModel.load(store.get(reward)), "g", folder).score(
        rollouts_of("g", [-1], [place[[1, 5, 9, 13]]], [np.arange(4)], np.array([[0, 1, place[0], place[17]]]), [np.zeros(4, np.int64)], ("click",))
    )
    assert np.allclose(scores.preference_BG[0], [entry["preference"] for entry in after[0]["items"]], atol=1e-6)
    assert client.post("/v1/reward/scores", json={"users": users, "dataset": "datasets/sha256-" + "0" * 64}).status_code == 404
    other_catalog = store.put("datasets", write_shop(tmp_path / "other", first_item=1000, pages=1))
    refused = client.post("/v1/reward/scores", json={"users": users, "dataset": other_catalog})
    assert refused.status_code == 409 and "another catalog" in refused.json()["error"]["message"]


def test_a_user_s_own_history_is_taken_where_none_is_sent(room: Room, client: TestClient, reward: str) -> None:
    NewestRewards(room.broker).put(reward, 1)
    events = [("item-2", "order"), ("item-2", "click"), ("item-5", "exposure"), ("item-6", "click"), ("item-9", "hate")]
    online = OnlineHistories(room.broker, 50, 1000)
    online.append(Interaction(user="u", item=item, time=number, action=action) for number, (item, action) in enumerate(events))
    reading = {"positive_intensity": 1.0, "deduplicate": "consecutive"}
    (told,) = api.told_of([api.ScoredUser(user="u", items=("item-1",))], online)
    assert api.events_of(told, room.settings.actions, reading) == [("item-2", "order"), ("item-6", "click")]
    by_user = client.post("/v1/reward/scores", json={"users": [{"user": "u", "items": ["item-10"]}]}).json()
    kept = [{"item": item, "action": action} for item, action in events]
    by_history = client.post("/v1/reward/scores", json={"users": [{"user": "u", "history": kept, "items": ["item-10"]}]}).json()
    assert by_user == by_history


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"users": [{"items": ["item-1"]}], "preference": {"hate": 1}}, 409, "foresees click, order"),
        ({"users": [{"items": ["item-1"]}], "preference": {"click": 0}}, 422, "positive weight"),
        ({"users": [{"items": ["item-1"]}], "reward": "rewards/sha256-" + "0" * 64}, 404, "GET /v1/reward lists them"),
        ({"users": [{"items": ["item-1"] * 10_000}] * 11}, 422, "at most 100000"),
    ],
)
def test_a_wrong_request_is_refused(room: Room, client: TestClient, reward: str, body: dict[str, Any], status: int, words: str) -> None:
    NewestRewards(room.broker).put(reward, 1)
    answer = client.post("/v1/reward/scores", json=body)
    assert answer.status_code == status and words in json.dumps(answer.json())


def test_the_events_of_a_request_are_bounded_those_that_are_stored_included(
    room: Room, client: TestClient, reward: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    NewestRewards(room.broker).put(reward, 1)
    monkeypatch.setattr(api, "_MOST_EVENTS", 6)
    OnlineHistories(room.broker, 50, 1000).append(Interaction(user="u", item=f"item-{number}", time=number, action="click") for number in range(4))
    sent = [{"item": "item-1"}] * 3
    answers = [
        client.post("/v1/reward/scores", json={"users": [{"user": "u", "items": ["item-1"]}, {"history": sent[:most], "items": ["item-1"]}]}) for most in (2, 3)
    ]
    assert [answer.status_code for answer in answers] == [200, 422] and "have 7 events" in answers[1].json()["error"]["message"]
    assert client.post("/v1/reward/scores", content=b" " * (room.settings.max_body_bytes + 1)).status_code == 413


def test_the_gate_shuts_out_no_more_positives_than_it_may() -> None:
    rng = np.random.default_rng(0)
    positives, others = (rng.normal(shift, 1, (400, 6)).astype(np.float32) for shift in (0.8, -0.8))
    for quantile in (0.0, 0.05, 0.3):
        gate = RelevanceGate.fit(positives[:200], others[:200], positives[200:], quantile)
        report = gate.report(positives[200:], others[200:])
        assert 1 - quantile <= report["positives_pass"] < 1 - quantile + 0.02 and report["others_pass"] < 0.6 and report["auc"] > 0.9
        assert RelevanceGate.of(json.loads(json.dumps(gate.as_dict()))) == gate and min(gate.weights) >= 0
    nothing = np.zeros((0, 6), np.float32)
    free = RelevanceGate.fit(nothing, others, nothing, 0.1)
    assert free.passes(free.relevance(others), np.ones(400, bool), np.ones(400, bool)).all() and free.report(nothing, nothing)["positives_pass"] == 1
    with pytest.raises(ValueError, match="from 0 to below 1"):
        RelevanceGate.fit(positives, others, positives, 1.0)
