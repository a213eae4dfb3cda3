"""What the console shows of a cluster is what the operator saw."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from semantide.operators.cluster_view import view
from semantide.operators.rounds import Rounds


def test_every_npu_has_its_holder_and_every_wait_its_reason(world: Callable[..., Any]) -> None:
    lab = world(["a", "b"])
    lab.operator = Rounds(lab.cluster, lab.settings, lambda: lab.now, writers=1)
    lab.submit("runs", npus=8)
    lab.serve("answers", npus=2)
    lab.settle()
    lab.submit("waits", pods=3, npus=8)
    lab.submit("first", pods=3, npus=8, priority=5)
    lab.settle(seconds=60)
    seen = json.loads(json.dumps(view(lab.operator.last)))
    jobs = {job["name"].rpartition("/")[2]: job for job in seen["jobs"]}
    assert [job["name"].rpartition("/")[2] for job in seen["jobs"]] == ["first", "waits", "runs"]
    assert jobs["runs"]["phase"] == "Running" and jobs["runs"]["nodes"] and jobs["runs"]["waits_seconds"] is None
    assert jobs["waits"]["message"] and jobs["waits"]["waits_seconds"] > 0 and jobs["first"]["priority"] == 5
    assert [node["name"] for node in seen["nodes"]] == ["a", "b"]
    holders = [npu["holder"] for node in seen["nodes"] for npu in node["npus"]]
    assert holders.count(f"job {jobs['runs']['name']}") == 8 and len(holders) == 16
    (service,) = seen["services"]
    assert holders.count(f"service {service['name']}") == 2 and service["replicas"] == 1 and service["nodes"]
    assert sum(len(node["work"]) for node in seen["nodes"]) == 2


def test_a_process_that_does_not_lead_says_nothing_of_the_cluster() -> None:
    assert view(None) == {"time": None, "nodes": [], "jobs": [], "services": []}
