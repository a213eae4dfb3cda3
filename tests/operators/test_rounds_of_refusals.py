"""What a gang or service needs beside its pods and does not get: a refusal, a name that is taken, an operator that dies in between."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.job_pods import gang_name
from semantide.operators.pods import time_of
from semantide.operators.rank_table import TOLD_ANNOTATION, table_name
from semantide.operators.resources import MANAGED_BY, MANAGED_BY_LABEL, NPUJob
from semantide.shared.errors import NotFound, PermanentError

Worlds = Callable[..., Any]


class _Death(BaseException):
    """The process is gone: nothing catches this."""


def told(lab: Any, name: str) -> list[bool]:
    return [TOLD_ANNOTATION in body["metadata"].get("annotations", {}) for body in lab.pods(name)]


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next(entry for entry in status["conditions"] if entry["type"] == kind)
    return found


def test_a_gang_whose_ranks_cannot_be_told_gives_its_places_back_and_says_why(world: Worlds) -> None:
    lab = world(["a", "b"])

    def refused(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "ConfigMap"):
            raise PermanentError("exceeded quota: tables")

    lab.cluster.fails = refused
    lab.submit("train", pods=2, npus=8, restartPolicy={"limit": 0, "backoffSeconds": 0})
    phases, messages = set(), set()
    for _ in range(12):
        lab.turn(1, 1.0)
        phases.add(lab.phase("train"))
        messages.add(lab.status("train")["message"])
    assert "Running" not in phases and "Restarting" in phases, "pods that wait for each other do not run"
    assert any("exceeded quota: tables" in message for message in messages), messages
    lab.submit("other", pods=2, npus=8)
    lab.cluster.fails = lambda *_: None
    for _ in range(60):
        lab.turn(1, 5.0)
        lab.end("other")
    assert lab.phase("other") == "Succeeded"
    assert lab.phase("train") == "Running" and told(lab, "train") == [True, True] and not lab.status("train").get("restarts"), "no loss that counts"


def test_a_gang_that_ran_untold_is_told_later(world: Worlds) -> None:
    """As an operator of another version leaves it: the phase says Running, and the table was never made."""
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    (table,) = lab.cluster.of("ConfigMap")
    lab.cluster.remove(table)
    for body in lab.pods("train"):
        lab.cluster.annotate("Pod", "lab", body["metadata"]["name"], {TOLD_ANNOTATION: None})

    def refused(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("create", "ConfigMap"):
            raise PermanentError("exceeded quota: tables")

    lab.cluster.fails = refused
    lab.turn(3, 1.0)
    assert lab.phase("train") == "Running" and "exceeded quota" in lab.status("train")["message"], "it is not known whether its ranks work"
    lab.cluster.fails = lambda *_: None
    lab.settle()
    assert told(lab, "train") == [True, True] and lab.cluster.of("ConfigMap")[0]["data"] == table["data"]
    assert "exceeded quota" not in lab.status("train")["message"]


def test_a_table_that_an_operator_left_untold_is_made_anew_where_pods_have_changed(world: Worlds) -> None:
    lab = world(["a", "b"])

    def dies(verb: str, kind: str, name: str) -> None:
        if (verb, kind) == ("annotate", "Pod"):
            raise _Death

    lab.cluster.fails = dies
    lab.submit("train", pods=2, npus=8)
    with pytest.raises(_Death):
        lab.settle()
    (old,) = lab.cluster.of("ConfigMap")
    lab.cluster.fails = lambda *_: None
    first = lab.pods("train")[0]
    lab.cluster.remove(first)
    lab.new_operator()
    lab.settle()
    assert lab.phase("train") == "Running" and told(lab, "train") == [True, True]
    (table,) = lab.cluster.of("ConfigMap")
    addresses = [body["status"]["podIP"] for body in lab.pods("train")]
    assert table["data"]["master-address"] == addresses[0] != old["data"]["master-address"]
    assert [server["container_ip"] for server in json.loads(table["data"]["hccl.json"])["server_list"]] == addresses


@pytest.mark.parametrize("labels", [{}, {MANAGED_BY_LABEL: MANAGED_BY}])
@pytest.mark.parametrize(("kind", "settings"), [("ConfigMap", {}), ("Service", {"rendezvous": "dns"})])
def test_a_gang_goes_round_a_name_that_is_somebody_elses(world: Worlds, kind: str, settings: dict[str, Any], labels: dict[str, str]) -> None:
    lab = world(["a", "b"], **settings)
    lab.submit("train", pods=2, npus=8)
    gang = gang_name(NPUJob.parse(lab.cluster.get("NPUJob", "lab", "train")), 1)
    name = table_name(gang) if kind == "ConfigMap" else gang
    body = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "namespace": "lab", "labels": labels}, "data": {"mine": "1"}, "spec": {"mine": 1}}
    theirs = lab.cluster.create(body)
    messages = set()
    for _ in range(30):
        lab.turn(1, 5.0)
        messages.add(lab.status("train")["message"])
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
    assert any(f"{kind} lab/{name} that does not belong to NPUJob train" in message for message in messages), messages
    assert lab.cluster.get(kind, "lab", name) == theirs


@pytest.mark.parametrize("labels", [{}, {MANAGED_BY_LABEL: MANAGED_BY}])
def test_a_service_keeps_its_replicas_where_its_name_is_somebody_elses(world: Worlds, labels: dict[str, str]) -> None:
    lab = world(["a", "b"])
    theirs = lab.cluster.create(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "shop", "namespace": "lab", "labels": labels}, "spec": {"mine": 1}}
    )
    lab.operator.forget()
    lab.serve("shop", low=2, high=2)
    lab.turn(6, 1.0)
    status = lab.status("shop", "NPUService")
    assert status["readyReplicas"] == 2 and status["phase"] == "Degraded"
    for text in (status["message"], condition(status, "Refused")["message"]):
        assert "Service lab/shop that does not belong to NPUService shop" in text
    assert condition(status, "Refused")["status"] == "True" and lab.cluster.get("Service", "lab", "shop") == theirs
    lab.change("NPUService", "shop", replicas={"min": 1, "max": 1})
    lab.turn(6, 20.0)
    assert len(lab.pods("shop", "service")) == 1, "what else is to be done is done"
    lab.cluster.remove(theirs)
    lab.settle()
    status = lab.status("shop", "NPUService")
    assert status["phase"] == "Running" and condition(status, "Refused")["status"] == "False"
    (ours,) = lab.cluster.of("Service")
    assert ours["metadata"]["ownerReferences"][0]["name"] == "shop"


def test_a_pod_of_somebody_elses_is_no_pod_of_a_gang(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    gang = gang_name(NPUJob.parse(lab.cluster.get("NPUJob", "lab", "train")), 1)
    alien = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{gang}-1", "namespace": "lab", "labels": {}},
        "spec": {"nodeName": "a", "containers": []},
    }
    theirs = lab.cluster.create(alien)
    lab.turn(30, 5.0)
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
    assert lab.cluster.get("Pod", "lab", f"{gang}-1")["metadata"]["uid"] == theirs["metadata"]["uid"]


def test_a_job_whose_pods_never_run_pauses_ever_longer_and_makes_nobody_leave_again(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("low", npus=8, restartPolicy={"limit": 100})
    lab.settle()
    bind = lab.nodes._bind
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "persistentvolumeclaim none not found"}

    def lacks_a_volume(body: dict[str, Any]) -> None:
        if body["metadata"]["labels"]["semantide.io/job"] != "high":
            bind(body)
        elif not body["status"].get("conditions"):
            lab.cluster.set_status("Pod", "lab", body["metadata"]["name"], conditions=[{**refused, "lastTransitionTime": time_of(lab.now)}])

    lab.nodes._bind = lacks_a_volume
    lab.submit("high", npus=8, priority=10)
    lab.turn(300, 5.0)
    assert lab.phase("low") == "Running" and lab.status("low")["attempt"] == 2, "it left once, and went on"
    assert lab.status("high")["attempt"] == 1 and "nobody makes room for it" in lab.status("high")["message"]
    lab.turn(100, 5.0)
    assert lab.status("low")["attempt"] == 3, "what was missing may be there after so long"
    lab.turn(10, 5.0)
    lab.end("low")
    lab.turn(400, 5.0)
    assert 3 <= lab.status("high")["attempt"] <= 12, "2,000 seconds in which every pause is longer than the one before"
    lab.nodes._bind = bind
    lab.turn(80, 5.0)
    assert lab.phase("high") == "Running" and not lab.status("high").get("failedPlacings")


@pytest.mark.parametrize(
    ("kind", "said", "spec", "settings"),
    [
        ("PodGroup", "PodGroup of scheduling.volcano.sh/v1beta1", {"scheduler": "volcano"}, {}),
        ("ResourceClaimTemplate", "ResourceClaimTemplate of resource.k8s.io/v1", {"scheduler": "native"}, {"dynamic_resources": True}),
    ],
)
def test_what_the_cluster_does_not_serve_is_named(world: Worlds, kind: str, said: str, spec: dict[str, Any], settings: dict[str, Any]) -> None:
    lab = world(["a"], **settings)

    def unheard_of(verb: str, of: str, name: str) -> None:
        if verb == "create" and of == kind:
            raise NotFound("404 page not found")

    lab.cluster.fails = unheard_of
    lab.submit("train", npus=8, **spec)
    lab.turn(4, 1.0)
    assert f"this cluster does not serve {said}" in lab.status("train")["message"] and not lab.pods("train")


def test_a_namespace_that_has_gone_is_no_refusal(world: Worlds) -> None:
    lab = world(["a"])

    def gone(verb: str, kind: str, name: str) -> None:
        if verb == "create" and kind == "Pod":
            raise NotFound('namespaces "lab" not found')

    lab.cluster.fails = gone
    lab.submit("train", npus=8)
    lab.turn(4, 1.0)
    assert lab.phase("train") == "Placing" and "not serve" not in lab.status("train")["message"]


def test_who_leads_anew_knows_of_no_refusal(world: Worlds) -> None:
    lab = world(["a"])

    def full(verb: str, kind: str, name: str) -> None:
        if verb == "create" and kind == "Pod":
            raise PermanentError("exceeded quota: pods")

    lab.cluster.fails = full
    lab.submit("train", npus=8)
    lab.turn(1, 1.0)
    lab.cluster.fails = lambda *_: None
    lab.operator.forget()
    lab.settle()
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 1
