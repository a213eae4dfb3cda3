"""What is read anew, and when: paced by a clock that is never set."""

from __future__ import annotations

import pytest

from semantide.operators.rounds import Rounds
from semantide.operators.settings import OperatorSettings
from tests.operators.fake_cluster import FakeCluster


@pytest.mark.parametrize("jump", [-86_400.0, 0.0, 86_400.0])
def test_a_clock_that_is_set_changes_no_pace(jump: float) -> None:
    wall, steady = 1_800_000_000.0, 0.0
    cluster = FakeCluster(lambda: wall)
    settings = OperatorSettings(profile="ascend", relist_seconds=60.0, device_info_seconds=15.0)
    rounds = Rounds(cluster, settings, lambda: wall, writers=1, steady=lambda: steady)

    def read() -> tuple[int, int]:
        cluster.calls.clear()
        rounds.turn()
        return cluster.calls.count(("list", "NPUJob", "")), cluster.calls.count(("list", "ConfigMap", ""))

    assert read() == (1, 1)
    wall += jump
    assert read() == (0, 0)
    wall, steady = wall + 16, steady + 16
    assert read() == (0, 1)
    wall, steady = wall + 45, steady + 45
    assert read() == (1, 1)
