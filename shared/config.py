"""Settings of this deployment, from environment variables that begin with ``SEMANTIDE_``.

Read once per process by the entry points (``services/local.py``, the command line) and passed on; never read at import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, StringConstraints
from pydantic_settings import BaseSettings, SettingsConfigDict

Finite = Annotated[float, Field(allow_inf_nan=False)]


class Settings(BaseSettings):
    """Where things are and how much is allowed. Each field's description has its unit."""

    model_config = SettingsConfigDict(env_prefix="SEMANTIDE_", extra="ignore", use_attribute_docstrings=True)

    data_dir: Path = Path(".semantide")
    """Folder of everything this stack keeps: events, artifacts, checkpoints, broker files."""
    redis_url: str = Field(default="", validation_alias=AliasChoices("SEMANTIDE_REDIS_URL", "REDIS_URL", "redis_url"))
    """Broker address, redis://[:password@]host:port/db, or redis+sentinel://[:password@]host:port,host:port/NAME/db where sentinels watch it. Empty: ``semantide up`` starts one of its own."""
    broker_replicas: int = Field(default=0, ge=0)
    """Replicas of the broker on whose disks accepted rows must be before they are answered 202, so that a failover loses none, servers."""
    artifacts_url: str = ""
    """Root of the artifact store, any fsspec URL (s3://bucket/prefix). Empty: ``data_dir``/artifacts."""
    host: str = "127.0.0.1"
    """Address the APIs listen on; ``::`` is every one of this machine, of IPv6 and IPv4. Beyond loopback an API key must be configured."""
    port: int = Field(default=8000, ge=1, le=65535)
    """TCP port of the APIs."""
    url: str = ""
    """Base address of a stack that the command line talks to. Empty: the one started in ``data_dir``."""
    api_keys: str = ""
    """Accepted API keys, separated by commas, each as KEY (may do all), read:KEY, write:KEY, admin:KEY or NAME@ROLE:KEY. Empty on loopback: one is made and kept in ``data_dir``/api_key."""
    user_id_key: str = Field(default="", repr=False)
    """Key under which users' ids become pseudonyms at the door, at least 16 characters, the same for all processes and for ever. Empty: ids are kept as they come."""
    rate_limit: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Requests that the holder of one key may make of one process, health and metrics aside; beyond it the answer is 429. 0: any number, requests a second."""
    rate_limit_burst: int = Field(default=100, ge=1)
    """Requests that such a holder may make at once after a rest, requests."""
    audit_days: int = Field(default=365, ge=1)
    """How long the audit log keeps what admins did, days."""
    console_stack: str = ""
    """Address of the APIs that the console shows, http://host:port. Empty: those of its own process."""
    operator_url: str = ""
    """Address of the operator's page, as in http://semantide-operator:8080, from which the console's Cluster page learns of nodes and jobs. Empty: there is none."""
    import_roots: str = ""
    """Folders that imports may read, hidden files and ``data_dir`` in them excepted, separated by ':'. Empty: the working folder. ``data_dir``/uploads always."""
    max_body_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Largest request body, bytes."""
    body_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """How long a request's body may take to come; an upload's may take longer, but not pause for so long. Beyond it the answer is 408, seconds."""
    max_batch_rows: int = Field(default=5000, ge=1)
    """Most interactions or items in one request, rows."""
    max_backlog_bytes: int = Field(default=256 * 1024 * 1024, ge=1024 * 1024)
    """Accepted rows that may wait in the broker for the event log before new ones are answered 503, bytes."""
    actions: dict[str, Finite] = Field(
        default={
            "exposure": 0.0,
            "click": 1.0,
            "view": 1.0,
            "rate": 1.0,
            "review": 1.0,
            "long_view": 1.5,
            "like": 2.0,
            "comment": 2.1,
            "follow": 2.2,
            "forward": 2.3,
            "cart": 2.5,
            "order": 3.0,
            "hate": -1.0,
        }
    )
    """Known actions and their intensity: below 1 exposed, from 1 clicked, from 3 ordered, negative disliked. JSON."""
    event_days: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long the event log keeps an event after it happened; the last of its time go a tenth of that later. 0: for ever, days."""
    event_bytes: int = Field(default=0, ge=0)
    """Most that the event log may take on the disk; beyond it the oldest events go. 0: any amount, bytes."""
    artifact_days: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long an artifact is kept that nothing needs any more, days. What serves or may be promoted, the newest of each kind, what jobs of that time name and what all these were made of stays. 0: for ever."""
    artifacts_kept: int = Field(default=5, ge=1)
    """Newest artifacts of each kind that stay whatever their age, artifacts."""
    job_days: float = Field(default=365.0, ge=0, allow_inf_nan=False)
    """How long the record, log, report and checkpoints of a job that has ended are kept. 0: for ever, days."""
    upload_days: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """How long a file sent with PUT /v1/uploads is kept. 0: until somebody removes it, days."""
    retention_hours: float = Field(default=24.0, ge=0, allow_inf_nan=False)
    """Time between two looks for artifacts, jobs and uploads that need not be kept. 0: only `semantide retention` looks, hours."""
    history_length: int = Field(default=200, ge=1)
    """Most recent interactions kept online per user, events."""
    history_ttl_seconds: int = Field(default=90 * 86400, ge=60)
    """How long an idle user's online history is kept, seconds."""
    item_changes_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Least time between two tellings of changed items under steady change, each of which makes new catalogs; the first change after a rest is told at once, seconds."""
    data_executor: Literal["local", "ray"] = "local"
    """Where data sets are made, items' texts and pairs read for a catalog, and whole epochs of negatives drawn: in the job's own process, or on a Ray cluster (needs the ``[ray]`` extra there and here, and one ``data_dir`` for all)."""
    ray_address: str = ""
    """Address of the Ray cluster, such as ray://head:10001. Empty: Ray is started on this machine."""
    data_part_rows: int = Field(default=1_000_000, ge=1)
    """Events, or pairs of items, that one part of such work has: what a worker holds at a time, rows."""
    session_gap_seconds: int = Field(default=1800, ge=1)
    """Silence that ends a session, seconds."""
    job_runner: Literal["process", "cluster"] = "process"
    """Where a worker's long jobs run: in child processes of its own, or as NPUJobs that the operator gives pods to (needs the ``[cluster]`` extra)."""
    cluster_jobs: dict[str, Any] = {}
    """What the NPUJobs of this deployment have in common, with ``job_runner`` cluster: ``namespace``, ``labels``, ``default`` and ``kinds`` (parts of their spec). JSON."""
    job_slots: int = Field(default=1, ge=1)
    """Jobs that one worker runs at the same time."""
    job_attempts: int = Field(default=5, ge=1)
    """Times a job is started before a crash of its process counts as failure."""
    job_stop_seconds: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """How long a job's processes may take for a last checkpoint when they are asked to stop, seconds. Pods of NPUJobs are told what their period of grace leaves."""
    training_processes: int = Field(default=0, ge=0)
    """Processes that train one model together, unless the job says otherwise. 0: one per accelerator of this machine, a single one where there is none."""
    training_timeout_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """How long a process waits for the others of the same job before all start again from the last checkpoint, seconds."""
    reward_preference: dict[str, Finite] = {}
    """Weight of each feedback signal in the preference of reward models trained from now on; negative for dislike. Empty: the intensities of ``actions``. JSON."""
    reward_wait_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long an alignment run waits for scores that it asked the reward room for, before it computes them itself, seconds. 0: it never asks."""
    negatives_wait_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """How long a training run waits for negatives that it asked the negatives room for, before it draws them itself, seconds an epoch."""
    serving_batch: int = Field(default=32, ge=1)
    """Most recommendation requests answered together, requests."""
    serving_round_beams: int = Field(default=1024, ge=1)
    """Most beams of the requests answered together; a wider request goes alone, beams."""
    serving_round_tokens: int = Field(default=16384, ge=1)
    """Most prompt tokens of the requests answered together (a merged item counts as one); a longer one goes alone, tokens."""
    serving_workers: int = Field(default=0, ge=0)
    """Threads that compute recommendations, each with its share of the cores. 0: one per two cores, at most 4."""
    serving_weights: Literal["float32", "bfloat16", "int8", "auto"] = "float32"
    """Form in which a CPU keeps the served model's layers. ``auto``: whatever is clearly fastest there, measured when a model is loaded; `semantide evaluate --weights` says what a form costs."""
    serving_records: Literal["float32", "bfloat16", "float16"] = "float32"
    """Form in which layers of linear attention record what beams generate. The shorter ones take half the memory and round."""
    serving_snapshots: int = Field(default=2, ge=1, le=8)
    """States of layers of linear attention that are kept of a user's last prompt: at its end, before its last item, its last two, four and so on. From the last one within what a new prompt has in common it is read on."""
    serving_queue: int = Field(default=2048, ge=1)
    """Most recommendation requests that wait; beyond it the answer is 429, requests."""
    serving_deadline_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """How long a recommendation request may take before it is given up, seconds."""
    serving_narrowing_seconds: float = Field(default=0.2, ge=0, allow_inf_nan=False)
    """Expected wait from which on searches use fewer beams, stepwise down to a quarter and never below n; the answers say so. 0: never, seconds."""
    serving_kv_bytes: int = Field(default=1024**3, ge=1024**2)
    """Most memory for keys and values of running recommendation requests; others wait, bytes."""
    serving_prompt_cache_bytes: int = Field(default=256 * 1024**2, ge=0)
    """Most memory for the prompts of users who may return, of each live model; 0: none is kept, bytes."""
    serving_scored_items: int = Field(default=1000, ge=1, le=10_000)
    """Most items that one request may have scored, items."""
    serving_exploration: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Share of a list's places for items younger than the model, where there are any; a request may decline. 0: none."""
    serving_randomisation: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    """Chance with which each place of a list goes to an item drawn among the next best ones, so that other models can be judged by the log; a request may decline. 0: none."""
    serving_shown_seconds: int = Field(default=86400, ge=0)
    """How long a list that a split or a draw had a part in is kept, to be joined with the feedback that names its request id, seconds. 0: not at all."""
    serving_shown_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    """Most memory in the broker for such lists; the oldest go first, bytes."""
    serving_source: Literal["auto", "generator", "retriever", "both"] = "auto"
    """Who ranks where a request does not say. ``auto``: the generator, and the promoted retriever where no generator is live or too many requests wait for it."""
    promotion_bounds: dict[
        Annotated[str, StringConstraints(pattern=r"^(hr|recall|ndcg|mrr)@[1-9][0-9]{0,3}$")], Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
    ] = Field(default={"hr@50": 0.02, "ndcg@50": 0.02}, min_length=1)
    """How much of the live model's figure on held-out users a candidate that goes live `if-not-worse` may have lost, in 95 of 100 such tests, metric by metric, shares. JSON."""
    promotion_users: int = Field(default=0, ge=0)
    """Most users of that test, drawn by chance. 0: all."""
    serving_cursor_seconds: int = Field(default=900, ge=1)
    """How long a ranking is kept for its later pages after the last one that was asked for, seconds."""
    serving_cursor_bytes: int = Field(default=256 * 1024**2, ge=1024**2)
    """Most memory in the broker for rankings that are kept for later pages; the oldest go first, bytes."""
    replica_model: str = ""
    """Model that this serving process serves, whatever is live (a replica of an NPUService sets it). Empty: the live one."""
    replica_catalog: str = ""
    """Catalog for ``replica_model``. Empty: the newest of the line that the model was trained for."""
    replica_variant: str = ""
    """Variant of the split that this serving process serves to everybody. Empty: the live model and its variants."""
    route_to: str = ""
    """Serving replicas that `semantide route` forwards to, separated by commas, as in http://semantide-serving:8000; each address that a name has is a replica."""
    route_patience_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """How long the router keeps a request for which no replica is ready, seconds."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port on which a process shows its metrics without a key; ``semantide up`` gives its workers this one and the next. 0: none."""
    metrics_host: str = "127.0.0.1"
    """Address of that port; in a pod or container ``::`` (every one), so that a collector reaches it."""
    otlp_endpoint: str = ""
    """OpenTelemetry collector, http://host:4318. Empty: traces stay in the process, nothing leaves the machine."""
    log_level: str = "INFO"
    """Least severe level that is logged."""

    @property
    def artifacts_root(self) -> str:
        """The artifact store's root as an fsspec URL or absolute path."""
        return self.artifacts_url or str((self.data_dir / "artifacts").absolute())

    @property
    def import_folders(self) -> list[Path]:
        """Folders below which imports may read."""
        folders = [Path(folder) for folder in self.import_roots.split(":") if folder] or [Path.cwd()]
        return [folder.resolve() for folder in [*folders, self.data_dir / "uploads"]]
