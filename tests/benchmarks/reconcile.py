"""One round of the operator over many jobs: how long it takes to read what is there and to decide, without the API server.

    python tests/benchmarks/reconcile.py [--quick] [--json] [--jobs 1000] [--nodes 1000] [--kept-nodes 5000] [--kept-pods 20000]

arrive   all jobs are new; nineteen of twenty are placed, the others ask for more than a node has and are told so
steady   what was placed runs; nothing is to be done, and nothing may be
lost     a pod of every twentieth gang is gone: these gangs and only these are told to stop
What a round decides is carried out on the objects in memory (no pod is bound or run by anybody else).

kept     bytes of the objects that are kept of a cluster where other people's pods run on all nodes, as an API server tells of them; against the same objects
         whole (without who wrote which field). Nodes as placement sees them must be equal.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from stopwatch import finish  # type: ignore[import-not-found]

from semantide.operators.actions import AnnotatePod, Create, DeletePod, PatchStatus
from semantide.operators.extracts import extract_of
from semantide.operators.inventory import read_nodes
from semantide.operators.pods import time_of
from semantide.operators.reconcile import Round, reconcile_all
from semantide.operators.resources import API_VERSION
from semantide.operators.settings import OperatorSettings
from semantide.operators.snapshot import ObjectCache

RESOURCE = "huawei.com/Ascend910"
SIZES, WEIGHTS = (1, 2, 4, 8, 16, 32), (30, 15, 15, 27, 8, 5)


class Objects:
    """The newest objects, and a clock."""

    def __init__(self, jobs: int, nodes: int, seed: int) -> None:
        rng = random.Random(seed)
        self.cache, self.now, self._version = ObjectCache(lambda: self.now), 1_800_000_000.0, 0
        self.settings = OperatorSettings(profile="ascend")
        for at in range(nodes):
            capacity = {RESOURCE: "8", "cpu": "96", "memory": "700Gi", "pods": "110"}
            labels = {"accelerator-type": "module-910b-8", "huawei.com/topotree.superpodid": str(at // 48)}
            status = {"capacity": capacity, "allocatable": capacity, "conditions": [{"type": "Ready", "status": "True"}]}
            self.put({"kind": "Node", "metadata": {"name": f"n{at:05}", "labels": labels}, "spec": {}, "status": status})
        for at in range(jobs):
            size = rng.choices(SIZES, WEIGHTS)[0]
            spec = {
                "kind": "train",
                "jobId": f"j{at}",
                "room": "training",
                "worldSize": max(1, size // 8),
                "npusPerPod": 16 if at % 20 == 0 else min(size, 8),
                "priority": rng.choice((0, 0, 0, 1)),
            }
            metadata = {"name": f"job-{at:04}", "namespace": "lab", "creationTimestamp": time_of(self.now - rng.random())}
            self.put({"apiVersion": API_VERSION, "kind": "NPUJob", "metadata": metadata, "spec": spec, "status": {}})

    def put(self, body: dict[str, Any]) -> None:
        """A new state of an object."""
        self._version += 1
        kept = {"uid": f"{body['kind']}-{body['metadata']['name']}", "generation": 1}
        self.cache.put({**body, "metadata": {**kept, **body["metadata"], "resourceVersion": str(self._version)}})

    def round(self) -> tuple[Round, float]:
        """Look and decide; the seconds that it took."""
        self.now += 5
        began = time.perf_counter()
        decided = reconcile_all(self.cache.snapshot(self.settings, self.now), self.settings)
        return decided, time.perf_counter() - began

    def carry_out(self, decided: Round) -> None:
        """Statuses are written, pods made (bound and running) and deleted."""
        jobs = {(body["metadata"]["namespace"], body["metadata"]["name"]): body for body in self.cache.bodies("NPUJob")}
        pods = {(body["metadata"]["namespace"], body["metadata"]["name"]): body for body in self.cache.bodies("Pod")}
        for actions in decided.actions.values():
            for action in actions:
                if isinstance(action, PatchStatus):
                    self.put({**jobs[action.namespace, action.name], "status": dict(action.status)})
                elif isinstance(action, DeletePod):
                    self.cache.drop(pods[action.namespace, action.name])
                elif isinstance(action, AnnotatePod):
                    body = pods[action.namespace, action.name]
                    metadata = {**body["metadata"], "annotations": {**body["metadata"]["annotations"], **action.annotations}}
                    pods[action.namespace, action.name] = {**body, "metadata": metadata}
                    self.put(pods[action.namespace, action.name])
                elif isinstance(action, Create) and action.manifest["kind"] == "Pod":
                    body = dict(action.manifest)
                    node = body["metadata"]["annotations"]["semantide.io/node"]
                    running = {
                        "phase": "Running",
                        "podIP": "10.0.0.1",
                        "conditions": [{"type": "Ready", "status": "True"}],
                        "containerStatuses": [{"state": {"running": {}}}],
                    }
                    self.put({**body, "spec": {**body["spec"], "nodeName": node}, "status": running})


def someones_pod(at: int, nodes: int) -> str:
    """A pod of a web service as the API server writes it; every fourth has a sidecar."""
    probe = {
        "httpGet": {"path": "/ready", "port": 8080, "scheme": "HTTP"},
        "periodSeconds": 10,
        "timeoutSeconds": 1,
        "successThreshold": 1,
        "failureThreshold": 3,
    }

    def container(name: str) -> dict[str, Any]:
        return {
            "name": name,
            "image": f"registry.example.com/team-{at % 50}/{name}:1.{at % 9}.0",
            "env": [{"name": f"VARIABLE_{number}", "value": f"value {number} of {at % 50}"} for number in range(12)],
            "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"cpu": "1", "memory": "1Gi"}},
            "volumeMounts": [{"name": "config", "mountPath": "/etc/app", "readOnly": True}, {"name": "token", "mountPath": "/var/run/secrets/token"}],
            "livenessProbe": probe,
            "readinessProbe": probe,
            "terminationMessagePath": "/dev/termination-log",
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True},
        }

    names = ["app", "proxy"] if at % 4 == 0 else ["app"]
    started = {"startedAt": f"2026-11-{at % 28 + 1:02}T08:00:00Z"}
    statuses = [
        {"name": name, "ready": True, "restartCount": 0, "imageID": f"sha256:{at:064x}", "containerID": f"c://{at:064x}", "state": {"running": started}}
        for name in names
    ]
    managed = {
        "manager": "kube-controller-manager",
        "operation": "Update",
        "time": "2026-11-01T08:00:00Z",
        "fieldsV1": {f"f:{number}": {} for number in range(60)},
    }
    metadata = {
        "name": f"web-{at % 50}-5d8f7c9b6-{at:05}",
        "namespace": f"team-{at % 50}",
        "uid": f"{at:032x}",
        "resourceVersion": str(1_000_000 + at),
        "creationTimestamp": "2026-11-01T08:00:00Z",
        "labels": {"app.kubernetes.io/name": "web", "app.kubernetes.io/instance": f"web-{at % 50}", "pod-template-hash": "5d8f7c9b6"},
        "annotations": {"checksum/config": f"{at % 50:064x}", "prometheus.io/scrape": "true"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": f"web-{at % 50}-5d8f7c9b6", "uid": f"{at % 50:032x}", "controller": True}],
        "managedFields": [managed, managed],
    }
    spec = {
        "containers": [container(name) for name in names],
        "nodeName": f"n{at % nodes:05}",
        "volumes": [{"name": "config", "configMap": {"name": "app", "defaultMode": 420}}, {"name": "token", "projected": {"sources": [{"serviceAccountToken": {"expirationSeconds": 3607}}]}}],
        "tolerations": [{"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300} for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")],
    }  # fmt: skip
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": "2026-11-01T08:00:00Z", "lastProbeTime": None} for kind in kinds]
    status = {
        "phase": "Running",
        "conditions": conditions,
        "containerStatuses": statuses,
        "podIP": f"10.{at // 65536}.{at // 256 % 256}.{at % 256}",
        "hostIP": "10.0.0.1",
    }
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec, "status": status})


def someones_node(at: int) -> str:
    """A node as the API server writes it, with the fifty images that a kubelet tells of."""
    capacity = {RESOURCE: "8", "cpu": "96", "memory": "737280000Ki", "pods": "110", "ephemeral-storage": "1Ti", "hugepages-2Mi": "0"}
    images = [
        {"names": [f"registry.example.com/team-{number}/app@sha256:{number:064x}", f"registry.example.com/team-{number}/app:1.0.0"], "sizeBytes": 10**8}
        for number in range(50)
    ]
    kinds = ("MemoryPressure", "DiskPressure", "PIDPressure", "Ready")
    conditions = [
        {"type": kind, "status": str(kind == "Ready"), "lastHeartbeatTime": "2026-11-30T08:00:00Z", "reason": "Kubelet", "message": "as it should be"}
        for kind in kinds
    ]
    labels = {
        "accelerator-type": "module-910b-8",
        "huawei.com/topotree.superpodid": str(at // 48),
        "kubernetes.io/hostname": f"n{at:05}",
        "kubernetes.io/arch": "arm64",
    }
    metadata = {
        "name": f"n{at:05}",
        "uid": f"node-{at}",
        "resourceVersion": str(at + 1),
        "labels": labels,
        "managedFields": [{"manager": "kubelet", "fieldsV1": {f"f:{number}": {} for number in range(80)}}],
    }
    status = {
        "capacity": capacity,
        "allocatable": capacity,
        "conditions": conditions,
        "images": images,
        "nodeInfo": {"kernelVersion": "6.1", "osImage": "Linux"},
    }
    return json.dumps({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"podCIDR": "10.0.0.0/24"}, "status": status})


def whole(body: dict[str, Any]) -> dict[str, Any]:
    """The object without who wrote which field."""
    return {**body, "metadata": {key: value for key, value in body["metadata"].items() if key != "managedFields"}}


def kept(keep: Callable[[dict[str, Any]], dict[str, Any]], nodes: int, pods: int) -> tuple[float, list[Any]]:
    """Bytes of what is kept of a cluster's objects, and the nodes that placement sees in them."""
    gc.collect()
    tracemalloc.start()
    there = [keep(json.loads(someones_node(at))) for at in range(nodes)]
    running = [keep(json.loads(someones_pod(at, nodes))) for at in range(pods)]
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return float(size), read_nodes(there, running)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--kept-nodes", type=int, default=5000)
    parser.add_argument("--kept-pods", type=int, default=20_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.threads = 1
    if options.quick:
        options.runs, options.kept_nodes, options.kept_pods = 2, 500, 2000
    wrong: list[str] = []
    seconds: dict[str, list[float]] = {"arrive": [], "steady": [], "lost": []}
    for run in range(options.runs):
        objects = Objects(options.jobs, options.nodes, run)
        decided, took = objects.round()
        seconds["arrive"].append(took)
        if len(decided.decision.starts) != options.jobs - options.jobs // 20 or len(decided.decision.reasons) != options.jobs // 20:
            wrong.append("a job was neither placed nor told why not")
        for _ in range(5):  # pods are made, addresses and ranks become known
            objects.carry_out(decided)
            decided, _ = objects.round()
        held: dict[tuple[str, str], int] = {}
        for body in objects.cache.bodies("Pod"):
            annotations = body["metadata"]["annotations"]
            for npu in annotations["semantide.io/npus"].split(","):
                held[annotations["semantide.io/node"], npu] = held.get((annotations["semantide.io/node"], npu), 0) + 1
        if max(held.values()) > 1:
            wrong.append("an NPU has two holders")
        decided, took = objects.round()
        seconds["steady"].append(took)
        if any(isinstance(action, (Create, DeletePod)) for actions in decided.actions.values() for action in actions):
            wrong.append("a round without news changed pods")
        gangs = sorted({body["metadata"]["labels"]["semantide.io/job"] for body in objects.cache.bodies("Pod")})[::20]
        for body in objects.cache.bodies("Pod"):
            labels = body["metadata"]["labels"]
            if labels["semantide.io/job"] in gangs and labels["semantide.io/rank"] == "0":
                objects.cache.drop(body)
        decided, took = objects.round()
        seconds["lost"].append(took)
        touched = {key.rsplit("/", 1)[1] for key, actions in decided.actions.items() if any(isinstance(action, (PatchStatus, DeletePod)) for action in actions)}
        if not set(gangs) <= touched:
            wrong.append("a gang that lost a pod was left alone")
    (before, seen_whole), (after, seen) = (kept(keep, options.kept_nodes, options.kept_pods) for keep in (whole, extract_of))
    if seen != seen_whole:
        wrong.append("nodes look different in what is kept of objects")
    measures: dict[str, dict[str, Any]] = {
        f"round_{name}": {"value": statistics.median(values), "unit": "s", "better": "lower", "at_least": 60, "runs": options.runs}
        for name, values in seconds.items()
    }
    of = f"of {options.kept_nodes:,} nodes and {options.kept_pods:,} pods"
    measures["kept_megabytes"] = {
        "value": after / 2**20,
        "unit": "MiB",
        "better": "lower",
        "baseline": f"whole: {before / 2**20:.0f} MiB {of}",
        "at_least": 200,
        "runs": 1,
    }
    measures["kept_ratio"] = {"value": before / after, "unit": "ratio", "better": "higher", "baseline": f"whole objects {of}", "at_least": 4, "runs": 1}
    return finish("reconcile", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
