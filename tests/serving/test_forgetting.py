"""What a serving process keeps in memory of somebody who is forgotten goes, whatever the process missed and whoever was being answered meanwhile."""

import pytest

from semantide.services.serving.forgetting import ForgettingWatch
from semantide.shared.contracts import Interaction
from semantide.shared.forgetting import KNOWN_SECONDS, LOOK_SECONDS, MISSED_SECONDS, Forgetting
from semantide.shared.history import Histories
from semantide.shared.models.prompt_cache import PromptCache

from .world import Server, wait_until


class Kept:
    """As a prompt, in what a cache asks of one."""

    num_places, num_bytes = 4, 100


@pytest.fixture
def caches() -> list[PromptCache]:
    made = [PromptCache(1000), PromptCache(1000)]
    for cache in made:
        for user in ("anna", "otto"):
            cache.put(user, Kept())  # type: ignore[arg-type]
    return made


def test_who_is_being_forgotten_is_dropped_again_and_again_and_nobody_else(broker, caches):
    now = [0.0]
    forgetting = Forgetting(broker)
    watch = ForgettingWatch(forgetting, lambda: caches, lambda: now[0])
    forgetting.add("d1", "anna")
    for _ in range(3):
        watch.poll()
        assert all(cache.get("anna") is None and cache.get("otto") is not None for cache in caches)
        caches[0].put("anna", Kept())  # by a request that began before
        now[0] += LOOK_SECONDS
    watch.poll()
    forgetting.remove(["d1"])
    watch.poll()
    assert not broker.exists("semantide:ingestion:forgetting") and all(cache.get("anna") is None for cache in caches)


@pytest.mark.parametrize(("away", "kept"), [(MISSED_SECONDS - 0.1, True), (MISSED_SECONDS + 0.1, False)])
def test_who_may_have_missed_somebody_forgets_everybody(broker, caches, away, kept):
    now = [0.0]
    watch = ForgettingWatch(Forgetting(broker), lambda: caches, lambda: now[0])
    now[0] += away
    watch.poll()
    assert all((cache.get("otto") is not None) == kept for cache in caches)
    caches[0].put("otto", Kept())
    now[0] += LOOK_SECONDS
    watch.poll()
    assert caches[0].get("otto") is not None
    assert LOOK_SECONDS < MISSED_SECONDS < KNOWN_SECONDS


def test_a_running_service_drops_the_prompt_of_who_is_forgotten(server: Server, world):
    bundle = server.service.swapper.bundle
    for user in ("anna", "otto"):
        Histories(world.room.broker, 50, 1000).append(Interaction(user=user, item=f"i{number}", time=1_700_000_000_000 + number) for number in range(3))
        assert server.recommend(user=user).status_code == 200
        wait_until(lambda user=user: bundle.prompts.get(user) is not None, 10)
    Forgetting(world.room.broker).add("d1", "anna")
    wait_until(lambda: bundle.prompts.get("anna") is None)
    assert bundle.prompts.get("otto") is not None
