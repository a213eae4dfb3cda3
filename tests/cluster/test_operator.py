"""The operator on a real control plane, killed again and again while jobs are made, run, fail, pause and go."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

import pytest

from .api import Api, Object, until
from .job_play import ENDS, JOB, KINDS, holds, job, left_behind
from .operator_process import OperatorProcess
from .simulated_nodes import SimulatedNodes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

_NUM_JOBS = int(os.environ.get("SEMANTIDE_CLUSTER_JOBS", "50"))
_PATIENCE = 1800.0


def test_jobs_end_as_they_must_however_often_the_operator_dies(operator: OperatorProcess, played: SimulatedNodes, api: Api, namespace: str) -> None:
    draw = random.Random(5)
    kinds = [KINDS[number % len(KINDS)] for number in range(_NUM_JOBS)]
    draw.shuffle(kinds)
    waiting = [f"{kind}-{number:03}" for number, kind in enumerate(kinds)]
    expected = {name: ENDS[name.partition("-")[0]] for name in waiting}
    paused: dict[str, bool] = {}
    kills, changes_until_kill, seen = 0, draw.randint(1, 40), set[str]()
    begin = time.monotonic()
    while True:
        assert time.monotonic() - begin < _PATIENCE, _state(api, namespace, operator)
        for name in [waiting.pop() for _ in range(min(len(waiting), draw.randint(0, 4)))]:
            api.create("npujobs", job(name, draw), namespace)
        found = {one["metadata"]["name"]: one for one in api.list("npujobs", namespace)}
        for name in found:
            if name.startswith("gone") and draw.random() < 0.1:
                api.delete("npujobs", name, namespace)
            # Suspended once at some moment, resumed at some later one.
            if name.startswith("paused") and paused.get(name) is not False and draw.random() < 0.2 and _phase(found[name]) not in ("Succeeded", "Failed"):
                paused[name] = name not in paused
                api.patch("npujobs", name, {"spec": {"suspend": paused[name]}}, namespace)
        pods = api.list("pods", namespace)
        assert not (wrong := holds(pods)), wrong
        fresh = {one["metadata"]["uid"] + one["metadata"]["resourceVersion"] for one in [*found.values(), *pods]}
        changes, seen = len(fresh - seen), fresh
        changes_until_kill -= changes
        if not waiting and all(_phase(found[name]) == end if end else name not in found for name, end in expected.items() if end is None or name in found):
            break
        operator.check()
        if changes_until_kill <= 0:
            operator.kill()
            operator.start()
            kills, changes_until_kill = kills + 1, draw.randint(1, 40)
        time.sleep(0.1)
    assert kills >= 3, "the operator was hardly killed: nothing was shown"
    assert {name: _phase(one) for name, one in found.items()} == {name: end for name, end in expected.items() if end}
    assert all(one["status"].get("restarts", 0) >= 1 for name, one in found.items() if name.startswith(("flaky", "bad")))
    until(lambda: not left_behind(api, namespace), "nothing is left of jobs that are gone")
    _nothing_moves_when_pods_are_collected(api, namespace, found)
    print(f"{_NUM_JOBS} jobs, the operator was killed {kills} times, {time.monotonic() - begin:.0f} s; ends: {Counter(expected.values())}")


def _nothing_moves_when_pods_are_collected(api: Api, namespace: str, ended: dict[str, Object]) -> None:
    for pod in api.list("pods", namespace):
        api.delete("pods", pod["metadata"]["name"], namespace, grace_seconds=0)
    # A job that is made now is seen by the operator after all of that.
    api.create("npujobs", job("good-last", random.Random(0)), namespace)
    until(lambda: _phase(api.get("npujobs", "good-last", namespace)) == "Succeeded", "a job after them")
    after = {one["metadata"]["name"]: _phase(one) for one in api.list("npujobs", namespace)}
    assert after == {name: _phase(one) for name, one in ended.items()} | {"good-last": "Succeeded"}
    assert not [pod for pod in api.list("pods", namespace) if pod["metadata"]["labels"].get(JOB) != "good-last"]


def _phase(job: Object) -> str:
    return str(job.get("status", {}).get("phase", ""))


def _state(api: Api, namespace: str, operator: OperatorProcess) -> str:
    jobs = {one["metadata"]["name"]: (_phase(one), one.get("status", {}).get("message")) for one in api.list("npujobs", namespace)}
    return f"{jobs}\n{operator.log()[-6000:]}"
