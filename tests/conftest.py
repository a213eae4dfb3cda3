"""Fixtures that every test may use: a real broker, a real stack, real data where it is present."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from semantide.shared import http
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect
from semantide.shared.config import Settings
from semantide.shared.queues import Queues
from semantide.shared.room import Room

# No test judges how long an example takes. Continuous integration draws no examples by chance; whoever works on the code looks for new ones.
hypothesis.settings.register_profile("patient", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("patient")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def patient_probes() -> Iterator[None]:
    """A broker on a slow disk has long to answer the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http, "_FIRST_PROBE_SECONDS", 120.0)
        yield


@pytest.fixture(scope="session")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """One real server for the whole session."""
    with OwnBroker(tmp_path_factory.mktemp("broker")) as server:
        yield server


@pytest.fixture
def broker(own_broker: OwnBroker) -> Iterator[Any]:
    """A client of an empty server."""
    client = connect(own_broker.url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def settings(tmp_path: Path, own_broker: OwnBroker) -> Settings:
    """Settings of a fresh data folder on the session's broker."""
    return Settings(data_dir=tmp_path / "data", redis_url=own_broker.url, import_roots=str(tmp_path), api_keys="test-key")


@pytest.fixture
def make_room(broker: Any, settings: Settings) -> Any:
    """A function that opens a room by name, with an empty broker."""

    def make(name: str) -> Room:
        return Room(name, settings, broker, ArtifactStore(settings.artifacts_root), Queues(settings.redis_url))

    return make


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real data sets; the test is skipped, and says so, where it is absent."""
    folder = Path(os.environ.get("SEMANTIDE_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not (folder / "amazon" / "beauty.seq").exists():
        pytest.skip(f"no real data in {folder}: set SEMANTIDE_TEST_DATA to the folder that holds amazon/, movielens/, kuairand/")
    return folder
