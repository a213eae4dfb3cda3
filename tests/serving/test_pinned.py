"""A replica that serves one model or one variant, whatever is live for others."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from semantide.services.serving.pinned import Pin
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Pair, RegistryState, Split, Variant
from semantide.shared.errors import NotFound
from semantide.shared.room import Room

from .world import Server, World, wait_until


def test_a_pinned_model_is_served_beside_the_live_one(world: World, make_room: Callable[[str], Room]) -> None:
    live, other = world.live(0), world.add_model(1)
    room = replace(make_room("serving"), settings=world.room.settings.model_copy(update={"replica_model": other}))
    with Server(world.room) as everybody, Server(room) as replica:
        wait_until(lambda: everybody.loaded()["model"] and replica.loaded()["model"])
        assert (everybody.loaded()["model"], replica.loaded()["model"]) == (live.model, other)
        assert replica.recommend(history=["i1"]).json()["model"] == other
        third = world.candidate(2)
        Registry(world.room.broker).promote(Pair(model=third, catalog=world.catalog_ref))
        wait_until(lambda: everybody.loaded()["model"] == third)
        assert replica.loaded()["model"] == other and replica.client.get("/readyz").status_code == 200


def test_a_variant_that_is_not_there_is_waited_for(world: World, make_room: Callable[[str], Room]) -> None:
    live, candidate = world.live(0), world.candidate(1)
    room = replace(make_room("serving"), settings=world.room.settings.model_copy(update={"replica_variant": "b"}))
    with Server(room) as replica:
        answer = replica.client.get("/readyz")
        assert answer.status_code == 503 and "variant 'b' is not among" in answer.json()["problems"][0]
        pair = Pair(model=candidate, catalog=live.catalog)
        Registry(world.room.broker).divide(Split(variants=(Variant(name="b", pair=pair, share=0.1),)))
        wait_until(lambda: replica.client.get("/readyz").status_code == 200)
        assert {replica.recommend(user=f"u{number}").json()["model"] for number in range(8)} == {candidate}


def ref(kind: str, digit: str) -> str:
    return f"{kind}/sha256-{digit * 64}"


def test_the_newest_catalog_of_the_line_is_taken() -> None:
    state = RegistryState(extensions={ref("catalogs", "1"): ref("catalogs", "2")})
    pinned = Pin(model=ref("models", "a")).seen(state, lambda _: ref("catalogs", "1"))
    assert pinned.live == Pair(model=ref("models", "a"), catalog=ref("catalogs", "2"))
    with pytest.raises(NotFound, match="SEMANTIDE_REPLICA_CATALOG"):
        Pin(model=ref("models", "a")).seen(state, lambda _: None)


def test_what_does_not_go_together_is_refused() -> None:
    assert not Pin()
    with pytest.raises(ValueError, match="SEMANTIDE_REPLICA_VARIANT"):
        Pin(model="m", variant="v")
    with pytest.raises(ValueError, match="SEMANTIDE_REPLICA_MODEL"):
        Pin(catalog="c")
