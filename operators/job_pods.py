"""The pods of a job's gang: names, environment of torch.distributed, devices, and the objects beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from json import dumps
from typing import Any

from semantide.operators.actions import Remove
from semantide.operators.pod_resources import threads_of
from semantide.operators.pod_template import Container, child_name, dns_label, full_template, owned, owner_label, pod_manifest, short_digest
from semantide.operators.profiles import profile_of
from semantide.operators.rank_table import ADDRESS_FILE, RANKS_FOLDER, TABLE_FILE, has_ranks, ranks_per_pod, reads_table, table_name
from semantide.operators.resources import (
    ATTEMPT_LABEL,
    ELASTIC_ANNOTATION,
    NODE_ANNOTATION,
    NPUS_ANNOTATION,
    RANK_LABEL,
    REVISION_LABEL,
    WORK_ANNOTATION,
    NPUJob,
    PodPlacement,
)
from semantide.operators.schedulers import POD_GROUPS, HandOver, hand_over
from semantide.operators.settings import OperatorSettings

_ENTRY = ("semantide", "pod")
_LAST_WORDS_SECONDS = 10  # of a pod's period of grace, to record how it ended once its ranks have
# A change of these is no change of what the pods do.
_NOT_IN_PODS = {"priority", "suspend", "elastic", "world_size", "restart_policy", "deadline_seconds"}


def job_revision(job: NPUJob) -> str:
    """A digest of what the pods are made of; another one means another gang. Fields that a later version adds do not change it."""
    return short_digest(job.spec.model_dump(mode="json", exclude=_NOT_IN_PODS, exclude_defaults=True))


def gang_name(job: NPUJob, attempt: int) -> str:
    """The common part of the names of a gang's pods."""
    return child_name(job, attempt)


def pod_names(job: NPUJob, attempt: int, count: int) -> tuple[str, ...]:
    """The names of a gang's pods by rank."""
    return tuple(f"{gang_name(job, attempt)}-{rank}" for rank in range(count))


def resource_name(job: NPUJob) -> str:
    """The name under which Kubernetes counts the job's NPUs."""
    return job.spec.resource_name or profile_of(job.spec.profile).resource_name


def gang_manifests(job: NPUJob, placement: Sequence[PodPlacement], attempt: int, settings: OperatorSettings, now: float) -> list[dict[str, Any]]:
    """What is to be created for a gang: what its scheduler and its devices want first, then its pods in order of rank.

    Raises: ValueError for a template with an unknown field.
    """
    gang = gang_name(job, attempt)
    npus = job.spec.npus_per_pod
    resources = {resource_name(job): str(npus)} if npus and not settings.dynamic_resources else {}
    over = hand_over(job, gang, len(placement), resources, full_template(job, settings), settings.volcano_queue)
    objects: list[dict[str, Any]] = [dict(manifest) for manifest in over.objects]
    if settings.rendezvous == "dns" and len(placement) > 1:
        objects.append(_ranks_service(job, gang, attempt, settings.master_port))
    if npus and settings.dynamic_resources:
        objects.append(claim_template(owned(job, gang, owner_label(job)), profile_of(job.spec.profile).device_class, npus))
    return [*objects, *(_pod(job, placement, rank, attempt, resources, over, settings, now) for rank in range(len(placement)))]


def gang_remains(job: NPUJob, attempt: int, settings: OperatorSettings) -> tuple[Remove, ...]:
    """What may be left of a gang besides its pods, to be taken away once these have ended."""
    gang, npus = gang_name(job, attempt), job.spec.npus_per_pod
    several = job.spec.most_pods > 1
    kinds = (
        ("v1", "ConfigMap", table_name(gang), has_ranks(job, job.spec.most_pods)),
        ("v1", "Service", dns_label(gang), several and settings.rendezvous == "dns"),
        ("resource.k8s.io/v1", "ResourceClaimTemplate", gang, npus and settings.dynamic_resources),
        (POD_GROUPS.get(job.spec.scheduler, ""), "PodGroup", gang, job.spec.scheduler in POD_GROUPS),
    )
    return tuple(Remove(version, kind, job.namespace, name, job.metadata.uid) for version, kind, name, made in kinds if made)


def _pod(
    job: NPUJob,
    placement: Sequence[PodPlacement],
    rank: int,
    attempt: int,
    resources: Mapping[str, str],
    over: HandOver,
    settings: OperatorSettings,
    now: float,
) -> dict[str, Any]:
    mine, gang = placement[rank], gang_name(job, attempt)
    template = full_template(job, settings)
    own = Container(
        name=mine.pod,
        labels={**owner_label(job), ATTEMPT_LABEL: str(attempt), RANK_LABEL: str(rank), REVISION_LABEL: job_revision(job)},
        annotations={
            **device_annotations(job.spec.profile, resource_name(job), mine.npus, settings, now),
            ELASTIC_ANNOTATION: str(len(placement)),
            **({WORK_ANNOTATION: job.spec.job_id} if job.spec.job_id else {}),
            **({NODE_ANNOTATION: mine.node} if mine.node else {}),
            **over.annotations,
        },
        image=job.spec.image or settings.image,
        command=job.spec.command or (*_ENTRY, job.spec.job_id or job.name),
        environment=[
            *_environment(job, placement, rank, gang, attempt, settings, int(template.get("terminationGracePeriodSeconds", settings.stop_seconds))),
            *threads_of(template),
        ],
        resources=resources,
        restart="Never",
        node=mine.node,
        stop_seconds=settings.stop_seconds,
        volumes=({"name": "semantide-ranks", "configMap": {"name": table_name(gang), "optional": True}},) if has_ranks(job, len(placement)) else (),
        mounts=({"name": "semantide-ranks", "mountPath": RANKS_FOLDER, "readOnly": True},),
    )
    manifest = pod_manifest(job, template, own)
    spec = manifest["spec"]
    spec |= over.pod_spec
    if settings.rendezvous == "dns" and len(placement) > 1:
        spec |= {"hostname": dns_label(mine.pod), "subdomain": dns_label(gang)}
    if job.spec.npus_per_pod and settings.dynamic_resources:
        claim_devices(spec, gang)
    return manifest


def _environment(
    job: NPUJob, placement: Sequence[PodPlacement], rank: int, gang: str, attempt: int, settings: OperatorSettings, grace_seconds: int
) -> list[dict[str, Any]]:
    local = ranks_per_pod(job)
    # RANK is that of the pod's first process; a pod that starts several gives them RANK + LOCAL_RANK.
    variables = {
        "WORLD_SIZE": str(len(placement) * local),
        "RANK": str(rank * local),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(len(placement)),
        "MASTER_PORT": str(settings.master_port),
        "SEMANTIDE_GANG_ATTEMPT": str(attempt),
        "SEMANTIDE_JOB_STOP_SECONDS": str(max(1, grace_seconds // 2, grace_seconds - _LAST_WORDS_SECONDS)),
        "SEMANTIDE_GANG_JOB": dumps(
            {"id": job.spec.job_id or job.name, "kind": job.spec.kind, "room": job.spec.room, "parameters": job.spec.parameters}, sort_keys=True
        ),
    }
    if len(placement) == 1:
        variables["MASTER_ADDR"] = "127.0.0.1"
    elif settings.rendezvous == "dns":
        variables["MASTER_ADDR"] = f"{dns_label(placement[0].pod)}.{dns_label(gang)}.{job.namespace}.svc"
    if has_ranks(job, len(placement)):
        variables["SEMANTIDE_MASTER_ADDRESS_FILE"] = ADDRESS_FILE
    if reads_table(job, len(placement)):
        variables["RANK_TABLE_FILE"] = TABLE_FILE
    return [
        *({"name": name, "value": value} for name, value in variables.items()),
        *visible_devices(job.spec.profile, resource_name(job), placement[rank].npus, settings),
    ]


def visible_devices(profile_name: str, resource: str, npus: Sequence[int], settings: OperatorSettings) -> list[dict[str, Any]]:
    """The variable that says which devices a container has, where the operator chooses them: read from the annotation that the device plugin reads."""
    profile = profile_of(profile_name)
    if profile.name != "ascend" or not npus or not settings.assign_devices or settings.dynamic_resources:
        return []
    return [{"name": profile.visible, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{resource}']"}}}]


def device_annotations(profile_name: str, resource: str, npus: Sequence[int], settings: OperatorSettings, now: float) -> dict[str, str]:
    """What a pod's annotations say of its devices."""
    if not npus:
        return {}
    result = {NPUS_ANNOTATION: ",".join(map(str, npus))}
    profile = profile_of(profile_name)
    if profile.name == "ascend" and settings.assign_devices and not settings.dynamic_resources:
        # Of several pods that ask for as many, the plugin serves the one with the earliest time.
        result |= {resource: profile.device_names(npus, resource), "predicate-time": str(int(now * 1e9))}
    return result


def claim_template(metadata: Mapping[str, Any], device_class: str, count: int) -> dict[str, Any]:
    """What each pod claims under dynamic resource allocation."""
    request = {"name": "npus", "exactly": {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}}
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": dict(metadata),
        "spec": {"spec": {"devices": {"requests": [request]}}},
    }


def claim_devices(spec: dict[str, Any], template: str) -> None:
    """Let a pod's spec claim by a template."""
    spec["resourceClaims"] = [{"name": "npus", "resourceClaimTemplateName": template}]
    container = spec["containers"][0]
    container["resources"] = {**(container.get("resources") or {}), "claims": [{"name": "npus"}]}


def _ranks_service(job: NPUJob, gang: str, attempt: int, port: int) -> dict[str, Any]:
    """Gives every pod of a gang a name in the cluster's DNS, from before it is ready."""
    selector = {**owner_label(job), ATTEMPT_LABEL: str(attempt)}
    spec = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": [{"name": "ranks", "port": port}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": owned(job, dns_label(gang), owner_label(job)), "spec": spec}
