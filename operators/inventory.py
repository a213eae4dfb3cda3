"""Nodes for placement, from Kubernetes' own objects: nodes, pods, device-info ConfigMaps and, where devices are claimed, resource slices and claims.

Counting is careful: a pod that the operator created holds its NPUs from then on, bound or not, and a foreign pod whose devices nobody
names is given those that cost the least, so that what is called free really is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from semantide.operators import rings
from semantide.operators.claimed_devices import ClaimedDevices
from semantide.operators.device_health import CONFIG_MAP_PREFIX, DeviceHealth, device_health, device_indices
from semantide.operators.node import Node, Taint
from semantide.operators.pod_resources import asked
from semantide.operators.pods import REAL_ANNOTATION
from semantide.operators.profiles import PROFILES, profile_of_resource
from semantide.operators.quantities import quantity, whole
from semantide.operators.resources import NODE_ANNOTATION, NPUS_ANNOTATION, SLOW_ANNOTATION

Body = Mapping[str, Any]

SUPER_POD_LABELS = ("huawei.com/topotree.superpodid", "nvidia.com/gpu.clique", "topology.kubernetes.io/zone")
RACK_LABELS = ("huawei.com/topotree.rackid", "topology.kubernetes.io/rack")
DEVICE_NAMES = frozenset(profile.resource_name for profile in PROFILES.values() if profile.resource_name)
MOST_DEVICES = 128  # of one kind in a node; what there is more of (shares of memory, handles of /dev/kvm) is not one by one somebody's
GONE_SECONDS = 60.0  # a node not ready for so long has lost its pods
_NO_DEVICES = ClaimedDevices("", ())
_STAYING = ("DaemonSet", "Node", "StatefulSet", "ReplicaSet", "ReplicationController")  # whose pods are there for good; those of Node are static ones
_SLOWED = 1.15  # step time assumed of a node with an NPU in sub-health


@dataclass(frozen=True)
class Use:
    """What one pod takes of its node. ``npus`` None: so many that nobody names; ``stays``: it does not end by itself, and nobody here ends it."""

    holder: str
    millicores: int
    memory_bytes: int
    count: int
    npus: tuple[int, ...] | None
    stays: bool = False


def _metadata(body: Body) -> Body:
    found: Body = body.get("metadata") or {}
    return found


def label_of(body: Body) -> str:
    """Kind, namespace and name, in words."""
    metadata = _metadata(body)
    return f"{body.get('kind', 'object')} {'/'.join(part for part in (metadata.get('namespace', ''), metadata.get('name', '?')) if part)}"


def _first(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


def node_of(pod: Body) -> str:
    """The node a pod is on or was put on by the operator; empty when neither."""
    return str((pod.get("spec") or {}).get("nodeName") or (_metadata(pod).get("annotations") or {}).get(NODE_ANNOTATION) or "")


def holds_room(pod: Body) -> bool:
    """Whether a pod takes room on its node: it has one and has not ended."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed") and bool(node_of(pod))


def use_of(pod: Body, resource_names: Collection[str]) -> Use:
    """What a pod takes."""
    spec, metadata = pod.get("spec") or {}, _metadata(pod)
    devices = {name: asked(spec, name) for name in resource_names}
    name = max(devices, key=lambda name: devices[name], default="")
    count = devices.get(name, 0)
    annotations = metadata.get("annotations") or {}
    said = annotations.get(REAL_ANNOTATION) or annotations.get(NPUS_ANNOTATION) or annotations.get(name) or ""
    npus = device_indices(said)
    return Use(
        holder=f"{metadata.get('namespace', 'default')}/{metadata.get('name', '')}",
        millicores=asked(spec, "cpu", 1000),
        memory_bytes=asked(spec, "memory"),
        count=max(count, len(npus)) if NPUS_ANNOTATION in annotations else count,
        npus=npus if npus and len(npus) >= count else None,
        stays=any(owner.get("controller") and owner.get("kind") in _STAYING for owner in metadata.get("ownerReferences") or ()),
    )


def _holders(uses: Iterable[Use], capacity: int, ring: int, claimed: Mapping[int, str]) -> dict[int, str]:
    """Who holds which device. What a claim says stands; a pod whose devices others have been given holds as many others, for so many it was promised."""
    held = dict(claimed)
    users = set(claimed.values())
    unnamed: list[Use] = []
    for use in uses:
        if use.holder in users:
            continue  # a claim says better than the pod's own annotation what it has
        if use.npus is None:
            unnamed += [use] if use.count else []
            continue
        own = [npu for npu in use.npus if npu < capacity and npu not in held]
        held.update(dict.fromkeys(own, use.holder))
        taken = sum(npu in claimed for npu in use.npus)
        unnamed += [replace(use, count=taken, npus=None)] if taken else []
    for use in sorted(unnamed, key=lambda use: (-use.count, use.holder)):
        free = ((1 << capacity) - 1) & ~rings.mask_of(list(held))
        chosen = rings.indices_of(rings.choose(free, capacity, ring, use.count)) or rings.indices_of(free)[: use.count]
        held.update(dict.fromkeys(chosen, use.holder))
    return held


def ready(body: Body) -> bool:
    """Whether a node answers, as the cluster's controller says."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    return any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)


def _readiness(body: Body, silent_seconds: float, gone_seconds: float) -> tuple[str, bool]:
    """Why no new pod may come, and whether the pods that are there count as lost."""
    if not ready(body):
        return "not ready", silent_seconds >= gone_seconds
    if _metadata(body).get("deletionTimestamp"):
        return "being deleted", False
    return ("cordoned" if (body.get("spec") or {}).get("unschedulable") else ""), False


def read_nodes(
    nodes: Iterable[Body],
    pods: Iterable[Body],
    config_maps: Iterable[Body] = (),
    *,
    resource_names: Collection[str] = DEVICE_NAMES,
    own_names: Collection[str] = DEVICE_NAMES,
    claimed: Mapping[str, ClaimedDevices] | None = None,
    silence: Mapping[str, float] | None = None,
    gone_seconds: float = GONE_SECONDS,
    unread: dict[str, Exception] | None = None,
) -> list[Node]:
    """The nodes, as the API server's objects describe them.

    ``resource_names`` are the names that devices are counted by here; a node that has devices of ``own_names`` is counted by these, whatever else it has. ``claimed``: under dynamic resource allocation a node has the devices in it and no others.
    ``silence`` is how long nodes have been seen not ready, seconds. One object that cannot be read must not stop the rest: what is wrong with it goes into
    ``unread``, a pod counts as none, and no new pod comes to a node.
    """
    faults = {} if unread is None else unread
    there: dict[str, list[Body]] = {}
    for pod in pods:
        try:
            if holds_room(pod):
                there.setdefault(node_of(pod), []).append(pod)
        except Exception as error:
            faults[label_of(pod)] = error
    health: dict[str, DeviceHealth] = {}
    for body in config_maps:
        if (name := _metadata(body).get("name", "")).startswith(CONFIG_MAP_PREFIX):
            health[name.removeprefix(CONFIG_MAP_PREFIX)] = device_health(body)
    result = []
    for body in nodes:
        name = _metadata(body)["name"]
        devices = None if claimed is None else claimed.get(name, _NO_DEVICES)
        readiness = _readiness(body, (silence or {}).get(name, 0.0), gone_seconds)
        try:
            result.append(_node(body, there.get(name, []), faults, health.get(name, DeviceHealth()), resource_names, own_names, devices, readiness))
        except Exception as error:
            faults[label_of(body)] = error
            result.append(Node(name, unusable="not to be read", gone=readiness[1]))
    return result


def _counted_name(total: Body, names: Collection[str], own: Collection[str]) -> str:
    """The name that a node's devices are counted by; empty where it has none."""
    offered = [name for name in names if 0 < quantity(total.get(name, 0)) <= MOST_DEVICES]
    return max(offered, key=lambda name: (name in own, quantity(total[name]), name), default="")


def _uses(pods: Iterable[Body], names: Collection[str], faults: dict[str, Exception]) -> Iterator[Use]:
    for pod in pods:
        try:
            yield use_of(pod, names)
        except Exception as error:
            faults[label_of(pod)] = error


def _node(
    body: Body,
    pods: list[Body],
    faults: dict[str, Exception],
    health: DeviceHealth,
    resource_names: Collection[str],
    own_names: Collection[str],
    devices: ClaimedDevices | None,
    readiness: tuple[str, bool],
) -> Node:
    metadata, status = _metadata(body), body.get("status") or {}
    labels, annotations = metadata.get("labels") or {}, metadata.get("annotations") or {}
    # Allocatable leaves out what is sick, capacity does not: indices run over the latter.
    total, usable = status.get("capacity") or {}, status.get("allocatable") or status.get("capacity") or {}
    name = _counted_name(total, resource_names, own_names) if devices is None else ""
    # What a pod has of anything else is no device of this node.
    uses = list(_uses(pods, resource_names if devices is not None else [name] if name else (), faults))
    capacity = int(quantity(total.get(name, 0))) if name else 0
    sick = set(health.sick)
    if devices is not None and devices.indices:
        name, capacity = devices.resource_name, devices.indices[-1] + 1
        sick |= devices.sick | (set(range(capacity)) - set(devices.indices))
    ring = profile_of_resource(name).ring_size(labels)
    held = _holders(uses, capacity, ring, devices.held if devices is not None else {})
    missing = capacity - int(quantity(usable.get(name, capacity))) - len(sick) if name and devices is None else 0
    if missing > 0:  # the plugin says how many are sick, and nobody which: those that nobody holds, from the end
        sick |= set([npu for npu in reversed(range(capacity)) if npu not in held and npu not in sick][:missing])
    try:
        said = float(annotations.get(SLOW_ANNOTATION, 1.0))
    except ValueError:
        said = 1.0
    slow = max(1.0, said) if math.isfinite(said) else 1.0
    staying = [use for use in uses if use.stays]
    keepers = {use.holder for use in staying}
    return Node(
        name=metadata["name"],
        capacity=capacity,
        ring_size=ring,
        resource_name=name,
        healthy=((1 << capacity) - 1) & ~rings.mask_of(list(sick)),
        lost=rings.mask_of(list(health.lost)),
        held=held,
        super_pod=_first(labels, SUPER_POD_LABELS[:2]) or health.super_pod or _first(labels, SUPER_POD_LABELS[2:]),
        rack=_first(labels, RACK_LABELS),
        labels=labels,
        taints=tuple(
            Taint(taint["key"], taint.get("value") or "", taint.get("effect") or "NoSchedule") for taint in (body.get("spec") or {}).get("taints") or ()
        ),
        slow=max(slow, _SLOWED) if health.slow else slow,
        unusable=readiness[0],
        gone=readiness[1],
        millicores=(millicores := whole(usable.get("cpu", 0), 1000)),
        memory_bytes=(memory_bytes := whole(usable.get("memory", 0))),
        free_millicores=millicores - sum(use.millicores for use in uses),
        free_memory_bytes=memory_bytes - sum(use.memory_bytes for use in uses),
        free_pods=quantity(usable.get("pods", 110)) - len(uses),
        kept=rings.mask_of([npu for npu, holder in held.items() if holder in keepers]),
        kept_millicores=sum(use.millicores for use in staying),
        kept_memory_bytes=sum(use.memory_bytes for use in staying),
    )
