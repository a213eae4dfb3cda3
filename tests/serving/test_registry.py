import json
import re
import threading

import pytest

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import LIVE, Candidate, Pair, RegistryState, Split, Variant
from semantide.shared.errors import Conflict, NotFound


def model(number: int) -> str:
    return f"models/sha256-{number:064x}"


def catalog(number: int) -> str:
    return f"catalogs/sha256-{number:064x}"


def pair(m: int, c: int) -> Pair:
    return Pair(model=model(m), catalog=catalog(c))


def test_promotions_pile_up_and_rollbacks_take_them_off():
    state = RegistryState().promoted(pair(1, 1), 10).promoted(pair(2, 1), 20).promoted(pair(3, 1), 30)
    assert state.live == pair(3, 1) and state.previous == (pair(1, 1), pair(2, 1))
    state = state.rolled_back(40, "worse")
    assert state.live == pair(2, 1) and state.previous == (pair(1, 1),)
    state = state.rolled_back(50)
    with pytest.raises(Conflict, match="nothing was live before"):
        state.rolled_back(60)
    assert [(d.action, d.model, d.time, d.reason) for d in state.decisions][-2:] == [("rollback", model(2), 40, "worse"), ("rollback", model(1), 50, "")]


def test_promoting_what_is_live_changes_nothing():
    state = RegistryState().promoted(pair(1, 1), 10)
    assert state.promoted(pair(1, 1), 20) is state


def test_extensions_reach_every_pair_of_the_line_in_any_order():
    state = RegistryState().registered(Candidate(model=model(9), catalog=catalog(1)))
    state = state.promoted(pair(7, 5), 5).promoted(pair(1, 1), 10).promoted(pair(2, 1), 20)
    in_order = state.extended(catalog(1), catalog(2), 30).extended(catalog(2), catalog(3), 40)
    reversed_order = state.extended(catalog(2), catalog(3), 30).extended(catalog(1), catalog(2), 40)
    for end in (in_order, reversed_order):
        assert end.live == pair(2, 3)
        assert end.previous == (pair(7, 5), pair(1, 3))
        assert end.candidates[0].catalog == catalog(3)
        assert end.rolled_back(50).live == pair(1, 3)
        assert end.version > state.version
    assert in_order.extended(catalog(1), catalog(2), 50) is in_order


def test_a_circle_of_extensions_ends():
    state = RegistryState().promoted(pair(1, 1), 1).extended(catalog(1), catalog(2), 2).extended(catalog(2), catalog(1), 3)
    assert state.newest(catalog(1)) in (catalog(1), catalog(2))


def test_the_registry_survives_in_the_broker_and_counts_versions(broker):
    registry = Registry(broker, clock=lambda: 1.5)
    assert registry.version() == 0 and registry.read() == RegistryState()
    registry.register(Candidate(model=model(1), catalog=catalog(1), metrics={"ndcg@10": 0.2}))
    registry.promote(pair(1, 1), reason="first")
    again = Registry(broker)
    assert again.version() == again.read().version == 2
    assert again.read().decisions[0].time == 1500 and again.read().candidates[0].promoted
    assert Registry(broker, "other").read().live is None


def test_a_state_that_was_stored_before_there_were_splits_goes_on(broker):
    decision = {"action": "promote", "model": model(1), "catalog": catalog(1), "time": 5, "reason": "first", "forced": False}
    candidate = {"model": model(1), "catalog": catalog(1), "job_id": "j", "registered": 4, "recipe": "tiny", "metrics": {}, "promoted": True}
    stored = {"version": 7, "live": pair(1, 1).model_dump(), "previous": [pair(2, 1).model_dump()], "candidates": [candidate], "decisions": [decision]}
    broker.set("semantide:serving:default:registry", json.dumps(stored | {"extensions": {}}))
    broker.set("semantide:serving:default:version", 7)
    registry = Registry(broker)
    assert registry.read().split == Split() and registry.read().split.assign("anybody") == LIVE
    state = registry.divide(Split(salt="s", variants=(Variant(name="b", pair=pair(3, 1), share=0.5),)))
    assert (state.version, state.live, state.previous, state.decisions[0].reason) == (8, pair(1, 1), (pair(2, 1),), "first")
    assert Registry(broker).read() == state and registry.rollback().live == pair(2, 1)
    sides = {user: Registry(broker).read().split.assign(user) for user in map(str, range(200))}
    assert sides == {user: state.split.assign(user) for user in sides} and set(sides.values()) == {LIVE, "b"}


def test_what_a_promotion_means(broker):
    registry = Registry(broker)
    with pytest.raises(NotFound, match="is no candidate"):
        registry.resolve(model(1), catalog(1))
    assert registry.resolve(model(1), catalog(1), force=True) == pair(1, 1)
    assert registry.resolve(model(1), None, force=True, trained_on=catalog(4)) == pair(1, 4)
    with pytest.raises(NotFound, match="does not say which catalog"):
        registry.resolve(model(1), None, force=True)
    registry.register(Candidate(model=model(1), catalog=catalog(1)))
    registry.extend(catalog(1), catalog(2))
    assert registry.resolve(model(1), None) == pair(1, 2)
    assert registry.resolve(model(1), catalog(1)) == pair(1, 1)
    registry.register(Candidate(model=model(2), catalog=catalog(1)))
    assert registry.resolve(model(2), None) == pair(2, 2)


def test_concurrent_changes_are_all_kept(broker, own_broker):
    from semantide.shared.broker import connect

    def register(first: int) -> None:
        registry = Registry(connect(own_broker.url))
        for number in range(first, first + 8):
            registry.register(Candidate(model=model(number), catalog=catalog(1)))

    threads = [threading.Thread(target=register, args=(first,)) for first in (0, 10, 20, 30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = Registry(broker).read()
    assert len(state.candidates) == 32 and state.version == 32 == Registry(broker).version()


def test_old_candidates_go_but_never_what_is_live():
    state = RegistryState().registered(Candidate(model=model(0), catalog=catalog(1))).promoted(pair(0, 1), 1)
    for number in range(1, 120):
        state = state.registered(Candidate(model=model(number), catalog=catalog(1)))
    assert len(state.candidates) == 50
    assert state.candidate(model(0)) is not None and state.candidate(model(119)) is not None and state.candidate(model(5)) is None


def retrievers() -> RegistryState:
    """A generator and a retriever are live, and another retriever was held back."""
    state = RegistryState().registered(Candidate(model=model(1), catalog=catalog(1))).promoted(pair(1, 1), 1)
    one, other = (model(number) for number in (2, 3))
    state = state.registered(Candidate(model=one)).retrieving(one, 2, "asked for").registered(Candidate(model=other))
    return state.judging(other, "evaluate-1").held(other, "its comparison failed", 3, evaluation="evaluate-1")


def test_versions_that_knew_no_decisions_about_retrievers_read_the_registry(broker):
    """Those before 0.2 want a catalog in every candidate and decision, and know these fields alone."""
    registry = Registry(broker)
    assert registry.change(lambda _: retrievers()) == registry.read() == retrievers()
    document = json.loads(broker.get(registry._key))
    candidate = {"model", "catalog", "job_id", "registered", "recipe", "metrics", "promoted", "judging", "judged"}
    decision = {"action", "model", "catalog", "time", "reason", "forced", "shares", "evaluation", "against", "cases", "figures"}
    state = {"version", "live", "previous", "candidates", "decisions", "extensions", "split", "retriever", "following", "followed"}
    for name, fields in (("candidates", candidate), ("decisions", decision)):
        for note in document[name]:
            assert set(note) <= fields and re.fullmatch(r"[a-z]+/sha256-[0-9a-f]{64}", note["catalog"])
            assert note.get("action", "promote") in ("promote", "rollback", "extend", "split", "hold")
    assert set(document) <= state and len(document["decisions"]) == 3


def test_what_a_later_version_has_added_is_left_out(broker):
    registry = Registry(broker)
    known = registry.change(lambda _: retrievers())
    document = json.loads(broker.get(registry._key))
    odd = {"action": "canary", "model": model(4), "catalog": None, "time": 9}
    document["decisions"] = [{**document["decisions"][0], "why": {"more": 1}}, odd, "later", *document["decisions"][1:]]
    document["candidates"].append({"model": {"shards": 4}, "catalog": catalog(1)})
    document |= {"weather": "fine", "live": {**document["live"], "adapter": "x"}}
    broker.set(registry._key, json.dumps(document))
    assert registry.read() == known
    assert registry.promote(pair(5, 5)).previous == (pair(1, 1),), "and it goes on from there"


def test_a_registry_whose_live_model_cannot_be_read_is_not_taken_for_an_empty_one(broker):
    registry = Registry(broker)
    registry.change(lambda _: retrievers())
    document = json.loads(broker.get(registry._key))
    broker.set(registry._key, json.dumps({**document, "live": {"models": [1, 2]}}))
    with pytest.raises(ValueError, match="live"):
        registry.read()
