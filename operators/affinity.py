"""Where a template's affinity lets its pods go: what it requires of a node's labels, and near which other pods. Pure.

``podAffinity`` comes down to labels too: those pods are on nodes whose label ``topologyKey`` has some values, and one of these it must be. Where such pods are
not there yet, and the pods that ask for them are such pods themselves, any value will do, but the same one for all of a gang.
``podAntiAffinity`` and what is only preferred are left to Kubernetes' scheduler, and so is a term with a ``namespaceSelector``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from semantide.operators.node import Node
from semantide.operators.pods import Pod
from semantide.operators.resources import NODE_ANNOTATION

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_NAMED = 3  # values that are told


@dataclass(frozen=True)
class Expression:
    """What a label must be. ``place`` says it in words where a label says little."""

    key: str
    operator: str
    values: tuple[str, ...] = ()
    place: str = ""

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether something with these labels fulfils it."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value in self.values
            case "NotIn":
                return value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                try:
                    found, bound = int(value or ""), int(self.values[0])
                except (ValueError, IndexError):
                    return False
                return found > bound if self.operator == "Gt" else found < bound
            case _:
                return False

    def __str__(self) -> str:
        if self.operator == "In" and len(self.values) == 1:
            return f"{self.key}={self.values[0]}"
        return f"{self.key} {self.operator} {', '.join(self.values)}".rstrip()


@dataclass(frozen=True)
class Near:
    """Pods of some namespaces which a pod must be near: where the nodes' label ``topology`` has the same value."""

    topology: str
    selector: tuple[Expression, ...]
    namespaces: tuple[str, ...]

    def means(self, namespace: str, labels: Mapping[str, str]) -> bool:
        """Whether a pod with these labels is one of them."""
        return namespace in self.namespaces and all(expression.holds(labels) for expression in self.selector)

    def __str__(self) -> str:
        return f"pods with {', '.join(map(str, self.selector)) or 'any labels'}"


class Neighbourhood:
    """The pods of one moment and where they are."""

    def __init__(self, pods: Iterable[Pod], nodes: Mapping[str, Node]) -> None:
        self._nodes, self._values = nodes, dict[Near, tuple[str, ...]]()
        self._pods = [(pod, node) for pod in pods if not pod.finished and (node := nodes.get(pod.node or pod.annotations.get(NODE_ANNOTATION, "")))]

    def wanted(self, template: Mapping[str, Any], namespace: str, labels: Mapping[str, str]) -> tuple[tuple[Expression, ...], str]:
        """What nodes must be where ``template`` wants pods with these labels near others, and the label of which all of them must have the same value.

        Raises: ValueError.
        """
        expressions, together = [], ""
        for near in nears(template, namespace):
            values = self._of(near)
            if not values and near.means(namespace, labels):
                together = together or near.topology
                continue
            there = ", ".join(values[:_NAMED]) + (f" and {len(values) - _NAMED} more" if len(values) > _NAMED else "")
            place = f"where {near} are ({near.topology} {there})" if values else f"near {near}, of which none runs"
            expressions.append(Expression(near.topology, "In", values, place))
        return tuple(expressions), together

    def _of(self, near: Near) -> tuple[str, ...]:
        """The values of a label where such pods are."""
        if near not in self._values:
            found = {node.labels.get(near.topology) for pod, node in self._pods if near.means(pod.namespace, pod.labels)}
            self._values[near] = tuple(sorted(value for value in found if value is not None))
        return self._values[near]


def node_terms(template: Mapping[str, Any]) -> Sequence[tuple[Expression, ...]]:
    """The sets of expressions of a template's node affinity, one of which must hold.

    Raises: ValueError.
    """
    required = _map(_affinity(template, "nodeAffinity").get(REQUIRED), f"nodeAffinity.{REQUIRED}")
    terms = [_map(term, "nodeSelectorTerms") for term in _list(required.get("nodeSelectorTerms"), "nodeSelectorTerms")] or [{}]
    for term in terms:
        for field in _list(term.get("matchFields"), "matchFields"):
            _expression(field)  # Kubernetes' scheduler goes by these
    return [_expressions(term) for term in terms]


def nears(template: Mapping[str, Any], namespace: str) -> Sequence[Near]:
    """The pods that a template's pod affinity requires, for pods of this namespace.

    Raises: ValueError.
    """
    found = []
    for entry in _list(_affinity(template, "podAffinity").get(REQUIRED), f"podAffinity.{REQUIRED}"):
        term = _map(entry, f"podAffinity.{REQUIRED}")
        if term.get("namespaceSelector") is not None or term.get("labelSelector") is None:
            continue
        if not term.get("topologyKey"):
            raise ValueError(f"template.affinity has the pod affinity {entry!r}: give it a topologyKey")
        selector = _map(term["labelSelector"], "labelSelector")
        labels = _map(selector.get("matchLabels"), "matchLabels")
        expressions = (*(Expression(str(key), "In", (str(value),)) for key, value in sorted(labels.items())), *_expressions(selector))
        namespaces = tuple(map(str, _list(term.get("namespaces"), "namespaces"))) or (namespace,)
        found.append(Near(str(term["topologyKey"]), expressions, namespaces))
    return found


def _affinity(template: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    return _map(_map(template.get("affinity"), "it").get(kind), kind)


def _expressions(term: Mapping[str, Any]) -> tuple[Expression, ...]:
    return tuple(_expression(entry) for entry in _list(term.get("matchExpressions"), "matchExpressions"))


def _expression(entry: Any) -> Expression:
    said = _map(entry, "matchExpressions")
    if not said.get("key") or not said.get("operator"):
        raise ValueError(f"template.affinity has the expression {entry!r}: give it key and operator")
    return Expression(str(said["key"]), str(said["operator"]), tuple(map(str, _list(said.get("values"), "values"))))


def _map(value: Any, where: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"template.affinity: {where} has {value!r} where a map belongs")
    return value or {}


def _list(value: Any, where: str) -> Sequence[Any]:
    if value is not None and not isinstance(value, list):
        raise ValueError(f"template.affinity: {where} is {value!r}, it must be a list")
    return value or []
