"""What this room answers over HTTP: interactions and items in, imports, uploads, histories and counts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from typing import Any, Literal

import pyarrow as pa
from opentelemetry.metrics import CallbackOptions, Observation
from pydantic import BaseModel, ConfigDict, Field

from semantide.services.ingestion.answers import Deletion, IntakeAnswer, UserExport
from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.experimentlog import read_experiment
from semantide.services.ingestion.experiments import report
from semantide.services.ingestion.fileimport import ImportConfig
from semantide.services.ingestion.itemlog import ItemLog
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.rows import check_interactions, check_items, interaction_table, item_table
from semantide.services.ingestion.schema import Kind, Rejection, Rules
from semantide.services.ingestion.sources import OutsideRoots, confined
from semantide.services.ingestion.stream import DIMENSION, STREAM, encode
from semantide.services.ingestion.uploads import Uploads
from semantide.services.ingestion.user_ids import settled
from semantide.services.ingestion.users import Users
from semantide.shared import broker as broker_door
from semantide.shared.availability import Availability
from semantide.shared.contracts import Identifier, Interaction, Item, JobRecord, JobSpec
from semantide.shared.errors import BadData, NotFound, TransientError
from semantide.shared.history import Histories
from semantide.shared.http import (
    APIRouter,
    HTTPException,
    IdempotencyKey,
    JSONResponse,
    PathParameter,
    Query,
    Request,
    Response,
    StreamingResponse,
    run_in_threadpool,
)
from semantide.shared.jobs import Jobs, now_ms
from semantide.shared.room import Room
from semantide.shared.telemetry import logger, meter

_LOG = logger("ingestion")
_FSYNC_MS = 5000
_EXPERIMENT_MS = 14 * 86_400_000
_LAST_MS = 1 << 53  # exact in any client
_MOST_DAYS = 36_500


class ImportRequest(BaseModel):
    """What to import and, where it cannot be told from the files, how to read it."""

    model_config = ConfigDict(extra="forbid")

    path: str = Field(description="File or folder on the server, inside an allowed folder", min_length=1)
    format: str = Field("", description="Name of a format; told from the files where it is left out")
    kind: str = Field("", pattern="^(interactions|items)?$")
    mapping: dict[str, str] = Field({}, description="Our field -> the file's column")
    time_unit: str = Field("", pattern="^(ms|s|us|ns)?$", description="What numbers in the time column count")
    delimiter: str = ""
    encoding: str = "utf-8"
    default_action: str = Field("click", description="Action of rows that name none")


_TAKEN: dict[str, Any] = {"status_code": 202, "responses": {202: {"model": IntakeAnswer}}, "response_class": JSONResponse}


class Intake:
    """Puts checked rows on the stream and answers for them."""

    def __init__(self, room: Room) -> None:
        self.room, self._redis = room, room.broker
        self.pseudonyms = settled(room.settings, room.broker)
        self._waits_for_disk = True

    def rules(self) -> Rules:
        """What rows must keep to now."""
        return Rules(self.room.settings.actions, now_ms())

    def admit(self) -> None:
        """Refuse new rows while too many wait for the log.

        Raises: TransientError.
        """
        used = int(self._redis.memory_usage(STREAM, samples=5) or 0)
        limit = self.room.settings.max_backlog_bytes
        if used > limit:
            raise TransientError(
                f"{used} bytes of accepted rows wait for the event log, more than the {limit} allowed: try again; if it lasts, see whether the ingestion worker runs and the disk has room"
            )

    def put(self, kind: Kind, table: pa.Table) -> None:
        """Add one entry and return when it is on the broker's disk, and on those of as many replicas as are asked for.

        Raises: TransientError where the broker cannot make it durable.
        """
        replicas = self.room.settings.broker_replicas
        pipe = self._redis.pipeline(transaction=False)
        pipe.xadd(STREAM, encode(kind, table))
        if self._waits_for_disk:
            pipe.execute_command("WAITAOF", 1, replicas, _FSYNC_MS)
        answers = pipe.execute(raise_on_error=False)
        if isinstance(answers[0], Exception):
            raise TransientError(f"the broker did not take the rows ({answers[0]}): try again") from answers[0]
        if not self._waits_for_disk:
            return
        if isinstance(answers[1], broker_door.ResponseError):
            if "unknown command" in str(answers[1]).lower():
                if replicas:
                    raise TransientError(
                        f"SEMANTIDE_BROKER_REPLICAS is {replicas} and the broker cannot say what its replicas have on disk (WAITAOF): run Redis 7.2 or Valkey, or set it to 0"
                    )
                # Older servers have no such command: durability is what their own configuration says.
                self._waits_for_disk = False
                _LOG.warning("the broker cannot say when a write is on disk (WAITAOF); run it with appendonly yes and appendfsync always")
                return
            raise TransientError(f"the broker keeps no append-only file ({answers[1]}), so accepted rows would not survive it: start it with appendonly yes")
        if isinstance(answers[1], Exception) or not answers[1] or not answers[1][0]:
            raise TransientError(f"the broker did not write the rows to its disk within {_FSYNC_MS} ms: send them again, repeated rows are recognised")
        if answers[1][1] < replicas:
            raise TransientError(
                f"{answers[1][1]} of the broker's replicas wrote the rows to their disks within {_FSYNC_MS} ms, and SEMANTIDE_BROKER_REPLICAS asks for {replicas}: send them again, repeated rows are recognised"
            )

    def interactions(self, raws: Sequence[Any]) -> tuple[int, list[Rejection]]:
        """Check, store durably; how many were accepted and why the others were not."""
        self.admit()
        good, bad = check_interactions(raws, self.rules())
        if good:
            table = interaction_table(good)
            self.put("interactions", table.set_column(0, table.schema.field("user"), self.pseudonyms.column(table["user"])) if self.pseudonyms else table)
        return len(good), bad

    def items(self, raws: Sequence[Any]) -> tuple[int, list[Rejection]]:
        """Check, store durably, and make availability known at once."""
        self.admit()
        dimension = self._dimension(raws)
        good, bad = check_items(raws, Rules(self.room.settings.actions, now_ms(), embedding_dimension=dimension))
        if good:
            self.put("items", item_table(good))
            self.tell_availability(good)
        return len(good), bad

    def tell_availability(self, items: Sequence[Item]) -> None:
        """Hide and show items right away; what a sender did not say stays as it is."""
        said = {item.id: not item.deleted and item.available for item in items if item.deleted or "available" in item.model_fields_set}
        if said:
            Availability(self._redis).update(said)

    def _dimension(self, raws: Sequence[Any]) -> int | None:
        """The length that embeddings must have; the first good one that was ever sent decides."""
        known = self._redis.get(DIMENSION)
        if known is None:
            good, _ = check_items([raw for raw in raws if isinstance(raw, dict) and raw.get("embedding")][:50], self.rules())
            first = next((len(item.embedding) for item in good if item.embedding), None)
            if first is None:
                return None
            self._redis.set(DIMENSION, first, nx=True)
            known = self._redis.get(DIMENSION) or first
        return int(known)


def _answer(accepted: int, bad: Sequence[Rejection]) -> Response:
    errors = [{"index": entry.pop("row"), **entry} for entry in (rejection.as_dict() for rejection in bad)]
    if accepted or not bad:
        return JSONResponse({"accepted": accepted, "rejected": len(bad), "errors": errors}, status_code=202)
    first = errors[0]
    message = (
        f"none of the {len(bad)} rows can be used; row {first['index']}, field {first['field']}, value {first['value']!r}: {first['reason']}; {first['remedy']}"
    )
    return JSONResponse(
        {"error": {"type": "BadData", "message": message, "details": errors}, "accepted": 0, "rejected": len(bad), "errors": errors}, status_code=422
    )


async def _rows(request: Request, name: str, limit: int) -> list[Any]:
    """The rows of a batch's body.

    Raises: BadData, HTTPException 413.
    """
    body = await request.body()
    try:
        # Bytes would be guessed to be UTF-16 where they look like it.
        batch = await run_in_threadpool(json.loads, body.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise BadData(f"the body is not UTF-8: byte {body[error.start]:#04x} at {error.start}; send UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise BadData(f"the body is not JSON ({error}): send {{{json.dumps(name)}: [...]}}") from error
    if not isinstance(batch, dict) or not isinstance(batch.get(name), list) or len(batch) > 1:
        keys = sorted(map(str, batch)) if isinstance(batch, dict) else type(batch).__name__
        raise BadData(f"the body is {keys}: send an object with the one key {name!r} and a list of rows in it")
    if not batch[name]:
        raise BadData(f"{name} is empty: send at least one row")
    if len(batch[name]) > limit:
        raise HTTPException(413, f"{len(batch[name])} rows are more than the {limit} allowed in one batch: send several, or raise SEMANTIDE_MAX_BATCH_ROWS")
    return list(batch[name])


def _body(name: str, row: type[BaseModel]) -> dict[str, Any]:
    schema = {"type": "object", "required": [name], "properties": {name: {"type": "array", "minItems": 1, "items": row.model_json_schema()}}}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def start(room: Room) -> Callable[[], None]:
    """Begin to show what waits for the log; what is returned ends nothing."""

    def backlog(_: CallbackOptions) -> Iterable[Observation]:
        with suppress(broker_door.RedisError):
            yield Observation(int(room.broker.xlen(STREAM)))

    meter("ingestion").create_observable_gauge("semantide_backlog_batches", [backlog], description="Accepted batches that wait for the event log")
    return lambda: None


def build(room: Room) -> APIRouter:
    """Routes of this room."""
    router = APIRouter(prefix="/v1", tags=["ingestion"])
    settings = room.settings
    intake = Intake(room)
    jobs = Jobs(room.broker, room.queues)
    histories = Histories(room.broker, settings.history_length, settings.history_ttl_seconds)
    uploads = Uploads(settings.data_dir / "uploads")
    users, known_as = Users(room, jobs, histories), intake.pseudonyms.of_user

    @router.post("/interactions", summary="Accept a batch of interactions, durably", openapi_extra=_body("interactions", Interaction), **_TAKEN)
    async def post_interactions(request: Request) -> Response:
        rows = await _rows(request, "interactions", settings.max_batch_rows)
        return _answer(*await run_in_threadpool(intake.interactions, rows))

    @router.get("/interactions/stats", summary="What the event log holds")
    def stats() -> dict[str, Any]:
        backlog = int(room.broker.xlen(STREAM))
        with closing(Manifest(settings.data_dir / "events")) as manifest:
            segments = EventLog(manifest).segments()
            actions: dict[str, int] = {}
            for segment in segments:
                for action, count in segment.actions.items():
                    actions[action] = actions.get(action, 0) + count
            return {
                "interactions": sum(segment.num_rows for segment in segments),
                "duplicates": manifest.counter("duplicates"),
                "actions": dict(sorted(actions.items())),
                "first_time": min((segment.first_time for segment in segments), default=None),
                "last_time": max((segment.last_time for segment in segments), default=None),
                "segments": len(segments),
                "bytes": sum(segment.num_bytes for segment in segments),
                "waiting_batches": backlog,
                **ItemLog(manifest).counts(),
            }

    @router.get("/experiments", tags=["serving"], summary="What the variants of a split were worth to the people who met them, with confidence intervals")
    def experiments(since: int | None = None, until: int | None = None, base: str = "live", before_days: int = 28) -> dict[str, Any]:
        end = now_ms() if until is None else until
        begin = end - _EXPERIMENT_MS if since is None else since
        if not (0 <= begin < end <= _LAST_MS and 0 <= before_days <= _MOST_DAYS):
            raise BadData(
                f"since is {begin}, until {end} and before_days {before_days}: give times in milliseconds since 1970, since before until, and from 0 to {_MOST_DAYS} days"
            )
        with closing(Manifest(settings.data_dir / "events")) as manifest:
            found = read_experiment(EventLog(manifest).segments(), begin, end, before_days * 86_400_000)
        return {"since": begin, "until": end, **report(*found, settings.actions, base).as_dict()}

    @router.get("/users/{user:path}/history", summary="The user's recent interactions, oldest first")
    def history(user: str) -> dict[str, Any]:
        return {"user": user, "events": [event._asdict() for event in histories.get(known_as(user))]}

    @router.get("/users/{user:path}/export", tags=["users"], summary="All that is stored of a user: events, online history, and which data sets hold them")
    def export(user: str) -> UserExport:
        online = [{"item": event.item, "time": event.time, "action": event.action} for event in histories.get(known_as(user))]
        events = [{**event, "user": user} for event in users.events(known_as(user))]
        return UserExport(user=user, events=events, history=online, datasets=list(users.datasets(known_as(user))))

    @router.delete(
        "/users/{user:path}", status_code=202, tags=["users"], summary="Forget a user: at once for recommendations, everywhere once the job has ended"
    )
    def forget(
        user: Identifier,
        accept: Literal["never", "later"] = Query(default="never", description="`later`: events that happen from now on are taken again; `never`: none is"),
    ) -> Deletion:
        digest, since, job = users.forget(known_as(user), accept_later=accept == "later")
        return Deletion(digest=digest, since=since, accept=accept, job=job.id)

    @router.get("/deletions", tags=["users"], summary="Who was forgotten, by digests, what was found of them, and what had learned from them")
    def deletions() -> list[Deletion]:
        return [
            Deletion(digest=each.digest, since=each.since, accept="later" if each.accept_later else "never", swept=each.swept, found=each.found)
            for each in users.tombstones()
        ]

    @router.post("/items", summary="Add, change or withdraw items; a field left out keeps its value", openapi_extra=_body("items", Item), **_TAKEN)
    async def post_items(request: Request) -> Response:
        rows = await _rows(request, "items", settings.max_batch_rows)
        return _answer(*await run_in_threadpool(intake.items, rows))

    @router.get("/items/{item:path}", summary="An item's stored state")
    def get_item(item: str) -> dict[str, Any]:
        with closing(Manifest(settings.data_dir / "events")) as manifest:
            found = ItemLog(manifest).state([item]).to_pylist()
        if not found:
            raise NotFound(f"no item {item!r} is stored (a new one appears within a second): send it to POST /v1/items")
        return {**found[0], "attributes": json.loads(found[0]["attributes"])}

    @router.delete("/items/{item:path}", summary="Withdraw an item for good", **_TAKEN)
    def delete_item(item: str) -> Response:
        return _answer(*intake.items([{"id": item, "deleted": True}]))

    @router.post("/imports", status_code=202, tags=["jobs"], summary="Import a file or folder that the server can see")
    def post_import(wanted: ImportRequest, once: IdempotencyKey = None) -> JobRecord:
        config = ImportConfig.parse(wanted.model_dump())
        try:
            path = confined(config.path, settings.import_folders, settings.data_dir.resolve())
        except OutsideRoots as error:
            raise HTTPException(403, str(error)) from error
        return jobs.submit(JobSpec(kind="import", config={**asdict(config), "path": str(path)}), once)

    @router.get(
        "/imports/{job_id}/rejects",
        tags=["jobs"],
        summary="The refused rows of an import, JSON Lines",
        response_class=Response,
        responses={200: {"content": {"application/x-ndjson": {}}}},
    )
    def rejects(job_id: str) -> Response:
        record = jobs.get(job_id)
        path = settings.data_dir / "jobs" / record.id / "rejects.jsonl"

        def lines() -> Iterator[bytes]:
            if path.exists():
                with path.open("rb") as stream:
                    while block := stream.read(1 << 16):
                        yield block

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    @router.get("/datasets/{ref:path}/pages", summary="What the pages of a data set are like, and whether training by pages can pay")
    def page_report(ref: str) -> dict[str, Any]:
        full = ref if ref.startswith("datasets/") else f"datasets/{ref}"
        if full not in room.store.list("datasets"):
            raise NotFound(f"no data set {ref!r}: `semantide dataset` makes one")
        report = json.loads(room.store.text(full, "dataset.json")).get("page_report")
        if report is None:
            raise NotFound(f"{full} was made before pages were counted: make it anew with `semantide dataset`")
        return {"dataset": full, **report}

    @router.put("/uploads/{name:path}", status_code=201, summary="Send a file that an import can then read")
    async def put_upload(request: Request, name: str = PathParameter(max_length=1000)) -> dict[str, Any]:
        return await uploads.receive(request, name)

    @router.delete("/uploads/{name:path}", status_code=204, summary="Remove an uploaded file", response_class=Response)
    def delete_upload(name: str) -> Response:
        uploads.remove(name)
        return Response(status_code=204)

    return router
