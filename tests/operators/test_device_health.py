"""Health of NPUs from the device plugin's ConfigMap."""

from __future__ import annotations

import json
from typing import Any

import pytest

from semantide.operators.device_health import DeviceHealth, device_health, device_indices


def config_map(devices: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": "mindx-dl-deviceinfo-n1"},
        "data": {"DeviceInfoCfg": json.dumps({"DeviceInfo": {"DeviceList": devices, "UpdateTime": 1}, **more})},
    }


def fault(name: str, handling: str) -> dict[str, str]:
    return {"fault_type": "CardUnhealthy", "npu_name": name, "fault_level": handling, "fault_handling": handling, "fault_code": "80E18402"}


def test_levels_say_who_must_leave() -> None:
    faults = [
        fault("Ascend910-1", "SeparateNPU"),
        fault("Ascend910-2", "NotHandleFault"),
        fault("Ascend910-3", "PreSeparateNPU"),
        fault("Ascend910-4", "SubHealthFault"),
        fault("Ascend910-5", "RestartBusiness"),
    ]
    health = device_health(
        config_map(
            {
                "huawei.com/Ascend910": "Ascend910-0",
                "huawei.com/Ascend910-Unhealthy": "Ascend910-1,Ascend910-6",
                "huawei.com/Ascend910-NetworkUnhealthy": "Ascend910-3",
                "huawei.com/Ascend910-Recovering": "Ascend910-7",
                "huawei.com/Ascend910-Fault": json.dumps(faults),
            },
            SuperPodID=12,
        )
    )
    assert health == DeviceHealth(sick=frozenset({1, 3, 5, 6, 7}), lost=frozenset({1, 5, 6}), slow=frozenset({4}), super_pod="12")


def test_the_worst_of_several_faults_counts() -> None:
    faults = json.dumps([fault("npu-0", "NotHandleFault"), fault("npu-0", "PreSeparateNPU"), fault("npu-0,npu-1", "RestartNPU")])
    assert device_health(config_map({"huawei.com/npu-Fault": faults})).lost == {0, 1}


def test_a_healthy_node() -> None:
    health = device_health(config_map({"huawei.com/Ascend910-Fault": "[]", "huawei.com/Ascend910-Unhealthy": ""}, SuperPodID=-2))
    assert health == DeviceHealth() and health.readable


@pytest.mark.parametrize(
    "data", [None, {}, {"DeviceInfoCfg": "{"}, {"DeviceInfoCfg": "[]"}, {"DeviceInfoCfg": '{"DeviceInfo": {}}'}, {"DeviceInfoCfg": "null"}]
)
def test_what_cannot_be_read_says_nothing(data: dict[str, str] | None) -> None:
    assert device_health({"data": data}) == DeviceHealth(readable=False)
    assert not device_health(config_map({"huawei.com/Ascend910-Fault": "not json"})).sick


def test_numbers_of_names() -> None:
    assert device_indices("Ascend910-0,Ascend910-11 npu-3") == (0, 11, 3) and device_indices("") == () and device_indices("none") == ()
    assert device_indices("0,1,2") == (0, 1, 2)
    assert device_indices(f"²,٣,Ascend910-{'9' * 5000},5") == (5,), "numbers that no device can have"
