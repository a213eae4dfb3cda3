"""The retriever as second source: alone, as fallback, joined with the generator, promoted and taken away."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving import tasks
from semantide.services.serving.registry import Registry
from semantide.services.serving.retrieval import fused
from semantide.services.serving.service import Service
from semantide.shared.availability import Availability
from semantide.shared.contracts import Interaction, ModelTrained
from semantide.shared.history import Histories
from semantide.shared.models.retriever import ItemVectors, Retriever, RetrieverConfig
from semantide.shared.models.retriever_search import ExactSearch

from .world import Server, World, wait_until

ITEMS = [f"i{row}" for row in range(150, -1, -1)] + ["only here"]


def add_retriever(world: World, seed: int = 0, broken: bool = False) -> str:
    torch.manual_seed(seed)
    model = Retriever(RetrieverConfig(hidden_size=16, num_layers=1, num_heads=2, max_items=20, time_buckets=16))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    if broken:
        torch.nn.init.constant_(model.begin, float("nan"))
    folder = world.folder / f"retriever-{seed}-{broken}"
    model.save_pretrained(folder, torch.randn(len(ITEMS), 16), ITEMS)
    (folder / "semantide.json").write_text(json.dumps({"model_type": "retriever", "max_items": 20, "dataset": f"datasets/sha256-{0:064x}"}))
    return world.room.store.put("models", folder)


def best(world: World, ref: str, history: list[str], n: int, times: list[int] | None = None) -> list[str]:
    folder = world.room.store.get(ref)
    table = ItemVectors.load(folder)
    rows = np.array([ITEMS.index(item) for item in history], dtype=np.int64)
    scores = ExactSearch(Retriever.from_pretrained(folder), lambda: table.vectors_ND, 20).scores([rows], [None if times is None else np.array(times)])[0]
    return [ITEMS[row] for row in scores.topk(n).indices.tolist()]


def names(answer: dict[str, Any]) -> list[str]:
    return [hit["item"] for hit in answer["items"]]


def test_without_a_generator_the_retriever_answers_and_says_so(empty_server: Server, world: World) -> None:
    assert empty_server.recommend(history=["i1"], source="retriever").status_code == 503
    ref = add_retriever(world)
    live = empty_server.client.post("/v1/serving/promote", json={"model": ref}).json()
    assert (live["model"], live["retriever"], live["loaded_retriever"], live["retriever_error"]) == (None, ref, ref, None)
    response = empty_server.recommend(history=["i1", "i7", "nowhere"], n=7)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert (answer["source"], answer["model"], answer["catalog"], answer["exact"]) == ("retriever", ref, None, True)
    assert "no generator" in answer["fallback"]
    assert (answer["history_items"], answer["unknown_history_items"], answer["beam_width"]) == (2, 1, 0)
    assert names(answer) == best(world, ref, ["i1", "i7"], 7)
    assert {hit["source"] for hit in answer["items"]} == {"retriever"}
    assert empty_server.recommend(history=["i1"], source="generator").status_code == 503
    assert "categories" in empty_server.recommend(history=["i1"], categories_any=["red"]).text
    cold = empty_server.recommend(user="never seen").json()
    assert (cold["based_on"], len(cold["items"])) == ("unconditional", 10)
    assert empty_server.client.delete("/v1/serving/retriever").json()["loaded_retriever"] is None
    assert empty_server.recommend(history=["i1"]).status_code == 503


def test_what_must_not_come_back_does_not(server: Server, world: World) -> None:
    ref = add_retriever(world)
    server.client.post("/v1/serving/promote", json={"model": ref})
    ranked = best(world, ref, ["i1"], len(ITEMS))
    Availability(world.room.broker).update({ranked[0]: False})
    wait_until(lambda: ranked[0] in server.service.availability.current.items)
    answer = server.recommend(history=["i1", {"item": "i9", "action": "hate"}], exclude_ids=[ranked[1]], exclude_seen=True, n=1000, source="retriever").json()
    assert names(answer) == [item for item in ranked if item not in (ranked[0], ranked[1], "i1", "i9")]
    assert str(len(answer["items"])) in answer["short_reason"]
    assert answer["fallback"] is None
    red = server.recommend(history=["i1"], categories_any=["red", "green"], categories_all=["small"], n=9, source="retriever").json()
    wanted = [item for item in ranked if item[1:].isdigit() and int(item[1:]) % 3 < 2 and int(item[1:]) % 2 == 0 and item != ranked[0]]
    assert names(red) == wanted[:9]
    catalog = world.catalogs[world.catalog_ref]
    assert all(hit["codes"] == catalog.codes[catalog.row_of[hit["item"]]].tolist() and hit["title"] for hit in red["items"])


def test_stored_and_sent_times_count_as_in_training(empty_server: Server, world: World) -> None:
    ref = add_retriever(world)
    empty_server.client.post("/v1/serving/promote", json={"model": ref})
    items, times = ["i1", "i7", "i3"], [1000, 61_000, 90_061_000]
    Histories(world.room.broker, 200, 3600).append(
        [Interaction(user="ann", item=item, time=time, action="click") for item, time in zip(items, times, strict=True)]
    )
    expected = best(world, ref, items, 20, [time // 1000 for time in times])
    assert names(empty_server.recommend(user="ann", n=20).json()) == expected
    sent = [{"item": item, "time": time} for item, time in zip(items, times, strict=True)]
    assert names(empty_server.recommend(history=sent[::-1], n=20).json()) == expected
    assert names(empty_server.recommend(history=items, n=20).json()) == best(world, ref, items, 20) != expected


def test_lists_are_joined_and_pages_go_on(server: Server, world: World) -> None:
    alone = server.recommend(history=["i1"], n=12).json()
    assert server.recommend(history=["i1"], n=12, source="both").json()["source"] == "generator"
    ref = add_retriever(world)
    server.client.post("/v1/serving/promote", json={"model": ref})
    answer = server.recommend(history=["i1"], n=12, source="both").json()
    assert (answer["source"], answer["model"], answer["retriever"]) == ("both", alone["model"], ref)
    assert names(answer) == fused(names(alone), best(world, ref, ["i1"], 12), 12)
    assert {hit["source"] for hit in answer["items"]} == {"generator", "retriever"}
    page = server.recommend(history=["i1"], n=4, depth=12, source="both").json()
    following = server.recommend(cursor=page["cursor"]).json()
    assert names(page) + names(following) == names(answer)[:8]
    assert server.recommend(history=["i1"], n=12).json()["source"] == "generator"


def test_the_retriever_ranks_while_the_generator_searches(server: Server, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server.client.post("/v1/serving/promote", json={"model": add_retriever(world)})
    expected = names(server.recommend(history=["i1"], n=12, source="both").json())
    submit, retrieve, asked = server.service.submit, server.service.retrieve, threading.Event()

    def search_ends_after_the_retriever_was_asked(*given: Any) -> Any:
        found, held = submit(*given), Future[Any]()
        threading.Thread(target=lambda: held.set_result(found.result(60)) if asked.wait(60) else held.set_exception(TimeoutError())).start()
        return held

    def retriever_is_asked(*given: Any) -> Any:
        asked.set()
        return retrieve(*given)

    monkeypatch.setattr(server.service, "submit", search_ends_after_the_retriever_was_asked)
    monkeypatch.setattr(server.service, "retrieve", retriever_is_asked)
    answer = server.recommend(history=["i1"], n=12, source="both")
    assert answer.status_code == 200 and names(answer.json()) == expected


def test_a_broken_generator_leaves_the_process_ready_where_a_retriever_answers(world: World) -> None:
    pair, ref = world.live(0), add_retriever(world)
    (world.room.store.get(pair.model) / "model.safetensors").unlink()
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.status.error)
        assert server.client.get("/readyz").status_code == 503
        server.client.post("/v1/serving/promote", json={"model": ref})
        ready = server.client.get("/readyz")
        assert ready.status_code == 200
        (state,) = ready.json()["state"]
        assert "cannot be loaded" in state and f"{ref} answers in its place" in state
        for source in ("auto", "both"):
            answer = server.recommend(history=["i1"], source=source).json()
            assert (answer["source"], answer["model"]) == ("retriever", ref) and "no generator" in answer["fallback"]
        assert server.recommend(history=["i1"], source="generator").status_code == 503
        world.room.settings.serving_source = "generator"
        assert server.client.get("/readyz").status_code == 503
        world.room.settings.serving_source = "retriever"
        assert server.client.get("/readyz").json()["state"] == [f"serving {ref}"]


def test_the_retriever_answers_while_the_first_generator_is_being_loaded(empty_server: Server, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process promotes it, and all of them load it at the same time: there would be nobody to answer."""
    ref = add_retriever(world)
    empty_server.client.post("/v1/serving/promote", json={"model": ref})
    swapper, begun, allowed = empty_server.service.swapper, threading.Event(), threading.Event()
    wait_until(lambda: swapper.settled)
    load = swapper._load

    def slowly(pair: Any) -> Any:
        begun.set()
        assert allowed.wait(600)
        return load(pair)

    monkeypatch.setattr(swapper, "_load", slowly)
    pair = world.live(0)
    try:
        assert begun.wait(600)
        ready = empty_server.client.get("/readyz")
        assert ready.status_code == 200 and f"{ref} answers meanwhile" in ready.json()["state"][0]
        for source in ("auto", "both"):
            answer = empty_server.recommend(history=["i1"], source=source).json()
            assert (answer["source"], answer["model"]) == ("retriever", ref) and "no generator" in answer["fallback"]
        refused = empty_server.recommend(history=["i1"], source="generator")
        assert refused.status_code == 503 and "is being loaded" in refused.text
        world.room.settings.serving_source = "generator"
        assert empty_server.client.get("/readyz").status_code == 503
        world.room.settings.serving_source = "auto"
    finally:
        allowed.set()
    wait_until(lambda: swapper.bundle is not None)
    answer = empty_server.recommend(history=["i1"]).json()
    assert (answer["source"], answer["model"], answer["fallback"]) == ("generator", pair.model, None)


def test_a_process_that_begins_leaves_requests_to_others_until_its_generator_is_there(world: World) -> None:
    pair = world.live(0)
    Registry(world.room.broker).retrieve(add_retriever(world))
    service = Service(world.room.settings, world.room.broker, world.room.store)
    service.retrievers.poll()
    assert service.ready() == (False, "serving: the live model is being loaded")
    service.swapper.poll()
    assert service.ready() == (True, f"serving {pair.model}")
    service.scheduler.device_error = "RuntimeError: CUDA error: unspecified launch failure"
    fine, why = service.ready()
    assert not fine and "CUDA error" in why and "started again" in why


def test_a_process_is_ready_once_the_retriever_that_is_wanted_answers(world: World) -> None:
    Registry(world.room.broker).retrieve(ref := add_retriever(world))
    service = Service(world.room.settings, world.room.broker, world.room.store)
    assert service.ready() == (False, "serving: the retriever is being loaded")
    service.retrievers.poll()
    assert service.ready() == (True, f"serving {ref}; no generator is live yet")
    Registry(world.room.broker).retrieve(add_retriever(world, broken=True))
    unlucky = Service(world.room.settings, world.room.broker, world.room.store)
    unlucky.retrievers.poll()
    fine, why = unlucky.ready()
    assert not fine and "not numbers" in why


def test_requests_that_run_while_retrievers_change_are_each_answered_whole_by_one_of_them(empty_server: Server, world: World) -> None:
    """Promotions, roll-backs of the registry and a broken one among them: no request fails, and every answer is that of the model that it names."""
    refs, broken = [add_retriever(world, seed) for seed in range(3)], add_retriever(world, 9, broken=True)
    histories = [["i1"], ["i7", "i3"], ["only here", "i150", "i4"]]
    wanted = {(ref, number): best(world, ref, history, 8) for ref in refs for number, history in enumerate(histories)}
    promote = lambda ref: empty_server.client.post("/v1/serving/promote", json={"model": ref})  # noqa: E731
    assert promote(refs[0]).status_code == 200
    done, seen, wrong = threading.Event(), set[str](), list[Any]()

    def ask(number: int) -> None:
        with httpx.Client(base_url=empty_server.url, headers=empty_server.headers, timeout=120) as client:
            while not done.is_set():
                answer = client.post("/v1/recommendations", json={"history": histories[number], "n": 8, "source": "retriever"})
                told = answer.json()
                if answer.status_code != 200 or names(told) != wanted.get((told["model"], number)):
                    wrong.append(told)
                    return
                seen.add(told["model"])

    threads = [threading.Thread(target=ask, args=(number % 3,)) for number in range(6)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(15):
            if turn % 5 == 4:
                assert promote(broken).status_code == 409
            # Here, and by another process, which this one follows in the background.
            ref = refs[turn % 3]
            if turn % 2:
                assert promote(ref).status_code == 200
            else:
                Registry(world.room.broker).retrieve(ref, "")
            wait_until(lambda ref=ref: ref == empty_server.client.get("/v1/serving/live").json()["loaded_retriever"])
            seen.discard(ref)
            wait_until(lambda ref=ref: ref in seen or wrong)
    finally:
        done.set()
        for thread in threads:
            thread.join(60)
    assert not wrong and seen <= set(refs)


def test_a_broken_retriever_changes_nothing(server: Server, world: World) -> None:
    good = add_retriever(world)
    server.client.post("/v1/serving/promote", json={"model": good})
    refused = server.client.post("/v1/serving/promote", json={"model": add_retriever(world, broken=True)})
    assert refused.status_code == 409 and "not numbers" in refused.text
    assert server.recommend(history=["i1"], source="retriever").json()["model"] == good
    assert Registry(world.room.broker).read().retriever == good


def test_a_job_that_asked_for_it_brings_its_retriever_live_in_every_process(server: Server, world: World) -> None:
    ref = add_retriever(world)
    tasks.keep_candidate(ModelTrained(job_id="j", model=ref), world.room)
    assert Registry(world.room.broker).read().retriever is None
    tasks.keep_candidate(ModelTrained(job_id="j", model=ref, promote=True), world.room)
    wait_until(lambda: server.service.retrievers.current is not None)
    assert server.recommend(history=["i1"], source="retriever").json()["model"] == ref


@given(st.permutations(range(8)), st.permutations(range(8)), st.integers(1, 8))
def test_joining_keeps_what_both_agree_on(first: list[int], second: list[int], n: int) -> None:
    one, two = ([str(item) for item in ranking] for ranking in (first, second))
    both = fused(one, two, n)
    assert len(both) == len(set(both)) == n
    assert fused(one, one, n) == one[:n]
    assert fused(one, [], n) == one[:n]
    if one[0] == two[0]:
        assert both[0] == one[0]


def test_an_overloaded_generator_leaves_the_answer_to_the_retriever(server: Server, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from semantide.services.serving.scheduler import Overloaded

    def full(*_: Any) -> Any:
        raise Overloaded("many requests wait already", 1.0)

    monkeypatch.setattr(server.service, "submit", full)
    assert server.recommend(history=["i1"]).status_code == 429
    server.client.post("/v1/serving/promote", json={"model": add_retriever(world)})
    answer = server.recommend(history=["i1"]).json()
    assert answer["source"] == "retriever" and "too many requests" in answer["fallback"]
    assert server.recommend(history=["i1"], source="generator").status_code == 429
