"""What differs between kinds of devices: the name Kubernetes counts them by, how they are wired, and how a container is told which it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from semantide.operators.resources import ProfileName


@dataclass(frozen=True)
class Profile:
    """One kind of device.

    ``resource_name`` empty: CPU pods, which hold no device. ``ring_sizes``: NPUs per ring by the node's ``type_label``;
    ``default_ring`` where the label says nothing (0: the whole node is one ring). ``aligned``: an allocation of 1, 2 or 4 stays inside
    a ring and larger ones take whole rings. ``visible`` is the variable that programs read; ``device_class`` the one of dynamic resource allocation.
    """

    name: ProfileName
    resource_name: str = ""
    type_label: str = ""
    ring_sizes: Mapping[str, int] = field(default_factory=dict)
    default_ring: int = 0
    aligned: bool = False
    visible: str = ""
    device_class: str = ""

    def device_names(self, npus: Sequence[int], resource_name: str = "") -> str:
        """What the annotation of the resource's name says of a pod's devices: ``Ascend910-0,Ascend910-1``."""
        short = (resource_name or self.resource_name).rsplit("/", 1)[-1]
        return ",".join(f"{short}-{npu}" for npu in npus)


# module-a3-16: 16 dies in 8 modules on one switch plane; module-910b-8: two rings of 4; 910-9392 trays follow the A3.
_ASCEND_RINGS = {
    "module": 4,
    "half": 4,
    "card": 1,
    "module-910b-8": 4,
    "module-910b-16": 8,
    "card-910b-2": 2,
    "card-910b-infer": 1,
    "module-a3-16": 16,
    "module-a3-8": 8,
    "module-a3-16-super-pod": 16,
    "module-a3-8-super-pod": 8,
}

PROFILES: dict[str, Profile] = {
    "ascend": Profile(
        name="ascend",
        resource_name="huawei.com/Ascend910",
        type_label="accelerator-type",
        ring_sizes=_ASCEND_RINGS,
        default_ring=4,
        aligned=True,
        visible="ASCEND_VISIBLE_DEVICES",
        device_class="npu.huawei.com",
    ),
    "nvidia": Profile(name="nvidia", resource_name="nvidia.com/gpu", visible="NVIDIA_VISIBLE_DEVICES", device_class="gpu.nvidia.com"),
    "cpu": Profile(name="cpu"),
}


def profile_of(name: str) -> Profile:
    """The profile called ``name``.

    Raises: ValueError.
    """
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}: one of {', '.join(PROFILES)}")
    return PROFILES[name]
