"""What the operator relies on in an API server: run against the one in memory and against a real one, so that the former stays honest."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.cluster import Api
from semantide.operators.resources import API_VERSION
from semantide.shared.errors import Conflict, NotFound

Body = dict[str, Any]


def until(true: Callable[[], object], what: str) -> None:
    """Wait for what happens in its own time on a real server."""
    end = time.monotonic() + 120
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.1)


def job(namespace: str, name: str, **metadata: Any) -> Body:
    return {
        "apiVersion": API_VERSION,
        "kind": "NPUJob",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"kind": "train", "worldSize": 1, "npusPerPod": 0, "priority": 0, "suspend": False, "restartPolicy": {"limit": 1, "backoffSeconds": 1}},
    }


def pod(namespace: str, name: str, node: str = "", **metadata: Any) -> Body:
    spec: Body = {"containers": [{"name": "main", "image": "nothing"}], **({"nodeName": node} if node else {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace, **metadata}, "spec": spec}


class ApiContract:
    """The tests; a subclass gives the fixtures ``api`` and ``namespace``."""

    def test_what_is_created_has_an_identity_and_its_name_is_taken(self, api: Api, namespace: str) -> None:
        made = api.create(job(namespace, "one"))
        assert made["metadata"]["uid"] and made["metadata"]["resourceVersion"].isdigit() and made["metadata"]["creationTimestamp"]
        assert made["metadata"]["generation"] == 1
        with pytest.raises(Conflict):
            api.create(job(namespace, "one"))
        assert api.get("NPUJob", namespace, "one")["metadata"]["uid"] == made["metadata"]["uid"]
        with pytest.raises(NotFound):
            api.get("NPUJob", namespace, "other")

    def test_lists_are_by_label_say_what_they_hold_and_have_a_version(self, api: Api, namespace: str) -> None:
        api.create(job(namespace, "red", labels={"colour": "red"}))
        made = api.create(job(namespace, "blue", labels={"colour": "blue"}))
        found = api.list("NPUJob", namespace, "colour=red")
        assert [body["metadata"]["name"] for body in found.items] == ["red"]
        assert {body["kind"] for body in found.items} == {"NPUJob"}
        assert int(found.version) >= int(made["metadata"]["resourceVersion"])
        assert {"red", "blue"} <= {body["metadata"]["name"] for body in api.list("NPUJob").items}

    def test_who_writes_on_old_knowledge_is_refused(self, api: Api, namespace: str) -> None:
        old = api.create(job(namespace, "one"))
        changed = {**old, "spec": {**old["spec"], "priority": 3}}
        new = api.replace(changed)
        assert new["metadata"]["generation"] == 2 and int(new["metadata"]["resourceVersion"]) > int(old["metadata"]["resourceVersion"])
        with pytest.raises(Conflict):
            api.replace(changed)

    def test_status_is_written_apart_from_the_spec(self, api: Api, namespace: str) -> None:
        made = api.create(job(namespace, "one"))
        metadata = {key: made["metadata"][key] for key in ("name", "namespace", "uid", "resourceVersion")}
        written = {"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": metadata, "status": {"phase": "Pending", "ofANewerOperator": [1]}}
        after = api.replace_status(written)
        assert after["spec"] == made["spec"] and after["metadata"]["generation"] == 1
        assert api.get("NPUJob", namespace, "one")["status"] == {"phase": "Pending", "ofANewerOperator": [1]}
        with pytest.raises(Conflict):
            api.replace_status(written)
        fresh = {**metadata, "resourceVersion": after["metadata"]["resourceVersion"]}
        with pytest.raises(Conflict):
            api.replace_status({**written, "metadata": {**fresh, "uid": "00000000-0000-0000-0000-000000000000"}})
        again = api.replace({**after, "spec": {**after["spec"], "priority": 1}, "status": {}})
        assert again["status"]["phase"] == "Pending"

    def test_annotations_are_written_and_taken_away_one_by_one(self, api: Api, namespace: str) -> None:
        made = api.create(pod(namespace, "one", annotations={"kept": "a"}))
        uid = made["metadata"]["uid"]
        assert api.annotate("Pod", namespace, "one", {"new": "b"}, uid)["metadata"]["annotations"] == {"kept": "a", "new": "b"}
        assert api.annotate("Pod", namespace, "one", {"kept": None})["metadata"]["annotations"] == {"new": "b"}
        with pytest.raises(Conflict):
            api.annotate("Pod", namespace, "one", {"new": "c"}, "00000000-0000-0000-0000-000000000000")
        with pytest.raises(NotFound):
            api.annotate("Pod", namespace, "two", {"new": "c"})

    def test_a_pod_on_a_node_ends_in_its_time_and_one_without_at_once(self, api: Api, namespace: str) -> None:
        api.create(pod(namespace, "waits"))
        api.delete("Pod", namespace, "waits")
        with pytest.raises(NotFound):
            api.get("Pod", namespace, "waits")
        api.create(pod(namespace, "sits", "nowhere"))
        api.delete("Pod", namespace, "sits", grace_seconds=30)
        first = api.get("Pod", namespace, "sits")["metadata"]["deletionTimestamp"]
        api.delete("Pod", namespace, "sits", grace_seconds=30)
        assert api.get("Pod", namespace, "sits")["metadata"]["deletionTimestamp"] == first
        api.delete("Pod", namespace, "sits", grace_seconds=0)
        with pytest.raises(NotFound):
            api.delete("Pod", namespace, "sits")

    def test_only_the_object_that_was_meant_is_deleted(self, api: Api, namespace: str) -> None:
        old = api.create(pod(namespace, "one"))
        api.delete("Pod", namespace, "one", uid=old["metadata"]["uid"])
        api.create(pod(namespace, "one"))
        with pytest.raises(Conflict):
            api.delete("Pod", namespace, "one", uid=old["metadata"]["uid"])
        assert api.get("Pod", namespace, "one")

    def test_what_is_owned_goes_with_its_owner(self, api: Api, namespace: str) -> None:
        owner = api.create(job(namespace, "one"))
        reference = {
            "apiVersion": API_VERSION,
            "kind": "NPUJob",
            "name": "one",
            "uid": owner["metadata"]["uid"],
            "controller": True,
            "blockOwnerDeletion": False,
        }
        api.create(pod(namespace, "child", ownerReferences=[reference]))
        api.create(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "table", "namespace": namespace, "ownerReferences": [reference]}, "data": {"a": "b"}}
        )
        api.delete("NPUJob", namespace, "one")
        until(lambda: not api.list("Pod", namespace).items, "the pod goes")
        until(lambda: all(body["metadata"]["name"] != "table" for body in api.list("ConfigMap", namespace).items), "the ConfigMap goes")

    def test_of_two_that_take_a_lease_one_is_refused(self, api: Api, namespace: str) -> None:
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "lead", "namespace": namespace}}
        free = api.create({**lease, "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15, "renewTime": "2030-01-01T00:00:00.000000Z"}})
        taken = api.replace({**free, "spec": {**free["spec"], "holderIdentity": "b"}})
        assert taken["spec"]["holderIdentity"] == "b"
        with pytest.raises(Conflict):
            api.replace({**free, "spec": {**free["spec"], "holderIdentity": "c"}})
