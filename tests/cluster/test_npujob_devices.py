"""NPUJobs on a real kubelet with a device plugin: pods get devices of their own, see what the plugin gives, and wait while there are too few sound ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .api import Api, Object, until
from .device_plugin import DRIVER, DevicePlugin
from .docker_engine import BASE_IMAGE
from .job_play import JOB, RESOURCE
from .kubelet import Kubelet
from .operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

# A rank that waits until it was told where the first one is, and leaves what it saw as its last words.
SCRIPT = f"""
import json, os, pathlib, time
told = pathlib.Path(os.environ["SEMANTIDE_MASTER_ADDRESS_FILE"])
while not told.exists():
    time.sleep(0.2)
driver = pathlib.Path({DRIVER!r}) / "version.info"
names = ("ASCEND_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
seen = {{name: os.environ.get(name, "") for name in names}}
seen |= {{"master": told.read_text(), "driver": driver.read_text(), "table": os.path.exists(os.environ["RANK_TABLE_FILE"])}}
pathlib.Path("/dev/termination-log").write_text(json.dumps(seen))
"""


def npujob(name: str, pods: int, npus: int) -> Object:
    """A gang that asks for the plugin's devices."""
    spec = {"kind": "train", "image": BASE_IMAGE, "command": ["python3", "-c", SCRIPT], "worldSize": pods, "npusPerPod": npus, "profile": "ascend"}
    return {
        "apiVersion": "semantide.io/v1alpha1",
        "kind": "NPUJob",
        "metadata": {"name": name},
        "spec": spec | {"resourceName": RESOURCE, "restartPolicy": {"limit": 0}, "template": {"imagePullPolicy": "IfNotPresent"}},
    }


def _ended(api: Api, namespace: str, name: str, operator: OperatorProcess) -> Object:
    def phase() -> str:
        operator.check()
        said = api.get("npujobs", name, namespace).get("status", {}).get("phase", "")
        return said if said in ("Succeeded", "Failed") else ""

    until(phase, f"{name} has ended", 600)
    status: Object = api.get("npujobs", name, namespace)["status"]
    assert status["phase"] == "Succeeded", status
    return status


def _last_words(api: Api, namespace: str, name: str) -> list[dict[str, Any]]:
    """What the pods of a job have seen, by rank."""
    pods = api.list("pods", namespace, f"{JOB}={name}")
    said = [json.loads(pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"]) for pod in pods]
    return sorted(said, key=lambda seen: int(seen["RANK"]))


def test_the_pods_of_an_npujob_get_devices_of_their_own(
    real_api: Api, real_namespace: str, real_operator: OperatorProcess, npus: DevicePlugin, nodes: dict[str, Kubelet]
) -> None:
    real_api.create("npujobs", npujob("train", pods=2, npus=2), real_namespace)
    status = _ended(real_api, real_namespace, "train", real_operator)
    assert {place["node"] for place in status["placement"]} <= set(nodes) and len(status["placement"]) == 2
    first, second = _last_words(real_api, real_namespace, "train")
    held = [seen["ASCEND_VISIBLE_DEVICES"].split(",") for seen in (first, second)]
    assert [len(one) for one in held] == [2, 2] and len({*held[0], *held[1]}) == 4, "the kubelet gives nobody what somebody has"
    assert [(seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_WORLD_SIZE"]) for seen in (first, second)] == [("0", "4", "2"), ("2", "4", "2")]
    assert first["master"] == second["master"] and first["driver"] == second["driver"] == "of the plugin"
    assert not first["table"] and not second["table"], "nobody said which devices these are, so no table says it either"


def test_an_npujob_waits_while_the_plugin_has_too_few_sound_devices(
    real_api: Api, real_namespace: str, real_operator: OperatorProcess, npus: DevicePlugin
) -> None:
    npus.set_health(5, False)
    until(lambda: any(node["status"]["allocatable"].get(RESOURCE) == "7" for node in real_api.list("nodes")), "7 NPUs are offered")
    real_api.create("npujobs", npujob("wide", pods=2, npus=4), real_namespace)

    def waits() -> str:
        real_operator.check()
        said = real_api.get("npujobs", "wide", real_namespace).get("status", {})
        return str(said.get("message", "")) if said.get("phase") == "Pending" else ""

    message = until(waits, "it says why it waits")
    assert RESOURCE in message and "unhealthy" in message and not real_api.list("pods", real_namespace)
    npus.set_health(5, True)
    _ended(real_api, real_namespace, "wide", real_operator)
    held = [seen["ASCEND_VISIBLE_DEVICES"].split(",") for seen in _last_words(real_api, real_namespace, "wide")]
    assert sorted(int(npu) for one in held for npu in one) == list(range(8))
