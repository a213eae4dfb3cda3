"""The whole loop as its users drive it: a stack of real processes, the command line, REST."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semantide.services.commandline.client import Client, StackError
from semantide.services.commandline.stack import Stack
from semantide.shared.broker import free_port
from semantide.shared.config import Settings

NUM_ITEMS, NUM_USERS = 48, 90


class World:
    """One stack and its command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = Settings(data_dir=folder / "data", port=free_port(), host="127.0.0.1", redis_url="", api_keys="", import_roots=str(folder / "in"))
        self.stack = Stack(settings, lambda text: None)
        self.environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith("SEMANTIDE_")}
        self.environment["SEMANTIDE_DATA_DIR"] = str(folder / "data")
        self.environment["SEMANTIDE_URL"] = self.stack.url

    def connect(self) -> None:
        self.client = Client(Settings(url=self.stack.url, data_dir=self.folder / "data", api_keys=""))

    def run(self, *arguments: str, status: int = 0) -> str:
        command = [sys.executable, "-m", "semantide.services.commandline.main", *arguments]
        outcome = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=250, cwd=self.folder)
        assert outcome.returncode == status, f"{arguments}: status {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
        return outcome.stdout + outcome.stderr

    def recommend(self, **body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.client.post("/v1/recommendations", body)
        return answer

    def items(self, **body: Any) -> list[str]:
        return [hit["item"] for hit in self.recommend(**body)["items"]]


def until(condition: Callable[[], bool], seconds: float = 60) -> float:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begin


def write_input(folder: Path) -> None:
    """Everybody walks along a ring of items; one row is broken."""
    folder.mkdir()
    words = ("red", "blue", "green", "small", "large", "old", "new", "soft", "hard", "round", "flat", "warm")
    items = [
        {
            "id": f"item-{n}",
            "title": f"{words[n % 12]} {words[n // 4]} thing {n}",
            "categories": ["even" if n % 2 == 0 else "odd", "low" if n < NUM_ITEMS // 2 else "high"],
        }
        for n in range(NUM_ITEMS)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    rng = np.random.default_rng(5)
    start = int(time.time() * 1000) - 10**9
    rows = ["user,item,time,action"]
    for user in range(NUM_USERS):
        walk = (rng.integers(NUM_ITEMS) + np.cumsum(rng.integers(1, 3, rng.integers(6, 12)))) % NUM_ITEMS
        rows += [f"user-{user},item-{item},{start + user * 1000 + step},click" for step, item in enumerate(walk)]
    rows.append("user-1,item-1,1700000000,click")
    (folder / "interactions.csv").write_text("\n".join(rows) + "\n")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A stack with a model live, brought there by the command line alone."""
    made = World(tmp_path_factory.mktemp("loop"))
    write_input(made.folder / "in")
    try:
        made.stack.start()
        made.connect()
        told = made.run("ingest", str(made.folder / "in"), status=1)
        assert f"row {sum(1 for _ in (made.folder / 'in' / 'interactions.csv').open()) - 1}" in told or "field time" in told
        assert "multiply by 1000" in told
        made.run("dataset")
        report = made.run("tokenize", "--set", "level_sizes=[8,8,8]")
        assert "0 after" in report and "verdict: pass" in report
        made.run("train", "--recipe", "tiny", "--set", "epochs=2")
        made.run("promote")
        until(lambda: made.client.get("/v1/serving/live")["loaded_model"] is not None)
        yield made
        made.client._http.close()
    finally:
        made.stack.stop()


def test_models_are_judged_side_by_side(world: World) -> None:
    world.run("train", "--recipe", "sasrec", "--set", "epochs=1")
    models = [job["artifacts"]["model"] for job in world.client.get("/v1/jobs", kind="train") if job["spec"]["recipe"] == "sasrec"]
    result = json.loads(world.run("evaluate", "--baseline", models[0], "--json"))["result"]
    assert {(row["model"], row["exclude_seen"]) for row in result["rows"]} == {
        (model, seen) for model in ("popularity", "sasrec", "generator") for seen in (False, True)
    }
    assert "recall@10" in world.run("evaluate", "--baseline", models[0])


def test_what_is_asked_for_comes_back(world: World) -> None:
    assert "item-" in world.run("recommend", "--user", "user-3", "--n", "5", "--exclude-seen")
    seen = {event["item"] for event in world.client.get("/v1/users/user-3/history")["events"]}
    assert seen
    wanted = {"user": "user-3", "n": 10, "beam_width": NUM_ITEMS}
    plain = world.items(**wanted)
    assert len(plain) == len(set(plain)) == 10
    assert not seen & set(world.items(**wanted, exclude_seen=True)) and len(world.items(**wanted, exclude_seen=True)) == 10
    left = world.items(**wanted, exclude_ids=plain[:4])
    assert not set(plain[:4]) & set(left) and len(left) == 10
    assert {int(item.split("-")[1]) % 2 for item in world.items(**wanted, categories_any=["even"])} == {0}
    few = world.recommend(**{**wanted, "n": 20}, categories_all=["even", "low"])
    assert len(few["items"]) == NUM_ITEMS // 4 and few["short_reason"]


def test_a_stranger_and_unknown_items_are_served(world: World) -> None:
    answer = world.recommend(user="nobody yet/with a slash", n=10)
    assert len(answer["items"]) == 10 and answer["based_on"] == "unconditional"
    answer = world.recommend(history=["gone", "item-5"], n=10)
    assert len(answer["items"]) == 10 and answer["unknown_history_items"] == 1


def test_a_dislike_takes_an_item_from_that_user_alone(world: World) -> None:
    wanted = {"n": 10, "beam_width": NUM_ITEMS}
    (first, *_) = world.items(user="user-7", **wanted)
    event = {"user": "user-7", "item": first, "time": int(time.time() * 1000), "action": "hate"}
    world.client.post("/v1/interactions", {"interactions": [event]})
    until(lambda: first not in world.items(user="user-7", **wanted))
    assert len(world.items(user="user-7", **wanted)) == 10
    assert first in world.items(user="a stranger", n=NUM_ITEMS, beam_width=NUM_ITEMS)


def test_a_hidden_item_is_gone_at_once_and_comes_back(world: World) -> None:
    wanted = {"user": "user-9", "n": 10, "beam_width": NUM_ITEMS}
    (first, *_) = world.items(**wanted)
    world.client.post("/v1/items", {"items": [{"id": first, "available": False}]})
    until(lambda: first not in world.items(**wanted), 60)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        items = world.items(**wanted)
        assert first not in items and len(items) == 10
    world.client.post("/v1/items", {"items": [{"id": first, "available": True}]})
    until(lambda: first in world.items(**wanted), 60)


def test_a_new_item_can_be_recommended_without_training_and_trained_on(world: World) -> None:
    world.client.post("/v1/items", {"items": [{"id": "newcomer", "title": "red small thing", "categories": ["new"]}]})

    def spelled() -> bool:
        try:
            world.client.get("/v1/catalogs/current/items/newcomer")
        except StackError as error:
            assert error.status == 404
            return False
        return True

    until(spelled)
    until(lambda: world.items(user="user-2", n=5, categories_any=["new"]) == ["newcomer"])
    explained = world.recommend(user="user-2", n=1, categories_any=["new"], explain=True)["items"][0]["explanation"]
    assert len(explained["nearest_history"]) == 3 and all(near["title"] for near in explained["nearest_history"])
    # A data set of now has the newcomer too: the catalog that training takes must have it as well.
    world.run("dataset")
    world.run("train", "--set", "epochs=1", "--promote")
    until(lambda: len(world.client.get("/v1/serving/live")["previous"]) == 1)
    live = world.client.get("/v1/serving/live")
    world.run("rollback")
    assert world.client.get("/v1/serving/live")["model"] == live["previous"][-1]["model"]
    assert world.items(user="user-2", n=5, categories_any=["new"]) == ["newcomer"]
    # The two models side by side, page by page.
    assert "50.00%" in world.run("variants", "set", "other", "--model", live["model"], "--share", "0.5")
    answers = [world.recommend(user=f"user-{number}", n=3, depth=9) for number in range(20)]
    assert {(answer["variant"], answer["model"]) for answer in answers} == {("other", live["model"]), ("live", live["previous"][-1]["model"])}
    now = int(time.time() * 1000)
    seen = [(answer["request_id"], user, item["item"]) for user, answer in enumerate(answers) for item in answer["items"]]
    events = [{"user": f"user-{user}", "item": item, "time": now, "action": "exposure", "request_id": request} for request, user, item in seen]
    events += [{**event, "action": "click", "time": now + 1} for event in events[::6]]
    world.client.post("/v1/interactions", {"interactions": events})
    until(lambda: world.client.get("/v1/experiments")["requests"] == 20)
    report = world.run("experiment")
    assert "other" in report and "doubly robust" in report and "20 requests of 20 users" in report
    world.run("variants", "end")
    assert world.recommend(user="user-1")["variant"] is None
    judging = world.client.promote(live["model"], if_not_worse=True)["judging"]
    until(lambda: any(one["evaluation"] == judging for one in world.client.get("/v1/serving/decisions")["decisions"]), 120)
    decision = world.client.get("/v1/serving/decisions")["decisions"][-1]
    assert decision["action"] in ("promote", "hold") and decision["cases"] > 50 and set(decision["figures"]) == {"hr@50", "ndcg@50"}
    assert decision["action"] in world.run("decisions")
    pages = [answers[0], *(world.recommend(cursor=answers[0]["cursor"]) for _ in range(2))]
    assert pages[1]["items"] == pages[2]["items"] and pages[1]["variant"] == answers[0]["variant"]
    output = world.run("recommend", "--cursor", pages[1]["cursor"], "--n", "2")
    assert "next page: semantide recommend --cursor" in output


def test_nothing_was_parked_and_the_log_carries_traces(world: World) -> None:
    assert world.client.get("/v1/queues")["dead_letters"] == {}
    assert "semantide_recommendations" in world.client._http.get("/metrics").text
    lines = [json.loads(line) for line in (world.folder / "data" / "logs" / "serving-worker.log").read_text().splitlines() if line.startswith("{")]
    assert any(line["event"] == "model promoted" and line["trace_id"] for line in lines)
