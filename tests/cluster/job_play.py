"""Jobs that are made, paused and deleted at random while their pods end as the jobs' names say; and the watch over what must hold at every moment.

good     all ranks end well                          -> Succeeded
flaky    the first gang loses its first rank          -> Succeeded, restarted
bad      every gang loses its first rank              -> Failed after its restarts
late     never ends, has a deadline                   -> Failed
paused   suspended while it waits or runs, resumed    -> Succeeded
gone     deleted at some moment                       -> not there, nor anything of it
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict

from .api import Api, Object
from .simulated_nodes import Fate

RESOURCE = "huawei.com/Ascend910"
JOB, ATTEMPT, RANK, NPUS = "semantide.io/job", "semantide.io/attempt", "semantide.io/rank", "semantide.io/npus"
MANAGED = "app.kubernetes.io/managed-by=semantide-operator"
KINDS = ("good", "good", "good", "flaky", "bad", "late", "paused", "gone")
ENDS = {"good": "Succeeded", "flaky": "Succeeded", "paused": "Succeeded", "bad": "Failed", "late": "Failed", "gone": None}
_RUN_SECONDS = 3.0


class Fates:
    """How each pod ends."""

    def __init__(self) -> None:
        self._first, self._lock = dict[str, int](), threading.Lock()

    def __call__(self, pod: Object) -> Fate:
        labels, seconds = pod["metadata"].get("labels", {}), random.Random(pod["metadata"]["uid"]).uniform(0, _RUN_SECONDS)
        name, attempt = labels.get(JOB, ""), int(labels.get(ATTEMPT, "0"))
        with self._lock:
            first = self._first.setdefault(name, attempt)
        if name.startswith(("late", "stay")) or not name:
            return Fate(exit_code=None)
        if name.startswith("bad") or (name.startswith("flaky") and attempt == first):
            # One rank fails; the others would wait for it for ever.
            return Fate(seconds, 1) if labels.get(RANK) == "0" else Fate(exit_code=None)
        return Fate(seconds)


def job(name: str, draw: random.Random) -> Object:
    """An NPUJob of a random size."""
    world, npus = draw.choice([(1, 1), (1, 2), (1, 4), (1, 8), (2, 4), (2, 8), (4, 8), (8, 1)])
    spec: Object = {"kind": "train", "image": "nothing", "profile": "ascend", "worldSize": world, "npusPerPod": npus, "priority": draw.randint(0, 3)}
    spec["restartPolicy"] = {"limit": 1 if name.startswith("bad") else 20, "backoffSeconds": 0.1}
    if name.startswith("late"):
        spec["deadlineSeconds"] = draw.randint(1, 5)
    return {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "metadata": {"name": name}, "spec": spec}


def holds(pods: list[Object]) -> list[str]:
    """What is wrong with the pods at one moment; nothing should be."""
    taken: dict[tuple[str, str], str] = {}
    attempts: dict[str, set[str]] = defaultdict(set)
    ranks: set[tuple[str, str]] = set()
    wrong = []
    for pod in pods:
        meta, node = pod["metadata"], pod["spec"].get("nodeName", "")
        labels = meta.get("labels", {})
        if pod["status"].get("phase") in ("Succeeded", "Failed") or JOB not in labels:
            continue
        for npu in filter(None, meta.get("annotations", {}).get(NPUS, "").split(",")):
            if node and (other := taken.setdefault((node, npu), meta["name"])) != meta["name"]:
                wrong.append(f"NPU {npu} of {node} is held by {other} and by {meta['name']}")
        if "deletionTimestamp" in meta:
            continue
        attempts[labels[JOB]].add(labels.get(ATTEMPT, ""))
        if (place := (labels[JOB], labels.get(RANK, ""))) in ranks:
            wrong.append(f"rank {place[1]} of {place[0]} exists twice")
        ranks.add(place)
    return wrong + [f"gangs {sorted(found)} of {name} live at the same time" for name, found in attempts.items() if len(found) > 1]


def left_behind(api: Api, namespace: str) -> list[str]:
    """What the operator has made for jobs that are not there any more."""
    there = {job["metadata"]["name"] for job in api.list("npujobs", namespace)}
    found = [(plural, one) for plural in ("pods", "configmaps", "services") for one in api.list(plural, namespace, MANAGED)]
    return [f"{plural}/{one['metadata']['name']}" for plural, one in found if one["metadata"].get("labels", {}).get(JOB) not in there]
