"""The profiles of docker-compose.yml: replicas behind the router, and what watches the stack."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import PATIENCE_SECONDS, REPOSITORY, ROOMS, ComposeStack, show, wait
from .load import Asker

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

_REPLICAS = 2
_PROMETHEUS = "semantide-test/prometheus:1"
_STARTED = ("up", "--no-build", "--wait", "--detach")


@pytest.fixture(scope="module")
def routed(stack: ComposeStack, items: list[str]) -> Iterator[str]:
    """Address of a router in front of replicas."""
    stack.compose("--profile", "replicas", *_STARTED, "replica", "router")
    yield f"http://127.0.0.1:{stack.router_port}"
    stack.compose("--profile", "replicas", "rm", "--stop", "--force", "replica", "router")


def test_a_replica_that_is_killed_costs_no_request(
    stack: ComposeStack, routed: str, questions: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    direct = stack.client()
    askers = [Asker(stack.client(routed), questions[place:] + questions[:place], patient=False) for place in range(4)]
    assert askers[0].expected == [[item["item"] for item in direct.post("/v1/recommendations", question)["items"]] for question in questions]
    for asker in askers:
        asker.start()
    rows = []
    for number in range(1, _REPLICAS + 1):
        wait(lambda: all(len(asker.served) > 5 for asker in askers), "answers by way of the router")
        begin = time.monotonic()
        wait(stack.kill("replica", number), f"replica {number} in health")
        healthy = time.monotonic() - begin
        wait(lambda since=begin + healthy: all(asker.was_served(since) for asker in askers), "answers")
        rows.append(f"  replica {number}: healthy after {healthy:.1f} s, longest pause of a client {max(asker.longest_pause(begin) for asker in askers):.1f} s")
    for asker in askers:
        asker.ended.set()
        asker.join(PATIENCE_SECONDS)
    wrong = [each for asker in askers for each in asker.wrong]
    show(
        capsys, "replicas killed with SIGKILL behind the router:", *rows, f"  {sum(len(asker.served) for asker in askers):,} right answers, {len(wrong)} others"
    )
    assert wrong == []


@pytest.fixture(scope="module")
def watched(stack: ComposeStack, engine: Any, items: list[str], docker_engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus of the profile, and the rooms sending their traces to a collector's place. There is no Grafana: nothing that could be installed here has one."""
    docker_engine.prometheus_image(engine, _PROMETHEUS)
    program = Path(__file__).with_name("span_counter.py")
    collector = {
        "image": "semantide:test",
        "entrypoint": ["python", "/etc/span_counter.py"],
        "volumes": [f"{program}:/etc/span_counter.py:ro"],
        "healthcheck": {"test": ["CMD", "python", "-c", "import urllib.request as web; web.urlopen('http://127.0.0.1:8889/metrics', timeout=4)"]},
    }
    said = json.loads(stack.override.read_text())
    said["services"] |= {"prometheus": {"image": _PROMETHEUS}, "collector": collector}
    stack.override.write_text(json.dumps(said))
    endpoint = {"SEMANTIDE_OTLP_ENDPOINT": "http://collector:4318"}
    stack.compose("--profile", "observability", *_STARTED, *ROOMS, "collector", "prometheus", **endpoint)
    with httpx.Client(base_url=f"http://127.0.0.1:{stack.prometheus_port}", timeout=60, trust_env=False) as client:
        yield client
    stack.compose("--profile", "observability", "rm", "--stop", "--force", "collector", "prometheus")


def _asked(client: httpx.Client, path: str, **parameters: str) -> Any:
    try:
        answer = client.get(path, params=parameters)
    except httpx.TransportError:
        return None
    assert answer.status_code in (200, 503), answer.text
    return answer.json()["data"] if answer.status_code == 200 else None


def _series(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    said = _asked(client, "/api/v1/query", query=expression)
    found: list[dict[str, Any]] = said["result"] if said and said["resultType"] != "scalar" else []
    return found


def test_prometheus_sees_every_process(stack: ComposeStack, watched: httpx.Client) -> None:
    def states() -> dict[str, str]:
        found = _asked(watched, "/api/v1/targets", state="active") or {"activeTargets": []}
        return {each["labels"]["instance"].partition(":")[0]: each["health"] for each in found["activeTargets"]}

    # Replicas and the router too, where they run: they are found by their addresses.
    wait(lambda: {*ROOMS, "collector"} <= set(found := states()) and set(found.values()) == {"up"}, "every target is up")


def test_prometheus_understands_the_alerts(engine: Any, watched: httpx.Client) -> None:
    files = {REPOSITORY / "docker" / "prometheus.yaml": "prometheus.yaml", REPOSITORY / "charts" / "semantide" / "files" / "alerts.yaml": "alerts.yaml"}
    mounts = [part for path, name in files.items() for part in ("--volume", f"{path}:/etc/prometheus/{name}:ro")]
    said = engine.docker("run", "--rm", *mounts, "--entrypoint", "promtool", _PROMETHEUS, "check", "config", "/etc/prometheus/prometheus.yaml")
    assert "SUCCESS" in said.stdout + said.stderr
    groups = wait(lambda: (_asked(watched, "/api/v1/rules") or {}).get("groups"), "rules")
    rules = [rule for group in groups for rule in group["rules"]]
    named = re.findall(r"alert: (\w+)", (REPOSITORY / "charts" / "semantide" / "files" / "alerts.yaml").read_text())
    assert sorted(rule["name"] for rule in rules) == sorted(named)

    def evaluated() -> bool:
        found = [rule for group in _asked(watched, "/api/v1/rules")["groups"] for rule in group["rules"]]
        assert [rule for rule in found if rule["health"] == "err"] == []
        return all(rule["health"] == "ok" for rule in found)

    wait(evaluated, "every rule was evaluated")


def test_the_dashboard_shows_what_happens(
    stack: ComposeStack, watched: httpx.Client, items: list[str], questions: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    panels = json.loads((REPOSITORY / "charts" / "semantide" / "files" / "dashboard.json").read_text())["panels"]
    replaced = {"$namespace": "compose", "$__rate_interval": "2m", "$__interval": "2m"}
    expressions = [(panel["title"], target["expr"]) for panel in panels for target in panel.get("targets", ())]
    for old, new in replaced.items():
        expressions = [(title, expression.replace(old, new)) for title, expression in expressions]
    must = {"Requests by outcome", "Time of an answer", "Where the time goes", "Events written to the log", "Open jobs", "Requests searched together"}
    client, number, empty = stack.client(), 0, must

    def traffic() -> bool:
        nonlocal number, empty
        for question in questions:
            client.post("/v1/recommendations", question)
        rows = [{"user": "watched", "item": item, "time": 1_767_225_600_000 + number, "action": "click", "event_id": f"watched-{number}"} for item in items[:1]]
        client.post("/v1/interactions", {"interactions": rows})
        number += 1
        # Every expression is asked, so that one which Prometheus does not understand is an error.
        shown = {title for title, expression in expressions if _series(watched, expression)}
        empty = {title for title, _ in expressions} - shown
        return not empty & must

    wait(traffic, f"figures of {must}")
    show(capsys, f"  {len(expressions)} queries of the dashboard, without data yet: {', '.join(sorted(empty)) or 'none'}")


def test_traces_of_the_rooms_arrive(stack: ComposeStack, watched: httpx.Client, capsys: pytest.CaptureFixture[str]) -> None:
    def services() -> dict[str, int]:
        return {each["metric"]["service_name"]: int(each["value"][1]) for each in _series(watched, "semantide_spans_calls_total")}

    found = wait(lambda: len(known := services()) > 1 and known, "spans of the APIs and a worker")
    show(capsys, f"  spans: {found}")
    assert all(name.startswith("semantide-") for name in found)
