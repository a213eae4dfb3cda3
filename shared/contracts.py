"""Messages between rooms and the nouns they speak of. Frozen, unknown fields refused.

One message type = one queue = one handler. Messages carry artifact references, never tensors.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

ROOMS = ("ingestion", "tokenization", "negatives", "training", "reward", "serving")

# Which room runs which kind of long work.
JOB_ROOMS: dict[str, str] = {
    "import": "ingestion",
    "dataset": "ingestion",
    "forget": "ingestion",
    "tokenize": "tokenization",
    "negatives": "negatives",
    "train": "training",
    "evaluate": "training",
    "align": "training",
    "reward": "reward",
    "retention": "serving",
}

_MODELS = ("models", "snapshots")
_DATA = {"dataset": ("datasets",), "catalog": ("catalogs",)}
JOB_INPUTS: dict[str, dict[str, tuple[str, ...]]] = {
    "import": {},
    "dataset": {},
    "forget": {},
    "tokenize": {**_DATA, "items": ("items",), "vectors": ()},
    "negatives": {**_DATA, "model": _MODELS, "beams": ("beams",)},
    "train": {**_DATA, "beams": ("beams",)},
    "evaluate": {**_DATA, "model": _MODELS, "baseline": _MODELS, "retriever": _MODELS, "live": _MODELS, "live_catalog": ("catalogs",)},
    "align": {**_DATA, "model": ("models",), "reward": ("rewards",), "judge": ("rewards",)},
    "reward": {"dataset": ("datasets",), "reward": ("rewards",), "retriever": _MODELS},
    "retention": {},
}
"""The inputs that each kind of job knows, and the kinds of artifacts that each may be; an empty tuple: any."""

Identifier = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
ArtifactRef = Annotated[str, StringConstraints(pattern=r"^[a-z]+/sha256-[0-9a-f]{64}$")]


class Contract(BaseModel):
    """Base of everything that crosses a process boundary."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Interaction(Contract):
    """One thing a user did with one item.

    ``signals`` are what else was done at once; ``tab`` is the screen or placement where the item was shown, ``position`` its place on the page from 0, and
    ``propensity`` the probability with which it was shown there. ``request_id`` is that of the answer which showed the item; where serving still knows it, place, propensity and
    ``variant`` (with the ``variant_share`` of users that it had) need not be sent. Units: ``time`` is milliseconds since 1970-01-01 UTC.
    """

    user: Identifier
    item: Identifier
    time: int
    action: Identifier = "click"
    page: Identifier | None = None
    value: float | None = None
    event_id: Identifier | None = None
    tab: Identifier | None = None
    position: int | None = Field(default=None, ge=0, lt=2**31)
    propensity: float | None = Field(default=None, gt=0, le=1)
    signals: tuple[Identifier, ...] = Field(default=(), max_length=64)
    request_id: Identifier | None = None
    variant: Identifier | None = None
    variant_share: float | None = Field(default=None, gt=0, le=1)


class Item(Contract):
    """One thing that can be recommended. ``deleted`` withdraws it for good."""

    id: Identifier
    title: str = ""
    text: str = ""
    categories: tuple[str, ...] = ()
    attributes: dict[str, str] = {}
    available: bool = True
    deleted: bool = False
    embedding: tuple[float, ...] | None = None

    @field_validator("embedding")
    @classmethod
    def _finite(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if value is not None:
            for position, number in enumerate(value):
                if not (-3.4e38 < number < 3.4e38):
                    raise ValueError(f"number {position} is {number}: an embedding holds finite float32 numbers; leave the field out where there is none")
        return value


class ClusterWish(Contract):
    """What a job asks of the cluster otherwise than its deployment says; where jobs are local processes nothing of it applies.

    ``priority`` decides who waits; with ``least_pods`` or ``most_pods`` it may run with fewer or more than ``pods``.
    """

    priority: int = Field(default=0, ge=-1_000_000, le=1_000_000)
    pods: int | None = Field(default=None, ge=1)
    npus_per_pod: int | None = Field(default=None, ge=0)
    least_pods: int | None = Field(default=None, ge=1)
    most_pods: int | None = Field(default=None, ge=1)
    deadline_seconds: int | None = Field(default=None, ge=1)


class JobSpec(Contract):
    """A piece of long work.

    ``config`` overrides fields of the recipe or of the job's own config class; ``inputs`` names artifacts.
    """

    kind: Literal["import", "dataset", "forget", "tokenize", "negatives", "train", "evaluate", "align", "reward", "retention"]
    recipe: str = ""
    config: dict[str, Any] = {}
    inputs: dict[str, ArtifactRef] = {}
    seed: int = 0
    cluster: ClusterWish = ClusterWish()

    @property
    def room(self) -> str:
        """The room whose workers run this kind of job."""
        return JOB_ROOMS[self.kind]

    def wrong_inputs(self) -> str:
        """What is wrong with the names of the inputs, or with the kinds of artifacts that they are; empty where nothing is."""
        known = JOB_INPUTS[self.kind]
        for name, ref in self.inputs.items():
            if name not in known:
                return f"input {name!r} is unknown to a job of kind {self.kind}: it knows {', '.join(known) or 'none'}"
            if known[name] and ref.partition("/")[0] not in known[name]:
                return f"input {name} is {ref[:26]}...: name an artifact of {' or '.join(known[name])}"
        return ""


JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
ENDED: tuple[JobState, ...] = ("succeeded", "failed", "cancelled")


class JobRecord(Contract):
    """What is known of a job. Times are milliseconds since 1970-01-01 UTC; ``trace`` is the W3C trace of who submitted it.

    ``resumes`` counts how often it was resumed; ``npujob`` is the name of the custom resource that runs it on a cluster.
    """

    id: str
    spec: JobSpec
    state: JobState = "queued"
    attempt: int = 0
    done: float = 0
    total: float = 0
    unit: str = ""
    stage: str = ""
    artifacts: dict[str, ArtifactRef] = {}
    result: dict[str, Any] = {}
    error: str | None = None
    cancel_requested: bool = False
    trace: str | None = None
    resumes: int = 0
    npujob: str = ""
    created: int = 0
    started: int | None = None
    finished: int | None = None


class Message(Contract):
    """Base of what travels on a queue."""


class RunJob(Message):
    """A worker of ``room`` shall run this job."""

    room: str
    job_id: str


class ItemsChanged(Message):
    """Items were added, updated or withdrawn; tokenization spells the new ones.

    ``items`` is an ``items/...`` artifact: one ``items.parquet`` with the changed items' current state (columns as in
    ``shared/dataset.py``'s items.parquet, without ``count``, with ``deleted``).
    """

    items: ArtifactRef


class CatalogReady(Message):
    """A catalog was made (``extends`` is None) or got new items under the same tokenizer."""

    catalog: ArtifactRef
    extends: ArtifactRef | None = None


Promotion = bool | Literal["if-not-worse"]
"""Whether a trained model shall go live: not by itself, in any case, or once a paired test on held-out data says that it is not worse than what is live."""


class ModelTrained(Message):
    """A model was trained; serving keeps a generator as a candidate, and promotes it when asked to. Without ``catalog`` it is a retriever, which needs none."""

    job_id: str
    model: ArtifactRef
    catalog: ArtifactRef | None = None
    promote: Promotion = False


class CandidateJudged(Message):
    """An evaluation has compared a candidate with the model that was live, case by case; serving promotes it where it is ``not_worse`` and that model still is. Of a
    retriever ``catalog`` is None.

    ``figures`` has for each metric the live model's mean, the candidate's, the mean difference, its lower bound and the bound that it was held against.
    """

    job_id: str
    model: ArtifactRef
    catalog: ArtifactRef | None = None
    against: ArtifactRef
    not_worse: bool
    reason: str = ""
    cases: int = 0
    figures: dict[str, dict[str, float]] = {}


class TablePublished(Message):
    """A retriever is being trained, and this is its newest state: a whole model (models/...) or what changed since the one before (snapshots/...)."""

    job_id: str
    model: ArtifactRef
    step: int
    promote: bool = False


class NegativesWanted(Message):
    """A training run will need this shard of negatives: those of a stretch of training events, drawn anew for every epoch.

    ``mix`` holds the fields of ``NegativeMix``. What comes out is a function of this message alone, whoever computes it.
    """

    dataset: ArtifactRef
    catalog: ArtifactRef | None = None
    beams: ArtifactRef | None = None
    mix: dict[str, float] = {}
    seed: int = 0
    epoch: int = 0
    shard: int = 0


class RolloutsToScore(Message):
    """An alignment run has made rollouts (rollouts/...) that a reward model (rewards/...) shall score. What comes out is a function of this message alone."""

    reward: ArtifactRef
    rollouts: ArtifactRef
