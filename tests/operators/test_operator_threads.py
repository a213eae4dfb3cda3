"""The threads of the operator's process: none ends by what goes wrong in it, and the health check sees one that has stopped."""

from __future__ import annotations

import threading
import time

import pytest

from semantide.operators import operator as module
from semantide.operators.operator import Operator
from semantide.operators.settings import OperatorSettings
from tests.operators.fake_cluster import FakeCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = FakeCluster(time.time)
    monkeypatch.setattr(module, "KubernetesApi", lambda: cluster)
    monkeypatch.setattr(module, "_AGAIN_SECONDS", 0.01)
    return cluster


def test_leading_goes_on_after_whatever_goes_wrong(cluster: FakeCluster) -> None:
    failures = [RuntimeError("nobody thought of this"), RuntimeError("nor of this")]

    def fail(verb: str, kind: str, name: str) -> None:
        if failures:
            raise failures.pop()

    cluster.fails = fail
    operator = Operator(OperatorSettings(lease_seconds=2.0, port=0))
    thread = threading.Thread(target=operator._lead, daemon=True)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not operator._held and time.monotonic() < until:
            time.sleep(0.01)
        assert operator._held and operator._lease.held() and not failures
    finally:
        operator._stop.set()
        thread.join(30)


@pytest.mark.parametrize("silent", ["_breath", "_renewed"])
def test_a_thread_that_stopped_fails_the_health_check(cluster: FakeCluster, silent: str) -> None:
    operator = Operator(OperatorSettings(port=0))
    operator._rounds.breath = time.monotonic() - 200.0
    assert operator._alive()
    setattr(operator, silent, time.monotonic() - 200.0)
    assert not operator._alive()
