"""Devices under dynamic resource allocation: what drivers offer (ResourceSlices) and what is given to whom (ResourceClaims). Pure.

Nobody knows which devices a new pod will get before its claim is allocated: until then the operator's own choice stands for them, and only their number
counts where somebody else was given those very devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from semantide.operators.device_health import device_indices
from semantide.operators.profiles import PROFILES

Body = Mapping[str, Any]


@dataclass(frozen=True)
class ClaimedDevices:
    """One node's devices of one driver. ``sick`` are those that are tainted, ``held`` says which pod (``namespace/name``) has which."""

    driver: str
    indices: tuple[int, ...]
    sick: frozenset[int] = frozenset()
    held: Mapping[int, str] = field(default_factory=dict)

    @property
    def resource_name(self) -> str:
        """The name by which placement knows such devices."""
        return next(profile.resource_name for profile in PROFILES.values() if profile.device_class == self.driver)


def claimed_devices(slices: Iterable[Body], claims: Iterable[Body]) -> dict[str, ClaimedDevices]:
    """The devices of every node that has some."""
    classes = {profile.device_class for profile in PROFILES.values() if profile.device_class}
    found: dict[str, tuple[str, dict[int, bool]]] = {}
    where: dict[tuple[str, str, str], tuple[str, int]] = {}
    for spec in _newest(slices):
        node, driver, pool = spec.get("nodeName"), str(spec.get("driver", "")), _pool(spec)
        if not node or driver not in classes:
            continue
        _, devices = found.setdefault(node, (driver, {}))
        for device in spec.get("devices") or ():
            index = _index(device, len(devices))
            where[driver, pool, device["name"]] = node, index
            taints = device.get("taints") or (device.get("basic") or {}).get("taints") or ()
            devices[index] = any(taint.get("effect") in ("NoSchedule", "NoExecute") for taint in taints)
    held: dict[str, dict[int, str]] = {}
    for body in claims:
        holder = _holder(body)
        for result in (((body.get("status") or {}).get("allocation") or {}).get("devices") or {}).get("results") or ():
            at = where.get((str(result.get("driver", "")), str(result.get("pool", "")), str(result.get("device", ""))))
            if at is not None and not result.get("adminAccess"):  # who only watches a device takes it from nobody
                held.setdefault(at[0], {})[at[1]] = holder
    return {
        node: ClaimedDevices(driver, tuple(sorted(devices)), frozenset(index for index, sick in devices.items() if sick), held.get(node, {}))
        for node, (driver, devices) in found.items()
    }


def _newest(slices: Iterable[Body]) -> list[Body]:
    """What slices say, without those of an earlier generation of their pool."""
    specs = [body.get("spec") or {} for body in slices]
    newest: dict[tuple[str, str], int] = {}
    for spec in specs:
        key = str(spec.get("driver", "")), _pool(spec)
        newest[key] = max(newest.get(key, 0), _generation(spec))
    return [spec for spec in specs if _generation(spec) == newest[str(spec.get("driver", "")), _pool(spec)]]


def _pool(spec: Body) -> str:
    return str((spec.get("pool") or {}).get("name", ""))


def _generation(spec: Body) -> int:
    return int((spec.get("pool") or {}).get("generation") or 0)


def _index(device: Body, otherwise: int) -> int:
    attributes = device.get("attributes") or (device.get("basic") or {}).get("attributes") or {}
    said = next((value["int"] for key, value in attributes.items() if key.rsplit("/", 1)[-1] == "index" and "int" in value), None)
    return int(said) if said is not None else next(iter(device_indices(device["name"])), otherwise)


def _holder(claim: Body) -> str:
    """Who has what was claimed: the pod that it is reserved for, or the one that it was made for and that will be; else the claim stands for its user."""
    metadata, status = claim.get("metadata") or {}, claim.get("status") or {}
    users = [user["name"] for user in status.get("reservedFor") or () if user.get("resource", "pods") == "pods"]
    owners = [owner["name"] for owner in metadata.get("ownerReferences") or () if owner.get("kind") == "Pod"]
    return f"{metadata.get('namespace', 'default')}/{next(iter([*users, *owners]), metadata.get('name', ''))}"
