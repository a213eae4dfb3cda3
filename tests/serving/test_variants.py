import threading
from collections import Counter
from dataclasses import replace

from semantide.services.serving import meters, service, tasks
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import LIVE, Candidate, Pair, Split, Variant
from semantide.shared.contracts import CatalogReady
from semantide.shared.errors import PermanentError

from .world import Server, wait_until

USERS = [f"user-{number}" for number in range(30)]


def divide(server: Server, *variants: dict, **options):
    return server.client.put("/v1/serving/variants", json={"variants": list(variants), **options})


def ask(server: Server, **body) -> dict:
    response = server.recommend(**body)
    assert response.status_code == 200, response.text
    return response.json()


def test_users_are_divided_and_answers_and_metrics_say_so(server, world, monkeypatch):
    counted: Counter = Counter()
    monkeypatch.setattr(meters.Meters, "request", lambda self, outcome, variant: counted.update([(outcome, variant)]))
    live, other = server.loaded()["model"], world.candidate(1)
    assert ask(server, user="a")["variant"] is None
    answer = divide(server, {"name": "b", "model": other, "share": 0.3}).json()
    assert [(one["name"], one["share"], one["loaded"]) for one in answer["variants"]] == [(LIVE, 0.7, True), ("b", 0.3, True)]
    assert answer == server.client.get("/v1/serving/variants").json()
    first = {user: ask(server, user=user) for user in USERS}
    assert {answer["variant"] for answer in first.values()} == {LIVE, "b"}
    for user in USERS[:10]:
        again = ask(server, user=user)
        assert (again["variant"], again["items"]) == (first[user]["variant"], first[user]["items"])
    live_bundle, other_bundle = server.service.swapper.bundles
    assert live_bundle.trie is other_bundle.trie and live_bundle.model is not other_bundle.model
    models = {answer["variant"]: answer["model"] for answer in first.values()}
    assert models == {LIVE: live, "b": other}
    lists = {answer["variant"]: answer["items"] for answer in first.values()}
    assert lists[LIVE] != lists["b"]
    assert counted["ok", "b"] == sum(answer["variant"] == "b" for answer in [*first.values(), *(first[user] for user in USERS[:10])])

    # Without a user nothing is split, unless the request says by whom or names a side.
    assert ask(server, history=["i1"])["variant"] is None
    assert {ask(server, history=["i1"], split_by=user)["variant"] for user in USERS[:20]} == {LIVE, "b"}
    assert all(ask(server, history=["i1"], split_by=user)["variant"] == first[user]["variant"] for user in USERS[:5])
    assert (ask(server, user="x", variant="b")["model"], ask(server, history=["i1"], variant=LIVE)["model"]) == (other, live)
    unknown = server.recommend(user="x", variant="z")
    assert unknown.status_code == 404 and "'z'" in unknown.text and "live, b" in unknown.text
    both = server.recommend(user="x", split_by="y")
    assert both.status_code == 422 and "split_by" in both.text

    # More for b: nobody leaves it. Then it wins.
    divide(server, {"name": "b", "model": other, "share": 0.6})
    for user, before in first.items():
        if before["variant"] == "b":
            assert ask(server, user=user)["variant"] == "b"
    assert server.client.post("/v1/serving/promote", json={"model": other}).json()["loaded_model"] == other
    assert divide(server).json()["variants"] == [
        {"name": LIVE, "model": other, "catalog": world.catalog_ref, "share": 1.0, "loaded": True, "error": None},
    ]
    assert ask(server, user="a")["variant"] is None and ask(server, user="a")["model"] == other
    assert server.client.post("/v1/serving/rollback").json()["loaded_model"] == live
    decisions = server.client.get("/v1/serving/decisions").json()["decisions"]
    assert [decision["action"] for decision in decisions[-5:]] == ["split", "split", "promote", "split", "rollback"]


def test_rollback_under_a_split_changes_the_live_side_only(server, world):
    first, second, third = server.loaded()["model"], world.candidate(1), world.candidate(2)
    server.client.post("/v1/serving/promote", json={"model": second})
    divide(server, {"name": "b", "model": third, "share": 0.5})
    assert server.client.post("/v1/serving/rollback").json()["loaded_model"] == first
    models = {answer["variant"]: answer["model"] for answer in (ask(server, user=user) for user in USERS)}
    assert models == {LIVE: first, "b": third}


def test_what_cannot_be_served_is_refused_and_nobody_moves(server, world):
    good, unregistered, damaged = world.candidate(1), world.add_model(2), world.candidate(3)
    path = world.room.store.get(damaged) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    assert divide(server, {"name": "b", "model": good, "share": 0.2}).status_code == 200
    before = server.client.get("/v1/serving/variants").json()
    for variants, status, word in (
        ([{"name": "b", "model": unregistered, "share": 0.2}], 404, "no candidate"),
        ([{"name": "b", "model": damaged, "share": 0.2}], 409, "digest of its manifest"),
        ([{"name": "b", "model": good, "share": 0.7}, {"name": "c", "model": good, "share": 0.7}], 422, "sum to 1.4"),
        ([{"name": LIVE, "model": good, "share": 0.1}], 422, "'live' is taken"),
        ([{"name": "b", "model": good, "share": -0.1}], 422, "share"),
        ([{"name": "b", "model": good, "share": 1.1}], 422, "share"),
        ([{"name": "b", "model": "models/latest", "share": 0.1}], 422, "model"),
        ([{"name": f"v{number}", "model": good, "share": 0.0} for number in range(17)], 422, "variants"),
    ):
        response = divide(server, *variants)
        assert response.status_code == status and word in response.text, response.text
        assert server.client.get("/v1/serving/variants").json() == before
    # What was taken by force once stays when another side changes.
    assert divide(server, {"name": "f", "model": unregistered, "share": 0.1}, force=True).status_code == 200
    forced = server.client.get("/v1/serving/variants").json()["variants"][1]
    kept = {name: forced[name] for name in ("name", "model", "catalog", "share")}
    assert divide(server, kept, {"name": "b", "model": good, "share": 0.1}).status_code == 200


def test_another_process_follows_and_goes_without_what_it_cannot_load(server, world):
    other = world.candidate(1)
    with Server(replace(world.room)) as second:
        wait_until(lambda: second.service.swapper.bundle is not None)
        divide(server, {"name": "b", "model": other, "share": 0.5})
        wait_until(lambda: "b" in second.service.swapper.lineup.bundles)
        assert [ask(server, user=user)["variant"] for user in USERS[:12]] == [ask(second, user=user)["variant"] for user in USERS[:12]]
    damaged = world.candidate(2)
    path = world.room.store.get(damaged) / "model.safetensors"
    registry = Registry(world.room.broker)
    split = registry.read().split
    broken = split.variants[0].model_copy(update={"pair": split.variants[0].pair.model_copy(update={"model": damaged})})
    path.write_bytes(b"")
    registry.divide(split.model_copy(update={"variants": (broken,)}))
    wait_until(lambda: server.client.get("/v1/serving/variants").json()["variants"][1]["error"])
    shown = server.client.get("/v1/serving/variants").json()["variants"][1]
    assert not shown["loaded"] and "Corrupt" in shown["error"]
    assert {ask(server, user=user)["variant"] for user in USERS[:12]} == {LIVE, None}
    assert server.client.get("/readyz").status_code == 200


def test_new_items_reach_the_variants_too(server, world):
    divide(server, {"name": "b", "model": world.candidate(1), "share": 0.5})
    bigger = world.add_catalog(items=260)
    tasks.extend_catalog(CatalogReady(catalog=bigger, extends=world.catalog_ref), world.room)
    wait_until(lambda: [one["catalog"] for one in server.client.get("/v1/serving/variants").json()["variants"] if one["loaded"]] == [bigger, bigger])
    for variant in (LIVE, "b"):
        assert "i259" in {hit["item"] for hit in ask(server, history=["i250"], n=260, variant=variant)["items"]}


def test_a_process_is_ready_when_its_variants_are(world, monkeypatch):
    """After a restart nobody is answered by the other side, not even while the variants are still being loaded."""
    world.live(0)
    other = world.candidate(1)
    Registry(world.room.broker).divide(Split(variants=(Variant(name="b", pair=Pair(model=other, catalog=world.catalog_ref), share=0.5),)))
    load, goes_on = service.load_and_warm, threading.Event()

    def slow(store, pair, *arguments):
        assert pair.model != other or goes_on.wait(60)
        return load(store, pair, *arguments)

    monkeypatch.setattr(service, "load_and_warm", slow)
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        assert server.client.get("/readyz").status_code == 503
        goes_on.set()
        wait_until(lambda: server.client.get("/readyz").status_code == 200)
        assert {ask(server, user=user)["variant"] for user in USERS} == {LIVE, "b"}


def test_a_variant_whose_new_catalog_cannot_be_had_goes_on_with_the_old_one(server, world, monkeypatch):
    other, bigger = world.candidate(1), world.add_catalog(items=260)
    divide(server, {"name": "b", "model": other, "share": 0.5})
    sides = {user: ask(server, user=user)["variant"] for user in USERS}
    load = server.service.swapper._load

    def failing(pair):
        if pair == Pair(model=other, catalog=bigger):
            raise PermanentError("no")
        return load(pair)

    monkeypatch.setattr(server.service.swapper, "_load", failing)
    tasks.extend_catalog(CatalogReady(catalog=bigger, extends=world.catalog_ref), world.room)
    wait_until(lambda: server.service.swapper.status.variant_errors)
    for user, side in sides.items():
        answer = ask(server, user=user)
        assert (answer["variant"], answer["catalog"]) == (side, {LIVE: bigger, "b": world.catalog_ref}[side])
    shown = server.client.get("/v1/serving/variants").json()["variants"][1]
    assert not shown["loaded"] and shown["error"] == "PermanentError: no"


def test_a_stack_without_a_model_divides_nobody(empty_server, world):
    other = world.candidate(1)
    response = divide(empty_server, {"name": "b", "model": other, "share": 0.5})
    assert response.status_code == 409 and "no model is live" in response.text
    assert empty_server.client.get("/v1/serving/variants").json() == {"salt": "", "variants": []}


def test_a_model_in_a_split_stays_a_candidate(world):
    registry = Registry(world.room.broker)
    world.live(0)
    kept = world.candidate(1)

    registry.divide(Split(variants=(Variant(name="b", pair=Pair(model=kept, catalog=world.catalog_ref), share=0.1),)))
    state = registry.read()
    for number in range(60):
        state = state.registered(Candidate(model=f"models/sha256-{number:064x}", catalog=world.catalog_ref))
    assert state.candidate(kept) is not None
