"""Pods that the operator makes of the chart's values: who reaches them, and whether collectors do."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from semantide.operators.job_pods import gang_manifests
from semantide.operators.resources import API_VERSION, JOB_LABEL, SERVICE_LABEL, NPUJob, NPUService, PodPlacement
from semantide.operators.service_pods import replica_manifests, service_revision
from semantide.operators.settings import OperatorSettings
from semantide.shared.contracts import JOB_ROOMS, JobRecord, JobSpec
from semantide.shared.npujob import Deployment, body
from semantide.shared.pod_template import merged
from tests.operators.conftest import World

from .test_chart import KNOWS, REPLICAS, Manifest, Render, environment, of_kind


def settings_of(manifests: list[Manifest]) -> OperatorSettings:
    """The operator's settings, as far as they are about pods."""
    said = environment(of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"])
    templates = {name: json.loads(said[f"SEMANTIDE_OPERATOR_{name.upper()}"]) for name in ("pod_template", "replica_template")}
    return OperatorSettings(own_namespace="shop", stop_seconds=int(said.get("SEMANTIDE_OPERATOR_STOP_SECONDS", 90)), **templates)


def deployment_of(manifests: list[Manifest], release: str = "shop-semantide") -> Deployment:
    """What the rooms of a release make of its settings."""
    return Deployment.model_validate(json.loads(of_kind(manifests, "ConfigMap")[f"{release}-settings"]["data"]["SEMANTIDE_CLUSTER_JOBS"]))


def service_of(manifests: list[Manifest], name: str) -> NPUService:
    service = of_kind(manifests, "NPUService")[f"shop-semantide-replicas-{name}"]
    return NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})


def replica(manifests: list[Manifest], name: str) -> Manifest:
    """The pod of one replica, as the operator makes it."""
    pod: Manifest = replica_manifests(service_of(manifests, name), PodPlacement(pod="p", node="n"), "r", settings_of(manifests), 0.0)[-1]
    return pod


def submitted(deployment: Deployment, kind: str = "train") -> Manifest:
    """The NPUJob that a room makes of a job."""
    made = body(JobRecord(id=f"{kind}-1", spec=JobSpec(kind=kind), created=1), deployment, 5)
    return {**made, "metadata": {**made["metadata"], "namespace": "shop", "uid": "u"}}


def pod_of(npujob: Manifest, operator: OperatorSettings) -> Manifest:
    """Its pod, as an operator makes it."""
    pod: Manifest = gang_manifests(NPUJob.parse(npujob), [PodPlacement(pod="p", node="n")], 1, operator, 0.0)[-1]
    return pod


def job_pod(manifests: list[Manifest], **spec: Any) -> Manifest:
    """The pod of a job that somebody made by hand, as the operator makes it."""
    return pod_of(
        {"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": {"name": "train-1", "namespace": "shop", "uid": "u"}, "spec": {"kind": "train", **spec}},
        settings_of(manifests),
    )


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
    *rules, load = policy["ingress"]
    assert name == "shop-semantide-replicas" and rules == api["ingress"]
    # Whichever operator runs them is let in where it reads their load.
    ((peer,), (port,)) = load["from"], load["ports"]
    operator = of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"]["metadata"]["labels"]
    assert peer["namespaceSelector"] == {} and chosen(peer["podSelector"], operator) and not chosen(peer["podSelector"], {})
    told = {entry["name"]: entry.get("value") for entry in pod["spec"]["containers"][0]["env"]}
    assert told["SEMANTIDE_METRICS_PORT"] == str(port["port"]) == "9100"
    named = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    assert {port["port"] for rule in rules for port in rule["ports"]} <= named


def test_replicas_ask_for_processors_and_memory(render: Render) -> None:
    own = {"resources": {"requests": {"cpu": "3"}, "limits": {"memory": "2Gi"}}}
    manifests = render("", "--set-json", f"servingReplicas={json.dumps({'plain': {}, 'own': {'template': own}})}", *KNOWS)
    asked = {name: replica(manifests, name)["spec"]["containers"][0] for name in ("plain", "own")}
    assert asked["plain"]["resources"] == {"requests": {"cpu": "250m", "memory": "512Mi"}} and asked["own"]["resources"] == own["resources"]
    threads = {name: {entry["name"]: entry.get("value") for entry in one["env"]}.get("OMP_NUM_THREADS") for name, one in asked.items()}
    # A quarter of a processor is for being placed, and says nothing of how many it may use.
    assert threads == {"plain": None, "own": "3"}


def test_collectors_find_replicas(render: Render) -> None:
    values = ("--set-json", 'servingReplicas={"main": {"template": {"env": [{"name": "A", "value": "b"}], "labels": {"team": "shop"}}}, "off": null}')
    manifests = render("", *values, *KNOWS, "--set", "metricsEnabled=true")
    pod = replica(manifests, "main")
    container = pod["spec"]["containers"][0]
    assert of_kind(manifests, "Service")["shop-semantide-metrics"]["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert pod["metadata"]["labels"]["app.kubernetes.io/component"] == "replicas-main" and pod["metadata"]["labels"]["team"] == "shop"
    have = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (have["A"], have["SEMANTIDE_METRICS_PORT"], have["SEMANTIDE_METRICS_HOST"]) == ("b", "9100", "::")
    assert {(port["name"], port["containerPort"]) for port in container["ports"]} == {("http", 8000), ("metrics", 9100)}
    services = of_kind(manifests, "Service")
    assert [name for name, each in services.items() if each["spec"]["selector"].items() <= pod["metadata"]["labels"].items()] == ["shop-semantide-metrics"]


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
        if name.endswith(("-operator", "-console")):
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


@pytest.mark.parametrize("operators", ["the first release's", "one of another namespace"])
def test_every_release_brings_what_its_own_pods_need(render: Render, operators: str) -> None:
    """Two releases in one namespace under one operator: each one's pods have its broker, volume, keys, account and image, and nothing of the other's."""
    options = ("--set", "settings.jobRunner=cluster,metricsEnabled=true,servingReplicas.main.replicas.max=2", *KNOWS)
    mine = render("", *options, "--set", "imageTag=v1,environmentSecret=mine,operatorPodTemplate.nodeSelector.pool=mine", release="shop")
    other = render(
        "", *options, "--set", "imageTag=v2,environmentSecret=theirs,operatorEnabled=false,operatorClusterWide=true,crdsEnabled=false", release="other"
    )
    operator = settings_of(mine).model_copy(update={"own_namespace": "shop" if operators.startswith("the first") else "operators"})
    for manifests, name, tag, secret in ((mine, "shop-semantide", "v1", "mine"), (other, "other-semantide", "v2", "theirs")):
        service = of_kind(manifests, "NPUService")[f"{name}-replicas-main"]
        replicas = NPUService.parse({**service, "metadata": {**service["metadata"], "namespace": "shop", "uid": "u"}})
        pods = {
            **{kind: pod_of(submitted(deployment_of(manifests, name), kind), operator) for kind in JOB_ROOMS},
            "replica": replica_manifests(replicas, PodPlacement(pod="p", node="n"), "r", operator, 0.0)[-1],
        }
        room = of_kind(manifests, "Deployment")[f"{name}-worker-training"]["spec"]["template"]
        for kind, pod in pods.items():
            spec, (container,) = pod["spec"], pod["spec"]["containers"]
            keys = {(f"{name}-keys", "api-keys")} if kind == "replica" else set()
            assert secrets_of(pod) == {(f"{name}-keys", "redis-url"), (secret, "*")} | keys, kind
            assert [source.get("configMapRef", {}).get("name") for source in container["envFrom"]] == [f"{name}-settings", None]
            assert spec["serviceAccountName"] == name and container["image"] == f"semantide:{tag}"
            claims = [volume["persistentVolumeClaim"]["claimName"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
            assert claims == [f"{name}-data"] and pod["metadata"]["labels"]["semantide.io/data"] == f"{name}-data"
            assert spec.get("nodeSelector") == ({"pool": "mine"} if manifests is mine else None)
            assert (
                spec["securityContext"] == room["spec"]["securityContext"] and container["securityContext"] == room["spec"]["containers"][0]["securityContext"]
            )
            near = spec["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            assert near == room["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"], "once, and that of its own volume"
            shared = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}.get("/dev/shm")
            assert (shared is None) == (kind == "replica")


def test_what_is_made_by_hand_gets_the_surroundings_of_the_operators_own_release(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster,operatorPodTemplate.nodeSelector.pool=npu")
    by_hand, by_room = job_pod(manifests), pod_of(submitted(deployment_of(manifests)), settings_of(manifests))
    for name in ("volumes", "securityContext", "affinity", "serviceAccountName", "nodeSelector"):
        assert by_hand["spec"][name] == by_room["spec"][name], name


def test_a_kinds_own_template_lies_over_the_releases(render: Render) -> None:
    kinds = {"train": {"npusPerPod": 2, "template": {"env": [{"name": "A", "value": "b"}], "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]}}}
    manifests = render("", "--set", "settings.jobRunner=cluster,operatorProfile=nvidia", "--set-json", f"jobKinds={json.dumps(kinds)}")
    pod = pod_of(submitted(deployment_of(manifests)), settings_of(manifests))
    (container,) = pod["spec"]["containers"]
    assert {"A", "SEMANTIDE_REDIS_URL"} <= {entry["name"] for entry in container["env"]}
    assert [volume for volume in pod["spec"]["volumes"] if volume["name"] == "tmp"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}


def test_settings_of_jobs_lie_over_the_charts(render: Render) -> None:
    own = {"keepSeconds": 60, "labels": {"team": "x"}, "default": {"scheduler": "volcano"}}
    deployment = deployment_of(render("", "--set", "settings.jobRunner=cluster", "--set-json", f"settings.clusterJobs={json.dumps(own)}"))
    assert deployment.keep_seconds == 60 and deployment.default["scheduler"] == "volcano" and deployment.default["template"]["volumes"]
    assert deployment.labels == {"team": "x", "app.kubernetes.io/instance": "shop", "semantide.io/release": "shop"}


def drawn(draw: random.Random, name: str) -> Manifest:
    """Any template, of few names, so that they meet."""

    def one(length: int = 3) -> str:
        return draw.choice("abcdef"[:length])

    lists: Manifest = {
        "env": [{"name": each, "value": one()} for each in {one() for _ in range(draw.randrange(4))}],
        "volumes": [{"name": each, "emptyDir": {"sizeLimit": f"{draw.randrange(1, 9)}Gi"}} for each in {one() for _ in range(draw.randrange(3))}],
        "volumeMounts": [{"name": one(), "mountPath": f"/{one()}"} for _ in range(draw.randrange(2))],
        "tolerations": [{"key": one(), "operator": "Exists"} for _ in range(draw.randrange(3))],
        "ports": [{"name": one(), "containerPort": 9000 + draw.randrange(3)} for _ in range(draw.randrange(2))],
    }
    near = {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": one(), "labelSelector": {"matchLabels": {name: one()}}}]}}
    maps: Manifest = {"labels": {one(): one()}, "resources": {"limits": {"memory": f"{draw.randrange(1, 9)}Gi"}, "requests": {"cpu": "1"}}, "affinity": near}
    fields = {**lists, **maps, "terminationGracePeriodSeconds": draw.randrange(10, 10**7)}
    return {field: value for field, value in fields.items() if draw.random() < 0.6}


def test_the_chart_merges_templates_as_the_operator_does(render: Render) -> None:
    draw = random.Random(5)
    below, over = drawn(draw, "below"), {f"t{number}": {"template": drawn(draw, "over")} for number in range(30)}
    assert any("env" in each["template"] for each in over.values()) and "env" in below
    bare = ("--set", "defaultResources.requests=null")
    values = ("--set-json", f"servingReplicas={json.dumps({**over, 'none': {}})}", "--set-json", f"operatorPodTemplate={json.dumps(below)}", *bare)
    found = of_kind(render("", *values, *KNOWS), "NPUService")
    base = found["shop-semantide-replicas-none"]["spec"]["template"]
    plain = of_kind(render("", "--set-json", 'servingReplicas={"none": {}}', *bare, *KNOWS), "NPUService")["shop-semantide-replicas-none"]["spec"]["template"]
    assert base == merged(plain, below)
    for name, each in over.items():
        assert found[f"shop-semantide-replicas-{name}"]["spec"]["template"] == merged(base, each["template"]), name
