import asyncio
import gc
import threading
import weakref

import httpx
import numpy as np
import pytest

from semantide.services.serving import registry_state as registry_module
from semantide.services.serving import tasks
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair
from semantide.services.serving.service import load_and_warm
from semantide.services.serving.swap import Swapper
from semantide.shared.catalog import Lineages
from semantide.shared.contracts import CatalogReady, ModelTrained
from semantide.shared.errors import Conflict, Corrupt, NotFound, TransientError

from .world import DIGEST, Reply, Server, make_catalog, post, storm, wait_until


def promote(server: Server, model: str, **body) -> httpx.Response:
    return server.client.post("/v1/serving/promote", json={"model": model, **body})


def test_promote_and_roll_back_change_the_answers(server, world):
    first = server.items(history=["i1"])
    second_model = world.candidate(1)
    assert [c["model"] for c in server.client.get("/v1/serving/candidates").json()["candidates"]][-1] == second_model
    body = promote(server, second_model, reason="better").json()
    assert body["model"] == body["loaded_model"] == second_model and body["error"] is None
    assert server.items(history=["i1"]) != first
    back = server.client.post("/v1/serving/rollback", json={"reason": "worse"}).json()
    assert back["loaded_model"] == back["model"] != body["model"]
    assert server.items(history=["i1"]) == first
    refused = server.client.post("/v1/serving/rollback")
    assert refused.status_code == 409 and "nothing was live before" in refused.text
    decisions = server.client.get("/v1/serving/decisions").json()["decisions"]
    assert [(d["action"], d["reason"]) for d in decisions] == [("promote", ""), ("promote", "better"), ("rollback", "worse")]


def test_what_cannot_be_served_is_refused_and_the_present_model_goes_on(server, world):
    before = server.loaded()
    answers = server.items(history=["i1"])
    wrong = world.add_catalog(digest="tokenizer-b")
    other = world.candidate(1)
    unregistered = world.add_model(2)
    damaged = world.candidate(3)
    path = world.room.store.get(damaged) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    for response, status, word in (
        (promote(server, other, catalog=wrong), 409, "use the catalog the model was trained for"),
        (promote(server, unregistered), 404, "no candidate"),
        (promote(server, "models/sha256-" + "0" * 64), 404, "not in"),
        (promote(server, "models/latest"), 422, "model"),
        (promote(server, damaged), 409, "digest of its manifest"),
    ):
        assert response.status_code == status, response.text
        assert word in response.text
        assert server.loaded() == before and server.items(history=["i1"]) == answers
    assert promote(server, unregistered, force=True).status_code == 200


def test_another_processs_promotion_is_followed_and_a_broken_one_is_not(server, world):
    second = Pair(model=world.candidate(1), catalog=world.catalog_ref)
    Registry(world.room.broker).promote(second)
    wait_until(lambda: server.loaded() == second.model_dump())
    damaged = world.candidate(2)
    path = world.room.store.get(damaged) / "config.json"
    path.write_text("{}")
    Registry(world.room.broker).promote(Pair(model=damaged, catalog=world.catalog_ref))
    wait_until(lambda: server.client.get("/v1/serving/live").json()["error"])
    body = server.client.get("/v1/serving/live").json()
    assert server.loaded() == second.model_dump() and body["model"] == damaged and "Corrupt" in body["error"]
    assert server.recommend(history=["i1"]).json()["model"] == second.model
    assert server.client.get("/readyz").status_code == 200
    Registry(world.room.broker).rollback()
    wait_until(lambda: server.client.get("/v1/serving/live").json()["error"] is None)


def test_a_start_with_a_broken_live_model_falls_back_to_the_one_before(world):
    good = world.live(0)
    damaged = world.candidate(1)
    path = world.room.store.get(damaged) / "model.safetensors"
    path.write_bytes(b"")
    Registry(world.room.broker).promote(Pair(model=damaged, catalog=world.catalog_ref))
    with Server(world.room) as server:
        wait_until(lambda: server.recommend(history=["i1"]).status_code == 200)
        body = server.client.get("/v1/serving/live").json()
        assert server.loaded() == good.model_dump() and body["model"] == damaged and "Corrupt" in body["error"]


def test_a_start_with_nothing_that_works_says_so_and_is_not_ready(world):
    pair = world.live(0)
    (world.room.store.get(pair.model) / "model.safetensors").unlink()
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.status.error)
        assert server.client.get("/readyz").status_code == 503
        response = server.recommend(user="a")
        assert response.status_code == 503 and "cannot be loaded" in response.text


def test_swaps_under_a_thousand_concurrent_requests_without_an_error(server, world):
    server.service.narrowing.__init__(0)  # all that is compared is searched as wide
    pairs = [server.loaded()["model"], world.candidate(1), world.candidate(2)]
    reference = {}
    rng = np.random.default_rng(0)
    histories = [[f"i{row}" for row in rng.integers(0, 200, 6)] for _ in range(20)]
    for model in [*pairs, pairs[0]]:
        promote(server, model)
        reference[model] = [server.items(history=history) for history in histories]

    async def both() -> list[Reply]:
        requests = asyncio.create_task(storm(server.url, [{"history": histories[number % 20]} for number in range(1000)], spread_seconds=1.0))
        swaps = 0
        while not requests.done():
            model = (pairs[1], pairs[2], None, pairs[0])[swaps % 4]
            path, body = ("promote", {"model": model}) if model else ("rollback", {})
            status, answer = await post(server.url, f"/v1/serving/{path}", body)
            assert status == 200, answer
            swaps += 1
        return await requests

    replies: list[Reply] = []
    while len({reply.body.get("model") for reply in replies}) < 2:  # a busy machine may answer a thousand between two swaps
        replies += asyncio.run(both())
    assert {reply.status for reply in replies} == {200}, [reply for reply in replies if reply.status != 200][:3]
    for reply in replies:
        assert [hit["item"] for hit in reply.body["items"]] == reference[reply.body["model"]][reply.number % 20]


def test_the_old_bundle_goes_with_its_last_request(world):
    registry = Registry(world.room.broker)
    world.live(0)
    swapper = Swapper(registry, lambda pair: load_and_warm(world.room.store, pair))
    swapper.poll()
    in_use = swapper.bundle
    gone = weakref.ref(in_use)
    registry.promote(Pair(model=world.candidate(1), catalog=world.catalog_ref))
    swapper.poll()
    gc.collect()
    assert gone() is in_use is not swapper.bundle
    del in_use
    gc.collect()
    assert gone() is None


def test_a_passing_fault_is_tried_again(world):
    world.live(0)
    now, faults = [0.0], [TransientError("disk away"), None]

    def load(pair):
        fault = faults.pop(0)
        if fault:
            raise fault
        return load_and_warm(world.room.store, pair)

    swapper = Swapper(Registry(world.room.broker), load, clock=lambda: now[0])
    swapper.poll()
    swapper.poll()
    assert swapper.bundle is None and "disk away" in swapper.status.error
    now[0] = 6.0
    swapper.poll()
    assert swapper.bundle is not None and swapper.status.error is None


@pytest.mark.parametrize("fault", [Corrupt("a file does not have its digest"), NotFound("no such artifact")])
def test_a_file_that_was_put_right_is_loaded_without_a_restart(world, fault):
    world.live(0)
    now, faults = [0.0], [fault, None]

    def load(pair):
        if (found := faults.pop(0)) is not None:
            raise found
        return load_and_warm(world.room.store, pair)

    swapper = Swapper(Registry(world.room.broker), load, clock=lambda: now[0])
    swapper.poll()
    now[0] = 6.0
    swapper.poll()  # not at once: to look through a large file again takes a while
    assert swapper.bundle is None and str(fault) in swapper.status.error
    now[0] = 16.0
    swapper.poll()
    assert swapper.bundle is not None and swapper.status.error is None


def test_a_model_that_does_not_fit_is_not_tried_again(world):
    world.live(0)
    now, tries = [0.0], []

    def load(pair):
        tries.append(pair)
        raise Conflict("made for another tokenizer")

    swapper = Swapper(Registry(world.room.broker), load, clock=lambda: now[0])
    for now[0] in (0.0, 100.0, 1000.0):
        swapper.poll()
    assert len(tries) == 1


def test_a_trained_model_becomes_a_candidate_and_is_promoted_when_asked_once(world):
    registry = Registry(world.room.broker)
    quiet, loud = world.add_model(1), world.add_model(2)
    tasks.keep_candidate(ModelTrained(job_id="train-1", model=quiet, catalog=world.catalog_ref), world.room)
    message = ModelTrained(job_id="train-2", model=loud, catalog=world.catalog_ref, promote=True)
    tasks.keep_candidate(message, world.room)
    state = registry.read()
    assert [(c.model, c.recipe, c.metrics) for c in state.candidates] == [(quiet, "tiny", {"ndcg@10": 0.1}), (loud, "tiny", {"ndcg@10": 0.1})]
    assert state.live == Pair(model=loud, catalog=world.catalog_ref)
    registry.promote(Pair(model=quiet, catalog=world.catalog_ref))
    registry.promote(Pair(model=quiet, catalog=world.catalog_ref))
    tasks.keep_candidate(message, world.room)  # delivered again
    assert registry.read().live.model == quiet


def test_a_trained_model_that_does_not_fit_is_never_promoted(world):
    registry = Registry(world.room.broker)
    pair = world.live(0)
    foreign = world.add_model(1, digest="tokenizer-b")
    tasks.keep_candidate(ModelTrained(job_id="j", model=foreign, catalog=world.catalog_ref, promote=True), world.room)
    held = registry.read().decisions[-1]
    assert (held.action, held.model) == ("hold", foreign) and "Conflict" in held.reason and "tokenizer-b" in held.reason
    damaged = world.add_model(2)
    (world.room.store.get(damaged) / "semantide.json").write_text("{")
    with pytest.raises(Corrupt):
        tasks.keep_candidate(ModelTrained(job_id="j", model=damaged, catalog=world.catalog_ref, promote=True), world.room)
    assert registry.read().live == pair


def test_new_items_are_reachable_without_training(server, world):
    bigger = world.add_catalog(items=260)
    tasks.extend_catalog(CatalogReady(catalog=bigger, extends=world.catalog_ref), world.room)
    wait_until(lambda: server.loaded()["catalog"] == bigger)
    body = server.recommend(history=["i1", "i250"], n=300, beam_width=300).json()
    assert len(body["items"]) == 260 and body["catalog"] == bigger and body["unknown_history_items"] == 0
    assert "i259" in {hit["item"] for hit in body["items"]}
    model = world.candidate(1)
    assert promote(server, model).json()["catalog"] == bigger
    assert promote(server, model, catalog=world.catalog_ref).json()["catalog"] == world.catalog_ref


def test_a_long_training_does_not_lose_the_items_of_its_time(world, monkeypatch):
    monkeypatch.setattr(registry_module, "_EXTENSIONS_KEPT", 2)
    lineages = Lineages(world.room.broker)
    lineages.begin(DIGEST, world.catalog_ref)
    ends = [world.catalog_ref]
    for items in (210, 220, 230, 240, 250):
        folder = world.folder / f"extended-{items}"
        make_catalog(folder, items=items)
        ends.append(world.room.store.put("catalogs", folder, config={"extends": ends[-1]}))
        assert lineages.extend(ends[-2], ends[-1])
        tasks.extend_catalog(CatalogReady(catalog=ends[-1], extends=ends[-2]), world.room)
    tasks.keep_candidate(ModelTrained(job_id="j", model=world.add_model(1), catalog=world.catalog_ref, promote=True), world.room)
    assert Registry(world.room.broker).read().live.catalog == ends[-1]
    other = world.add_catalog(items=20)
    tasks.keep_candidate(ModelTrained(job_id="k", model=world.add_model(2), catalog=other), world.room)
    assert Registry(world.room.broker).read().candidates[-1].catalog == other


def test_a_catalog_that_spells_otherwise_does_not_extend(world):
    world.live(0)
    before = Registry(world.room.broker).read()
    with pytest.raises(Conflict, match="tokenizer"):
        tasks.extend_catalog(CatalogReady(catalog=world.add_catalog(digest="tokenizer-b"), extends=world.catalog_ref), world.room)
    with pytest.raises(Conflict, match="other codes"):
        tasks.extend_catalog(CatalogReady(catalog=world.add_catalog(seed=5), extends=world.catalog_ref), world.room)
    tasks.extend_catalog(CatalogReady(catalog=world.add_catalog(items=10)), world.room)
    assert Registry(world.room.broker).read() == before


def test_promotions_from_many_threads_leave_the_server_on_the_last(server, world):
    models = [world.candidate(seed) for seed in range(1, 5)]
    threads = [threading.Thread(target=promote, args=(server, model)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_until(lambda: server.loaded()["model"] == server.client.get("/v1/serving/live").json()["model"])
    assert server.recommend(history=["i1"]).json()["model"] in models
    Registry(world.room.broker).register(Candidate(model=world.add_model(9), catalog=world.catalog_ref))
    wait_until(lambda: server.loaded()["model"] in models)
