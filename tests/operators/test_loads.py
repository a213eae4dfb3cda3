"""Whose replicas are asked for their load, and with what."""

from __future__ import annotations

import httpx

from semantide.operators.loads import Loads
from semantide.operators.pods import Pod
from semantide.operators.resources import NPUService
from semantide.operators.snapshot import Snapshot


def service(namespace: str, uid: str, release: str = "") -> NPUService:
    labels = {"semantide.io/release": release} if release else {}
    return NPUService.parse({"kind": "NPUService", "metadata": {"name": uid, "namespace": namespace, "uid": uid, "labels": labels}, "spec": {}})


def pod(namespace: str, owner: str, address: str) -> Pod:
    return Pod(namespace, f"pod-{address}", f"uid-{address}", owner=owner, phase="Running", ready=True, address=address)


def test_the_key_is_shown_to_the_own_releases_replicas_alone() -> None:
    shown: dict[tuple[str, int | None], str | None] = {}

    def answer(request: httpx.Request) -> httpx.Response:
        shown[request.url.host, request.url.port] = request.headers.get("X-API-Key")
        return httpx.Response(200, text="semantide_serving_queue 3\n")

    loads = Loads("secret", "own", lambda: 0.0, httpx.Client(transport=httpx.MockTransport(answer)), release="shop")
    services = (
        service("own", "ours", "shop"),
        service("own", "by-hand"),
        service("own", "other", "other"),
        service("lab", "theirs"),
        service("lab", "same", "shop"),
    )
    pods = [pod(one.namespace, one.name, f"10.0.0.{number}") for number, one in enumerate(services)]
    measured = loads.measure(Snapshot(now=0.0, services=services, pods=(*pods, pod("lab", "ours", "10.0.0.9"))))
    keyed = {(f"10.0.0.{number}", 8000): "secret" for number in (0, 1)}
    assert shown == {**keyed, **{(f"10.0.0.{number}", 9100): None for number in (2, 3, 4)}}, (
        "a pod elsewhere that names our service as its owner is not asked at all"
    )
    assert all([load.queue_depth for load in measured[one.key]] == [3.0] for one in services)
