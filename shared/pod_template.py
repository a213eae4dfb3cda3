"""Templates of the operator's pods, one over another: the operator does it, and so does who asks it for pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

# Says which release brought a resource: its template is then whole, and an operator adds nothing of its own release.
RELEASE_LABEL = "semantide.io/release"

# Lists whose entries have a name of their own: a later entry of the same name replaces the earlier one.
NAMED = {"env": "name", "volumes": "name", "volumeMounts": "mountPath", "imagePullSecrets": "name", "initContainers": "name", "ports": "containerPort"}


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """One template over another: maps are merged, named lists by name, other lists one after the other."""
    result = deepcopy(dict(base))
    for key, value in over.items():
        below = result.get(key)
        if isinstance(below, dict) and isinstance(value, Mapping):
            result[key] = merged(below, value)
        elif isinstance(below, list) and isinstance(value, Sequence) and not isinstance(value, str):
            named = NAMED.get(key)
            taken = {entry.get(named) for entry in value if isinstance(entry, Mapping)} if named else ()
            result[key] = [*(entry for entry in below if not (isinstance(entry, Mapping) and entry.get(named) in taken)), *deepcopy(list(value))]
        else:
            result[key] = deepcopy(value)
    return result
