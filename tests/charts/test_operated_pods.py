"""Pods that the operator makes of the chart's values: who reaches them, and whether collectors do."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semantide.operators.job_pods import gang_manifests
from semantide.operators.resources import API_VERSION, JOB_LABEL, SERVICE_LABEL, NPUJob, NPUService, PodPlacement
from semantide.operators.service_pods import replica_manifests, service_revision
from semantide.operators.settings import OperatorSettings
from tests.operators.conftest import World

from .test_chart import KNOWS, REPLICAS, Manifest, Render, environment, of_kind


def settings_of(manifests: list[Manifest]) -> OperatorSettings:
    """The operator's settings, as far as they are about pods."""
    said = environment(of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"])
    templates = {name: json.loads(said[f"SEMANTIDE_OPERATOR_{name.upper()}"]) for name in ("pod_template", "replica_template", "pod_extras")}
    return OperatorSettings(own_namespace="shop", stop_seconds=int(said.get("SEMANTIDE_OPERATOR_STOP_SECONDS", 90)), **templates)


def service_of(manifests: list[Manifest], name: str) -> NPUService:
    service = of_kind(manifests, "NPUService")[f"shop-semantide-replicas-{name}"]
    return NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})


def replica(manifests: list[Manifest], name: str) -> Manifest:
    """The pod of one replica, as the operator makes it."""
    pod: Manifest = replica_manifests(service_of(manifests, name), PodPlacement(pod="p", node="n"), "r", settings_of(manifests), 0.0)[-1]
    return pod


def job_pod(manifests: list[Manifest], **spec: Any) -> Manifest:
    """The pod of a job, as the operator makes it."""
    body = {"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": {"name": "train-1", "namespace": "shop", "uid": "u"}, "spec": {"kind": "train", **spec}}
    pod: Manifest = gang_manifests(NPUJob.parse(body), [PodPlacement(pod="p", node="n")], 1, settings_of(manifests), 0.0)[-1]
    return pod


def chosen(selector: Manifest, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", ())
    assert all(each["operator"] == "Exists" for each in expressions)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(each["key"] in labels for each in expressions)


def policies(manifests: list[Manifest], labels: dict[str, str]) -> dict[str, Manifest]:
    return {name: each["spec"] for name, each in of_kind(manifests, "NetworkPolicy").items() if chosen(each["spec"]["podSelector"], labels)}


def test_pods_of_jobs_are_reached_by_pods_of_jobs_alone(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster,metricsEnabled=true")
    labels = job_pod(manifests)["metadata"]["labels"]
    assert labels[JOB_LABEL] == "train-1"
    ((name, policy),) = policies(manifests, labels).items()
    assert name == "shop-semantide-jobs" and policy["policyTypes"] == ["Ingress"]
    ((peer,),) = (rule["from"] for rule in policy["ingress"])
    assert chosen(peer["podSelector"], labels)
    rooms = (each["spec"]["template"]["metadata"]["labels"] for each in of_kind(manifests, "Deployment").values())
    assert not any(chosen(peer["podSelector"], room) for room in rooms)


def test_replicas_are_of_another_revision_once_settings_change(render: Render) -> None:
    def revision(*more: str) -> str:
        manifests = render("", *REPLICAS, *KNOWS, *more)
        return service_revision(service_of(manifests, "main"), settings_of(manifests))

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


def secrets_of(pod: Manifest) -> set[tuple[str, str]]:
    """The keys of Secrets that a pod is told, one by one or whole."""
    (container,) = pod["spec"]["containers"]
    single = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})]
    whole = [source["secretRef"]["name"] for source in container.get("envFrom", ()) if "secretRef" in source]
    return {(reference["name"], reference["key"]) for reference in single} | {(name, "*") for name in whole}


def test_every_process_is_told_the_secrets_that_it_needs_and_no_others(render: Render) -> None:
    """Who answers requests knows the API keys; who works for a room alone does not."""
    manifests = render("", *REPLICAS, *KNOWS, "--set", "settings.jobRunner=cluster,environmentSecret=s3")
    broker, keys, own = ("shop-semantide-keys", "redis-url"), ("shop-semantide-keys", "api-keys"), ("s3", "*")
    assert secrets_of(job_pod(manifests)) == {broker, own}
    assert secrets_of(replica(manifests, "main")) == {broker, keys, own}
    for name, deployment in of_kind(manifests, "Deployment").items():
        found, answers = secrets_of(deployment["spec"]["template"]), "-api" in name or "-router" in name
        if name.endswith("-operator"):
            assert found == {keys}
        else:
            assert found == {broker, own, *([keys] if answers else [])}, name
    for pod in (job_pod(manifests), replica(manifests, "main")):
        assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_last_checkpoint_fits_into_a_pods_period_of_grace(render: Render) -> None:
    def told(pod: Manifest) -> tuple[int, float]:
        (container,) = pod["spec"]["containers"]
        said = {entry["name"]: entry.get("value") for entry in container["env"]}
        return pod["spec"]["terminationGracePeriodSeconds"], float(said["SEMANTIDE_JOB_STOP_SECONDS"])

    manifests = render("", "--set", "settings.jobRunner=cluster,settings.jobStopSeconds=200,operatorSettings.stopSeconds=600")
    assert told(job_pod(manifests)) == (600, 590), "a pod has its own time, whatever the rooms' processes have"
    for grace in (0, 1, 5, 30, 3600):
        have, stop = told(job_pod(manifests, template={"terminationGracePeriodSeconds": grace}))
        assert have == grace and (0 < stop < grace or grace < 2)
    worker = of_kind(manifests, "Deployment")["shop-semantide-worker-training"]["spec"]["template"]["spec"]
    assert worker["terminationGracePeriodSeconds"] > 200 + 50
    with pytest.raises(ValueError, match="whole number of seconds"):
        job_pod(manifests, template={"terminationGracePeriodSeconds": "90"})


def test_a_job_goes_where_the_rooms_hold_the_volume_of_one_node(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster")
    held = of_kind(manifests, "Deployment")["shop-semantide-worker-training"]["spec"]["template"]["metadata"]["labels"]
    lab = World([], npus=8)
    lab.settings = settings_of(manifests).model_copy(update={"own_namespace": "lab", "profile": "ascend", "device_info_namespace": "", "relist_seconds": 1e9})
    lab.new_operator()
    for name in "abc":
        lab.nodes.add(name, **{"kubernetes.io/hostname": name})
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "r", "uid": "r", "controller": True}
    metadata = {"name": "worker", "namespace": "lab", "labels": held, "ownerReferences": [owner]}
    lab.cluster.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "c", "containers": []}})
    lab.submit("train", pods=2, npus=4)
    lab.serve("shop", npus=0)
    lab.settle()
    assert {place["node"] for kind in ("NPUJob", "NPUService") for place in lab.status("train" if kind == "NPUJob" else "shop", kind)["placement"]} == {"c"}
    shared = render("", "--set", "settings.jobRunner=cluster,dataAccessMode=ReadWriteMany")
    assert "affinity" not in settings_of(shared).pod_template
