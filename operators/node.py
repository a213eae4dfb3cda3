"""One node as placement sees it: its NPUs (ring, health, holder), where it stands, and what keeps pods away from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from semantide.operators.rings import indices_of, mask_of


@dataclass(frozen=True)
class NPU:
    """One device. ``holder`` is the ``namespace/name`` of the pod that has it."""

    index: int
    ring: int
    healthy: bool
    holder: str | None


@dataclass(frozen=True)
class Taint:
    """Keeps pods away that do not tolerate it."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True)
class Node:
    """One node.

    ``healthy`` holds the NPUs that a new pod may get; ``lost`` those whose holder must leave (a fault that stops its work).
    ``slow`` is the step time of gangs here over what it should be: 1.25 is a quarter slower. ``unusable`` says why no new
    pod may come; ``gone`` that pods which were here are lost. Processor time, memory and pods: what pods may have in all, and
    what others left of it; ``kept_...`` is what those have that never end by themselves and are not ours (daemons, replicas of others), ``kept`` their NPUs.
    """

    name: str
    capacity: int = 0
    ring_size: int = 0
    resource_name: str = ""
    healthy: int = -1
    lost: int = 0
    held: Mapping[int, str] = field(default_factory=dict)
    super_pod: str = ""
    rack: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    slow: float = 1.0
    unusable: str = ""
    gone: bool = False
    millicores: float = math.inf
    memory_bytes: float = math.inf
    free_millicores: float = math.inf
    free_memory_bytes: float = math.inf
    free_pods: float = math.inf
    kept: int = 0
    kept_millicores: float = 0.0
    kept_memory_bytes: float = 0.0

    @cached_property
    def free(self) -> int:
        """Mask of the healthy NPUs that nobody holds."""
        return self.healthy & ((1 << self.capacity) - 1) & ~mask_of(list(self.held))

    @property
    def ring(self) -> int:
        """NPUs in a ring."""
        return self.ring_size if 0 < self.ring_size < self.capacity else max(self.capacity, 1)

    @property
    def npus(self) -> tuple[NPU, ...]:
        """All of its devices."""
        return tuple(NPU(index, index // self.ring, bool(self.healthy >> index & 1), self.held.get(index)) for index in range(self.capacity))

    @property
    def lost_holders(self) -> frozenset[str]:
        """Pods that hold an NPU which failed, or any NPU of a node that is gone."""
        if self.gone:
            return frozenset(self.held.values())
        return frozenset(self.held[index] for index in indices_of(self.lost) if index in self.held)
