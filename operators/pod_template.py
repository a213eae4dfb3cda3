"""From a resource's ``template`` to a pod: one container, a fixed set of fields, and what the operator adds.

A template is flat, since there is one container: fields of the pod's spec and of its container stand side by side.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from hashlib import sha256
from json import dumps
from typing import Any

from semantide.operators.affinity import REQUIRED, nears, node_terms
from semantide.operators.resources import API_VERSION, JOB_LABEL, MANAGED_BY, MANAGED_BY_LABEL, SERVICE_LABEL, NPUJob, NPUService
from semantide.operators.settings import OperatorSettings
from semantide.shared.pod_template import NAMED, RELEASE_LABEL, merged

_METADATA = ("labels", "annotations")
_POD = (
    "nodeSelector", "tolerations", "affinity", "serviceAccountName", "automountServiceAccountToken", "imagePullSecrets", "runtimeClassName",
    "priorityClassName", "terminationGracePeriodSeconds", "securityContext", "volumes", "initContainers", "hostAliases", "dnsPolicy", "dnsConfig",
    "enableServiceLinks", "hostNetwork",
)  # fmt: skip
_CONTAINER = (
    "args", "env", "envFrom", "volumeMounts", "resources", "containerSecurityContext", "ports", "readinessProbe", "livenessProbe", "startupProbe",
    "imagePullPolicy", "lifecycle", "workingDir",
)  # fmt: skip
_DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
TEMPLATE_FIELDS = frozenset((*_METADATA, *_POD, *_CONTAINER))
# The custom resource leaves templates open, so the API server lets any form through.
_MAPS = frozenset((
    "labels", "annotations", "nodeSelector", "affinity", "securityContext", "dnsConfig", "resources", "containerSecurityContext", "readinessProbe",
    "livenessProbe", "startupProbe", "lifecycle",
))  # fmt: skip
_LISTS_OF_MAPS = frozenset((
    "tolerations", "imagePullSecrets", "volumes", "initContainers", "hostAliases", "env", "envFrom", "volumeMounts", "ports",
))  # fmt: skip


@dataclass(frozen=True)
class Container:
    """What the operator itself says of a pod; it goes before what templates say."""

    name: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    image: str
    command: Sequence[str]
    environment: Sequence[Mapping[str, Any]]
    resources: Mapping[str, str]
    restart: str
    node: str = ""
    stop_seconds: int = 30
    volumes: Sequence[Mapping[str, Any]] = ()
    mounts: Sequence[Mapping[str, Any]] = ()


def short_digest(value: Any, length: int = 6) -> str:
    """A few characters that differ where values do."""
    return sha256(dumps(value, sort_keys=True).encode()).hexdigest()[:length]


def child_name(owner: NPUJob | NPUService, *parts: object) -> str:
    """A name for something that belongs to a resource: another resource of the same name, later, has other ones; 63 characters at most."""
    rest = "-".join(map(str, (short_digest(owner.metadata.uid, 5), *parts)))
    return f"{owner.name[: 62 - len(rest)].rstrip('-.')}-{rest}"


def dns_label(name: str) -> str:
    """The name itself where a Service and a host may have it; else one of at most 63 characters that they may have, and that other names do not give."""
    if _DNS_LABEL.fullmatch(name):
        return name
    return f"g-{re.sub('[^a-z0-9-]', '-', name)[:50].strip('-')}-{short_digest(name, 8)}"


def owner_label(owner: NPUJob | NPUService) -> dict[str, str]:
    """The label that what belongs to a resource has: its name; of one that is longer than labels may be the beginning, and what tells it from others alike."""
    name = owner.name if len(owner.name) <= 63 else f"{owner.name[:57].rstrip('-.')}-{short_digest(owner.name, 5)}"
    return {JOB_LABEL if isinstance(owner, NPUJob) else SERVICE_LABEL: name}


def full_template(owner: NPUJob | NPUService, settings: OperatorSettings) -> dict[str, Any]:
    """A resource's template; over the operator's where it belongs to no release, whose template would be whole.

    The operator's volumes and Secrets are those of its own namespace.

    Raises: ValueError for an unknown field, and for one that is not of its form.
    """
    template: Mapping[str, Any] = {}
    if owner.namespace == settings.own_namespace and RELEASE_LABEL not in owner.metadata.labels:
        template = settings.pod_template if isinstance(owner, NPUJob) else settings.replica_template
    for each in (template, owner.spec.template):
        check_template(each)
    return merged(template, owner.spec.template)


def child_labels(owner: NPUJob | NPUService, template: Mapping[str, Any]) -> dict[str, str]:
    """The labels that all pods of a resource have."""
    return {MANAGED_BY_LABEL: MANAGED_BY, **(template.get("labels") or {}), **owner_label(owner)}


def check_template(template: Mapping[str, Any]) -> None:
    """Refuse what would be passed over in silence, and what nothing can be made of.

    Raises: ValueError.
    """
    unknown = sorted(set(template) - TEMPLATE_FIELDS)
    if unknown:
        raise ValueError(f"template has the field {unknown[0]!r}, which pods do not get: take one of {', '.join(sorted(TEMPLATE_FIELDS))}")
    for name, value in template.items():
        if value is None:
            continue
        if name in _MAPS and not isinstance(value, Mapping):
            raise ValueError(f"template.{name} is {value!r}: it must be a map, as in a pod's spec")
        if name in _LISTS_OF_MAPS and not (isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)):
            raise ValueError(f"template.{name} is {value!r}: it must be a list of maps, as in a pod's spec")
    for name, key in NAMED.items():
        for entry in template.get(name) or ():
            if not isinstance(entry.get(key), str | int | None):
                raise ValueError(f"template.{name} has an entry whose {key} is {entry[key]!r}: it must be a text or a number, as in a pod's spec")
    # What is wrong with an affinity says itself.
    node_terms(template)
    nears(template, "")
    grace = template.get("terminationGracePeriodSeconds", 0)
    if not isinstance(grace, int) or isinstance(grace, bool) or grace < 0:
        raise ValueError(f"template.terminationGracePeriodSeconds is {grace!r}: it must be a whole number of seconds")
    for side in ("requests", "limits"):
        if not isinstance((template.get("resources") or {}).get(side) or {}, Mapping):
            raise ValueError(f"template.resources.{side} is {template['resources'][side]!r}: it must be a map of quantities")


def owned(owner: NPUJob | NPUService, name: str, labels: Mapping[str, str], *, blocks: bool = False) -> dict[str, Any]:
    """Metadata of an object that goes when ``owner`` does; one that ``blocks`` goes before it where the deletion is a foreground one."""
    reference = {"apiVersion": API_VERSION, "kind": owner.kind, "name": owner.name, "uid": owner.metadata.uid, "controller": True, "blockOwnerDeletion": blocks}
    return {"name": name, "namespace": owner.namespace, "labels": {MANAGED_BY_LABEL: MANAGED_BY, **labels}, "ownerReferences": [reference]}


def pod_manifest(owner: NPUJob | NPUService, template: Mapping[str, Any], own: Container) -> dict[str, Any]:
    """The pod to create, from a template that was checked."""
    metadata = owned(owner, own.name, {**(template.get("labels") or {}), **own.labels}, blocks=True)
    metadata["annotations"] = {**(template.get("annotations") or {}), **own.annotations}
    spec: dict[str, Any] = {key: deepcopy(template[key]) for key in _POD if key in template}
    spec.setdefault("terminationGracePeriodSeconds", own.stop_seconds)
    spec.setdefault("automountServiceAccountToken", False)
    spec["restartPolicy"] = own.restart
    if own.node:
        spec["affinity"] = _on_node(spec.get("affinity") or {}, own.node)
    container: dict[str, Any] = {key: deepcopy(template[key]) for key in _CONTAINER if key in template}
    if "containerSecurityContext" in container:
        container["securityContext"] = container.pop("containerSecurityContext")
    container |= {"name": "main", "image": own.image, "command": list(own.command)}
    container["env"] = merged({"env": container.get("env") or []}, {"env": [dict(entry) for entry in own.environment]})["env"]
    if own.resources:
        given = container.get("resources") or {}
        container["resources"] = {**given, **{side: {**(given.get(side) or {}), **own.resources} for side in ("requests", "limits")}}
    if own.volumes:
        spec["volumes"] = merged({"volumes": spec.get("volumes") or []}, {"volumes": list(own.volumes)})["volumes"]
        container["volumeMounts"] = merged({"volumeMounts": container.get("volumeMounts") or []}, {"volumeMounts": list(own.mounts)})["volumeMounts"]
    spec["containers"] = [container]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _on_node(affinity: Mapping[str, Any], node: str) -> dict[str, Any]:
    """The affinity that also wants this node. Kubernetes' scheduler still checks that the pod fits, as it does for DaemonSets."""
    of_nodes = affinity.get("nodeAffinity") or {}
    required = of_nodes.get(REQUIRED) or {}
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    terms: Sequence[Mapping[str, Any] | None] = required.get("nodeSelectorTerms") or ({},)
    narrowed = [{**(term or {}), "matchFields": [*((term or {}).get("matchFields") or ()), here]} for term in terms]
    return deepcopy({**affinity, "nodeAffinity": {**of_nodes, REQUIRED: {**required, "nodeSelectorTerms": narrowed}}})
