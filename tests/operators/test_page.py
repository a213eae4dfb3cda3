"""The operator's page answers what it is asked, and its figures are those of the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
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


def test_figures_are_those_of_the_cluster(world: Callable[..., Any]) -> None:
    lab, meters = world(["a", "b"]), Meters()
    lab.operator = Rounds(lab.cluster, lab.settings, lambda: lab.now, meters=meters, writers=1)
    lab.submit("runs", npus=8)
    lab.submit("waits", pods=3, npus=8)
    lab.settle()
    lab.end("runs", status=1)
    lab.settle(seconds=20)
    (place,) = lab.status("runs")["placement"]
    lab.nodes.ready("a" if place["node"] == "b" else "b", False)
    lab.settle()
    samples = {
        (sample.name, *sample.labels.values()): sample.value for family in text_string_to_metric_families(meters.page().decode()) for sample in family.samples
    }
    assert samples["semantide_operator_jobs", "Running"] == 1 and samples["semantide_operator_jobs", "Pending"] == 1
    assert samples["semantide_operator_npus", "held"] == 8 and samples["semantide_operator_npus", "unhealthy"] == 8
    assert samples["semantide_operator_restarts_total",] == 1
    assert samples["semantide_operator_longest_wait_seconds",] > 0
    assert samples["semantide_operator_wait_seconds_count",] == 2
