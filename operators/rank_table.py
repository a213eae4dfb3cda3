"""The rank table of a gang: which NPU of which server is which rank, in the form that Ascend's HCCL reads, and the address of the first rank.

    rings-config-<gang>   hccl.json        {status, version, server_count, server_list[{server_id, device[{device_id, device_ip, rank_id}]}]}
                          master-address   where the other ranks find the first one

The ConfigMap is made once every pod has an address, one for each gang: a table of an earlier gang is never read by a later one.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import JSONDecodeError, dumps, loads
from typing import Any

from semantide.operators.pod_template import owned, owner_label
from semantide.operators.pods import Pod
from semantide.operators.resources import NPUJob

RANKS_FOLDER = "/etc/semantide/ranks"
TABLE_FILE = f"{RANKS_FOLDER}/hccl.json"
ADDRESS_FILE = f"{RANKS_FOLDER}/master-address"
TOLD_ANNOTATION = "semantide.io/ranks"
# What Ascend's device plugin says of the devices that it gave a pod.
_CONFIGURATION = "ascend.kubectl.kubernetes.io/ascend-910-configuration"


def table_name(gang: str) -> str:
    """The ConfigMap of a gang, by the common part of its pods' names."""
    return f"rings-config-{gang}"


def rank_table(pods: Sequence[Pod], ranks_per_pod: int) -> dict[str, Any]:
    """The table of pods in order of rank."""
    servers: list[dict[str, Any]] = []
    for pod in pods:
        configuration = _configuration(pod)
        devices = _devices(configuration) or [{"device_id": str(npu)} for npu in pod.npus]
        first = pod.rank * ranks_per_pod
        servers.append(
            {
                "server_id": configuration.get("server_id") or pod.host_address or pod.node,
                "container_ip": pod.address,
                "device": [
                    {**{key: device[key] for key in ("device_id", "device_ip") if device.get(key)}, "rank_id": str(first + place)}
                    for place, device in enumerate(sorted(devices, key=lambda device: int(device["device_id"])))
                ],
            }
        )
    return {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": servers}


def rank_table_manifest(job: NPUJob, gang: str, pods: Sequence[Pod], ranks_per_pod: int) -> dict[str, Any]:
    """The ConfigMap to create for pods in order of rank."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": owned(job, table_name(gang), owner_label(job)),
        "data": {"hccl.json": dumps(rank_table(pods, ranks_per_pod)), "master-address": pods[0].address},
    }


def _configuration(pod: Pod) -> dict[str, Any]:
    try:
        read = loads(pod.annotations.get(_CONFIGURATION) or "{}")
    except JSONDecodeError:
        return {}
    return read if isinstance(read, dict) else {}


def _devices(configuration: dict[str, Any]) -> list[dict[str, Any]]:
    """The devices that the plugin names; none where one of them cannot be read."""
    devices = configuration.get("devices")
    sound = isinstance(devices, list) and all(isinstance(device, dict) and str(device.get("device_id", "")).isdigit() for device in devices)
    return devices if isinstance(devices, list) and sound else []
