"""What differs between kinds of devices: the name Kubernetes counts them by, how they are wired, and how a container is told which it has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semantide.operators.resources import RING_SIZE_LABEL, ProfileName


@dataclass(frozen=True)
class Profile:
    """One kind of device.

    ``resource_name`` empty: CPU pods, which hold no device; others may have any name below ``vendor``. ``ring_sizes``: NPUs per ring by
    patterns of the node's ``type_label``; ``default_ring`` where that says nothing (0: all NPUs of a node are one ring). ``aligned``: an
    allocation up to a ring stays inside one. ``visible`` is the variable that programs read, ``device_class`` that of dynamic resource allocation.
    """

    name: ProfileName
    vendor: str = ""
    resource_name: str = ""
    type_label: str = ""
    ring_sizes: tuple[tuple[str, int], ...] = ()
    default_ring: int = 0
    aligned: bool = False
    visible: str = ""
    device_class: str = ""

    def ring_size(self, labels: Mapping[str, str]) -> int:
        """NPUs per ring of a node with these labels; 0 where all are one."""
        if (said := labels.get(RING_SIZE_LABEL, "")).isdigit():
            return int(said)
        kind = labels.get(self.type_label, "")
        return next((size for pattern, size in self.ring_sizes if re.fullmatch(pattern, kind)), self.default_ring)

    def device_names(self, npus: Sequence[int], resource_name: str = "") -> str:
        """What the annotation of the resource's name says of a pod's devices: ``Ascend910-0,Ascend910-1``."""
        short = (resource_name or self.resource_name).rsplit("/", 1)[-1]
        return ",".join(f"{short}-{npu}" for npu in npus)


# Two rings of four in the first training servers and in those of the 910B; the A3 and later have one switched plane.
_ASCEND_RINGS = (
    (r"module|half|module-\w+b-8|350-Atlas-4p-\d+", 4),
    (r"module-\w+b-16", 8),
    (r"card|card-\w+b-\w+", 1),
    (r"module-a3-\d+(-super-pod)?|350-Atlas-\d+|[89]50-.*", 0),
)

PROFILES: dict[str, Profile] = {
    "ascend": Profile(
        name="ascend",
        vendor="huawei.com/",
        resource_name="huawei.com/Ascend910",
        type_label="accelerator-type",
        ring_sizes=_ASCEND_RINGS,
        default_ring=4,
        aligned=True,
        visible="ASCEND_VISIBLE_DEVICES",
        device_class="npu.huawei.com",
    ),
    "nvidia": Profile(name="nvidia", vendor="nvidia.com/", resource_name="nvidia.com/gpu", visible="NVIDIA_VISIBLE_DEVICES", device_class="gpu.nvidia.com"),
    "cpu": Profile(name="cpu"),
}


def profile_of(name: str) -> Profile:
    """The profile called ``name``.

    Raises: ValueError.
    """
    if name not in PROFILES:
        raise ValueError(f"no profile {name!r}: one of {', '.join(PROFILES)}")
    return PROFILES[name]


def profile_of_resource(resource_name: str) -> Profile:
    """The profile of nodes that offer this resource; the plain one for names of unknown makers."""
    return next((profile for profile in PROFILES.values() if profile.vendor and resource_name.startswith(profile.vendor)), PROFILES["cpu"])
