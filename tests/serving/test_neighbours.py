"""Whatever one client does, the others get what they would get alone: over HTTP, many at once."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import httpx
import numpy as np
import pytest
import torch

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.models.linear_layer import LinearConfig

from .world import Reply, Server, post, storm, wait_until

ITEMS = 200
EVERYTHING = [f"i{row}" for row in range(ITEMS)]
NONSENSE = [
    {"history": ["i1"], "beam_width": 0},
    {"history": ["i1"], "beam_width": -7},
    {"history": ["i1"], "beam_width": 10**9},
    {"history": ["i1"], "n": 0},
    {"history": []},
    {},
    {"user": "a", "history": ["i1"]},
    {"history": ["i1"] * 10_001},
    {"history": ["i1"], "exclude_ids": ["x"] * 10_001},
    {"history": [{"item": "i1", "action": "juggle"}]},
    {"history": {"item": "i1"}},
    {"history": ["i1"], "beam_widht": 3},
]


def good_bodies() -> list[dict]:
    """Requests of all sizes: one beam to more than the catalog, one item to more than the model reads, filters of every kind."""
    rng = np.random.default_rng(0)
    bodies = []
    for number, width in enumerate((1, 2, 10, 50, 128, 199, 200, 4096)):
        length = (1, 3, 20, 57)[number % 4]
        history = [f"i{row}" for row in rng.integers(0, ITEMS, length)]
        bodies += [
            {"history": history, "n": min(10, width), "beam_width": width},
            {"history": history, "n": min(10, width), "beam_width": width, "exclude_ids": history + [f"x{row}" for row in range(9_000)]},
            {"history": history, "n": min(10, width), "beam_width": width, "categories_any": ["red"], "categories_all": ["large"]},
        ]
    return [*bodies, {"user": "never seen"}, {"history": ["i1"], "exclude_ids": EVERYTHING}, {"history": ["i1"], "categories_all": ["red", "green"]}]


def same(mine: list[dict], right: list[dict]) -> bool:
    """The same items in the same order, with the same scores but for rounding."""
    return [hit["item"] for hit in mine] == [hit["item"] for hit in right] and np.allclose(
        [hit["score"] for hit in mine], [hit["score"] for hit in right], atol=1e-4
    )


@pytest.fixture
def right(server) -> list[list[dict]]:
    """What each good body gets when it is alone."""
    answers = [server.recommend(**body).json() for body in good_bodies()]
    for body, answer in zip(good_bodies(), answers, strict=True):
        assert len(answer["items"]) == body.get("n", 10) or answer["short_reason"], answer
    return [answer["items"] for answer in answers]


def check(replies: list[Reply], right: list[list[dict]]) -> None:
    for reply in replies:
        assert reply.status == 200, (reply.status, reply.body)
        assert same(reply.body["items"], right[reply.number % len(right)]), good_bodies()[reply.number % len(right)]


def nothing_left(server) -> None:
    """Nobody waits or runs, and no memory is held."""
    service = server.service
    wait_until(lambda: service.scheduler.depth() == service.scheduler.running() == service.pool.in_use_bytes == 0)
    assert service.pool.leases == 0


def test_answers_do_not_depend_on_the_company(server, right):
    check(asyncio.run(storm(server.url, good_bodies() * 6)), right)
    nothing_left(server)


def test_bad_requests_are_refused_and_their_neighbours_answered(server, right):
    async def crowd() -> tuple[list[Reply], list[Reply]]:
        return await asyncio.gather(storm(server.url, good_bodies() * 4, 0.5), storm(server.url, NONSENSE * 6, 0.5))

    answered, refused = asyncio.run(crowd())
    check(answered, right)
    assert {reply.status for reply in refused} == {422}
    assert all(reply.body["error"]["message"] for reply in refused)
    nothing_left(server)


def test_clients_that_hang_up_disturb_nobody(server, right):
    host, port = server.url.removeprefix("http://").split(":")

    async def hang_up(number: int) -> None:
        await asyncio.sleep(0.5 * number / 60)
        _, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({"history": EVERYTHING, "n": 100, "beam_width": (1, 128, 4096)[number % 3]}).encode()
        head = (
            f"POST /v1/recommendations HTTP/1.1\r\nHost: {host}\r\nX-API-Key: test-key\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        writer.write(head.encode() + data[: len(data) // (2 if number % 5 == 0 else 1)])  # some leave before they have said all
        await writer.drain()
        await asyncio.sleep((0, 0.001, 0.005, 0.02)[number % 4])
        writer.close()

    async def crowd() -> list[Reply]:
        replies, *_ = await asyncio.gather(storm(server.url, good_bodies() * 4, 0.5), *(hang_up(number) for number in range(60)))
        return replies

    check(asyncio.run(crowd()), right)
    nothing_left(server)
    assert server.client.get("/readyz").status_code == 200


def test_a_model_file_cut_short_is_refused_and_nobody_notices(server, world, right):
    before = server.loaded()
    whole = {name: world.candidate(seed) for seed, name in enumerate(("model.safetensors", "config.json", "semantide.json"), 1)}
    for name, ref in whole.items():
        path = world.room.store.get(ref) / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    async def promote(ref: str) -> tuple[int, dict]:
        return await post(server.url, "/v1/serving/promote", {"model": ref})

    async def crowd() -> tuple[list[Reply], list[tuple[int, dict]]]:
        replies, *refusals = await asyncio.gather(storm(server.url, good_bodies() * 4, 0.5), *map(promote, whole.values()))
        return replies, refusals

    replies, refusals = asyncio.run(crowd())
    check(replies, right)
    assert [status for status, _ in refusals] == [409] * 3, refusals
    assert server.loaded() == before


def test_a_stopped_process_answers_what_it_has_taken(world, settings: Settings):
    world.live(0)
    port = free_port()
    environment = os.environ | {
        "SEMANTIDE_REDIS_URL": settings.redis_url,
        "SEMANTIDE_DATA_DIR": str(settings.data_dir),
        "SEMANTIDE_PORT": str(port),
        "SEMANTIDE_API_KEYS": "test-key",
        "SEMANTIDE_LOG_LEVEL": "ERROR",
    }
    process = subprocess.Popen([sys.executable, "-m", "semantide.services.local", "api", "serving"], env=environment)
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, process.returncode
            try:
                return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
            except httpx.HTTPError:
                return False

        wait_until(ready, 60)

        async def crowd() -> list[object]:
            async def one(number: int) -> object:
                await asyncio.sleep(0.005 * number)
                try:
                    return await post(url, "/v1/recommendations", {"history": EVERYTHING[: 1 + number % 20], "n": 10, "beam_width": 200})
                except ConnectionRefusedError as error:  # not cut off once it was through
                    return error

            tasks = [asyncio.create_task(one(number)) for number in range(80)]
            while sum(task.done() for task in tasks) < 10:
                await asyncio.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            return await asyncio.gather(*tasks)

        outcomes = asyncio.run(crowd())
        assert process.wait(120) in (0, -signal.SIGTERM)  # the HTTP server raises the signal again once it is done
        answered = [outcome for outcome in outcomes if not isinstance(outcome, OSError)]
        assert len(answered) >= 10
        for status, body in answered:
            assert status == 200 and len(body["items"]) == 10, (status, body)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.mark.parametrize("types", [("linear_attention", "full_attention"), ()])
def test_a_request_whose_numbers_break_is_refused_and_the_others_get_what_they_got_before(world, types):
    """A history with a code whose vector is not a number: no client can bring one about, a damaged weight can."""
    shape = {"layer_types": types, "linear": LinearConfig(1, 2, 16, 16)} if types else {}
    model = world.add_model(0, num_layers=2, tie_word_embeddings=False, **shape)
    codes = world.catalogs[world.catalog_ref].codes
    good = [{"history": [f"i{row}" for row in np.flatnonzero(codes[:, 2] != codes[5, 2])[number::7][:6]], "n": 5} for number in range(7)]
    Registry(world.room.broker).register(Candidate(model=model, catalog=world.catalog_ref))
    Registry(world.room.broker).promote(Pair(model=model, catalog=world.catalog_ref))
    with Server(world.room) as server:
        wait_until(lambda: server.service.swapper.bundle is not None)
        right = [server.recommend(**body).json()["items"] for body in good]
        generator = server.service.swapper.bundle.model.generator
        with torch.no_grad():
            generator.model.embed_tokens.weight[generator.vocabulary.first(2) + int(codes[5, 2])] = torch.nan
        bad = {"history": ["i5", "i7"], "n": 5}
        replies = asyncio.run(storm(server.url, [*good, bad, *good, bad]))
        check([reply for reply in replies if reply.number not in (7, 15)], [*right, [], *right])
        for number in (7, 15):
            assert replies[number].status == 500 and "not finite numbers" in json.dumps(replies[number].body)
