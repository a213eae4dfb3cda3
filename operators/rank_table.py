"""The rank table of a gang: which NPU of which server is which rank, in the form that Ascend's HCCL reads, and the address of the first rank.

    rings-config-<gang>   hccl.json        {status, version, server_count, server_list[{server_id, device[{device_id, device_ip, rank_id}]}]}, and on super-pods
                                           {..., device[{..., super_device_id}], super_pod_list[{super_pod_id, server_list[{server_id}]}]}
                          master-address   where the other ranks find the first one

The ConfigMap is made once every pod has an address, one for each gang: a table of an earlier gang is never read by a later one. Where nobody says which devices
a pod has (its plugin or its driver chose them), there is no ``hccl.json`` in it: HCCL asks around by itself then.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import JSONDecodeError, dumps, loads
from typing import Any

from semantide.operators.device_health import device_indices
from semantide.operators.pod_template import owned, owner_label
from semantide.operators.pods import REAL_ANNOTATION, Pod
from semantide.operators.profiles import profile_of
from semantide.operators.resources import NPUJob
from semantide.operators.settings import OperatorSettings

RANKS_FOLDER = "/etc/semantide/ranks"
TABLE_FILE = f"{RANKS_FOLDER}/hccl.json"
ADDRESS_FILE = f"{RANKS_FOLDER}/master-address"
TOLD_ANNOTATION = "semantide.io/ranks"
# What Ascend's device plugin says of the devices that it gave a pod.
_CONFIGURATION = "ascend.kubectl.kubernetes.io/ascend-910-configuration"


def table_name(gang: str) -> str:
    """The ConfigMap of a gang, by the common part of its pods' names."""
    return f"rings-config-{gang}"


def ranks_per_pod(job: NPUJob) -> int:
    """Processes in one pod: one per NPU, a single one without NPUs."""
    return max(1, job.spec.npus_per_pod)


def reads_table(job: NPUJob, pods: int) -> bool:
    """Whether the processes of a gang of so many pods are told of a table: several of them on Ascend's NPUs."""
    return profile_of(job.spec.profile).name == "ascend" and pods * job.spec.npus_per_pod > 1


def has_ranks(job: NPUJob, pods: int) -> bool:
    """Whether a gang of so many pods gets the ConfigMap: who makes its pods, who makes the ConfigMap and who takes it away go by this."""
    return pods > 1 or reads_table(job, pods)


def rank_table(pods: Sequence[Pod], ranks_per_pod: int, resource_name: str = "", *, assigned: bool = True) -> dict[str, Any] | None:
    """The table of pods in order of rank, None where the devices of one are not known; ``assigned``: they have those that the operator chose."""
    servers: list[dict[str, Any]] = []
    super_pods: dict[str, list[dict[str, str]]] = {}
    for pod in pods:
        configuration = _configuration(pod)
        devices = _devices(configuration) or [{"device_id": str(npu)} for npu in _given(pod, resource_name, assigned=assigned)]
        if len(devices) < ranks_per_pod:
            return None
        first = pod.rank * ranks_per_pod
        server = str(configuration.get("server_id") or pod.host_address or pod.node)
        servers.append(
            {
                "server_id": server,
                "container_ip": pod.address,
                "device": [
                    {**{key: str(device[key]) for key in ("device_id", "device_ip", "super_device_id") if device.get(key)}, "rank_id": str(first + place)}
                    for place, device in enumerate(sorted(devices, key=lambda device: int(device["device_id"])))
                ],
            }
        )
        if (super_pod := _super_pod(configuration)) and all(device.get("super_device_id") for device in devices):
            super_pods.setdefault(super_pod, []).append({"server_id": server})
    table: dict[str, Any] = {"status": "completed", "version": "1.0", "server_count": str(len(servers)), "server_list": servers}
    if sum(map(len, super_pods.values())) == len(servers):
        table |= {"version": "1.2", "super_pod_list": [{"super_pod_id": name, "server_list": inside} for name, inside in super_pods.items()]}
    return table


def rank_table_manifest(job: NPUJob, gang: str, pods: Sequence[Pod], settings: OperatorSettings) -> dict[str, Any]:
    """The ConfigMap to create for pods in order of rank."""
    data = {"master-address": pods[0].address}
    if reads_table(job, len(pods)):
        name = job.spec.resource_name or profile_of(job.spec.profile).resource_name
        assigned = job.spec.scheduler == "own" and settings.assign_devices and not settings.dynamic_resources
        table = rank_table(pods, ranks_per_pod(job), name, assigned=assigned)
        data |= {"hccl.json": dumps(table)} if table is not None else {}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": owned(job, table_name(gang), owner_label(job)), "data": data}


def _given(pod: Pod, resource_name: str, *, assigned: bool) -> tuple[int, ...]:
    """The devices of a pod whose plugin does not describe them: those that it says it gave, that we chose, or that the pod's scheduler did."""
    given = device_indices(pod.annotations.get(REAL_ANNOTATION, ""))
    return given or (pod.npus if assigned else device_indices(pod.annotations.get(resource_name, "")))


def _super_pod(configuration: dict[str, Any]) -> str:
    """The super-pod that the plugin names; it says a number below 0 where there is none."""
    said = str(configuration.get("super_pod_id", ""))
    return said if said.isdigit() else ""


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
