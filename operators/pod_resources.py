"""What a pod asks of its node, counted as Kubernetes' scheduler does. Pure.

its containers together, and with them its sidecars (init containers that stay)
or, where that is more, one init container beside the sidecars that began before it
for the whole pod where its spec says so, and what its runtime takes besides (overhead)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semantide.operators.quantities import whole

_THREADS = "OMP_NUM_THREADS"
_OF_THE_WHOLE = ("cpu", "memory")  # and huge pages, which nobody here asks for: what a spec may ask for a pod as one


def asked(spec: Mapping[str, Any], name: str, parts: int = 1) -> int:
    """What a pod of this spec takes of a resource, in whole ``parts`` of its unit.

    Raises: ValueError for what is no quantity.
    """
    running = sum(_share(container, name, parts) for container in spec.get("containers") or ())
    staying = starting = 0
    for container in spec.get("initContainers") or ():
        share = _share(container, name, parts)
        if container.get("restartPolicy") == "Always":
            staying += share
            starting = max(starting, staying)
        else:
            starting = max(starting, staying + share)
    total = max(running + staying, starting)
    if name in _OF_THE_WHOLE and name in _requests(spec):
        total = _share(spec, name, parts)
    return total + whole((spec.get("overhead") or {}).get(name, 0), parts)


def threads_of(template: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The variable that keeps a pod of this template to the processors it asks for: on a node of many it would start as many threads as that has."""
    millicores = asked({"containers": [{"resources": template.get("resources")}]}, "cpu", 1000)
    # Less than one is for being placed, and says nothing of how many it may use.
    if millicores < 1000 or any(entry.get("name") == _THREADS for entry in template.get("env") or ()):
        return []
    return [{"name": _THREADS, "value": str(-(-millicores // 1000))}]


def names_of(spec: Mapping[str, Any]) -> list[str]:
    """The resources that a pod of this spec asks for."""
    parts = (spec, *(spec.get("containers") or ()), *(spec.get("initContainers") or ()))
    return sorted({*(spec.get("overhead") or {}), *(name for part in parts for name in _requests(part))})


def _requests(part: Mapping[str, Any]) -> Mapping[str, Any]:
    resources = part.get("resources") or {}
    sides = [resources.get(side) or {} for side in ("limits", "requests")] if isinstance(resources, Mapping) else [resources]
    if not all(isinstance(side, Mapping) for side in sides):
        raise ValueError(f"resources is {resources!r}: it must have requests and limits that are maps of quantities")
    return {name: value for side in sides for name, value in side.items()}


def _share(part: Mapping[str, Any], name: str, parts: int) -> int:
    return whole(_requests(part).get(name, 0), parts)
