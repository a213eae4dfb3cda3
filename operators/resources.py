"""The custom resources as frozen values: what users ask for (spec), what the operator says back (status), and every name the two sides share.

    NPUJob       a gang of pods that runs one job to its end        short name npujob
    NPUService   replicas that answer requests for as long as asked  short name npuservice

``NPUJob.parse(body)`` reads what the API server answers; ``to_body()`` of a spec or status is what is written there (camelCase).
Fields that this version does not know are left out, so an older operator reads objects of a newer chart.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

GROUP = "semantide.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
JOB_KIND, JOB_PLURAL = "NPUJob", "npujobs"
SERVICE_KIND, SERVICE_PLURAL = "NPUService", "npuservices"

# Labels of pods and ConfigMaps that belong to a job or a service.
MANAGED_BY_LABEL, MANAGED_BY = "app.kubernetes.io/managed-by", "semantide-operator"
JOB_LABEL = f"{GROUP}/job"
SERVICE_LABEL = f"{GROUP}/service"
RANK_LABEL = f"{GROUP}/rank"  # of the pod within its gang, from 0
ATTEMPT_LABEL = f"{GROUP}/attempt"  # counts the gangs of one job: its restarts, resumes and changes of size
REVISION_LABEL = f"{GROUP}/revision"  # of a service's pod: which spec it runs

# Annotations of pods.
NODE_ANNOTATION = f"{GROUP}/node"  # where the operator put the pod, known before the scheduler binds it
NPUS_ANNOTATION = f"{GROUP}/npus"  # indices on the pod's node, "0,1,2,3"
WORK_ANNOTATION = f"{GROUP}/job-id"  # the job whose work the pod does: two NPUJobs of one job must not run at once
ELASTIC_ANNOTATION = f"{GROUP}/world-size"  # pods in the gang that this one belongs to

# Annotations of nodes.
SLOW_ANNOTATION = f"{GROUP}/slow"  # step time over the gang's median, decayed; "1.25" is 25 % slow
RING_SIZE_LABEL = f"{GROUP}/ring-size"  # NPUs per ring, where the node's type does not say it

# Annotations that a job's own first rank writes onto its NPUJob.
PROGRESS_ANNOTATION = f"{GROUP}/progress"  # JSON: {done, total, unit, stage}
CHECKPOINT_ANNOTATION = f"{GROUP}/checkpoint"
IMBALANCE_ANNOTATION = f"{GROUP}/imbalance"  # slowest rank's step time over the mean, less 1
STEP_SECONDS_ANNOTATION = f"{GROUP}/step-seconds"  # JSON: {pod within its gang: seconds, "attempt": the gang}

ProfileName = Literal["ascend", "nvidia", "cpu"]
SchedulerName = Literal["own", "volcano", "native"]
JobPhase = Literal["Pending", "Placing", "Running", "Restarting", "Suspended", "Succeeded", "Failed"]
ServicePhase = Literal["Pending", "Rolling", "Running", "Degraded", "Suspended"]
ENDED_PHASES: tuple[JobPhase, ...] = ("Succeeded", "Failed")


def _lean(value: Any) -> Any:
    """Without empty texts, and whole numbers without a fraction."""
    if isinstance(value, dict):
        return {key: _lean(inner) for key, inner in value.items() if inner != ""}
    if isinstance(value, list):
        return [_lean(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _time(said: str) -> str:
    """A time as the API server writes it."""
    datetime.fromisoformat(said.replace("Z", "+00:00")).timestamp()
    return said


Time = Annotated[str, AfterValidator(_time)]


class Part(BaseModel):
    """Base of everything inside a resource: frozen, camelCase outside, snake_case inside, unknown fields left out."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, allow_inf_nan=False)

    def to_body(self) -> dict[str, Any]:
        """As the API server keeps it; fields without a value or text are left out, for some builds of the server take an empty text for none at all."""
        found: dict[str, Any] = _lean(self.model_dump(mode="json", by_alias=True, exclude_none=True))
        return found


class Owner(Part):
    """Who owns an object."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


class Metadata(Part):
    """What every object has. Times are RFC 3339 as the API server writes them."""

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    finalizers: tuple[str, ...] = ()
    owner_references: tuple[Owner, ...] = ()


class Elastic(Part):
    """Between how many pods a job may run; it asks for ``worldSize`` first."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"elastic.max is {self.max}, below elastic.min {self.min}: swap them")
        return self


class RestartPolicy(Part):
    """How often a gang that lost a pod, node or NPU starts again, and the first pause, which doubles each time."""

    limit: int = Field(default=10, ge=0)
    backoff_seconds: float = Field(default=10.0, ge=0)


class NPUJobSpec(Part):
    """What a job asks for. ``world_size`` counts pods; ``resource_name`` empty means the profile's own."""

    kind: str
    job_id: str = ""
    room: str = ""
    parameters: dict[str, Any] = {}
    image: str = ""
    command: tuple[str, ...] = ()
    world_size: int = Field(default=1, ge=1)
    npus_per_pod: int = Field(default=0, ge=0)
    resource_name: str = ""
    profile: ProfileName = "cpu"
    elastic: Elastic | None = None
    priority: int = 0
    restart_policy: RestartPolicy = RestartPolicy()
    deadline_seconds: int | None = Field(default=None, ge=1)
    suspend: bool = False
    template: dict[str, Any] = {}
    scheduler: SchedulerName = "own"

    @model_validator(mode="after")
    def _elastic_holds_the_world(self) -> Self:
        if self.elastic is not None and not self.elastic.min <= self.world_size <= self.elastic.max:
            raise ValueError(f"worldSize {self.world_size} is not within elastic {self.elastic.min} to {self.elastic.max}: change one of them")
        return self

    @property
    def least_pods(self) -> int:
        """The fewest pods that the job runs with."""
        return self.world_size if self.elastic is None else self.elastic.min

    @property
    def most_pods(self) -> int:
        """The most pods that the job runs with."""
        return self.world_size if self.elastic is None else self.elastic.max


class Condition(Part):
    """One line of ``status.conditions``, as ``kubectl wait`` reads it."""

    type: str
    status: Literal["True", "False", "Unknown"] = "Unknown"
    reason: str = ""
    message: str = ""
    last_transition_time: Time | None = None
    observed_generation: int = 0


class PodPlacement(Part):
    """Where one pod of a job or service is: its node and the NPUs it holds there. ``node`` is empty until another scheduler has chosen one."""

    pod: str
    node: str = ""
    npus: tuple[int, ...] = ()


class Progress(Part):
    """How far the job is."""

    done: float = 0
    total: float = 0
    unit: str = ""
    stage: str = ""


class NodeUntil(Part):
    """A node that a job or a service keeps off for a while, and why."""

    node: str
    until: Time
    reason: str = ""


class SlowNode(Part):
    """A node on which a gang's pod needed longer than the others: its step time over their median."""

    node: str
    ratio: float


class NPUJobStatus(Part):
    """What the operator says of a job.

    ``wish`` is how many pods its next gang asks for, where that is not ``worldSize``; ``recent_restarts`` counts those since it last ran steadily,
    ``resumed_from`` is the checkpoint that there was when the gang began. ``revision`` tells which spec the gang was made of. It stands in line since ``queue_time``
    and was placed at ``placed_time``; ``waited_seconds`` is what earlier gangs of it waited. ``reason_time`` is when the reason for
    its waiting was written. ``failed_placings`` counts those in a row of which not all pods came to run. What stood beside the first ``cleared`` gangs (tables of ranks and the like) is taken away.
    """

    phase: JobPhase = "Pending"
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    placement: tuple[PodPlacement, ...] = ()
    progress: Progress = Progress()
    checkpoint: str = ""
    attempt: int = 0
    cleared: int = 0
    restarts: int = 0
    restart_time: Time | None = None
    reason_time: Time | None = None
    message: str = ""
    imbalance: float | None = None
    wish: int = 0
    recent_restarts: int = 0
    failed_placings: int = 0
    resumed_from: str = ""
    revision: str = ""
    finished_ranks: tuple[int, ...] = ()
    avoid: tuple[NodeUntil, ...] = ()
    slow: tuple[SlowNode, ...] = ()
    slow_time: Time | None = None
    queue_time: Time | None = None
    waited_seconds: float = 0.0
    placed_time: Time | None = None
    start_time: Time | None = None
    completion_time: Time | None = None


class Replicas(Part):
    """Between how many replicas a service runs; none at all where both are 0."""

    min: int = Field(default=1, ge=0)
    max: int = Field(default=1, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _most_as_least(cls, said: Any) -> Any:
        """Without a most, as many as at least."""
        return {**said, "max": int(said.get("min", 1))} if isinstance(said, dict) and "max" not in said else said

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"replicas.max is {self.max}, below replicas.min {self.min}: swap them")
        return self


class Rollout(Part):
    """How a new revision replaces the old one: beside it where there is room (Surge), or where it was (InPlace)."""

    strategy: Literal["Surge", "InPlace"] = "Surge"
    max_unavailable: int = Field(default=1, ge=0)


class LoadTarget(Part):
    """The load that one replica should have: waiting requests, and the time 99 of 100 answers stay below."""

    queue_depth: float = Field(default=8.0, gt=0)
    p99_milliseconds: float = Field(default=0.0, ge=0)


class NPUServiceSpec(Part):
    """What a service asks for."""

    replicas: Replicas = Replicas()
    npus_per_replica: int = Field(default=0, ge=0)
    resource_name: str = ""
    profile: ProfileName = "cpu"
    image: str = ""
    command: tuple[str, ...] = ()
    model: str = ""
    catalog: str = ""
    variant: str = ""
    rollout: Rollout = Rollout()
    target: LoadTarget = LoadTarget()
    template: dict[str, Any] = {}
    priority: int = 0
    suspend: bool = False


class ServiceLoad(Part):
    """A service's measured load: waiting requests per replica, 99th percentile of answers, and the fullest queue over the mean one."""

    queue_depth: float = 0.0
    p99_milliseconds: float = 0.0
    imbalance: float = 1.0


class NPUServiceStatus(Part):
    """What the operator says of a service.

    ``wish`` is how many replicas its load asks for, changed at ``scale_time``; ``moving`` is a pod whose replica shall run on another node. ``revisions`` are
    those whose templates of resource claims are there. Nodes in ``avoid`` refused a replica not long ago. The rollout has found too little room beside the old replicas since ``cramped_time``.
    """

    phase: ServicePhase = "Pending"
    conditions: tuple[Condition, ...] = ()
    observed_generation: int = 0
    replicas: int = 0
    ready_replicas: int = 0
    updated_replicas: int = 0
    placement: tuple[PodPlacement, ...] = ()
    load: ServiceLoad = ServiceLoad()
    wish: int = 0
    moving: str = ""
    avoid: tuple[NodeUntil, ...] = ()
    scale_time: Time | None = None
    cramped_time: Time | None = None
    revisions: tuple[str, ...] = ()
    message: str = ""
    selector: str = ""


class _Resource(Part):
    kind: str = ""
    api_version: str = API_VERSION
    metadata: Metadata

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """The resource in an API server's answer.

        Raises: ValueError, naming field, value and what is wrong with it.
        """
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            name = body.get("metadata", {}).get("name", "?")
            faults = "; ".join(f"{'.'.join(map(str, fault['loc'])) or 'spec'} = {fault['input']!r}: {fault['msg']}" for fault in error.errors())
            raise ValueError(f"{body.get('kind', 'resource')} {name!r} cannot be used: {faults}") from error

    @property
    def name(self) -> str:
        """Its name in its namespace."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.metadata.namespace

    @property
    def key(self) -> str:
        """Namespace and name, one string for the whole cluster."""
        return f"{self.metadata.namespace}/{self.metadata.name}"

    @property
    def deleting(self) -> bool:
        """Somebody asked for its deletion."""
        return self.metadata.deletion_timestamp is not None


class NPUJob(_Resource):
    """A gang of pods that runs one job to its end."""

    kind: Literal["NPUJob"] = "NPUJob"
    spec: NPUJobSpec
    status: NPUJobStatus = NPUJobStatus()

    @property
    def ended(self) -> bool:
        """It succeeded or failed, and stays so."""
        return self.status.phase in ENDED_PHASES


class NPUService(_Resource):
    """Replicas that answer requests for as long as asked."""

    kind: Literal["NPUService"] = "NPUService"
    spec: NPUServiceSpec = NPUServiceSpec()
    status: NPUServiceStatus = NPUServiceStatus()
