"""Whose replicas are asked for their load, and with what."""

from __future__ import annotations

import httpx

from semantide.operators.loads import Loads
from semantide.operators.pods import Pod
from semantide.operators.resources import NPUService
from semantide.operators.snapshot import Snapshot


def service(namespace: str, uid: str) -> NPUService:
    return NPUService.parse({"kind": "NPUService", "metadata": {"name": "shop", "namespace": namespace, "uid": uid}, "spec": {}})


def pod(namespace: str, owner: str, address: str) -> Pod:
    return Pod(namespace, f"pod-{address}", f"uid-{address}", owner=owner, phase="Running", ready=True, address=address)


def test_the_key_is_shown_in_the_own_namespace_alone() -> None:
    shown: dict[str, str | None] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        shown[request.url.host] = request.headers.get("X-API-Key")
        return httpx.Response(200, text="semantide_serving_queue 3\n")

    loads = Loads("secret", "release", lambda: 0.0, httpx.Client(transport=httpx.MockTransport(answer)))
    pods = (pod("release", "ours", "10.0.0.1"), pod("lab", "theirs", "10.0.0.2"), pod("lab", "ours", "10.0.0.3"))
    measured = loads.measure(Snapshot(now=0.0, services=(service("release", "ours"), service("lab", "theirs")), pods=pods))
    assert shown == {"10.0.0.1": "secret", "10.0.0.2": None}, "a pod elsewhere that names our service as its owner is not asked at all"
    assert [load.queue_depth for load in measured["release/shop"]] == [3.0] == [load.queue_depth for load in measured["lab/shop"]]
