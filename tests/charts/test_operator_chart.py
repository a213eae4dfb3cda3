"""The operator in the chart: definitions that agree with the operator's own models, its rights, and its settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.alias_generators import to_camel

from semantide.operators.cluster import KINDS
from semantide.operators.job_pods import gang_name
from semantide.operators.lease import Lease
from semantide.operators.meters import Meters
from semantide.operators.pod_template import TEMPLATE_FIELDS, check_template
from semantide.operators.resources import NPUJob, NPUJobSpec, NPUJobStatus, NPUServiceSpec, NPUServiceStatus
from semantide.operators.settings import OperatorSettings
from semantide.operators.snapshot import WATCHED
from semantide.shared import cluster_jobs
from tests.operators.conftest import World

Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]


def definition(render: Render, name: str, *options: str) -> Manifest:
    return next(body for body in render("", *options) if body["kind"] == "CustomResourceDefinition" and body["metadata"]["name"].startswith(name))


def schema_of(body: Manifest) -> Manifest:
    found: Manifest = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    return found


def walk(schema: Manifest) -> list[Manifest]:
    inner = [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]
    return [schema, *(found for one in inner for found in walk(one))]


def agree(model: type[BaseModel], schema: Manifest, path: str) -> None:
    """Every field of the model is in the schema with its bounds, and the other way round."""
    fields = {to_camel(name): field for name, field in model.model_fields.items()}
    assert set(fields) == set(schema["properties"]), path
    for name, field in fields.items():
        inner, where = schema["properties"][name], f"{path}.{name}"
        kind = (
            next((one for one in get_args(field.annotation) if one is not type(None)), field.annotation)
            if get_origin(field.annotation) in (Union, UnionType)
            else field.annotation
        )
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            agree(kind, inner, where)
        elif get_origin(kind) is Literal:
            assert set(inner["enum"]) == set(get_args(kind)), where
        for bound in field.metadata:
            if getattr(bound, "ge", None) is not None:
                assert inner["minimum"] >= bound.ge, where
        # A default of the definition is the model's own, so that a resource means the same with and without it.
        if "default" in inner and not inner.get("properties"):
            assert inner["default"] == field.default, where


@pytest.mark.parametrize(("name", "spec", "status"), [("npujobs", NPUJobSpec, NPUJobStatus), ("npuservices", NPUServiceSpec, NPUServiceStatus)])
def test_definitions_agree_with_the_models(render: Render, name: str, spec: type[BaseModel], status: type[BaseModel]) -> None:
    schema = schema_of(definition(render, name))
    agree(spec, schema["spec"], "spec")
    assert set(schema["status"]["properties"]) <= {to_camel(field) for field in status.model_fields}
    assert schema["status"]["x-kubernetes-preserve-unknown-fields"] is True
    assert all("type" in one for part in schema.values() for one in walk(part)), "a structural schema says the type of everything"


def test_printed_columns_exist(render: Render) -> None:
    for name in ("npujobs", "npuservices"):
        body = definition(render, name)
        for column in body["spec"]["versions"][0]["additionalPrinterColumns"]:
            place = schema_of(body)
            steps = column["jsonPath"].strip(".").split(".")
            if steps[0] == "metadata":
                continue
            schema: Manifest = {"properties": place}
            for step in steps:
                schema = schema["properties"][step]
            assert schema["type"] == column["type"] or (column["type"], schema["type"]) == ("date", "string"), column


def bounds(schema: Manifest, path: str = "") -> dict[str, Manifest]:
    """The numbers of a schema by their path."""
    found = {path: schema} if schema.get("type") in ("integer", "number") else {}
    for name, inner in schema.get("properties", {}).items():
        found |= bounds(inner, f"{path}.{name}")
    return found


@pytest.mark.parametrize(("value", "name"), [("jobKinds", "npujobs"), ("servingReplicas", "npuservices")])
def test_numbers_that_the_chart_takes_are_taken_by_the_server(render: Render, lint: ModuleType, value: str, name: str) -> None:
    schema = json.loads((lint.CHART / "values.schema.json").read_text())
    entry = schema["properties"][value]["additionalProperties"]
    taken = bounds(schema["$defs"][entry["$ref"].rpartition("/")[2]] if "$ref" in entry else entry)
    kept = bounds(schema_of(definition(render, name))["spec"])
    assert len(taken) >= 6
    for path, own in taken.items():
        for side, tighter in (("minimum", max), ("maximum", min)):
            if side in kept[path]:
                assert side in own and own[side] == tighter(own[side], kept[path][side]), f"{value}{path}: {side}"


def test_operators_stand_on_nodes_of_their_own_where_they_can(render: Render) -> None:
    pod = next(body for body in render("", "--set", "operatorReplicas=2") if body["kind"] == "Deployment" and body["metadata"]["name"].endswith("-operator"))
    (spread,) = pod["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname" and spread["labelSelector"]["matchLabels"] == pod["spec"]["selector"]["matchLabels"]


def rights(render: Render, *options: str) -> set[tuple[str, str, str]]:
    """(kind of role, resource, verb) of all that the operator's account may do."""
    manifests = render("", *options)
    account = next(body["metadata"]["name"] for body in manifests if body["kind"] == "ServiceAccount" and body["metadata"]["name"].endswith("-operator"))
    bound = {
        (body["roleRef"]["kind"], body["roleRef"]["name"])
        for body in manifests
        if body["kind"].endswith("RoleBinding") and any(subject["name"] == account for subject in body["subjects"])
    }
    return {
        (body["kind"], resource, verb)
        for body in manifests
        if (body["kind"], body["metadata"]["name"]) in bound
        for rule in body["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_a_namespaced_operator_may_only_read_nodes_beyond_its_namespace(render: Render) -> None:
    beyond = {(resource, verb) for kind, resource, verb in rights(render) if kind == "ClusterRole"}
    assert beyond == {("nodes", "list"), ("nodes", "watch")}
    everywhere = {resource for kind, resource, _ in rights(render, "--set", "operatorClusterWide=true") if kind == "ClusterRole"}
    assert "pods" in everywhere and "leases" not in everywhere


def test_no_secret_and_no_wildcard(render: Render) -> None:
    options = ("--set", "operatorClusterWide=true,operatorScheduler=volcano,operatorSettings.dynamicResources=true,operatorDeviceInfoNamespace=kube-system")
    found = rights(render, *options)
    assert not [right for right in found if "secrets" in right or "*" in right]
    for resource in ("podgroups", "resourceclaimtemplates"):
        assert {verb for _, of, verb in found if of == resource} == {"get", "create", "delete"}
    assert ("ClusterRole", "resourceslices", "list") in found
    assert ("Role", "configmaps", "list") in found


def test_rooms_may_do_with_npujobs_what_they_do_and_no_more(render: Render) -> None:
    called = set(re.findall(r'"([a-z]+)_namespaced_custom_object"', Path(cluster_jobs.__file__).read_text()))
    (role,) = (body for body in render("", "--set", "settings.jobRunner=cluster") if body["kind"] == "Role" and body["metadata"]["name"].endswith("-jobs"))
    assert [(rule["resources"], set(rule["verbs"])) for rule in role["rules"]] == [(["npujobs"], called)]


class Recorded:
    """An API server that remembers who was asked for what: (kind, verb)."""

    def __init__(self, api: Any) -> None:
        self._api, self.calls = api, set[tuple[str, str]]()

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.add((given[0] if isinstance(given[0], str) else given[0]["kind"], verb))
            return getattr(self._api, verb)(*given, **named)

        return call


def asked(spec: Manifest, **settings: Any) -> set[tuple[str, str]]:
    """(resource, verb) of all that the operator does to an API server: a gang that is lost, names that are taken, replicas, its lease."""
    lab = World(["a", "b"])
    lab.settings = lab.settings.model_copy(update=settings)
    lab.new_operator()
    api = lab.operator.api = Recorded(lab.cluster)
    for node in "ab":
        devices = [{"name": f"npu-{npu}", "attributes": {"index": {"int": npu}}} for npu in range(8)]
        pool = {"nodeName": node, "driver": "npu.huawei.com", "pool": {"name": node}, "devices": devices}
        lab.cluster.create({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": node}, "spec": pool})
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 9, "backoffSeconds": 0}, **spec)
    lab.serve("shop", npus=0)
    first = gang_name(NPUJob.parse(lab.cluster.get("NPUJob", "lab", "train")), 1)
    for kind, name in (("Pod", f"{first}-1"), ("Service", "shop")):
        lab.cluster.create(
            {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "lab", "labels": {}}, "spec": {"containers": [], "nodeName": "a"}}
        )
    lab.turn(8, 40.0)
    lab.end("train", rank=0, status=1)
    lab.turn(8, 40.0)
    assert lab.status("train")["attempt"] > 2 and lab.status("shop", "NPUService")["readyReplicas"] == 1
    for kind, name in (("NPUJob", "train"), ("NPUService", "shop")):
        lab.operator._reread(kind, "lab", name)
    lease = Lease(api, "lab", "me", 15.0, lambda: lab.now, lambda: lab.now)
    assert lease.renew() and lease.renew()
    verbs = {"annotate": "patch", "replace": "update", "replace_status": "update"}
    found = {(KINDS[kind].plural + ("/status" if verb == "replace_status" else ""), verbs.get(verb, verb)) for kind, verb in api.calls}
    # Pods that hold up the deletion of what owns them.
    owners = {owner["kind"] for body in lab.cluster.of("Pod") for owner in body["metadata"].get("ownerReferences", ()) if owner["blockOwnerDeletion"]}
    return found | {(KINDS[kind].plural, "watch") for kind in WATCHED} | {(f"{KINDS[kind].plural}/finalizers", "update") for kind in owners}


@pytest.mark.parametrize(
    ("option", "settings", "spec"),
    [
        ("operatorReplicas=1", {}, {}),
        ("operatorDeviceInfoNamespace=kube-system", {"device_info_namespace": "kube-system"}, {}),
        ("operatorScheduler=volcano", {}, {"scheduler": "volcano"}),
        ("operatorScheduler=native", {}, {"scheduler": "native"}),
        ("operatorSettings.dynamicResources=true", {"dynamic_resources": True}, {}),
    ],
)
def test_the_operator_may_do_what_it_does_and_nothing_else(render: Render, option: str, settings: dict[str, Any], spec: Manifest) -> None:
    allowed = {(resource, verb) for _, resource, verb in rights(render, "--set", option)}
    assert asked(spec, **settings) | asked({}, rendezvous="dns") == allowed


def test_the_deployment_sets_what_the_operator_reads(render: Render, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--set", "operatorSettings.unschedulableSeconds=7,operatorPodTemplate.nodeSelector.pool=npu,operatorProfile=ascend")
    deployment = next(body for body in render("", *options) if body["kind"] == "Deployment" and body["metadata"]["name"].endswith("-operator"))
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    fields = {f"SEMANTIDE_OPERATOR_{name.upper()}" for name in OperatorSettings.model_fields}
    for entry in container["env"]:
        assert entry["name"] in fields, entry["name"]
        if "value" in entry:
            monkeypatch.setenv(entry["name"], entry["value"])
    settings = OperatorSettings()
    assert settings.unschedulable_seconds == 7 and settings.profile == "ascend" and settings.release == "shop"
    for template in (settings.pod_template, settings.replica_template):
        check_template(template)
        assert template["nodeSelector"] == {"pool": "npu"} and {volume["name"] for volume in template["volumes"]} >= {"data"}


def test_the_schema_of_replicas_is_the_resources_own(lint: ModuleType, render: Render) -> None:
    chart = json.loads((lint.CHART / "values.schema.json").read_text())
    shown, known = chart["properties"]["servingReplicas"]["additionalProperties"], schema_of(definition(render, "npuservices"))["spec"]
    assert set(shown["properties"]) == set(known["properties"])
    for name, field in shown["properties"].items():
        for inner, bounds in field.get("properties", {}).items():
            of = known["properties"][name]["properties"][inner]
            assert all(of[bound] == value for bound, value in bounds.items() if bound in ("enum", "minimum") and name != "replicas"), (name, inner)
    template = chart["$defs"]["podTemplate"]
    assert set(template["properties"]) == TEMPLATE_FIELDS and template["additionalProperties"] is False
    wrong: dict[str, Any] = {"object": [1], "array": {"a": 1}}
    for name, field in template["properties"].items():
        if field["type"] in wrong and name != "args":
            with pytest.raises(ValueError, match=name):
                check_template({name: wrong[field["type"]]})
    places = (shown["properties"]["template"], chart["properties"]["operatorPodTemplate"])
    assert all(place == {"$ref": "#/$defs/podTemplate"} for place in places)


def test_definitions_outlive_their_release_and_fit_any_other(render: Render) -> None:
    """`helm uninstall` leaves them; whoever takes them over (docs/operations.md says how) finds them as its own chart would make them, but for the labels that name the release."""

    def definitions(release: str, *options: str) -> list[Manifest]:
        return [body for body in render("", *options, release=release) if body["kind"] == "CustomResourceDefinition"]

    first, other = definitions("shop"), definitions("other")
    assert {body["metadata"]["name"] for body in first} == {"npujobs.semantide.io", "npuservices.semantide.io"}
    for one, same in zip(first, other, strict=True):
        assert one["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
        assert one["metadata"]["name"] == same["metadata"]["name"] and one["spec"] == same["spec"]
        assert one["metadata"]["labels"].items() - same["metadata"]["labels"].items() == {("app.kubernetes.io/instance", "shop")}
    assert not definitions("other", "--set", "crdsEnabled=false")


def test_a_drain_takes_one_operator_at_a_time(render: Render) -> None:
    def budgets(*options: str) -> dict[str, Manifest]:
        return {body["metadata"]["name"]: body for body in render("", *options) if body["kind"] == "PodDisruptionBudget"}

    assert not budgets(), "one alone would hold up the drain of its node for ever"
    (budget,) = budgets("--set", "operatorReplicas=2").values()
    pods = next(body for body in render("", "--set", "operatorReplicas=2") if body["kind"] == "Deployment" and body["metadata"]["name"].endswith("-operator"))
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"]["matchLabels"].items() <= pods["spec"]["template"]["metadata"]["labels"].items()
    assert not budgets("--set", "operatorReplicas=2,operatorEnabled=false") and not budgets("--set", "operatorReplicas=2,disruptionBudgetEnabled=false")


def test_the_page_and_the_schema_have_every_setting(environment_table: ModuleType, lint: ModuleType) -> None:
    table = environment_table.table(OperatorSettings, "SEMANTIDE_OPERATOR_")
    assert environment_table.shown(environment_table.OPERATOR_PAGE) == table, "run `python tests/charts/environment_table.py`"
    chart = json.loads((lint.CHART / "values.schema.json").read_text())
    assert chart["properties"]["operatorSettings"]["properties"] == environment_table.schema(OperatorSettings, environment_table.OPERATOR_OWN)


def test_the_page_tells_no_name_that_is_not_there(environment_table: ModuleType) -> None:
    page = environment_table.OPERATOR_PAGE.read_text()
    metrics = Meters().page().decode()
    for name in re.findall(r"`([a-z]+_[a-z_]+)`", page):
        assert name in OperatorSettings.model_fields or name in ("job_runner", "super_pod_list") or f"# TYPE {name} " in metrics, name
