"""The whole product on real nodes, installed by Helm: an NPUJob trains across two pods, goes on when a node is lost, and an NPUService answers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .api import Api, until
from .docker_engine import Engine
from .installed_shop import SLOT, Shop, build_images
from .kubelet import Kubelet

pytestmark = [pytest.mark.cluster_nodes, pytest.mark.timeout(3600)]

_JOB = "semantide.io/job"
_PATIENCE = 1200.0


@pytest.fixture(scope="module")
def shop(engine: Engine, nodes: dict[str, Kubelet], real_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    """An installed release with a data set, made through it."""
    build_images(engine, tmp_path_factory.mktemp("wheels"))
    namespace = real_api.create("namespaces", {"metadata": {"generateName": "shop-"}})["metadata"]["name"]
    made = Shop(real_api, namespace, tmp_path_factory.mktemp("shop"), nodes)
    try:
        made.install()
        _write_input(made.folder / "in")
        made.run("ingest", str(made.folder / "in"))
        made.run("dataset")
        made.run("tokenize")
        yield made
    finally:
        made.remove()
        real_api.delete("namespaces", namespace)
        until(lambda: not real_api.list("pods", namespace), "its pods are gone", _PATIENCE)


def _write_input(folder: Path) -> None:
    """Everybody walks along a ring of items."""
    folder.mkdir()
    draw, start = random.Random(5), int(time.time() * 1000) - 10**9
    rows = ["user,item,time,action"]
    for user in range(120):
        item = draw.randrange(40)
        for step in range(draw.randint(6, 12)):
            item = (item + draw.randint(1, 2)) % 40
            rows.append(f"user-{user},item-{item},{start + user * 1000 + step},click")
    (folder / "interactions.csv").write_text("\n".join(rows) + "\n")
    (folder / "items.jsonl").write_text("".join(json.dumps({"id": f"item-{n}", "title": f"thing {n}", "categories": ["all"]}) + "\n" for n in range(40)))


def _losses(job: dict[str, Any]) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in job["metrics"] if "loss" in row}


def _pods(shop: Shop, job_id: str) -> dict[str, str]:
    """Node by name of the running pods of a job."""
    pods = shop.api.list("pods", shop.namespace, f"{_JOB}={job_id}")
    return {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods if pod["status"]["phase"] == "Running"}


_TRAIN = (
    "train",
    "--recipe",
    "tiny",
    "--set",
    "epochs=150",
    "--set",
    "patience=1000",
    "--set",
    "evaluate_every=50",
    "--set",
    "log_every=1",
    "--cluster",
    "pods=2",
    "--cluster",
    "npus_per_pod=1",
)


@pytest.fixture(scope="module")
def undisturbed(shop: Shop) -> dict[str, Any]:
    """A job that trained across two pods."""
    job_id = shop.start(*_TRAIN)
    until(lambda: len(_pods(shop, job_id)) == 2, "two pods run", _PATIENCE)
    until(lambda: shop.job(job_id)["state"] in ("succeeded", "failed"), "it has ended", _PATIENCE, pause=2)
    found = shop.job(job_id)
    assert found["state"] == "succeeded", found["error"]
    return found


def test_an_npujob_trains_across_two_pods(shop: Shop, undisturbed: dict[str, Any]) -> None:
    losses = _losses(undisturbed)
    assert losses[max(losses)] < losses[min(losses)]
    status = shop.api.get("npujobs", undisturbed["id"], shop.namespace)["status"]
    assert status["phase"] == "Succeeded" and len(status["placement"]) == 2 and status["restarts"] == 0


def test_a_job_that_lost_a_node_goes_on_from_its_checkpoint(shop: Shop, undisturbed: dict[str, Any]) -> None:
    job_id = shop.start(*_TRAIN)
    until(lambda: (shop.api.find("npujobs", job_id, shop.namespace) or {}).get("status", {}).get("checkpoint"), "it has a checkpoint", _PATIENCE)
    where = until(lambda: len(found := _pods(shop, job_id)) == 2 and found, "two pods run", _PATIENCE)
    reached = max(_losses(shop.job(job_id)), default=0)
    kept, lost = shop.nodes.values()
    assert set(where.values()) == set(shop.nodes)
    lost.lose()
    try:
        until(lambda: shop.api.get("npujobs", job_id, shop.namespace)["status"].get("restarts", 0) >= 1, "its gang is given up", _PATIENCE)
        kept.offer({SLOT: "2"})
        until(lambda: list(_pods(shop, job_id).values()) == [kept.name] * 2, "both pods run on the node that is left", _PATIENCE)
    finally:
        lost.come_back()
        for node in (kept, lost):
            node.offer({SLOT: "1"})
    until(lambda: shop.job(job_id)["state"] in ("succeeded", "failed"), "it has ended", _PATIENCE, pause=2)
    found = shop.job(job_id)
    assert found["state"] == "succeeded", found["error"]
    losses, expected = _losses(found), _losses(undisturbed)
    assert 0 < reached < max(losses), "it was not disturbed half-way"
    # Not one step is missing, and each has the loss that it has in a run that nobody disturbed.
    assert losses == expected


def test_an_npuservice_answers(shop: Shop, undisturbed: dict[str, Any]) -> None:
    shop.run("promote", "--model", undisturbed["artifacts"]["model"])
    spec = {"replicas": {"min": 2, "max": 2}, "model": undisturbed["artifacts"]["model"]}
    body = {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUService", "metadata": {"name": "front"}, "spec": spec}
    shop.api.create("npuservices", body, shop.namespace)
    until(lambda: shop.api.get("npuservices", "front", shop.namespace).get("status", {}).get("readyReplicas") == 2, "two replicas are ready", _PATIENCE)
    pods = shop.api.list("pods", shop.namespace, "semantide.io/service=front")
    for pod in pods:
        address = f"http://{pod['status']['podIP']}:8000/v1/recommendations"
        answer = httpx.post(address, json={"user": "user-3", "n": 5}, headers={"X-API-Key": shop.key}, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["items"]) == 5
