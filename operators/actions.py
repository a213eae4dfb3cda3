"""What the operator may do to the cluster, as values: the pure parts return them, ``carry_out`` in ``cluster.py`` does them.

Actions of one resource are carried out in order and stop at the first that fails; the next round begins with what is there then. Every action may be
carried out twice, or half of a list may be lost with the process, without harm:
    Create        the name is a function of the resource, so a second one finds the first
    DeletePod     by uid, so a newer pod of the same name stays
    Remove        what belongs to somebody else by now stays
    PatchStatus   fails where somebody has written since, and nothing after it is done
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Create:
    """Create an object; one of the same name that its owner has already is taken for it, but for a ConfigMap that says something else, which is made anew."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True)
class DeletePod:
    """Delete a pod. ``grace_seconds`` None: its own; 0: forget it at once, for its node cannot answer."""

    namespace: str
    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class Remove:
    """Delete an object that is not a pod, if ``owner`` (a uid) owns it; what is gone, or cannot be deleted for want of a right, stops nothing."""

    api_version: str
    kind: str
    namespace: str
    name: str
    owner: str


@dataclass(frozen=True)
class PatchStatus:
    """Write the status of a resource that still has ``resource_version``."""

    kind: str
    namespace: str
    name: str
    uid: str
    resource_version: str
    status: Mapping[str, Any]


@dataclass(frozen=True)
class AnnotatePod:
    """Write annotations onto a pod, which also makes its kubelet look at its volumes again."""

    namespace: str
    name: str
    uid: str
    annotations: Mapping[str, str]


@dataclass(frozen=True)
class Event:
    """Tell people about a resource: ``kubectl describe`` shows it."""

    kind: str
    namespace: str
    name: str
    uid: str
    reason: str
    message: str
    type: Literal["Normal", "Warning"] = "Normal"


Action = Create | DeletePod | Remove | PatchStatus | AnnotatePod | Event
