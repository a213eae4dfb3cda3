"""Fixtures of serving: a room with one catalog, and servers on top of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from semantide.shared.room import Room

from .world import Server, World, wait_until


@pytest.fixture
def world(make_room: Callable[[str], Room], tmp_path: Path) -> World:
    """A room whose requests have all the time that a slow machine takes, so that none is narrowed or late but where a test wants it."""
    room = make_room("serving")
    patient = room.settings.model_copy(update={"serving_deadline_seconds": 600.0, "serving_narrowing_seconds": 0.0})
    made = World(replace(room, settings=patient), tmp_path / "artifacts")
    made.catalog_ref = made.add_catalog()
    return made


@pytest.fixture
def empty_server(world: World) -> Iterator[Server]:
    """Serving without a model."""
    with Server(world.room) as server:
        yield server


@pytest.fixture
def server(world: World) -> Iterator[Server]:
    """Serving with model 0 live."""
    world.live(0)
    with Server(world.room) as running:
        wait_until(lambda: running.service.swapper.bundle is not None)
        yield running
