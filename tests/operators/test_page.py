"""The operator's page answers what it is asked, and its figures are those of the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from semantide.operators.meters import Meters
from semantide.operators.page import Page
from semantide.operators.rounds import Rounds


def test_health_readiness_and_figures() -> None:
    alive = [True]
    page = Page(0, lambda: b"figure 1\n", lambda: {"nodes": []}, lambda: alive[0], lambda: False)
    page.start()
    try:
        address = f"http://127.0.0.1:{page.port}"
        assert httpx.get(f"{address}/healthz").status_code == 200
        alive[0] = False
        assert httpx.get(f"{address}/healthz").status_code == 503
        assert httpx.get(f"{address}/readyz").status_code == 503
        assert httpx.get(f"{address}/metrics").text == "figure 1\n"
        assert httpx.get(f"{address}/cluster").json() == {"nodes": []}
        assert httpx.get(f"{address}/other").status_code == 404
    finally:
        page.stop()


def shown(meters: Meters) -> dict[tuple[str, ...], float]:
    """Every figure of the page by its name and the values of its labels."""
    page = meters.page().decode()
    return {(sample.name, *sample.labels.values()): sample.value for family in text_string_to_metric_families(page) for sample in family.samples}


@pytest.mark.parametrize("strategy", ["Surge", "InPlace"])
def test_a_rollout_that_hangs_is_seen_in_the_figures(world: Callable[..., Any], strategy: str) -> None:
    lab, meters = world(["a"], npus=3), Meters()
    lab.operator = Rounds(lab.cluster, lab.settings, lambda: lab.now, meters=meters, writers=1)
    lab.serve("shop", low=2, high=2, rollout={"strategy": strategy})
    lab.settle()
    lab.change("NPUService", "shop", image="semantide:misspelt")
    for _ in range(6):  # nodes let go of what ends and run nothing new: its image is nowhere
        lab.operator.turn()
        for body in lab.cluster.of("Pod"):
            if "deletionTimestamp" in body["metadata"]:
                lab.cluster.remove(body)
        lab.now += 60.0
    figures = shown(meters)
    assert lab.phase("shop", "NPUService") == "Rolling" and figures["semantide_operator_wished_replicas", "lab", "shop"] == 2
    assert figures["semantide_operator_replicas", "lab", "shop"] == (1 if strategy == "InPlace" else 2)
    assert figures["semantide_operator_outdated_replicas", "lab", "shop"] == (1 if strategy == "InPlace" else 2)
    lab.settle()
    figures = shown(meters)
    assert figures["semantide_operator_outdated_replicas", "lab", "shop"] == 0 and figures["semantide_operator_replicas", "lab", "shop"] == 2
    lab.change("NPUService", "shop", suspend=True)
    lab.settle()
    assert shown(meters)["semantide_operator_wished_replicas", "lab", "shop"] == 0, "nobody wants it"
    meters.lead(False)
    assert not [name for name in shown(meters) if "lab" in name], "another one says what is so now"


def test_figures_are_those_of_the_cluster(world: Callable[..., Any]) -> None:
    lab, meters = world(["a", "b"]), Meters()
    lab.operator = Rounds(lab.cluster, lab.settings, lambda: lab.now, meters=meters, writers=1)
    lab.submit("runs", npus=8)
    lab.submit("waits", pods=3, npus=8)
    lab.submit("wrong", elastic={"min": 4, "max": 2})
    lab.settle()
    lab.end("runs", status=1)
    lab.settle(seconds=20)
    (place,) = lab.status("runs")["placement"]
    lab.nodes.ready("a" if place["node"] == "b" else "b", False)
    lab.settle()
    samples = shown(meters)
    assert samples["semantide_operator_jobs", "Running"] == 1 and samples["semantide_operator_jobs", "Pending"] == 1
    assert samples["semantide_operator_npus", "held"] == 8 and samples["semantide_operator_npus", "unhealthy"] == 8
    assert samples["semantide_operator_restarts_total",] == 1
    assert (samples["semantide_operator_unreadable", "NPUJob"], samples["semantide_operator_unreadable", "NPUService"]) == (1, 0)
    assert samples["semantide_operator_longest_wait_seconds",] > 0
    assert samples["semantide_operator_wait_seconds_count",] == 2
