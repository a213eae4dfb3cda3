import asyncio
import threading

import httpx
import numpy as np
import pytest

from semantide.services.serving import api, engine
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.availability import Availability
from semantide.shared.broker import OwnBroker, connect
from semantide.shared.contracts import Interaction
from semantide.shared.history import Histories
from semantide.shared.pseudonyms import Pseudonyms
from semantide.shared.queues import Queues
from semantide.shared.room import Room

from .world import Server, World, wait_until


def remember(world, user: str, *events: tuple[str, str]) -> None:
    rows = [Interaction(user=user, item=item, time=1000 + place, action=action) for place, (item, action) in enumerate(events)]
    Histories(world.room.broker, 200, 3600).append(rows)


def test_the_answer_has_the_callers_ids_scores_versions_and_timing(server, world):
    response = server.recommend(history=["i1", {"item": "i2", "action": "order"}, "nowhere"], n=5, explain=True)
    assert response.status_code == 200, response.text
    body = response.json()
    pair = server.loaded()
    assert (body["model"], body["catalog"]) == (pair["model"], pair["catalog"])
    assert len(body["items"]) == 5 and body["short_reason"] is None
    assert (body["based_on"], body["history_items"], body["unknown_history_items"], body["beam_width"]) == ("history", 2, 1, 50)
    catalog = world.catalogs[world.catalog_ref]
    for hit in body["items"]:
        assert hit["codes"] == catalog.codes[catalog.row_of[hit["item"]]].tolist() and hit["title"] == f"Item {hit['item'][1:]}"
        assert sum(hit["explanation"]["level_log_probabilities"]) == pytest.approx(hit["score"])
    assert [hit["score"] for hit in body["items"]] == sorted((hit["score"] for hit in body["items"]), reverse=True)
    assert 0 <= body["timing"]["search_ms"] <= body["timing"]["total_ms"]
    assert body["request_id"] != server.recommend(history=["i1"]).json()["request_id"]
    assert (
        "explanation" not in server.recommend(history=["i1"]).json()["items"][0] or server.recommend(history=["i1"]).json()["items"][0]["explanation"] is None
    )


def test_a_stored_history_counts_like_the_same_one_sent_along(server, world):
    remember(world, "ann", ("i1", "click"), ("i7", "exposure"), ("i2", "order"), ("i3", "hate"))
    stored = server.recommend(user="ann", n=20).json()
    sent = server.recommend(
        history=[{"item": "i2", "action": "order", "time": 3}, {"item": "i1", "time": 1}, {"item": "i3", "action": "hate", "time": 4}], n=20
    ).json()
    assert [hit["item"] for hit in stored["items"]] == [hit["item"] for hit in sent["items"]]
    assert stored["history_items"] == 2
    assert "i3" not in server.items(user="ann", n=1000, beam_width=200)


def test_cold_users_get_a_list_and_are_told(server):
    cold = server.recommend(user="never seen").json()
    assert len(cold["items"]) == 10 and cold["based_on"] == "unconditional"
    unknown = server.recommend(history=["x", "y"]).json()
    assert unknown["based_on"] == "unconditional" and unknown["unknown_history_items"] == 2
    assert unknown["items"] == cold["items"]


def test_cold_users_see_lists_of_their_own_on_request(server):
    wanted = [server.items(user=f"new {number}", variety=3.0) for number in (1, 1, 2)]
    assert wanted[0] == wanted[1] != wanted[2]
    assert server.recommend(user="new 1", variety=3.0).json()["exact"] is False
    assert [server.recommend(user="x", variety=wrong).status_code for wrong in (-1, 101, "much")] == [422] * 3


def test_lists_differ_between_users(server):
    rng = np.random.default_rng(0)
    lists = [tuple(server.items(history=[f"i{row}" for row in rng.integers(0, 200, 8)])) for _ in range(40)]
    assert len(set(lists)) > 35


def test_excluded_and_seen_items_do_not_come_back_and_the_list_stays_full(server, world):
    first = server.items(history=["i1", "i2"], n=10)
    second = server.items(history=["i1", "i2"], n=10, exclude_ids=[*first, "not in the catalog"])
    assert len(second) == 10 and not set(first) & set(second)
    remember(world, "bob", *[(item, "click") for item in first])
    assert not set(server.items(user="bob", n=10, exclude_seen=True)) & set(first)
    assert len(server.items(user="bob", n=190, exclude_seen=True, beam_width=1)) == 190
    everything = [f"i{row}" for row in range(200)]
    body = server.recommend(history=["i1"], n=10, exclude_ids=everything + [f"x{row}" for row in range(9800)]).json()
    assert body["items"] == [] and "every item is unavailable, excluded" in body["short_reason"]


def test_categories_any_and_all(server):
    assert {int(item[1:]) % 3 for item in server.items(history=["i1"], n=50, categories_any=["red", "green"])} == {0, 1}
    both = server.items(history=["i1"], n=100, categories_any=["red"], categories_all=["large"])
    assert {(int(item[1:]) % 3, int(item[1:]) % 2) for item in both} == {(0, 1)}
    body = server.recommend(history=["i1"], n=100, categories_all=["red", "green"]).json()
    assert body["items"] == [] and body["short_reason"]


def test_an_unavailable_item_goes_and_comes_back(server, world):
    first = server.items(history=["i1"], n=10)
    availability = Availability(world.room.broker)
    availability.update({first[0]: False, first[3]: False, "unknown": False})
    wait_until(lambda: not {first[0], first[3]} & set(server.items(history=["i1"], n=10)))
    assert len(server.items(history=["i1"], n=10)) == 10
    assert not {first[0], first[3]} & set(server.items(user="cold", n=200))
    availability.update({first[0]: True, first[3]: True})
    wait_until(lambda: server.items(history=["i1"], n=10) == first)


BAD_REQUESTS = [
    ({"history": ["i1"], "beam_width": 0}, ["beam_width", "0", "greater than or equal to 1"]),
    ({"history": ["i1"], "beam_width": -3}, ["beam_width", "-3"]),
    ({"history": ["i1"], "beam_width": 5000}, ["beam_width", "5000", "less than or equal to 4096"]),
    ({"history": ["i1"], "n": 0}, ["n", "0", "greater than or equal to 1"]),
    ({"history": ["i1"], "n": 1001}, ["n", "1001", "less than or equal to 1000"]),
    ({"history": ["i1"], "n": "ten"}, ["n", "ten"]),
    ({"history": ["i1"], "n": True}, ["n", "True"]),
    ({"history": []}, ["history", "[]", "at least one item"]),
    ({}, ["neither", "user", "history"]),
    ({"user": "a", "history": ["i1"]}, ["both", "send one of them"]),
    ({"user": ""}, ["user"]),
    ({"history": ["i"] * 10_001}, ["history", "10000"]),
    ({"history": ["i1"], "exclude_ids": ["x"] * 10_001}, ["exclude_ids", "10000"]),
    ({"history": [{"item": "i1", "action": "juggle"}]}, ["history[0].action", "juggle", "click"]),
    ({"history": [{"item": "i1", "time": 3}, {"item": "i2"}]}, ["history[1].time", "missing"]),
    ({"history": [7]}, ["history"]),
    ({"history": ["i1"], "categories_any": "red"}, ["categories_any"]),
    ({"history": ["i1"], "widht": 3}, ["widht"]),
]


def test_bad_requests_are_refused_by_name(server):
    for body, words in BAD_REQUESTS:
        response = server.recommend(**body)
        assert response.status_code == 422, (body, response.text)
        for word in words:
            assert word in response.text, body
    assert server.recommend(history=["i1"]).status_code == 200


def test_malformed_json_and_missing_keys(server):
    assert server.client.post("/v1/recommendations", content=b"{").status_code == 422
    assert httpx.post(f"{server.url}/v1/recommendations", json={"user": "a"}).status_code == 401


def test_without_a_model_the_answer_says_what_to_do_and_the_stack_is_ready(empty_server):
    response = empty_server.recommend(user="a")
    assert response.status_code == 503 and "POST /v1/serving/promote" in response.text
    assert empty_server.client.get("/readyz").status_code == 200
    assert empty_server.client.get("/v1/serving/live").json()["model"] is None


def test_mixed_widths_all_succeed(server):
    for width in (1, 10, 128, 4096):
        body = server.recommend(history=["i1"], n=min(width, 1000), beam_width=width).json()
        assert len(body["items"]) == min(width, 200) and body["beam_width"] == min(width, 200)


def test_metrics_show_requests_and_stages(server, monkeypatch):
    from semantide.services.serving import meters

    counted = []
    monkeypatch.setattr(meters.Meters, "request", lambda self, outcome, variant: counted.append((outcome, variant)))
    server.items(history=["i1"])
    server.recommend(history=["i1"], n=500)
    server.recommend(history=["i1"], variant="nobody")
    server.recommend(history=["i1"], split_by="a", user="b")
    assert counted == [("ok", None), ("short", None), ("refused", None), ("refused", None)]


def test_a_full_queue_answers_429_with_the_time_to_come_back(server, monkeypatch):
    gate, taken = threading.Event(), threading.Event()
    advance = engine.Group.advance

    def held(group):
        taken.set()
        gate.wait(120)
        return advance(group)

    monkeypatch.setattr(engine.Group, "advance", held)
    monkeypatch.setattr(server.service.scheduler, "_max_queue", 2)

    async def crowd() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, headers=server.headers, timeout=120) as client:

            def ask() -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/recommendations", json={"history": ["i1"]}))

            tasks = [ask()]
            while not taken.is_set():
                await asyncio.sleep(0.01)
            tasks += [ask() for _ in range(6)]
            while sum(task.done() for task in tasks) < 4:  # one runs, two wait
                await asyncio.sleep(0.01)
            gate.set()
            return list(await asyncio.gather(*tasks))

    replies = asyncio.run(crowd())
    refused = [reply for reply in replies if reply.status_code == 429]
    assert sorted(reply.status_code for reply in replies) == [200] * 3 + [429] * 4
    assert all(int(reply.headers["Retry-After"]) >= 1 and "requests wait already" in reply.text for reply in refused)


def test_without_its_broker_explicit_histories_are_still_served(settings, tmp_path):
    with OwnBroker(tmp_path / "own") as own:
        alone = settings.model_copy(update={"redis_url": own.url})
        room = Room("serving", alone, connect(own.url), ArtifactStore(alone.artifacts_root), Queues(own.url))
        world = World(room, tmp_path / "artifacts")
        world.catalog_ref = world.add_catalog()
        world.live(0)
        with Server(room) as server:
            wait_until(lambda: server.recommend(user="ann").status_code == 200)
            before = server.items(history=["i1"])
            assert server.client.get("/readyz").json()["status"] == "ok"
            own.stop()
            response = server.recommend(user="ann")
            assert response.status_code == 503 and "send the `history` along" in response.text
            assert server.items(history=["i1"]) == before
            ready = server.client.get("/readyz")
            assert ready.status_code == 200 and ready.json()["status"] == "degraded"
            paged = server.recommend(history=["i1"], depth=20)
            assert paged.status_code == 503 and "leave `depth` out" in paged.text
            own.start()
            wait_until(lambda: server.recommend(user="ann").status_code == 200)


def test_under_pseudonyms_callers_are_answered_by_their_own_ids(world):
    settings = world.room.settings
    settings.user_id_key = "a-key-of-the-tests-for-pseudonyms"
    pseudonyms = Pseudonyms(settings.user_id_key)
    pseudonyms.settle(world.room.broker)
    world.live()
    rows = [Interaction(user=pseudonyms.of_user("anna"), item=f"i{number}", time=number, action="click") for number in (1, 2, 3)]
    Histories(world.room.broker, 200, 3600).append(rows)
    with Server(world.room) as own:
        wait_until(lambda: own.recommend(user="anna").status_code == 200)
        answer = own.recommend(user="anna", n=5).json()
        sent = own.recommend(history=["i1", "i2", "i3"], n=5).json()
        assert answer["history_items"] == 3 and [each["item"] for each in answer["items"]] == [each["item"] for each in sent["items"]]
        assert own.recommend(user=pseudonyms.of_user("anna")).json()["history_items"] == 0, "a pseudonym is nobody's id"
        asked = {"items": ["i4", "i5"]}
        scores = [own.client.post("/v1/scores", json={**asked, **who}).json() for who in ({"user": "anna"}, {"history": ["i1", "i2", "i3"]})]
        assert [each["score"] for each in scores[0]["items"]] == pytest.approx([each["score"] for each in scores[1]["items"]], abs=1e-4)
        assert [each["based_on"] for each in scores] == ["history", "history"]
        assert own.client.post("/v1/scores", json={**asked, "user": pseudonyms.of_user("anna")}).json()["based_on"] == "unconditional"
        page = own.recommend(user="anna", n=2, depth=6).json()
        assert own.recommend(cursor=page["cursor"]).status_code == 200
        assert not [key for key in world.room.broker.scan_iter("*anna*")]
    settings.user_id_key = ""
    with pytest.raises(ValueError, match="SEMANTIDE_USER_ID_KEY is not set"):
        api.build(world.room)
