"""Whose replicas are asked for their load, and with what."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from semantide.operators.loads import Loads
from semantide.operators.meters import Meters
from semantide.operators.pods import Pod
from semantide.operators.resources import API_VERSION, NPUService
from semantide.operators.rounds import Rounds
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
    pods = [replace(pod(one.namespace, one.name, f"10.0.0.{number}"), metrics_port=9100) for number, one in enumerate(services)]
    measured = loads.measure(Snapshot(now=0.0, services=services, pods=(*pods, pod("lab", "ours", "10.0.0.9"))))
    keyed = {(f"10.0.0.{number}", 8000): "secret" for number in (0, 1)}
    assert shown == {**keyed, **{(f"10.0.0.{number}", 9100): None for number in (2, 3, 4)}}, (
        "a pod elsewhere that names our service as its owner is not asked at all"
    )
    assert all([load.queue_depth for load in measured[one.key]] == [3.0] for one in services)


def test_a_port_that_wants_no_key_is_asked_elsewhere() -> None:
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(f"{request.url.host}:{request.url.port}{'!' * ('X-API-Key' in request.headers)}")
        return httpx.Response(200, text="semantide_serving_queue 3\n")

    loads = Loads("secret", "release", lambda: 0.0, httpx.Client(transport=httpx.MockTransport(answer)))
    pods = (replace(pod("release", "ours", "10.0.0.1"), metrics_port=9100), replace(pod("lab", "theirs", "fd00::2"), metrics_port=9100))
    loads.measure(Snapshot(now=0.0, services=(service("release", "ours"), service("lab", "theirs")), pods=pods))
    assert sorted(asked) == ["10.0.0.1:8000!", "fd00::2:9100"]


def test_replicas_that_hang_cost_a_look_its_time_once_and_keep_nobody_from_being_heard() -> None:
    """Every hanging replica holds a thread until the test lets it go: asked one after the other, the look would never end."""
    going, asked = threading.Event(), []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.host)
        if not request.url.host.endswith(".9"):
            going.wait()
        return httpx.Response(200, text="semantide_serving_queue 3\n")

    loads = Loads("", "own", lambda: 0.0, httpx.Client(transport=httpx.MockTransport(answer)), look_seconds=0.05)
    hanging = tuple(pod("own", "hangs", f"10.0.0.{number}") for number in (10, 11, 12))
    snapshot = Snapshot(now=0.0, services=(service("own", "hangs"), service("own", "shop")), pods=(*hanging, pod("own", "shop", "10.0.0.9")))
    try:
        heard = False
        for _ in range(200):  # a slow machine may need several looks to hear the one that answers
            measured = loads.measure(snapshot)
            assert measured["own/hangs"] == ()
            heard = heard or [load.queue_depth for load in measured["own/shop"]] == [3.0]
            if heard and "own/hangs" in loads.unmeasured:
                break
        assert heard and "did not answer in time" in loads.unmeasured["own/hangs"]
    finally:
        going.set()


def test_a_page_without_end_is_left() -> None:
    clock = iter(range(100))

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=(b"# still going\n" for _ in itertools.count()))

    loads = Loads("", "own", lambda: float(next(clock)), httpx.Client(transport=httpx.MockTransport(answer)))
    for _ in range(3):
        assert loads.measure(Snapshot(now=0.0, services=(service("own", "shop"),), pods=(pod("own", "shop", "10.0.0.1"),))) == {"own/shop": ()}
    assert "takes longer" in loads.unmeasured["own/shop"]


@pytest.mark.parametrize(
    ("namespace", "status", "said"),
    [("lab", 401, "template.ports"), ("release", 403, "SEMANTIDE_API_KEYS"), ("lab", 404, "reach /metrics"), ("lab", 0, "ConnectError")],
)
def test_a_service_of_which_nothing_is_heard_says_so_and_what_to_do(world: Callable[..., Any], namespace: str, status: int, said: str) -> None:
    answers = [status]

    def answer(request: httpx.Request) -> httpx.Response:
        if not answers[0]:
            raise httpx.ConnectError("no route")
        return httpx.Response(answers[0], text="semantide_serving_queue 3\n")

    lab, meters = world(["a"]), Meters()
    lab.operator = Rounds(lab.cluster, lab.settings, lambda: lab.now, meters=meters, writers=1)
    lab.cluster.create({"apiVersion": API_VERSION, "kind": "NPUService", "metadata": {"name": "shop", "namespace": namespace}, "spec": {}})
    lab.settle()
    loads = Loads("secret", "release", lambda: lab.now, httpx.Client(transport=httpx.MockTransport(answer)))

    def look() -> dict[str, Any]:
        lab.operator.measured(loads.measure(lab.operator.last), loads.unmeasured)
        lab.turn(1, 1.0)
        conditions = lab.cluster.get("NPUService", namespace, "shop")["status"]["conditions"]
        return {entry["type"]: entry for entry in conditions}

    def counted() -> str:
        return next(line for line in meters.page().decode().splitlines() if line.startswith("semantide_operator_unmeasured{")).split()[-1]

    assert "Unmeasured" not in look() and "Unmeasured" not in look(), "it may only just have started"
    told = look()
    assert (told["Unmeasured"]["status"], told["Unmeasured"]["reason"]) == ("True", "Unmeasured") and said in told["Unmeasured"]["message"]
    assert told["Complete"]["status"] == "True" and "load" not in told["Complete"].get("message", "") and counted() == "1.0"
    answers[0] = 200
    assert look()["Unmeasured"]["status"] == "False" and counted() == "0.0"
