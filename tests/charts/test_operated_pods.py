"""Pods that the operator makes of the chart's values: who reaches them, and whether collectors do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semantide.operators.resources import JOB_LABEL, SERVICE_LABEL, NPUService, PodPlacement
from semantide.operators.service_pods import replica_manifests, service_revision
from semantide.operators.settings import OperatorSettings

from .test_chart import KNOWS, REPLICAS, Manifest, Render, environment, of_kind


def template(manifests: list[Manifest]) -> dict[str, Any]:
    """What the operator gives every pod."""
    found: dict[str, Any] = json.loads(
        environment(of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"])["SEMANTIDE_OPERATOR_POD_TEMPLATE"]
    )
    return found


def replica(manifests: list[Manifest], name: str) -> Manifest:
    """The pod of one replica, as the operator makes it."""
    service = of_kind(manifests, "NPUService")[f"shop-semantide-replicas-{name}"]
    parsed = NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})
    settings = OperatorSettings(own_namespace="shop", pod_template=template(manifests))
    pod: Manifest = replica_manifests(parsed, PodPlacement(pod="p", node="n"), "r", settings, 0.0)[-1]
    return pod


def chosen(selector: Manifest, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "Exists" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(each["key"] in labels for each in expressions)


def policies(manifests: list[Manifest], labels: dict[str, str]) -> dict[str, Manifest]:
    return {name: each["spec"] for name, each in of_kind(manifests, "NetworkPolicy").items() if chosen(each["spec"]["podSelector"], labels)}


def test_pods_of_jobs_are_reached_by_pods_of_jobs_alone(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster,metricsEnabled=true")
    labels = {**template(manifests)["labels"], JOB_LABEL: "train-1"}
    ((name, policy),) = policies(manifests, labels).items()
    assert name == "shop-semantide-jobs" and policy["policyTypes"] == ["Ingress"]
    ((peer,),) = (rule["from"] for rule in policy["ingress"])
    assert chosen(peer["podSelector"], labels)
    rooms = (each["spec"]["template"]["metadata"]["labels"] for each in of_kind(manifests, "Deployment").values())
    assert not any(chosen(peer["podSelector"], room) for room in rooms)


def test_replicas_are_of_another_revision_once_settings_change(render: Render) -> None:
    def revision(*more: str) -> str:
        manifests = render("", *REPLICAS, *KNOWS, *more)
        service = of_kind(manifests, "NPUService")["shop-semantide-replicas-main"]
        parsed = NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})
        return service_revision(parsed, OperatorSettings(own_namespace="shop", pod_template=template(manifests)))

    before = revision()
    assert revision() == before == revision("--set", "operatorLogLevel=DEBUG")
    assert revision("--set", "settings.logLevel=DEBUG") != before


@pytest.mark.parametrize("namespaces", ["", "networkPolicyApiNamespaces.shops=true,"])
def test_replicas_are_reached_as_apis_are(render: Render, namespaces: str) -> None:
    manifests = render("", *REPLICAS, *KNOWS, "--set", f"{namespaces}metricsEnabled=true")
    pod = replica(manifests, "main")
    assert pod["metadata"]["labels"][SERVICE_LABEL] == "shop-semantide-replicas-main"
    ((name, policy),) = policies(manifests, pod["metadata"]["labels"]).items()
    api = of_kind(manifests, "NetworkPolicy")["shop-semantide-api"]["spec"]
    assert name == "shop-semantide-replicas" and policy["ingress"] == api["ingress"]
    named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= named


def test_collectors_find_replicas(render: Render) -> None:
    values = ("--set-json", 'servingReplicas={"main": {"template": {"env": [{"name": "A", "value": "b"}], "labels": {"team": "shop"}}}, "off": null}')
    manifests = render("", *values, *KNOWS, "--set", "metricsEnabled=true")
    pod = replica(manifests, "main")
    container = pod["spec"]["containers"][0]
    assert of_kind(manifests, "Service")["shop-semantide-metrics"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "replicas-main" and pod["metadata"]["labels"]["team"] == "shop"
    have = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (have["A"], have["SEMANTIDE_METRICS_PORT"], have["SEMANTIDE_METRICS_HOST"]) == ("b", "9100", "0.0.0.0")
    assert {(port["name"], port["containerPort"]) for port in container["ports"]} == {("http", 8000), ("metrics", 9100)}
    services = of_kind(manifests, "Service")
    assert [name for name, each in services.items() if each["spec"]["selector"].items() <= pod["metadata"]["labels"].items()] == ["shop-semantide-metrics"]
    assert "template" not in of_kind(render("", *REPLICAS, *KNOWS), "NPUService")["shop-semantide-replicas-main"]["spec"]
