"""What Volcano's PodGroup takes (scheduling.volcano.sh/v1beta1), as its documentation has it: the fields of a spec, and their types."""

from __future__ import annotations

from typing import Any

_QUANTITY = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"}]}
_MEMBERS = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}

PODGROUP: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "scheduling.volcano.sh/v1beta1"},
        "kind": {"const": "PodGroup"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "minMember": _MEMBERS,
                "minTaskMember": {"type": "object", "additionalProperties": _MEMBERS},
                "queue": {"type": "string"},
                "priorityClassName": {"type": "string"},
                "minResources": {"type": "object", "additionalProperties": _QUANTITY},
                "networkTopology": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"mode": {"enum": ["hard", "soft"]}, "highestTierAllowed": {"type": "integer"}},
                },
            },
        },
    },
}
