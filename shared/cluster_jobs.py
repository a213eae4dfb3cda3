"""Long work on a cluster: the door to Kubernetes, and the watch that keeps jobs and NPUJobs of one room in step.

    record in Redis (queued) -> NPUJob -> the operator's pods run ``semantide pod ID`` -> they record progress, metrics and outcome

Every look compares all that there is with all that there should be, so a lost wake-up, a restart, a second worker of the room or an API server that was away
cost time and nothing else. While the API server is away running jobs go on.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from semantide.shared import broker as broker_door
from semantide.shared.contracts import ENDED, JobRecord, JobState
from semantide.shared.errors import BadData, ClusterUnavailable, NotFound
from semantide.shared.followed_jobs import FollowedJobs
from semantide.shared.job_ending import write_report
from semantide.shared.jobs import end_of_file, now_ms
from semantide.shared.npujob import (
    GROUP,
    KIND,
    PLURAL,
    VERSION,
    Create,
    Delete,
    Deployment,
    End,
    Found,
    Note,
    annotations_of,
    body,
    earlier_of,
    found_of,
    name_of,
    next_step,
    step_after_end,
)
from semantide.shared.room import Room
from semantide.shared.telemetry import logger

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_LOOK_SECONDS = 2.0
_IDLE_SECONDS = 30.0  # while no job of the room is open: what is left over may wait
_PAGE = 500
_MOST_PAUSE_SECONDS = 30.0
_ANSWER_SECONDS = 10.0
_LOG_TAIL_BYTES = 2000


class _Refused(ClusterUnavailable):
    """The API server answers, and does not do this one thing."""


class NPUJobs:
    """The NPUJobs of one namespace. ``api`` is a ``kubernetes.client.CustomObjectsApi``."""

    def __init__(self, namespace: str, api: Any) -> None:
        self._namespace, self._api = namespace, api

    @classmethod
    def connect(cls, namespace: str = "") -> NPUJobs:
        """With the service account of this pod, or as ``kubectl`` does it; without a namespace in the one of the account.

        Raises: ValueError without the client or any way to a cluster.
        """
        try:
            from kubernetes import client, config
        except ImportError:
            raise ValueError("job_runner is cluster, and the Kubernetes client is not installed: pip install 'semantide[cluster]'") from None
        own = "default"
        try:
            config.load_incluster_config()
            own = _NAMESPACE_FILE.read_text().strip()
        except config.ConfigException:
            try:
                config.load_kube_config()
                _, active = config.list_kube_config_contexts()
                own = active["context"].get("namespace") or own
            except config.ConfigException as error:
                raise ValueError(
                    f"job_runner is cluster, and there is no way to one ({error}): run in a pod with a service account, or set KUBECONFIG"
                ) from error
        return cls(namespace or own, client.CustomObjectsApi())

    def of_room(self, room: str) -> dict[str, Found]:
        """NPUJobs with work of one room, by name; whoever made them. As the API server has them in memory: one that was made a moment ago may be missing.

        Raises: ClusterUnavailable.
        """
        found: dict[str, Found] = {}
        more: dict[str, Any] = {"resource_version": "0"}
        while more:
            page = self._call("list_namespaced_custom_object", limit=_PAGE, **more)
            found |= {each.name: each for each in map(Found.of, page["items"]) if each.room == room}
            token = (page.get("metadata") or {}).get("continue")
            more = {"_continue": token} if token else {}
        return found

    def get(self, name: str) -> Found | None:
        """One by name, as it is at this moment; None where there is none.

        Raises: ClusterUnavailable.
        """
        resource = self._call("get_namespaced_custom_object", name=name, fine=404)
        return None if resource is None else Found.of(resource)

    def create(self, resource: Mapping[str, Any]) -> None:
        """Make one; one that is there already is this one, made by somebody as quick.

        Raises: BadData when the cluster finds it wrong, ClusterUnavailable.
        """
        self._call("create_namespaced_custom_object", body=dict(resource), fine=409)

    def annotate(self, name: str, values: Mapping[str, str]) -> None:
        """Set annotations of one that may be gone.

        Raises: ClusterUnavailable.
        """
        self._call("patch_namespaced_custom_object", name=name, body={"metadata": {"annotations": dict(values)}}, fine=404)

    def delete(self, name: str) -> None:
        """Delete one that may be gone; its pods are asked to end, and it stays until they have.

        Raises: ClusterUnavailable.
        """
        self._call("delete_namespaced_custom_object", name=name, propagation_policy="Foreground", fine=404)

    def _call(self, verb: str, fine: int = 0, **arguments: Any) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return getattr(self._api, verb)(
                group=GROUP, version=VERSION, namespace=self._namespace, plural=PLURAL, _request_timeout=_ANSWER_SECONDS, **arguments
            )
        except ApiException as error:
            if error.status == fine:
                return None
            said = f"{verb.split('_')[0]} {KIND}: {error.status} {error.reason}: {_message(error)}"
            if error.status in (400, 422):
                raise BadData(said) from error
            remedy = {403: "give the worker's service account this right", 404: "install the chart's custom resources"}.get(error.status or 0, "")
            if error.status == 403 and " cannot " not in said:
                remedy = ""  # a quota or a policy forbids too
            raise _Refused(f"{said}: {remedy or 'it is tried again'}") from error
        except (OSError, HTTPError) as error:
            raise ClusterUnavailable(
                f"{verb.split('_')[0]} {KIND}: the API server cannot be reached ({type(error).__name__}: {error}): it is tried again"
            ) from error


def _message(error: Any) -> str:
    with suppress(TypeError, ValueError):
        return str(json.loads(error.body)["message"])
    return str(error.body or "")[:500]


class ClusterRunner:
    """Keeps a room's jobs and their NPUJobs in step; stands where ``JobRunner`` stands for local processes."""

    def __init__(self, room: Room, npujobs: NPUJobs | None = None, look_seconds: float = _LOOK_SECONDS, idle_seconds: float = _IDLE_SECONDS) -> None:
        try:
            self.deployment = Deployment.model_validate(room.settings.cluster_jobs)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"SEMANTIDE_CLUSTER_JOBS: {'.'.join(map(str, first['loc']))}: {first['msg']} (got {str(first['input'])[:80]!r})") from error
        self._room, self._jobs, self._look_seconds, self._idle_seconds = room, FollowedJobs(room.broker), look_seconds, idle_seconds
        self._looked, self._busy = float("-inf"), False
        self._npujobs = npujobs or NPUJobs.connect(self.deployment.namespace)
        self._annotated: dict[str, dict[str, str]] = {}
        self._attempts: dict[str, int] = {}
        self._told_ends: set[str] = set()  # names of NPUJobs that say how far their jobs came
        self._wake, self._ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="cluster-runner", daemon=True)
        self._log = logger("jobs")

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def wake(self) -> None:
        """Look now."""
        self._wake.set()

    def stop(self) -> None:
        """Look no more; what runs on the cluster goes on."""
        self._ending.set()
        self._wake.set()
        self._thread.join(_ANSWER_SECONDS + 5)

    def _watch(self) -> None:
        cause, pause = "", self._look_seconds
        while not self._ending.is_set():
            try:
                self._look_if_due()
                cause, pause = "", self._look_seconds
            except (ClusterUnavailable, broker_door.RedisError) as error:
                if str(error) != cause:
                    self._log.warning("jobs and NPUJobs cannot be compared now; what runs goes on", error=str(error))
                # Where one job alone was refused the others are looked at as often as ever.
                cause, pause = str(error), self._look_seconds if isinstance(error, _Refused) else min(2 * pause, _MOST_PAUSE_SECONDS)
            except Exception:
                self._log.exception("the cluster runner stumbled and goes on")
                pause = min(2 * pause, _MOST_PAUSE_SECONDS)
            self._wake.wait(pause)
            self._wake.clear()

    def _look_if_due(self) -> None:
        """All the time while jobs are open, and once after; else now and then."""
        busy = self._jobs.any_open(self._room.name)
        if busy or self._busy or time.monotonic() - self._looked >= self._idle_seconds:
            self.look()
            self._looked, self._busy = time.monotonic(), busy

    def look(self) -> None:
        """Compare once, and do what follows; what the API server refuses for one job keeps no other waiting.

        Raises: ClusterUnavailable.
        """
        # NPUJobs first, records after: what pods have recorded before they ended is then seen.
        try:
            found = self._npujobs.of_room(self._room.name)
        except ClusterUnavailable as error:
            self._tell_waiting(error)
            raise
        records = [record for record in self._jobs.open_jobs(self._room.name) if record.state not in ENDED]
        refused: list[_Refused] = []
        for record in records:
            own = found_of(record, found)
            self._alone(record.id, partial(self._tend, record, own, earlier_of(record, found)), refused)
            if own is not None:
                del found[own.name]
        self._told_ends &= set(found)
        for left in found.values():
            self._annotated.pop(left.name, None)
            self._attempts.pop(left.name, None)
            self._alone(left.job_id, partial(self._tend_left_over, left), refused)
        if refused:
            raise refused[0]

    def _alone(self, job_id: str, work: Callable[[], None], refused: list[_Refused]) -> None:
        """Do what one job needs; what goes wrong with it alone is put into ``refused``, and the others have their turn."""
        try:
            work()
        except _Refused as error:
            refused.append(error)
        except BadData as error:
            refused.append(_Refused(f"job {job_id}: {error}"))
        except (ClusterUnavailable, broker_door.RedisError):
            raise  # nobody else would fare better
        except Exception as error:
            self._log.exception("one job cannot be compared with its NPUJob; the others are", job=job_id)
            refused.append(_Refused(f"job {job_id}: {type(error).__name__}: {error}"))

    def _tell_waiting(self, error: ClusterUnavailable) -> None:
        for record in self._jobs.open_jobs(self._room.name):
            if record.state == "queued":
                self._jobs.write_open(record.id, stage=f"waits for the cluster: {error}")

    def _tend(self, record: JobRecord, found: Found | None, earlier: Found | None) -> None:
        if found is None and record.npujob:
            found = self._npujobs.get(record.npujob)  # no job ends because a list is a moment old
        step = next_step(record, found, earlier)
        match step:
            case Create():
                self._create(record)
            case Delete(name):
                self._npujobs.delete(name)
            case End(state, error):
                tail = end_of_file(self._folder(record.id) / "log.txt", _LOG_TAIL_BYTES).strip() if state == "failed" else ""
                self._end(record, state, f"{error}; the end of its log: {tail}" if tail else error)
            case Note(fields):
                started = {"started": now_ms()} if fields.get("state") == "running" and not record.started else {}
                self._jobs.write_open(record.id, **fields, **started)
        if found is not None and found.phase == "Running" and not found.deleting:
            self._annotate(record, found)

    def _end(self, record: JobRecord, state: JobState, error: str) -> None:
        """Record an end that the pods have not recorded themselves, and report it."""
        if self._jobs.end_open(record, state, error):
            write_report(self._jobs, self._jobs.get(record.id), self._room.store, self._folder(record.id))

    def _create(self, record: JobRecord) -> None:
        try:
            self._npujobs.create(body(record, self.deployment, self._room.settings.job_attempts))
        except BadData as error:
            self._end(record, "failed", str(error))
            return
        except ClusterUnavailable as error:
            self._jobs.write_open(record.id, stage=f"waits for the cluster: {error}")
            raise
        self._jobs.write_open(record.id, npujob=name_of(record), stage="waits for the operator")
        self._log.info("NPUJob made", job=record.id, kind=record.spec.kind, npujob=name_of(record))

    def _annotate(self, record: JobRecord, found: Found) -> None:
        if self._attempts.get(found.name) != found.attempt:
            self._jobs.forget_step_seconds(record.id)  # they may be those of an earlier gang, which had other places; this one says its own again
            self._attempts[found.name] = found.attempt
        said = annotations_of(record, self._jobs.step_seconds(record.id), found.pods, self._checkpoint(record.id), found.attempt)
        if self._annotated.get(found.name) != said:
            self._tell(found, said)
        self._annotated[found.name] = said

    def _tell(self, found: Found, said: Mapping[str, str]) -> None:
        if any(found.annotations.get(name) != value for name, value in said.items()):
            self._npujobs.annotate(found.name, said)

    def _tend_left_over(self, found: Found) -> None:
        with suppress(NotFound):  # another deployment's, or the broker lost it: nothing is deleted on a guess
            record = self._jobs.get(found.job_id)
            step = step_after_end(record, found, now_ms(), self.deployment.keep_seconds)
            if step is not None:
                self._npujobs.delete(step.name)
            elif record.state in ENDED and found.name == (record.npujob or name_of(record)) and found.name not in self._told_ends:
                self._tell(found, annotations_of(record, {}, found.pods, self._checkpoint(record.id), found.attempt))
                self._told_ends.add(found.name)

    def _folder(self, job_id: str) -> Path:
        return self._room.settings.data_dir.absolute() / "jobs" / job_id

    def _checkpoint(self, job_id: str) -> str:
        """Name of the newest checkpoint, as in step-000000120."""
        return max((path.name for path in (self._folder(job_id) / "checkpoints").glob("step-*[0-9]")), default="")
