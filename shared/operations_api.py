"""Routes that every room answers alike: jobs, artifacts and queues live in Redis and in the store, not in a room."""

from __future__ import annotations

import socket
from typing import Any

import httpx

from semantide.shared.audit import AuditEntry, AuditLog
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import BadData, TransientError
from semantide.shared.http import APIRouter, IdempotencyKey, Query, Response
from semantide.shared.job_ending import report_of
from semantide.shared.jobs import Jobs, end_of_file
from semantide.shared.room import Room

_LOG_BYTES = 64 * 1024
LAST_MS = 1 << 53  # exact in any client
_OPERATOR_SECONDS = 5.0


def build(room: Room) -> APIRouter:
    """Jobs, artifacts, queues."""
    router = APIRouter(prefix="/v1")
    jobs, log = Jobs(room.broker, room.queues), AuditLog(room.broker, room.settings.audit_days)

    @router.post("/jobs", status_code=202, tags=["jobs"], summary="Submit a piece of long work")
    def submit(spec: JobSpec, once: IdempotencyKey = None) -> JobRecord:
        if wrong := spec.wrong_inputs():
            raise BadData(wrong)
        for ref in spec.inputs.values():
            room.store.manifest(ref)
        return jobs.submit(spec, once)

    @router.get("/jobs", tags=["jobs"], summary="Jobs, newest first")
    def list_jobs(kind: str | None = None, state: str | None = None, limit: int = Query(default=50, ge=1, le=1000)) -> list[JobRecord]:
        return jobs.recent(kind=kind, state=state, limit=limit)

    @router.get("/jobs/{job_id}", tags=["jobs"], summary="One job")
    def show(job_id: str) -> JobRecord:
        return jobs.get(job_id)

    @router.post("/jobs/{job_id}/cancel", tags=["jobs"], summary="Ask a job to stop; its checkpoint stays")
    def cancel(job_id: str) -> JobRecord:
        return jobs.cancel(job_id)

    @router.post("/jobs/{job_id}/resume", tags=["jobs"], summary="Go on with a failed or cancelled job")
    def resume(job_id: str) -> JobRecord:
        return jobs.resume(job_id)

    @router.get("/jobs/{job_id}/metrics", tags=["jobs"], summary="Live metrics, rows of one step each")
    def metrics(job_id: str, after: int = -1) -> list[dict[str, float]]:
        jobs.get(job_id)
        return jobs.metrics(job_id, after)

    @router.get(
        "/jobs/{job_id}/report",
        tags=["jobs"],
        summary="The job and its metrics as one HTML page with plots",
        response_class=Response,
        responses={200: {"content": {"text/html": {}}}},
    )
    def report(job_id: str) -> Response:
        text = report_of(jobs.get(job_id), jobs, room.store, room.settings.data_dir / "jobs" / job_id)
        return Response(text, media_type="text/html; charset=utf-8")

    @router.get("/jobs/{job_id}/log", tags=["jobs"], summary="The end of the log of the job's process")
    def end_of_log(job_id: str) -> dict[str, str]:
        jobs.get(job_id)
        return {"log": end_of_file(room.settings.data_dir / "jobs" / job_id / "log.txt", _LOG_BYTES)}

    @router.get("/artifacts", tags=["artifacts"], summary="References of all artifacts")
    def artifacts(kind: str | None = Query(default=None, pattern="^[a-z]+$")) -> list[str]:
        return room.store.list(kind)

    @router.get("/artifacts/{kind}/{digest}", tags=["artifacts"], summary="What made an artifact")
    def manifest(kind: str, digest: str) -> dict[str, Any]:
        return room.store.manifest(f"{kind}/{digest}")

    @router.get("/cluster", tags=["jobs"], summary="Nodes and NPUs with what runs on them, and who waits for room and why, as the operator sees it")
    def cluster() -> dict[str, Any]:
        address = room.settings.operator_url
        if not address:
            return {"configured": False, "time": None, "nodes": [], "jobs": [], "services": []}
        try:
            return {"configured": True, **_seen(httpx.URL(f"{address.rstrip('/')}/cluster"))}
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise TransientError(
                f"the operator at {address} does not answer ({type(error).__name__}): does it run, and is SEMANTIDE_OPERATOR_URL right?"
            ) from error

    @router.get("/queues", tags=["queues"], summary="Waiting and parked messages")
    def queues() -> dict[str, Any]:
        parked = room.queues.parked(room.broker)
        return {"depths": room.queues.depths(room.broker), "parked": parked, "dead_letters": room.queues.dead_letters(room.broker)}

    @router.post("/queues/{queue}/requeue", tags=["queues"], summary="Put a queue's parked messages back on it")
    def requeue(queue: str) -> dict[str, int]:
        return {"requeued": room.queues.requeue(room.broker, queue)}

    @router.get("/audit", tags=["audit"], summary="What admins did, the newest first")
    def audit(
        limit: int = Query(default=100, ge=1, le=1000),
        since: int = Query(default=0, ge=0, le=LAST_MS),
        until: int | None = Query(default=None, ge=0, le=LAST_MS),
        who: str | None = None,
    ) -> list[AuditEntry]:
        return log.read(limit=limit, since=since, until=until, who=who)

    return router


def _seen(page: httpx.URL) -> dict[str, Any]:
    """What the operator sees; where one name is that of several, what the one that leads does.

    Raises: httpx.HTTPError, OSError where none of them answers.
    """
    # A certificate is of a name, not of addresses.
    places = [page.host] if page.scheme == "https" else [str(place[4][0]) for place in socket.getaddrinfo(page.host, page.port, type=socket.SOCK_STREAM)]
    found: dict[str, Any] | None = None
    failure: httpx.HTTPError | None = None
    for place in dict.fromkeys(places):
        try:
            answer = httpx.get(page.copy_with(host=place), headers={"Host": page.netloc.decode()}, timeout=_OPERATOR_SECONDS).raise_for_status().json()
        except httpx.HTTPError as error:
            failure = error
            continue
        if answer["time"]:
            return dict(answer)
        found = answer
    if found is None:
        assert failure is not None, "a name has an address"
        raise failure
    return found
