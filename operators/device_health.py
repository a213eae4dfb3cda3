"""Health of a node's NPUs as its device plugin writes it into the ConfigMap ``mindx-dl-deviceinfo-<node>``.

{"DeviceInfo": {"DeviceList": {"huawei.com/Ascend910-Unhealthy": "Ascend910-4", "huawei.com/Ascend910-NetworkUnhealthy": "",
                               "huawei.com/Ascend910-Fault": "[{npu_name, fault_handling, ...}]"}, "UpdateTime": 1744182144}, "SuperPodID": -2, ...}
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG_MAP_PREFIX = "mindx-dl-deviceinfo-"
_KEY = "DeviceInfoCfg"
# What to do about a fault, by its level: nothing; give the NPU to nobody else; take it from whoever has it.
_HARMLESS = {"", "NotHandleFault"}
_SLOWING = {"SubHealthFault"}
_KEEPS_HOLDER = {"PreSeparateNPU"}


@dataclass(frozen=True)
class DeviceHealth:
    """Indices of NPUs: not for new pods (``sick``), to be left by their holder (``lost``), working but slow (``slow``)."""

    sick: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    slow: frozenset[int] = frozenset()
    super_pod: str = ""
    readable: bool = True


def device_indices(names: str) -> tuple[int, ...]:
    """The numbers at the end of device names: ``Ascend910-0,Ascend910-1`` gives 0 and 1; numbers that no device can have are passed over."""
    found = (re.search(r"(?<![0-9])([0-9]{1,4})$", name) for name in re.split(r"[,\s]+", names.strip()))
    return tuple(int(match[1]) for match in found if match)


def _faults(text: str) -> list[Mapping[str, Any]]:
    try:
        faults = json.loads(text or "[]")
    except ValueError:
        return []
    return [fault for fault in faults if isinstance(fault, Mapping)] if isinstance(faults, list) else []


def device_health(config_map: Mapping[str, Any]) -> DeviceHealth:
    """Read one ConfigMap; one that cannot be read says nothing (``readable`` is False)."""
    try:
        body = json.loads((config_map.get("data") or {})[_KEY])
        devices = {str(key): str(value) for key, value in body["DeviceInfo"]["DeviceList"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return DeviceHealth(readable=False)
    handling: dict[int, set[str]] = {}
    for key, value in devices.items():
        if key.endswith("-Fault"):
            for fault in _faults(value):
                level = str(fault.get("fault_handling") or fault.get("fault_level") or "")
                for index in device_indices(str(fault.get("npu_name", ""))):
                    handling.setdefault(index, set()).add(level)
    listed = {index for key, value in devices.items() if key.endswith(("-Unhealthy", "-NetworkUnhealthy")) for index in device_indices(value)}
    recovering = {index for key, value in devices.items() if key.endswith("-Recovering") for index in device_indices(value)}
    lost, kept, slow = set(), set(), set()
    for index in listed | set(handling):
        levels = handling.get(index, {"SeparateNPU"}) - _HARMLESS
        if levels - _SLOWING - _KEEPS_HOLDER:
            lost.add(index)
        elif levels & _KEEPS_HOLDER or index in listed:
            kept.add(index)
        elif levels & _SLOWING:
            slow.add(index)
    super_pod = body.get("SuperPodID")
    known = isinstance(super_pod, int) and super_pod >= 0
    return DeviceHealth(frozenset(lost | kept | recovering), frozenset(lost), frozenset(slow), str(super_pod) if known else "")
