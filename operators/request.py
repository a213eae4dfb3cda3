"""What a gang asks of the nodes, and whether one node may carry its pods at all (labels, affinity, taints)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from semantide.operators.affinity import Expression, node_terms
from semantide.operators.node import Node, Taint
from semantide.operators.pod_resources import asked
from semantide.operators.profiles import profile_of


@dataclass(frozen=True)
class Toleration:
    """Lets a pod onto nodes with a taint."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def covers(self, taint: Taint) -> bool:
        """Whether the taint does not count for this pod."""
        if self.effect and self.effect != taint.effect:
            return False
        if not self.key:
            return self.operator == "Exists"
        return self.key == taint.key and (self.operator == "Exists" or self.value == taint.value)


@dataclass(frozen=True)
class Shape:
    """What each pod needs; requests of the same shape fit the same nodes. ``together``: a label of which all nodes of a gang must have the same value."""

    npus: int = 0
    resource_name: str = ""
    aligned: bool = True
    millicores: float = 0.0
    memory_bytes: float = 0.0
    terms: tuple[tuple[Expression, ...], ...] = ((),)  # any of these sets of expressions
    tolerations: tuple[Toleration, ...] = ()
    together: str = ""

    def obstacle(self, node: Node) -> str:
        """Why this node cannot carry such a pod even when it is empty, in plain words; empty when it can."""
        if node.unusable:
            return node.unusable
        if self.npus and node.resource_name != self.resource_name:
            return f"without {self.resource_name}"
        if not any(all(expression.holds(node.labels) for expression in term) for term in self.terms):
            missing = next(expression for term in self.terms for expression in term if not expression.holds(node.labels))
            if missing.place:
                return f"not {missing.place}"
            return f"without the label {missing}" if missing.operator in ("In", "Exists") else f"kept away by {missing}"
        for taint in node.taints:
            if taint.effect != "PreferNoSchedule" and not any(toleration.covers(taint) for toleration in self.tolerations):
                return f"with the taint {taint.key}{'=' if taint.value else ''}{taint.value} that is not tolerated"
        if self.npus > node.capacity:
            return f"too small ({node.capacity:,} {self.resource_name})"
        if self.millicores > node.millicores:
            return f"too small ({node.millicores / 1000:g} processors)"
        return f"too small ({node.memory_bytes / 2**30:.3g} GiB)" if self.memory_bytes > node.memory_bytes else ""


@dataclass(frozen=True)
class Request:
    """A gang: ``least`` to ``len(pods)`` pods of one shape, all placed at once.

    ``spread`` puts them far apart (replicas of a service) instead of close together; ``beside`` counts the replicas that
    nodes carry already. Nodes in ``avoid`` are used last.
    """

    key: str
    pods: tuple[str, ...]
    shape: Shape = Shape()
    least: int = 0
    spread: bool = False
    beside: Mapping[str, int] = field(default_factory=dict)
    avoid: frozenset[str] = frozenset()

    @property
    def fewest(self) -> int:
        """The fewest pods that it takes."""
        return self.least or len(self.pods)

    @property
    def npus(self) -> int:
        """NPUs of all its pods."""
        return self.shape.npus * len(self.pods)


def shape_of(profile: str, resource_name: str, npus: int, template: Mapping[str, Any], near: tuple[Expression, ...] = (), together: str = "") -> Shape:
    """The shape of pods with this template (``nodeSelector``, ``nodeAffinity``, ``tolerations``, ``resources``), which must also be ``near`` others.

    Raises: ValueError.
    """
    kind = profile_of(profile)
    name = resource_name or kind.resource_name
    if npus and not name:
        raise ValueError(f"{npus} NPUs a pod asked for, but the profile {profile!r} has no devices: name resourceName, or set the NPUs to 0")
    selector = tuple(Expression(key, "In", (str(value),)) for key, value in sorted((template.get("nodeSelector") or {}).items()))
    terms = tuple(selector + term + near for term in node_terms(template))
    tolerations = tuple(
        Toleration(**{key: str(entry[key]) for key in ("key", "operator", "value", "effect") if entry.get(key)}) for entry in template.get("tolerations") or ()
    )
    spec = {"containers": [{"resources": template.get("resources")}], "initContainers": template.get("initContainers")}
    return Shape(
        npus=npus,
        resource_name=name if npus else "",
        aligned=kind.aligned,
        millicores=asked(spec, "cpu", 1000),
        memory_bytes=asked(spec, "memory"),
        terms=terms,
        tolerations=tolerations,
        together=together,
    )
