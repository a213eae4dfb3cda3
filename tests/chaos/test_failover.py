"""A broker that fails over: real servers, real sentinels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion import api
from semantide.services.ingestion.stream import STREAM
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import connect, watched
from semantide.shared.config import Settings
from semantide.shared.contracts import RunJob
from semantide.shared.errors import BrokerUnavailable, TransientError
from semantide.shared.queues import Queues
from semantide.shared.room import Room

from .brokers import Brokers

ROW = {"user": "u", "item": "i", "time": 1_766_000_000_000, "action": "click"}


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    """A primary, two replicas, three sentinels."""
    made = Brokers(tmp_path_factory.mktemp("brokers"))
    try:
        made.start()
        yield made
    finally:
        made.remove()


def until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def intake(brokers: Brokers, folder: Path, replicas: int) -> api.Intake:
    settings = Settings(data_dir=folder, redis_url=brokers.url, broker_replicas=replicas)
    return api.Intake(Room("ingestion", settings, connect(brokers.url), ArtifactStore(settings.artifacts_root), Queues(brokers.url)))


def test_clients_queues_and_accepted_rows_follow_the_primary(brokers: Brokers, tmp_path: Path) -> None:
    client, queues, taking = connect(brokers.url), Queues(brokers.url), intake(brokers, tmp_path, 1)
    client.set("before", "1")
    queues.send(RunJob(room="training", job_id="one"))
    assert taking.interactions([ROW])[0] == 1
    first = brokers.primary()
    brokers.fail_over()
    until(lambda: brokers.primary() != first)
    brokers.wait_whole(200)
    # The same client and the same queue, whose connections were to the server that is a replica now.
    client.set("after", "2")
    queues.send(RunJob(room="training", job_id="two"))
    assert taking.interactions([ROW])[0] == 1
    assert client.mget("before", "after") == [b"1", b"2"] and client.xlen(STREAM) == 2
    assert queues.depths(client)["semantide.training.RunJob"] == 2
    client.close()


def test_rows_are_not_acknowledged_before_enough_replicas_have_them(brokers: Brokers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_FSYNC_MS", 200)
    with pytest.raises(TransientError, match=r"SEMANTIDE_BROKER_REPLICAS asks for 3"):
        intake(brokers, tmp_path, 3).interactions([ROW])


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True), st.integers(1, 65535)), min_size=1, max_size=4),
    st.from_regex(r"[A-Za-z0-9_-]{1,20}", fullmatch=True),
    st.integers(0, 15),
    st.text("abc123-_.~", max_size=12),
)
def test_an_address_of_sentinels_is_understood(places: list[tuple[str, int]], name: str, database: int, password: str) -> None:
    secret = f":{password}@" if password else ""
    found = watched(f"redis+sentinel://{secret}" + ",".join(f"{host}:{port}" for host, port in places) + f"/{name}/{database}")
    assert found is not None
    assert (found.sentinels, found.name, found.database, found.password) == (tuple(places), name, database, password)
    assert found.queue_urls.count("sentinel://") == len(places)


@pytest.mark.parametrize("url", ["redis+sentinel://one:1", "redis+sentinel://one:x/name", "redis+sentinel://:1/name", "redis+sentinel://one:1/name/x"])
def test_a_wrong_address_of_sentinels_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(BrokerUnavailable, match=r"NAME as the sentinels call the broker"):
        connect(url)
    assert watched("redis://127.0.0.1:6379/0") is None
