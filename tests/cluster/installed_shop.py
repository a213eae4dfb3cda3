"""The whole of Semantide installed by Helm on real nodes: every process in its pod, jobs as NPUJobs, and the command line of a user outside."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import redis

from semantide.shared.jobs import Jobs
from tests.compose.conftest import torch_index

from .api import Api, Object, until
from .docker_engine import REDIS_IMAGE, Engine, redis_image
from .kubelet import Kubelet
from .release import CHART, REPOSITORY, Release, remove_definitions, unbound

IMAGE_TAG, NEXT_IMAGE_TAG = "cluster-test", "cluster-test-next"
API, ROUTER, BROKER = "shop-semantide-api", "shop-semantide-router", "shop-semantide-redis"
SLOT = "huawei.com/slot"
"""What each node has one of, for NPUs that do not exist: the pods of a job that asks for one each are on different nodes."""
_SMALL: Object = {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "3Gi"}}
_OPERATOR_SETTINGS = {"leaseSeconds": 4, "roundSeconds": 1, "nodeGraceSeconds": 4, "lostStopSeconds": 1, "stopSeconds": 20, "backoffLimitSeconds": 2}


def build_images(engine: Engine, folder: Path) -> None:
    """Semantide's two images from this tree; with SEMANTIDE_CLUSTER_IMAGES=keep those of an earlier run, where they are there."""
    redis_image(engine)
    names = ("semantide", "semantide-operator")
    if os.environ.get("SEMANTIDE_CLUSTER_IMAGES") != "keep" or not all(engine.has_image(f"{name}:{IMAGE_TAG}") for name in names):
        with torch_index(folder) as address:
            for target, name in zip(("semantide", "operator"), names, strict=True):
                # The build reaches the package index by way of this machine's own network.
                options = ("--network", "host", "--build-arg", f"TORCH_INDEX={address}", "--target", target, "--tag", f"{name}:{IMAGE_TAG}")
                engine.docker("build", "--quiet", *options, str(REPOSITORY), timeout=3600)
    for name in names:
        engine.docker("tag", f"{name}:{IMAGE_TAG}", f"{name}:{NEXT_IMAGE_TAG}")


def write_ring(folder: Path) -> None:
    """Files to import: everybody walks along a ring of items."""
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


class Shop:
    """One installed release and what a user does with it."""

    def __init__(self, api: Api, namespace: str, folder: Path, nodes: dict[str, Kubelet]) -> None:
        self.api, self.namespace, self.folder, self.nodes = api, namespace, folder, nodes
        self.release = Release("shop", namespace, api.kubeconfig)
        self.volumes = [f"{namespace}-{name}" for name in ("data", "broker")]

    def install(self, chart: Path | None = None, values: Object | None = None, *options: str) -> None:
        """Make volumes that both nodes see, and install the chart: this tree's with jobs in pods of their own, unless said otherwise."""
        for name in self.volumes:
            (self.folder / name).mkdir(parents=True)
            # Processes run as a user of their own, and a folder of the host gets no group.
            (self.folder / name).chmod(0o777)
            spec: Object = {"capacity": {"storage": "100Gi"}, "accessModes": ["ReadWriteOnce", "ReadWriteMany"], "hostPath": {"path": str(self.folder / name)}}
            self.api.create("persistentvolumes", {"metadata": {"name": name}, "spec": spec | {"persistentVolumeReclaimPolicy": "Retain"}})
        others = list(self.nodes)[1:]
        # The release's own processes on one node: the others can be lost and leave it whole.
        for name in others:
            self.api.patch("nodes", name, {"spec": {"unschedulable": True}})
        self.release.install(chart or unbound(CHART, self.folder), *self._values(values or cluster_values()), *options)
        for name in others:
            self.api.patch("nodes", name, {"spec": {"unschedulable": None}})
        for node in self.nodes.values():
            node.offer({SLOT: "1"})

    def upgrade(self, chart: Path, values: Object) -> None:
        """Bring the release to this chart and these values, and wait until every process of it is ready."""
        self.release.upgrade(chart, *self._values(values))

    def _values(self, values: Object) -> tuple[str, ...]:
        path = self.folder / "values.json"
        path.write_text(json.dumps(values))
        return ("--values", str(path), "--wait", "--timeout", "20m")

    def remove(self) -> None:
        """Uninstall it, with its volumes and the custom resources."""
        self.release.uninstall()
        for plural in ("npujobs", "npuservices", "persistentvolumeclaims"):
            for one in self.api.list(plural, self.namespace):
                self.api.delete(plural, one["metadata"]["name"], self.namespace)
        for name in self.volumes:
            self.api.delete("persistentvolumes", name)
        # The next release shall make its own.
        remove_definitions(self.api)

    def run(self, *arguments: str) -> str:
        """What a command of ``semantide`` prints."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SEMANTIDE_")}
        environment |= {"SEMANTIDE_URL": self.url, "SEMANTIDE_API_KEYS": self.key, "SEMANTIDE_DATA_DIR": str(self.folder / "client")}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-m", "semantide.services.commandline.main", *arguments]
        outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=self.folder)
        assert outcome.returncode == 0, f"{arguments}: status {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
        return outcome.stdout

    def start(self, *arguments: str) -> str:
        """Begin a job and let it run; its id."""
        return str(json.loads(self.run(*arguments, "--no-wait", "--json"))["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """A job's record with its metric rows."""
        found: dict[str, Any] = json.loads(self.run("jobs", "show", job_id, "--metrics"))
        return found

    def ask(self, path: str) -> Any:
        """What the API answers to a plain GET; one that is started again meanwhile is waited for."""

        def answered() -> httpx.Response | None:
            try:
                return httpx.get(f"{self.url}{path}", headers={"X-API-Key": self.key}, timeout=60, trust_env=False)
            except httpx.TransportError:
                return None

        answer: httpx.Response = until(answered, f"an answer to GET {path}")
        answer.raise_for_status()
        return answer.json()

    def steps_told(self, job_id: str) -> list[int]:
        """Steps whose loss a job has told, in the order in which it did: one that went on from a checkpoint tells some of them twice."""
        with redis.Redis(self._address(BROKER), password=self._secret("redis-password")) as broker:
            rows = [json.loads(entry[b"row"]) for _, entry in broker.xrange(Jobs.metrics_key(job_id))]
        return [int(row["step"]) for row in rows if "loss" in row]

    @property
    def url(self) -> str:
        """Where the API is now."""
        return f"http://{self._address(API)}:8000"

    @property
    def key(self) -> str:
        """The key that the chart made."""
        return self._secret("api-keys")

    def _address(self, service: str) -> str:
        def ready() -> str:
            subsets = (self.api.find("endpoints", service, self.namespace) or {}).get("subsets") or ()
            return next((place["ip"] for subset in subsets for place in subset.get("addresses") or ()), "")

        return str(until(ready, f"{service} has an address"))

    def _secret(self, name: str) -> str:
        found = next(one["data"][name] for one in self.api.list("secrets", self.namespace) if name in (one.get("data") or {}))
        return base64.b64decode(found).decode()


def values(workers: tuple[str, ...]) -> Object:
    """What every version of the chart takes: small processes, and workers of some rooms."""
    worker: Object = {"replicas": 1, "threads": 1, "resources": _SMALL}
    rooms = ("ingestion", "tokenization", "negatives", "training", "serving")
    return {
        "imageTag": IMAGE_TAG,
        "imagePullPolicy": "Never",
        "dataAccessMode": "ReadWriteMany",
        "apis": {"all": worker},
        "workers": {room: worker if room in workers else None for room in rooms},
        "redisImage": REDIS_IMAGE,
        "redisResources": _SMALL,
    }


def operator_values() -> Object:
    """Those of the operator, for nodes with one SLOT each."""
    return {
        "operatorImageTag": IMAGE_TAG,
        "operatorResources": _SMALL,
        "operatorSettings": _OPERATOR_SETTINGS,
        "operatorProfile": "ascend",
        "operatorResourceName": SLOT,
    }


def cluster_values() -> Object:
    """This tree's chart with jobs in pods of their own."""
    common = values(("ingestion", "tokenization", "training", "serving"))
    small = {"jobResources": dict.fromkeys(("import", "dataset", "tokenize", "train", "evaluate"), _SMALL)}
    return common | operator_values() | small | {"workers": common["workers"] | {"reward": None}, "settings": {"jobRunner": "cluster"}}
