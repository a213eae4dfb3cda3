"""The pods of a service's replicas, and the Service in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from semantide.operators.actions import Remove
from semantide.operators.job_pods import claim_devices, claim_template, device_annotations, visible_devices
from semantide.operators.pod_resources import threads_of
from semantide.operators.pod_template import Container, child_name, full_template, owned, owner_label, pod_manifest, short_digest
from semantide.operators.profiles import profile_of
from semantide.operators.resources import NODE_ANNOTATION, REVISION_LABEL, NPUService, PodPlacement
from semantide.operators.settings import OperatorSettings
from semantide.shared.pod_template import merged

HTTP_PORT = 8000
_ENTRY = ("semantide", "replica")
# A change of these is no change of what the pods do.
_NOT_IN_PODS = {"replicas", "rollout", "target", "priority", "suspend"}


def service_revision(service: NPUService, settings: OperatorSettings) -> str:
    """A digest of what the pods are made of, the operator's own part included: pods of another one are replaced."""
    spec = service.spec.model_dump(mode="json", exclude=_NOT_IN_PODS, exclude_defaults=True)
    return short_digest([spec, "" if service.spec.image else settings.image, full_template(service, settings)])


def replica_prefix(service: NPUService, revision: str) -> str:
    """The common part of the names of a revision's pods."""
    return child_name(service, revision)


def service_selector(service: NPUService) -> dict[str, str]:
    """Labels that every pod of the service has."""
    return owner_label(service)


def service_resource(service: NPUService) -> str:
    """The name under which Kubernetes counts the service's NPUs."""
    return service.spec.resource_name or profile_of(service.spec.profile).resource_name


def replica_manifests(service: NPUService, place: PodPlacement, revision: str, settings: OperatorSettings, now: float) -> list[dict[str, Any]]:
    """What is to be created for one replica.

    Raises: ValueError for a template with an unknown field.
    """
    spec = service.spec
    npus = spec.npus_per_replica
    claims = bool(npus) and settings.dynamic_resources
    template = full_template(service, settings)
    environment = {"SEMANTIDE_REPLICA_MODEL": spec.model, "SEMANTIDE_REPLICA_CATALOG": spec.catalog, "SEMANTIDE_REPLICA_VARIANT": spec.variant}
    own = Container(
        name=place.pod,
        labels={**service_selector(service), REVISION_LABEL: revision},
        annotations={**device_annotations(spec.profile, service_resource(service), place.npus, settings, now), NODE_ANNOTATION: place.node},
        image=spec.image or settings.image,
        command=spec.command or _ENTRY,
        environment=[
            *({"name": name, "value": value} for name, value in environment.items() if value),
            *visible_devices(spec.profile, service_resource(service), place.npus, settings),
            *threads_of(template),
        ],
        resources={service_resource(service): str(npus)} if npus and not claims else {},
        restart="Always",
        node=place.node,
        stop_seconds=settings.stop_seconds,
    )
    manifest = pod_manifest(service, merged(_defaults(), template), own)
    if not claims:
        return [manifest]
    claim = replica_prefix(service, revision)
    claim_devices(manifest["spec"], claim)
    return [claim_template(owned(service, claim, service_selector(service)), profile_of(spec.profile).device_class, npus), manifest]


def revision_remains(service: NPUService, revision: str) -> Remove:
    """What may be left of a revision besides its pods, to be taken away once these are gone."""
    return Remove("resource.k8s.io/v1", "ResourceClaimTemplate", service.namespace, replica_prefix(service, revision), service.metadata.uid)


def service_manifest(service: NPUService) -> dict[str, Any]:
    """The headless Service whose name stands for the addresses of all replicas that are ready."""
    spec = {"clusterIP": "None", "selector": service_selector(service), "ports": [{"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": owned(service, service.name, service_selector(service)), "spec": spec}


def _defaults() -> Mapping[str, Any]:
    """What a replica gets where no template says otherwise: it serves HTTP, and takes no requests before it is ready."""
    ready = {"httpGet": {"path": "/readyz", "port": HTTP_PORT}, "periodSeconds": 2, "timeoutSeconds": 5}
    alive = {"httpGet": {"path": "/healthz", "port": HTTP_PORT}, "periodSeconds": 15, "timeoutSeconds": 5, "failureThreshold": 4}
    start = {"httpGet": {"path": "/healthz", "port": HTTP_PORT}, "periodSeconds": 5, "failureThreshold": 120}
    return {
        "ports": [{"name": "http", "containerPort": HTTP_PORT}],
        "readinessProbe": ready,
        "livenessProbe": alive,
        "startupProbe": start,
        # Routers learn of the end first; requests that still come in are answered.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
    }
