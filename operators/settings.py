"""Settings of the operator's process, from environment variables that begin with ``SEMANTIDE_OPERATOR_``; read once by its entry and passed on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class OperatorSettings(BaseSettings):
    """What the operator watches, and how patient it is. Each field's description has its unit."""

    model_config = SettingsConfigDict(env_prefix="SEMANTIDE_OPERATOR_", extra="ignore", frozen=True, use_attribute_docstrings=True)

    namespace: str = ""
    """The only namespace whose jobs and services are run. Empty: those of all."""
    own_namespace: str = "default"
    """Namespace of the operator itself, where its lease is kept."""
    identity: str = ""
    """Name of this process among several that may lead. Empty: host name and process id."""
    scheduler: Literal["own", "volcano", "native"] = "own"
    """Who places gangs where a job does not say: the operator itself, or PodGroups handed to Volcano or to Kubernetes 1.37."""
    profile: Literal["ascend", "nvidia", "cpu"] = "cpu"
    """Kind of device where a resource does not say."""
    resource_name: str = ""
    """Name under which Kubernetes counts devices where a resource does not say. Empty: that of the kind of device."""
    image: str = "semantide:0.2.0"
    """Image of pods whose resource names none."""
    pod_template: dict[str, Any] = {}
    """What pods of jobs in the operator's own namespace get that belong to no release (`kubectl apply`), below what their resource's `template` says. JSON, in that field's form."""
    replica_template: dict[str, Any] = {}
    """The same for pods of services. JSON."""
    release: str = ""
    """The operator's own release: its services' replicas, and those of no release, are shown the key when their metrics are read."""
    port: int = Field(default=8080, ge=0, le=65535)
    """TCP port of /metrics, /healthz and /readyz. 0: none."""
    lease_seconds: float = Field(default=15.0, ge=2)
    """How long another process waits for a leader that no longer renews its lease, seconds."""
    round_seconds: float = Field(default=5.0, gt=0, le=60)
    """Longest time between two looks at everything when nothing happens, seconds; at most 60, since /healthz takes two minutes without one for a death."""
    relist_seconds: float = Field(default=60.0, gt=0)
    """How often everything is read anew, in case a watch has missed something, seconds."""
    device_info_namespace: str = "kube-system"
    """Namespace where the Ascend device plugin says which NPUs are unhealthy. Empty: it is not asked."""
    device_info_seconds: float = Field(default=15.0, gt=0)
    """How often unhealthy NPUs are asked for, seconds."""
    assign_devices: bool = True
    """The Ascend device plugin gives a pod the NPUs that its annotation names. false: the plugin chooses, and only their number is ours."""
    dynamic_resources: bool = False
    """Ask for NPUs by resource claims (dynamic resource allocation) instead of a device plugin's resource."""
    rendezvous: Literal["address", "dns"] = "address"
    """How ranks find the first one: its pod's address in a file that is mounted, or its name under a headless Service (wants cluster DNS)."""
    master_port: int = Field(default=29500, ge=1, le=65535)
    """TCP port on which the first rank gathers the others."""
    volcano_queue: str = "default"
    """Volcano's queue for jobs that are handed to it."""
    node_grace_seconds: float = Field(default=20.0, ge=0)
    """How long a node may be not ready before its pods count as lost, by the operator's own clock from when it heard of it, seconds."""
    unschedulable_seconds: float = Field(default=30.0, ge=0)
    """How long Kubernetes' scheduler may refuse a placed pod before the whole gang is placed anew elsewhere, seconds."""
    surge_seconds: float = Field(default=120.0, ge=0)
    """How long a new replica looks for room beside the old ones before some of these make way for it (at most `rollout.maxUnavailable` at a time), seconds."""
    placing_seconds: float = Field(default=900.0, gt=0)
    """How long all pods of a gang may take to run (images are pulled) before that counts as a failure, seconds."""
    ageing_seconds: float = Field(default=600.0, gt=0)
    """How long a job must have waited for that to be worth one step of priority, seconds."""
    patience_seconds: float = Field(default=60.0, ge=0)
    """How long the head of the line waits before it takes room back from smaller jobs that went past it, seconds."""
    drain_seconds: float = Field(default=1800.0, ge=0)
    """How long the head of the line waits before the nodes that it needs take no more jobs which cannot be restarted, seconds."""
    reason_seconds: float = Field(default=15.0, ge=0)
    """How often the reason why a job waits is written anew, at most, seconds."""
    avoid_seconds: float = Field(default=300.0, ge=0)
    """How long a job avoids a node that refused its pod, or on which a pod of it failed, seconds."""
    backoff_limit_seconds: float = Field(default=300.0, ge=0)
    """Longest pause before a restart, seconds."""
    steady_seconds: float = Field(default=600.0, ge=0)
    """How long a gang must have run for its next failure to begin with the shortest pause again, and before an elastic job grows, seconds."""
    stop_seconds: int = Field(default=90, ge=1)
    """How long a pod may take for a last checkpoint when it is stopped, seconds."""
    lost_stop_seconds: int = Field(default=10, ge=0)
    """How long the rest of a gang may take to end once a pod of it is lost, which makes a checkpoint impossible, seconds."""
    slow_ratio: float = Field(default=1.1, gt=1)
    """Step time over the gang's median from which a node counts as slow."""
    api_keys: str = ""
    """Keys of the services' API, separated by commas; the first one is shown to replicas of the operator's own release when their metrics are read."""
    load_seconds: float = Field(default=5.0, gt=0)
    """How often services' load is measured, seconds."""
    log_level: str = "INFO"
    """Least severe level that is logged."""
