"""Who puts a gang's pods onto nodes: the operator itself, Volcano, or Kubernetes' own gang scheduling.

Handed over, the operator still makes the pods, restarts the gang and reports; it does not place, and pods are held back by their scheduler until
all of them fit: each is told how many there are, so with fewer they would hold NPUs and wait for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from semantide.operators.pod_resources import asked, names_of
from semantide.operators.pod_template import owned, owner_label
from semantide.operators.resources import NPUJob

_VOLCANO = "scheduling.volcano.sh/v1beta1"
_NATIVE = "scheduling.k8s.io/v1beta1"
POD_GROUPS = {"volcano": _VOLCANO, "native": _NATIVE}
"""API version of the PodGroup that a scheduler wants."""


@dataclass(frozen=True)
class HandOver:
    """What a gang needs beside its pods, and what every pod of it says."""

    objects: tuple[Mapping[str, Any], ...] = ()
    annotations: Mapping[str, str] = field(default_factory=dict)
    pod_spec: Mapping[str, Any] = field(default_factory=dict)


def hand_over(job: NPUJob, gang: str, pods: int, resources: Mapping[str, str], template: Mapping[str, Any], queue: str) -> HandOver:
    """How the job's scheduler hears of a gang of so many pods with this template, each of which asks for ``resources`` besides."""
    metadata = owned(job, gang, owner_label(job))
    if job.spec.scheduler == "volcano":
        # Its plugins read of a group what pods are labelled and annotated with, such as ring-controller.atlas and huawei.com/schedule_policy.
        metadata["labels"] = {**(template.get("labels") or {}), **metadata["labels"]}
        metadata |= {"annotations": dict(template["annotations"])} if template.get("annotations") else {}
        spec = {"containers": [{"resources": template.get("resources")}], "initContainers": template.get("initContainers")}
        least = {name: f"{asked(spec, name, 1000) * pods}m" if name == "cpu" else str(asked(spec, name) * pods) for name in names_of(spec)}
        least |= {name: str(int(count) * pods) for name, count in resources.items()}
        group = {
            "apiVersion": _VOLCANO,
            "kind": "PodGroup",
            "metadata": metadata,
            "spec": {"minMember": pods, "queue": queue, "minResources": least},
        }
        return HandOver((group,), {"scheduling.k8s.io/group-name": gang}, {"schedulerName": "volcano"})
    if job.spec.scheduler == "native":
        group = {"apiVersion": _NATIVE, "kind": "PodGroup", "metadata": metadata, "spec": {"schedulingPolicy": {"gang": {"minCount": pods}}}}
        return HandOver((group,), {}, {"schedulingGroup": {"podGroupName": gang}})
    return HandOver()
