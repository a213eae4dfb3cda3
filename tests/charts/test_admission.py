"""The rules of the custom resources, compiled and asked as an API server does it; the old one of `make test-cluster` does not know them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.operators.request import shape_of
from semantide.operators.resources import NPUJob, NPUService

from .admission import Admission, Object, RuleError

Render = Callable[..., list[Object]]

_DEFINITIONS = ("npujobs", "npuservices")
# Of every rule, by its message: (what is refused), (what is kept); each a spec, with one that it replaces where the rule is about changes. _NAME is the object's name.
_NAME = "metadata.name"
_JOB: dict[str, tuple[list[tuple[Object, Object | None]], list[tuple[Object, Object | None]]]] = {
    "worldSize must be within elastic.min and elastic.max": (
        [
            ({"elastic": {"min": 2, "max": 4}}, None),
            ({"worldSize": 5, "elastic": {"min": 2, "max": 4}}, None),
            ({"worldSize": 1, "elastic": {"min": 2, "max": 4}}, {"worldSize": 3, "elastic": {"min": 2, "max": 4}}),
        ],
        [({}, None), ({"worldSize": 7}, None), *(({"worldSize": size, "elastic": {"min": 2, "max": 4}}, None) for size in (2, 3, 4))],
    ),
    "elastic.min is above elastic.max": ([({"worldSize": 3, "elastic": {"min": 4, "max": 2}}, None)], [({"elastic": {"min": 1, "max": 1}}, None)]),
    "the profile cpu has no NPUs, set npusPerPod to 0 or another profile": (
        [({"profile": "cpu", "npusPerPod": 1}, None), ({"profile": "cpu", "npusPerPod": 1, "resourceName": ""}, None)],
        [
            ({"profile": "cpu"}, None),
            ({"npusPerPod": 8}, None),
            ({"profile": "ascend", "npusPerPod": 8}, None),
            ({"profile": "cpu", "npusPerPod": 1, "resourceName": "example.com/device"}, None),
        ],
    ),
    "kind cannot be changed": ([({"kind": "evaluate"}, {"kind": "train"})], [({"kind": "train"}, {"kind": "train", "suspend": True})]),
    "jobId cannot be changed, make another NPUJob": (
        [({"jobId": "a"}, {"jobId": "b"}), ({"jobId": "a"}, {}), ({}, {"jobId": "a"})],
        [({"jobId": "a"}, None), ({"jobId": "a"}, {"jobId": "a", "suspend": True}), ({}, {"suspend": True})],
    ),
}
_SERVICE: dict[str, tuple[list[tuple[Object, Object | None]], list[tuple[Object, Object | None]]]] = {
    "metadata.name is also that of the Service in front: at most 63 small letters, digits and '-', a letter first": (
        [({_NAME: name}, None) for name in ("a.b", "1a", "a" * 64)],
        [({_NAME: name}, None) for name in ("a", "a-1", "a" * 63)],
    ),
    "the profile cpu has no NPUs, set npusPerReplica to 0 or another profile": (
        [({"profile": "cpu", "npusPerReplica": 2}, None)],
        [({}, None), ({"npusPerReplica": 2}, None), ({"profile": "cpu", "npusPerReplica": 2, "resourceName": "example.com/device"}, None)],
    ),
    "replicas.min is above replicas.max": (
        [({"replicas": {"min": 3, "max": 2}}, None), ({"replicas": {"min": 3, "max": 2}}, {})],
        [({"replicas": {"min": 3}}, None), ({"replicas": {"max": 2}}, None), ({"replicas": {"min": 2, "max": 2}}, {}), ({"replicas": {"min": 0}}, None)],
    ),
}


@pytest.fixture(scope="module")
def definitions(render: Render) -> dict[str, Object]:
    bodies = [body for body in render("") if body["kind"] == "CustomResourceDefinition"]
    return {body["spec"]["names"]["plural"]: body for body in bodies}


@pytest.fixture(scope="module")
def admission(definitions: dict[str, Object]) -> Callable[[str], Admission]:
    return functools.cache(lambda name: Admission(definitions[name]))


def _body(name: str, spec: Object) -> Object:
    kind = {"npujobs": "NPUJob", "npuservices": "NPUService"}[name]
    least: Object = {"kind": "train"} if name == "npujobs" else {}
    own = {field: value for field, value in spec.items() if field != _NAME}
    return {"apiVersion": "semantide.io/v1alpha1", "kind": kind, "metadata": {"name": spec.get(_NAME, "mine")}, "spec": least | own}


@pytest.mark.parametrize(("name", "cases"), [("npujobs", _JOB), ("npuservices", _SERVICE)])
def test_every_rule_refuses_what_it_is_there_for_and_nothing_else(admission: Callable[[str], Admission], name: str, cases: dict[str, Any]) -> None:
    known = admission(name)
    assert {rule.message for rules in known.rules.values() for rule in rules} == set(cases), "a rule has no example here, or an example has no rule"
    for message, (refused, kept) in cases.items():
        for spec, before in refused:
            wrong = known.refusals(_body(name, spec), None if before is None else _body(name, before))
            assert message in wrong, (spec, before, wrong)
        for spec, before in kept:
            assert known.refusals(_body(name, spec), None if before is None else _body(name, before)) == [], (spec, before)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("has(self.nothing)", "undefined field"),
        ("self.worldSize == 'two'", "no matching overload"),
        ("self.worldSize + 1", "not true or false"),
        ("self.worldSize >", "Syntax error"),
        ("self.elastic.least > 0", "undefined field"),
        ("other.worldSize > 0", "undeclared reference"),
    ],
)
def test_a_rule_that_no_server_would_compile_is_found(definitions: dict[str, Object], rule: str, words: str) -> None:
    body = copy.deepcopy(definitions["npujobs"])
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    schema["x-kubernetes-validations"].append({"rule": rule, "message": "never"})
    with pytest.raises(RuleError, match=words):
        Admission(body)


def test_servers_without_rules_get_none(lint: Any) -> None:
    text = "".join((lint.CHART / "templates" / f"crd-{name}.yaml").read_text() for name in ("npujob", "npuservice"))
    blocks = text.split("{{- if $rules }}")[1:]
    assert all("x-kubernetes-validations" in block.split("{{- end }}")[0] for block in blocks) and len(blocks) == text.count("x-kubernetes-validations")


_SIZES = st.integers(0, 4)
_JOBS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["train", ""])},
    optional={
        "worldSize": _SIZES,
        "npusPerPod": st.integers(-1, 2),
        "resourceName": st.sampled_from(["", "huawei.com/Ascend910"]),
        "profile": st.sampled_from(["cpu", "ascend", "nvidia", "none"]),
        "elastic": st.fixed_dictionaries({"min": _SIZES}, optional={"max": _SIZES}),
        "restartPolicy": st.fixed_dictionaries({}, optional={"limit": st.integers(-1, 1), "backoffSeconds": st.sampled_from([-1, 0.5])}),
        "deadlineSeconds": st.integers(0, 2),
        "scheduler": st.sampled_from(["own", "another"]),
    },
)
_SERVICES = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.fixed_dictionaries({}, optional={"min": st.integers(-1, 3), "max": st.integers(1, 4)}),
        "npusPerReplica": st.integers(-1, 2),
        "resourceName": st.sampled_from(["", "huawei.com/Ascend910"]),
        "profile": st.sampled_from(["cpu", "ascend", "nvidia", "none"]),
        "rollout": st.fixed_dictionaries({}, optional={"strategy": st.sampled_from(["Surge", "Never"]), "maxUnavailable": st.integers(-1, 1)}),
        "target": st.fixed_dictionaries({}, optional={"queueDepth": st.sampled_from([-1.0, 0.0, 2.0]), "p99Milliseconds": st.sampled_from([-1.0, 0.0, 2.0])}),
    },
)


def _understood(name: str, body: Object) -> bool:
    """Whether the operator can do what is asked, where the profile is said (else its own counts)."""
    try:
        if name == "npujobs":
            job = NPUJob.parse(body).spec
            shape_of(job.profile, job.resource_name, job.npus_per_pod if "profile" in body["spec"] else 0, {})
            return bool(job.kind)
        service = NPUService.parse(body).spec
        shape_of(service.profile, service.resource_name, service.npus_per_replica if "profile" in body["spec"] else 0, {})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", _DEFINITIONS)
def test_the_server_keeps_what_the_operator_understands_and_nothing_else(admission: Callable[[str], Admission], name: str) -> None:
    known, specs = admission(name), _JOBS if name == "npujobs" else _SERVICES

    @settings(max_examples=300, deadline=None)
    @given(spec=specs)
    def agrees(spec: Object) -> None:
        body = _body(name, spec)
        wrong = known.refusals(body)
        # With the schema's defaults and without them it means the same.
        assert (wrong == []) == _understood(name, body), wrong
        assert wrong or _understood(name, known.kept(body))

    agrees()
