"""Kinds of devices."""

from __future__ import annotations

import pytest

from semantide.operators.profiles import PROFILES, profile_of, profile_of_resource


@pytest.mark.parametrize(
    ("kind", "ring"),
    [
        ("module-910b-8", 4),
        ("module-910b-16", 8),
        ("module", 4),
        ("module-a3-16-super-pod", 0),
        ("module-a3-16", 0),
        ("350-Atlas-4p-8", 4),
        ("850-Atlas-8p-8", 0),
        ("card-910b-2", 1),
        ("", 4),
    ],
)
def test_rings_of_ascend_servers(kind: str, ring: int) -> None:
    assert profile_of("ascend").ring_size({"accelerator-type": kind}) == ring
    assert profile_of("ascend").ring_size({"accelerator-type": kind, "semantide.io/ring-size": "2"}) == 2


def test_resources_have_a_profile() -> None:
    assert [profile_of_resource(name).name for name in ("huawei.com/npu", "huawei.com/Ascend910B3", "nvidia.com/gpu", "", "example.com/x")] == [
        "ascend",
        "ascend",
        "nvidia",
        "cpu",
        "cpu",
    ]
    assert PROFILES["ascend"].device_names((0, 3)) == "Ascend910-0,Ascend910-3"
    assert PROFILES["ascend"].device_names((1,), "huawei.com/npu") == "npu-1"
    with pytest.raises(ValueError, match="no profile 'tpu': one of ascend, nvidia, cpu"):
        profile_of("tpu")
