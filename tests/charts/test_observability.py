"""Growing, metrics, alerts and the dashboard: what the chart makes, and that alerts and plots ask for figures which exist."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from semantide.operators.resources import NPUService
from semantide.operators.service_pods import service_selector
from semantide.shared.contracts import ROOMS, RunJob
from semantide.shared.queues import queue_name

REPOSITORY = Path(__file__).resolve().parents[2]
FILES = REPOSITORY / "charts" / "semantide" / "files"
Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]
# What Prometheus' exporters add to a name.
_UNITS = {"s": "seconds", "By": "bytes"}
_SUFFIXES = ("_bucket", "_sum", "_count")


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def made_metrics() -> dict[str, set[str]]:
    """Every metric that the code makes, by the name that collectors see -> label names that the code gives it."""
    found: dict[str, set[str]] = {}
    for folder in ("shared", "services", "operators"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
                name = call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
                words = [argument.value for argument in call.args if isinstance(argument, ast.Constant) and isinstance(argument.value, str)]
                if not words or not words[0].startswith("semantide_"):
                    continue
                unit = next((word.value.value for word in call.keywords if word.arg == "unit" and isinstance(word.value, ast.Constant)), None)
                unit = unit or (words[2] if name == "gauge" and len(words) > 2 else "")
                exported = words[0]
                if (ending := _UNITS.get(unit, unit)) and not exported.endswith(ending):
                    exported += f"_{ending}"
                if "counter" in name.lower():
                    exported = f"{exported.removesuffix('_total')}_total"
                found[exported] = set(words[2:3])
    return found


def asked(expression: str) -> Iterator[str]:
    yield from re.findall(r"\b(semantide_[a-z_]+)", expression)


def expressions() -> Iterator[tuple[str, str]]:
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]


def test_every_metric_that_is_asked_for_exists() -> None:
    made = made_metrics()
    assert "semantide_recommendations_total" in made and "semantide_ingestion_flush_seconds" in made and "semantide_kv_bytes" in made
    for title, expression in expressions():
        for name in asked(expression):
            base = next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix) and name.removesuffix(suffix) in made), name)
            assert base in made, f"{title} asks for {name}, which nothing shows"


def test_panels_have_a_place_of_their_own() -> None:
    places = [panel["gridPos"] for panel in json.loads((FILES / "dashboard.json").read_text())["panels"]]
    cells = [(x, y) for place in places for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) == 23


def test_alerts_say_what_to_do() -> None:
    for group in yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert len(rule["annotations"]["description"]) > 40 and rule["annotations"]["summary"], rule["alert"]


METRICS = ("--set", "metricsEnabled=true,serviceMonitorEnabled=true,prometheusRuleEnabled=true,grafanaDashboardEnabled=true,metricsNamespaces.monitoring=true")


def test_alerts_and_dashboard_arrive_as_they_are(render: Render) -> None:
    manifests = render("", *METRICS)
    assert of_kind(manifests, "PrometheusRule")["shop-semantide"]["spec"] == yaml.safe_load((FILES / "alerts.yaml").read_text())
    board = of_kind(manifests, "ConfigMap")["shop-semantide-dashboard"]
    assert json.loads(board["data"]["semantide.json"]) == json.loads((FILES / "dashboard.json").read_text())
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_a_collector_reaches_every_process(render: Render) -> None:
    manifests = render("", *METRICS)
    for name, deployment in of_kind(manifests, "Deployment").items():
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert "metrics" in {port["name"] for port in container["ports"]}, name
    service = of_kind(manifests, "Service")["shop-semantide-metrics"]
    monitor = of_kind(manifests, "ServiceMonitor")["shop-semantide"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        # A worker shows the metrics of its jobs.
        if not name.endswith(("-redis", "-jobs")):
            peers = [peer for rule in policy["spec"]["ingress"] if rule["ports"] == [{"port": "metrics"}] for peer in rule["from"]]
            assert {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}} in peers, name


@pytest.mark.parametrize("release", ["shop", "semantide", "semantide-prod", "my-semantide2"])
def test_a_process_that_is_down_is_noticed_whatever_the_release_is_called(lint: ModuleType, release: str) -> None:
    manifests = yaml.safe_load_all(lint.helm("template", release, str(lint.CHART), *METRICS).stdout)
    (job,) = (each["metadata"]["name"] for each in manifests if each and each["kind"] == "Service" and each["metadata"]["name"].endswith("-metrics"))
    expression = next(expression for title, expression in expressions() if title == "SemantideProcessDown")
    assert re.fullmatch(re.findall(r'job=~"(.*?)"', expression)[0], job)


def test_without_metrics_nothing_listens_for_collectors(render: Render) -> None:
    manifests = render()
    assert "shop-semantide-metrics" not in of_kind(manifests, "Service") and not of_kind(manifests, "ServiceMonitor")
    for name, policy in of_kind(manifests, "NetworkPolicy").items():
        if "-worker-" in name:
            assert "ingress" not in policy["spec"], name


def test_what_grows_has_no_fixed_number(render: Render) -> None:
    manifests = render("", "--set", "apis.all.minReplicas=2,apis.all.maxReplicas=6,apis.all.targetCpuPercent=55")
    assert "replicas" not in of_kind(manifests, "Deployment")["shop-semantide-api"]["spec"]
    scaler = of_kind(manifests, "HorizontalPodAutoscaler")["shop-semantide-api"]["spec"]
    assert (scaler["minReplicas"], scaler["maxReplicas"], scaler["metrics"][0]["resource"]["target"]["averageUtilization"]) == (2, 6, 55)
    assert scaler["scaleTargetRef"]["name"] in of_kind(manifests, "Deployment")
    assert not of_kind(render(), "HorizontalPodAutoscaler")


def test_keda_counts_requests_and_jobs(render: Render) -> None:
    options = "autoscaler=keda,kedaPrometheusAddress=http://prometheus:9090,apis.all.maxReplicas=6,workers.training.maxReplicas=3"
    manifests = render("", "--set", options)
    assert not of_kind(manifests, "HorizontalPodAutoscaler")
    scaled = of_kind(manifests, "ScaledObject")
    queries = {name: [t["metadata"]["query"] for t in each["spec"]["triggers"] if t["type"] == "prometheus"] for name, each in scaled.items()}
    assert set(queries) == {"shop-semantide-api", "shop-semantide-worker-training"}
    assert "semantide_serving_queue" in queries["shop-semantide-api"][0] and 'room="training"' in queries["shop-semantide-worker-training"][0]
    assert {name for query in queries.values() for name in asked(query[0])} <= set(made_metrics())
    pods = re.compile(re.findall(r'pod=~"(.*?)"', queries["shop-semantide-api"][0])[0])
    assert pods.fullmatch("shop-semantide-api-5d9f8c7b6d-x2x4z")
    assert not pods.fullmatch("shop-semantide-api-serving-5d9f8c7b6d-x2x4z"), "another API's requests"


def test_keda_counts_no_jobs_that_wait_for_npus_and_nothing_of_others(render: Render) -> None:
    options = "autoscaler=keda,kedaPrometheusAddress=http://prometheus:9090,workers.training.maxReplicas=3,workers.negatives.maxReplicas=2"
    router = "router.maxReplicas=4,servingReplicas.main.replicas.max=4"
    knows = ("--api-versions", "semantide.io/v1alpha1/NPUService")
    scaled = of_kind(render("", *knows, "--set", f"{options},{router},settings.jobRunner=cluster"), "ScaledObject")
    triggers = {name: each["spec"]["triggers"] for name, each in scaled.items()}
    assert [trigger["type"] for trigger in triggers["shop-semantide-router"]] == ["cpu"], "nothing waits at a router"
    for room in ("training", "negatives"):
        ((query, kind),) = [(trigger["metadata"]["query"], trigger["type"]) for trigger in triggers[f"shop-semantide-worker-{room}"]]
        assert kind == "prometheus" and "semantide_jobs_open" not in query
        queues = re.compile(re.findall(r'queue=~"(.*?)"', query)[0])
        assert queues.fullmatch(queue_name(RunJob, room))
        assert not [other for other in ROOMS if other != room and queues.fullmatch(queue_name(RunJob, other))]
    for each in of_kind(render("", "--set", options), "ScaledObject").values():
        pods = re.compile(re.findall(r'pod=~"(.*?)"', each["spec"]["triggers"][0]["metadata"]["query"])[0])
        assert pods.fullmatch("shop-semantide-api-5d9f8c7b6d-x2x4z") and pods.fullmatch("shop-semantide-api-serving-5d9f8c7b6d-x2x4z")
        assert not pods.fullmatch("other-semantide-api-5d9f8c7b6d-x2x4z"), "another release's broker"


def test_router_replicas_and_operator_are_watched() -> None:
    titles = {title for title, _ in expressions()}
    shown = {name for _, expression in expressions() for name in asked(expression)}
    assert {"SemantideRouterFails", "SemantideReplicaTakesNothing", "SemantideServiceShort", "SemantideNoOperatorLeads"} <= titles
    for name in made_metrics():
        if name.startswith(("semantide_operator_", "semantide_routed_", "semantide_replica_")):
            assert any(each.startswith(name) for each in shown), f"{name} is on no panel and in no alert"


def test_a_budget_never_holds_up_a_single_replica(render: Render) -> None:
    assert not of_kind(render(), "PodDisruptionBudget")
    budgets = of_kind(render("", "--set", "apis.all.replicas=3,workers.ingestion.minReplicas=2,workers.ingestion.maxReplicas=4"), "PodDisruptionBudget")
    assert set(budgets) == {"shop-semantide-api", "shop-semantide-worker-ingestion"}
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets.values())
    assert not of_kind(render("", "--set", "apis.all.replicas=3,disruptionBudgetEnabled=false"), "PodDisruptionBudget")


def test_a_drain_takes_one_replica_of_a_service_at_a_time(render: Render) -> None:
    replicas = {
        "main": {"replicas": {"min": 2, "max": 8}},
        "one": {"replicas": {"max": 3}},
        "bare": {},
        "off": {"replicas": {"min": 4}, "suspend": True},
        "gone": None,
    }
    options = ("--set-json", f"servingReplicas={json.dumps(replicas)}", "--api-versions", "semantide.io/v1alpha1/NPUService")
    manifests = render("", *options)
    ((name, budget),) = ((name, budget) for name, budget in of_kind(manifests, "PodDisruptionBudget").items() if name != "shop-semantide-router")
    service = of_kind(manifests, "NPUService")[name]
    parsed = NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})
    assert name == "shop-semantide-replicas-main" and budget["spec"] == {"maxUnavailable": 1, "selector": {"matchLabels": service_selector(parsed)}}
    assert not of_kind(render("", *options, "--set", "disruptionBudgetEnabled=false"), "PodDisruptionBudget")


def test_older_servers_get_no_objects_that_they_lack(lint: ModuleType) -> None:
    folder = lint.CHART / "templates"
    for kind, api in (("HorizontalPodAutoscaler", "autoscaling/v2"), ("PodDisruptionBudget", "policy/v1")):
        template = next(path.read_text() for path in folder.glob("*.yaml") if f"kind: {kind}" in path.read_text())
        assert f'.Capabilities.APIVersions.Has "{api}"' in template, kind


@pytest.mark.parametrize(("live", "items", "status", "words"), [
    ({"model": "models/a"}, [{"item": "x"}, {"item": "y"}], 0, "recommends x, y"),
    ({"model": None, "retriever": None}, [], 0, "no model is live yet"),
    ({"model": "models/a"}, [], 1, "recommended nothing: filters"),
])  # fmt: skip
def test_helm_test_asks_for_a_recommendation(render: Render, live: Manifest, items: list[Manifest], status: int, words: str) -> None:
    seen: list[tuple[str, str | None]] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            seen.append((self.path, self.headers["Authorization"]))
            body = json.dumps({"/v1/serving/live": live, "/v1/recommendations": {"items": items, "short_reason": "filters"}}.get(self.path, {})).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None:
            pass

    pod = of_kind(render(), "Pod")["shop-semantide-api-test"]
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    assert pod["metadata"]["annotations"]["helm.sh/hook-delete-policy"] == "before-hook-creation", "its log is read once it has ended"
    program, *arguments, address = pod["spec"]["containers"][0]["command"]
    assert (program, address) == ("python", "http://shop-semantide-api:8000")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, *arguments, f"http://127.0.0.1:{server.server_address[1]}"]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "SEMANTIDE_API_KEYS": "first,second"})
        server.shutdown()
    assert outcome.returncode == status and words in outcome.stdout + outcome.stderr
    assert seen[0][0] == "/readyz" and all(key == "Bearer first" for _, key in seen)
    assert ("/v1/recommendations" in {path for path, _ in seen}) == bool(live["model"])


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's package prometheus) is not installed")


@needs_promtool
@pytest.mark.parametrize(("figures", "minutes", "told"), [
    # A rollout in place whose image nobody has: the phase is Rolling for ever.
    ({"wished_replicas": 2, "replicas": 1, "outdated_replicas": 1, "services": ("Rolling", 1)}, 5, set()),
    ({"wished_replicas": 2, "replicas": 1, "outdated_replicas": 1, "services": ("Rolling", 1)}, 15, {"SemantideServiceShort"}),
    ({"wished_replicas": 2, "replicas": 1, "outdated_replicas": 1, "services": ("Rolling", 1)}, 45, {"SemantideServiceShort", "SemantideRolloutStuck"}),
    ({"wished_replicas": 2, "replicas": 2, "outdated_replicas": 2, "services": ("Rolling", 1)}, 45, {"SemantideRolloutStuck"}),
    ({"wished_replicas": 2, "replicas": 2, "outdated_replicas": 0, "services": ("Running", 1)}, 45, set()),
    ({"wished_replicas": 2, "replicas": 2, "outdated_replicas": 0, "services": ("Degraded", 1)}, 15, {"SemantideServiceShort"}),
    ({"wished_replicas": 0, "replicas": 0, "outdated_replicas": 0, "services": ("Suspended", 1)}, 45, set()),
])  # fmt: skip
def test_a_service_that_is_short_or_hangs_in_a_rollout_raises_an_alert(tmp_path: Path, figures: dict[str, Any], minutes: int, told: set[str]) -> None:
    of_service = 'namespace="ops", exported_namespace="lab", service="shop"'
    phase, number = figures.pop("services")
    series = [{"series": f"semantide_operator_{name}{{{of_service}}}", "values": f"{value}x60"} for name, value in figures.items()]
    series.append({"series": f'semantide_operator_services{{namespace="ops", phase="{phase}"}}', "values": f"{number}x60"})
    asked_alerts = {"SemantideServiceShort", "SemantideRolloutStuck"}
    query = [{"expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)', "eval_time": f"{minutes}m"} for name in sorted(asked_alerts)]
    expected = [
        {**asked, "exp_samples": [{"labels": "{}", "value": 1 if name in told else 0}]} for asked, name in zip(query, sorted(asked_alerts), strict=True)
    ]
    test = {
        "rule_files": [str(FILES / "alerts.yaml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": expected}],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(test))
    outcome = subprocess.run(["promtool", "test", "rules", "test.yaml"], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@needs_promtool
def test_prometheus_itself_understands_every_expression(tmp_path: Path) -> None:
    shown = [expression for _, expression in expressions()]
    for variable, value in (("$__rate_interval", "5m"), ("$__interval", "1m"), ("$namespace", ".*")):
        shown = [expression.replace(variable, value) for expression in shown]
    rules = {"groups": [{"name": "all", "rules": [{"record": f"shown:{place}", "expr": expression} for place, expression in enumerate(shown)]}]}
    (tmp_path / "rules.yaml").write_text(json.dumps(rules))
    shutil.copy(FILES / "alerts.yaml", tmp_path)
    shutil.copy(REPOSITORY / "docker" / "prometheus.yaml", tmp_path)
    for check in (("rules", "rules.yaml"), ("config", "prometheus.yaml")):
        outcome = subprocess.run(["promtool", "check", *check], capture_output=True, text=True, check=False, cwd=tmp_path)
        assert outcome.returncode == 0, outcome.stdout + outcome.stderr
