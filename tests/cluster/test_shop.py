"""The whole product on real nodes, installed by Helm: an NPUJob trains across two pods, goes on when a node or a pod is lost, and an NPUService answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .api import Api, until
from .docker_engine import Engine
from .installed_shop import SLOT, Shop, build_images, write_ring
from .kubelet import Kubelet

pytestmark = pytest.mark.timeout(3600)

_JOB = "semantide.io/job"
_PATIENCE = 1200.0
_LONG = 500
"""Steps of a training that loses a node and a pod on its way."""


@pytest.fixture(scope="module")
def shop(engine: Engine, nodes: dict[str, Kubelet], real_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """An installed release with a data set, made through it."""
    build_images(engine, tmp_path_factory.mktemp("wheels"))
    namespace = real_api.create("namespaces", {"metadata": {"generateName": "shop-"}})["metadata"]["name"]
    made = Shop(real_api, namespace, tmp_path_factory.mktemp("shop"), nodes)
    try:
        made.install()
        write_ring(made.folder / "in")
        made.run("ingest", str(made.folder / "in"))
        made.run("dataset")
        made.run("tokenize")
        yield made
    finally:
        made.remove()
        real_api.delete("namespaces", namespace)
        until(lambda: not real_api.list("pods", namespace), "its pods are gone", _PATIENCE)


def _ended(shop: Shop, job_id: str) -> dict[str, Any]:
    """A job's record and metric rows, once it has ended well."""
    until(lambda: shop.ask(f"/v1/jobs/{job_id}")["state"] in ("succeeded", "failed"), f"{job_id} has ended", _PATIENCE, pause=1)
    found = shop.job(job_id)
    assert found["state"] == "succeeded", found["error"]
    return found


def _losses(job: dict[str, Any]) -> dict[int, float]:
    return {int(row["step"]): row["loss"] for row in job["metrics"] if "loss" in row}


def _pods(shop: Shop, job_id: str) -> dict[str, str]:
    """Node by name of the running pods of a job."""
    pods = shop.api.list("pods", shop.namespace, f"{_JOB}={job_id}")
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"}


def _train(steps: int) -> tuple[str, ...]:
    """A training of two pods, one step an epoch."""
    numbers = (f"epochs={steps}", f"patience={2 * steps}", "evaluate_every=50", "log_every=1")
    return ("train", "--recipe", "tiny", *(word for number in numbers for word in ("--set", number)), "--cluster", "pods=2", "--cluster", "npus_per_pod=1")


def _trained(shop: Shop, steps: int) -> dict[str, Any]:
    """A job that trained across two pods."""
    job_id = shop.start(*_train(steps))
    until(lambda: len(_pods(shop, job_id)) == 2, "two pods run", _PATIENCE)
    return _ended(shop, job_id)


@pytest.fixture(scope="module")
def trained(shop: Shop) -> dict[str, Any]:
    """A short training."""
    return _trained(shop, 60)


@pytest.mark.cluster
def test_an_npujob_trains_across_two_pods(shop: Shop, trained: dict[str, Any]) -> None:
    losses = _losses(trained)
    assert losses[max(losses)] < losses[min(losses)]

    def status() -> dict[str, Any]:
        return dict(shop.api.get("npujobs", trained["id"], shop.namespace)["status"])

    # The job says itself that it has ended; the operator learns it from the pods, a moment later.
    until(lambda: status()["phase"] == "Succeeded", "the NPUJob has ended well", _PATIENCE)
    assert len(status()["placement"]) == 2 and status()["restarts"] == 0


def _curves(losses: dict[int, float], expected: dict[int, float], around: list[int]) -> Iterator[str]:
    """The losses of both runs next to each other, near some steps."""
    yield f"  {'step':>6} {'disturbed':>12} {'undisturbed':>12}"
    near = {step for place in around for step in range(place - 4, place + 5)} | {min(expected), max(expected)}
    for step in sorted(near & set(expected)):
        yield f"  {step:>6} {losses.get(step, float('nan')):>12.8f} {expected[step]:>12.8f}{'  <- reached when it was disturbed' if step in around else ''}"


def _again(told: list[int]) -> list[int]:
    """Steps that a job computed twice."""
    return sorted({step for step in told if told.count(step) > 1})


def _steps(shop: Shop, job_id: str) -> int:
    """How far a job says it has come."""
    return max((int(row["step"]) for row in shop.ask(f"/v1/jobs/{job_id}/metrics") if "loss" in row), default=0)


def _kill(shop: Shop, pod: str) -> None:
    """End a pod's container from below, as the kernel does when memory runs out."""
    status = shop.api.get("pods", pod, shop.namespace)["status"]["containerStatuses"][0]
    next(iter(shop.nodes.values())).engine.docker("kill", "--signal", "KILL", status["containerID"].removeprefix("docker://"))


@pytest.mark.cluster_nodes
def test_a_job_that_lost_a_node_and_then_a_pod_goes_on_from_its_checkpoints(shop: Shop, capsys: pytest.CaptureFixture[str]) -> None:
    undisturbed = _trained(shop, _LONG)
    job_id = shop.start(*_train(_LONG))

    def status() -> dict[str, Any]:
        return (shop.api.find("npujobs", job_id, shop.namespace) or {}).get("status", {})

    until(lambda: status().get("checkpoint"), "it has a checkpoint", _PATIENCE)
    where = until(lambda: len(found := _pods(shop, job_id)) == 2 and found, "two pods run", _PATIENCE)
    reached = [_steps(shop, job_id)]
    kept, lost = shop.nodes.values()
    assert set(where.values()) == set(shop.nodes)
    lost.lose()
    try:
        until(lambda: status().get("restarts", 0) >= 1, "its gang is given up", _PATIENCE)
        kept.offer({SLOT: "2"})
        until(lambda: list(_pods(shop, job_id).values()) == [kept.name] * 2, "both pods run on the node that is left", _PATIENCE)
        until(lambda: _steps(shop, job_id) > reached[0], "it has gone on", _PATIENCE)
        _kill(shop, max(_pods(shop, job_id)))
        reached.append(_steps(shop, job_id))
        until(lambda: status().get("restarts", 0) >= 2, "its gang is given up again", _PATIENCE)
    finally:
        lost.come_back()
        for node in (kept, lost):
            node.offer({SLOT: "1"})
    found = _ended(shop, job_id)
    losses, expected = _losses(found), _losses(undisturbed)
    told = shop.steps_told(job_id)
    with capsys.disabled():
        print("", f"a node lost, then a pod killed, in {len(expected)} steps of two pods:", *_curves(losses, expected, reached), sep="\n")
        print(f"  steps told a second time, after a checkpoint that lay before them: {_again(told) or 'none'}")
    assert all(0 < step < max(losses) for step in reached), "it was not disturbed half-way"
    assert told.count(min(losses)) == 1, "it began anew instead of going on"
    # Not one step is missing, and each has the loss that it has in a run that nobody disturbed.
    assert losses == expected


@pytest.mark.cluster
def test_an_npuservice_answers(shop: Shop, trained: dict[str, Any]) -> None:
    shop.run("promote", "--model", trained["artifacts"]["model"])
    spec = {"replicas": {"min": 2, "max": 2}, "model": trained["artifacts"]["model"]}
    body = {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUService", "metadata": {"name": "front"}, "spec": spec}
    shop.api.create("npuservices", body, shop.namespace)
    until(lambda: shop.api.get("npuservices", "front", shop.namespace).get("status", {}).get("readyReplicas") == 2, "two replicas are ready", _PATIENCE)
    pods = shop.api.list("pods", shop.namespace, "semantide.io/service=front")
    for pod in pods:
        address = f"http://{pod['status']['podIP']}:8000/v1/recommendations"
        answer = httpx.post(address, json={"user": "user-3", "n": 5}, headers={"X-API-Key": shop.key}, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        items = [one["item"] for one in answer.json()["items"]]
        assert len(set(items)) == 5 and set(items) <= {f"item-{number}" for number in range(40)}
