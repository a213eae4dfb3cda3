"""What the operator keeps of the objects that it hears of: the fields that it reads, and no others.

Of a cluster with tens of thousands of pods most is of no use here: images that a node holds, volumes, environments, who wrote which field. What is kept has the
form of the object itself, so that whoever reads it need not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from sys import intern
from typing import Any

from semantide.operators.pod_resources import asked, names_of
from semantide.operators.resources import GROUP

Body = dict[str, Any]

_IDENTITY = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp", "deletionGracePeriodSeconds")
_DEVICES = ("huawei.com", "ascend.kubectl.kubernetes.io", "nvidia.com")  # whose annotations say which devices a pod has
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
_POD_CONDITIONS = ("PodScheduled", "Ready")


def extract_of(body: Mapping[str, Any]) -> Body:
    """The object without what nobody here reads; of one that has another form than it should what can be read is kept as it is."""
    extract = _EXTRACTS.get(str(body.get("kind", "")), _resource)
    try:
        return extract(body)
    except (AttributeError, TypeError, ValueError, KeyError):
        return _resource(body)  # its reader says what is wrong with it


def _resource(body: Mapping[str, Any]) -> Body:
    """All but who wrote which field, and what somebody once applied."""
    metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
    if _LAST_APPLIED in (metadata.get("annotations") or {}):
        metadata["annotations"] = {key: value for key, value in metadata["annotations"].items() if key != _LAST_APPLIED}
    return {**body, "metadata": metadata}


def _pod(body: Mapping[str, Any]) -> Body:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    names = names_of(spec)
    # One container that asks for what all of them do: for everybody else here that is the same.
    asks = {intern(name): f"{asked(spec, name, 1000)}m" if name == "cpu" else asked(spec, name) for name in names}
    ports = [_some(port, ("name", "containerPort")) for one in spec.get("containers") or () for port in one.get("ports") or () if port.get("name") == "metrics"]
    container = {**({"resources": {"requests": asks}} if asks else {}), **({"ports": ports} if ports else {})}
    kept_spec = {**_some(spec, ("nodeName",)), **({"containers": [container]} if container else {})}
    kept_status: Body = _some(status, ("phase", "podIP", "hostIP", "reason", "message"))
    if conditions := [_some(entry, ("type", "status", "reason", "message")) for entry in status.get("conditions") or () if entry["type"] in _POD_CONDITIONS]:
        kept_status["conditions"] = conditions
    if states := [{"state": state} for entry in status.get("containerStatuses") or () if (state := _state(entry.get("state") or {}))]:
        kept_status["containerStatuses"] = states
    return _kept(body, _metadata(body, lambda key: key in names), kept_spec, kept_status)


def _state(state: Mapping[str, Any]) -> Body:
    """Why a container waits, or how it ended; of one that runs nothing is to be said."""
    wanted = {"waiting": ("reason", "message"), "terminated": ("exitCode", "finishedAt", "reason", "message")}
    return {kind: _some(state[kind], fields) for kind, fields in wanted.items() if state.get(kind)}


def _node(body: Mapping[str, Any]) -> Body:
    spec, status = body.get("spec") or {}, body.get("status") or {}
    kept_status = {side: _short(status[side]) for side in ("capacity", "allocatable") if status.get(side)}
    conditions = [_some(entry, ("type", "status")) for entry in status.get("conditions") or () if entry["type"] == "Ready"]
    return _kept(body, _metadata(body), _some(spec, ("unschedulable", "taints")), {**kept_status, **({"conditions": conditions} if conditions else {})})


def _service(body: Mapping[str, Any]) -> Body:
    return _kept(body, _metadata(body))


def _kept(body: Mapping[str, Any], metadata: Body, spec: Body | None = None, status: Body | None = None) -> Body:
    return {**_some(body, ("apiVersion", "kind")), "metadata": metadata, **({"spec": spec} if spec else {}), **({"status": status} if status else {})}


def _metadata(body: Mapping[str, Any], wanted: Callable[[str], bool] = lambda key: False) -> Body:
    """Who it is, whose it is, its labels, and the annotations that say something here, or that are ``wanted``."""
    metadata = body["metadata"]
    kept = _some(metadata, _IDENTITY)
    if labels := metadata.get("labels"):
        kept["labels"] = _short(labels)
    if annotations := {key: value for key, value in (metadata.get("annotations") or {}).items() if _says(key) or wanted(key)}:
        kept["annotations"] = _short(annotations)
    if owners := metadata.get("ownerReferences"):
        kept["ownerReferences"] = [_some(owner, ("kind", "uid", "controller")) for owner in owners]
    return kept


def _says(annotation: str) -> bool:
    prefix = annotation.partition("/")[0]
    return prefix == GROUP or prefix in _DEVICES


def _some(part: Mapping[str, Any], names: Iterable[str]) -> Body:
    return {name: _one(value) for name in names if (value := part.get(name)) is not None}


def _one(value: Any) -> Any:
    """Texts that many objects share are kept once."""
    return intern(value) if type(value) is str else value


def _short(texts: Mapping[str, Any]) -> Body:
    return {_one(key): _one(value) for key, value in texts.items()}


_EXTRACTS: dict[str, Callable[[Mapping[str, Any]], Body]] = {"Pod": _pod, "Node": _node, "Service": _service}
