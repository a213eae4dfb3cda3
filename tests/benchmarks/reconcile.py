"""One round of the operator over many jobs: how long it takes to read what is there and to decide, without the API server.

    python tests/benchmarks/reconcile.py [--quick] [--json] [--jobs 1000] [--nodes 1000]

arrive   all jobs are new; nineteen of twenty are placed, the others ask for more than a node has and are told so
steady   what was placed runs; nothing is to be done, and nothing may be
lost     a pod of every twentieth gang is gone: these gangs and only these are told to stop
What a round decides is carried out on the objects in memory (no pod is bound or run by anybody else).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import Any

from stopwatch import finish  # type: ignore[import-not-found]

from semantide.operators.actions import AnnotatePod, Create, DeletePod, PatchStatus
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.threads = 1
    if options.quick:
        options.runs = 2
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
    measures = {
        f"round_{name}": {"value": statistics.median(values), "unit": "s", "better": "lower", "at_least": 60, "runs": options.runs}
        for name, values in seconds.items()
    }
    return finish("reconcile", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
