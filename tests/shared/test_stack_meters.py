"""What the broker holds arrives as metrics."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from semantide.shared import stack_meters
from semantide.shared.contracts import ROOMS, JobSpec
from semantide.shared.jobs import Jobs
from semantide.shared.queues import dead_letter_key
from semantide.shared.retention_account import RetentionAccount
from semantide.shared.room import Room


@pytest.fixture
def figures(make_room: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Room, Callable[[str], dict[tuple[str, ...], float]]]:
    """A room, and a function that reads one metric as attributes' values -> value."""
    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    monkeypatch.setattr(stack_meters, "meter", provider.get_meter)
    room = make_room("serving")
    stack_meters.observe(room)

    def read(name: str) -> dict[tuple[str, ...], float]:
        data: Any = reader.get_metrics_data()
        metrics = [metric for resource in data.resource_metrics for scope in resource.scope_metrics for metric in scope.metrics] if data else []
        points = [point for metric in metrics if metric.name == name for point in metric.data.data_points]
        return {tuple(str(value) for _, value in sorted(point.attributes.items())): point.value for point in points}

    return room, read


def test_jobs_are_counted_open_and_ended(figures: Any) -> None:
    room, read = figures
    jobs = Jobs(room.broker)
    first, second, third = (jobs.submit(JobSpec(kind=kind)) for kind in ("train", "train", "dataset"))
    assert read("semantide_jobs_open")[("training",)] == 2 and read("semantide_jobs_open")[("ingestion",)] == 1
    assert read("semantide_jobs_ended") == {}
    jobs.end(first, "succeeded")
    jobs.end(second, "failed", error="why")
    jobs.cancel(third.id)
    assert read("semantide_jobs_open")[("training",)] == 0
    assert read("semantide_jobs_ended") == {("training", "succeeded"): 1, ("training", "failed"): 1, ("ingestion", "cancelled"): 1}


def test_messages_are_counted_waiting_and_parked(figures: Any) -> None:
    room, read = figures
    queue = "semantide.training.RunJob"
    assert read("semantide_queue_messages")[(queue,)] == 0 and read("semantide_parked_messages") == {}
    room.broker.rpush(f"semantide:queue:{queue}", "a", "b")
    room.broker.rpush(dead_letter_key(queue), json.dumps({"message": {}}))
    assert read("semantide_queue_messages")[(queue,)] == 2 and read("semantide_parked_messages") == {(queue,): 1}


def test_retention_is_due_after_its_hours_and_never_where_it_is_off(figures: Any) -> None:
    room, read = figures
    account = RetentionAccount(room.broker)
    assert read("semantide_retention_due") == {} == read("semantide_retention_looked")
    account.add("retention-1", {"artifacts": 3}, 100, 1_700_000_000.0)
    room.settings.retention_hours = 2.0
    assert read("semantide_retention_looked") == {(): 1_700_000_000.0} and read("semantide_retention_due") == {(): 1_700_007_200.0}
    assert read("semantide_retention_removed") == {("artifacts",): 3} and read("semantide_retention_bytes") == {(): 100}
    for off in ({"retention_hours": 0.0}, {"artifact_days": 0.0, "job_days": 0.0, "upload_days": 0.0}):
        before = {name: getattr(room.settings, name) for name in off}
        for name, value in off.items():
            setattr(room.settings, name, value)
        assert read("semantide_retention_due") == {}
        for name, value in before.items():
            setattr(room.settings, name, value)


def test_a_lost_broker_takes_no_other_metric_along(figures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room, read = figures

    def gone(*_: Any) -> Any:
        raise stack_meters.RedisError("gone")

    monkeypatch.setattr(type(room.queues), "depths", gone)
    assert read("semantide_queue_messages") == {}
    assert len(read("semantide_jobs_open")) == len(ROOMS)
