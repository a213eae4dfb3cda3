"""What a client does, step by step and without input or output: each function yields the requests that it wants made and the pauses that it wants kept, and is given the answers.

So the client that waits and the one that awaits are the same code (``synchronous.py``, ``asynchronous.py``).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from semantide.client.answers import Rejected, Sent
from semantide.client.progress import Progress, Watcher
from semantide.client.refusal import StackError
from semantide.shared.contracts import ENDED, Interaction, Item, JobRecord, JobSpec

_CHUNK_BYTES = 1 << 20
_POLL_SECONDS = 0.5
_ERRORS_KEPT = 1000
_SAFE = ("GET", "HEAD", "PUT", "DELETE")

Row = Interaction | Item | Mapping[str, Any]
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Call:
    """One request. ``again`` says that it may be sent twice, beyond the methods for which that always holds; ``content`` makes a body anew for each attempt."""

    method: str
    path: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content: Callable[[], Iterator[bytes]] | None = None
    again: bool = False
    timeout_seconds: float | None = None

    @property
    def repeatable(self) -> bool:
        """Whether to send it twice does no harm."""
        return self.again or self.method in _SAFE


@dataclass(frozen=True)
class Pause:
    """Nothing to do for a while."""

    seconds: float


Steps = Generator[Call | Pause, Any, T]


def ask(
    method: str,
    path: str,
    *,
    body: Any = None,
    again: bool = False,
    headers: Mapping[str, str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    timeout_seconds: float | None = None,
) -> Steps[Any]:
    """One request; the decoded answer. Parameters that are None are left out."""
    said = {name: value for name, value in (parameters or {}).items() if value is not None}
    return (yield Call(method, path, said, body, headers or {}, again=again, timeout_seconds=timeout_seconds))


def read(kind: type[M], method: str, path: str, **options: Any) -> Steps[M]:
    """One request whose answer is of this kind; fields that a newer stack says beyond are passed over."""
    return kind.model_validate((yield from ask(method, path, **options)), extra="ignore")


def submit(path: str, body: Mapping[str, Any]) -> Steps[JobRecord]:
    """Submit a job under a key of its own: sent twice, it is still one job."""
    return (yield from read(JobRecord, "POST", path, body=body, again=True, headers={"Idempotency-Key": uuid.uuid4().hex}))


def submit_spec(spec: JobSpec) -> Steps[JobRecord]:
    """Submit a job as its specification says."""
    return (yield from submit("/v1/jobs", spec.model_dump(mode="json")))


def jobs(kind: str | None, state: str | None, limit: int) -> Steps[list[JobRecord]]:
    """Jobs, the newest first."""
    found = yield from ask("GET", "/v1/jobs", parameters={"kind": kind, "state": state, "limit": limit})
    return [JobRecord.model_validate(raw, extra="ignore") for raw in found]


def followed(record: JobRecord, tell: Watcher, timeout_seconds: float | None) -> Steps[JobRecord]:
    """The record of a job once it has ended.

    Raises: TimeoutError; the job goes on.
    """
    begun = time.monotonic()
    while record.state not in ENDED:
        if timeout_seconds is not None and time.monotonic() - begun > timeout_seconds:
            raise TimeoutError(f"job {record.id} is {record.state} after {timeout_seconds:g} s; it goes on, wait for it again")
        yield Pause(_POLL_SECONDS)
        record = yield from read(JobRecord, "GET", f"/v1/jobs/{record.id}")
        tell(Progress(record.stage or record.spec.kind, record.done, record.total or None, record.unit))
    return record


def user_path(user: str, below: str = "") -> str:
    """The path of a user's routes; their id may hold any character."""
    return f"/v1/users/{quote(user, safe='')}{below}"


def batches(rows: Iterable[Row], size: int) -> Iterator[list[Row]]:
    """The rows in lists of at most ``size``; never more of them in memory."""
    batch: list[Row] = []
    for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def post_rows(name: str, rows: Sequence[Row], begin: int) -> Steps[Sent]:
    """Send one batch, in halves where the stack finds it too large. Rows that cannot be used are told, and stop no others; ``begin`` is the first row's number among all."""
    plain = [row.model_dump(mode="json", exclude_unset=True) if isinstance(row, BaseModel) else dict(row) for row in rows]
    try:
        answer = yield from ask("POST", f"/v1/{name}", body={name: plain}, again=True)
    except StackError as error:
        if error.status == 413 and len(rows) > 1:
            half = len(rows) // 2
            first = yield from post_rows(name, rows[:half], begin)
            return joined(first, (yield from post_rows(name, rows[half:], begin + half)))
        listed = error.details if isinstance(error.details, list) else []
        if error.status != 422 or not listed or not all(isinstance(each, dict) and "index" in each for each in listed):
            raise
        answer = {"accepted": 0, "rejected": len(listed), "errors": listed}
    sent = Sent.model_validate(answer)
    return sent.model_copy(update={"errors": tuple(each.model_copy(update={"index": each.index + begin}) for each in sent.errors)})


def joined(one: Sent, other: Sent) -> Sent:
    """What became of both."""
    errors: tuple[Rejected, ...] = (*one.errors, *other.errors)[:_ERRORS_KEPT]
    return Sent(accepted=one.accepted + other.accepted, rejected=one.rejected + other.rejected, errors=errors)


def send_next(name: str, batch: Sequence[Row], before: Sent, tell: Watcher) -> Steps[Sent]:
    """Send the next batch of a stream; what became of all until now."""
    begin = before.accepted + before.rejected
    sent = joined(before, (yield from post_rows(name, batch, begin)))
    tell(Progress(f"send {name}", sent.accepted + sent.rejected, None, "rows"))
    return sent


def _as_sent(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[-200:] or "file"


def upload(path: Path, folder: str | None, tell: Watcher) -> Steps[tuple[str, str]]:
    """Stream a file to the stack, into a folder of its own or that one; the name it has there, and the path under which an import finds it."""
    # Two uploads of one file name must not meet.
    name, size = f"{folder or uuid.uuid4().hex[:12]}/{_as_sent(path.name)}", path.stat().st_size

    def chunks() -> Iterator[bytes]:
        done = 0
        with path.open("rb") as stream:
            while block := stream.read(_CHUNK_BYTES):
                yield block
                done += len(block)
                tell(Progress(f"send {path.name}", done, size, "bytes"))

    answer = yield Call("PUT", f"/v1/uploads/{name}", headers={"Content-Length": str(size)}, content=chunks)
    return name, str(answer["path"])


def upload_folder(folder: Path, tell: Watcher) -> Steps[tuple[list[str], str]]:
    """Stream a folder's files, below the same names; the names they have there, and the path under which an import finds them all.

    Raises: ValueError where it has none.
    """
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    if not (files := [file for file in files if not any(part.startswith(".") for part in file.parts)]):
        raise ValueError(f"{folder} holds no files: name a folder with data in it, or a file")
    there, names, place = uuid.uuid4().hex[:12], list[str](), ""
    for file in files:
        inside = "/".join([there, *map(_as_sent, file.parts[:-1])])
        name, place = yield from upload(folder / file, inside, tell)
        names.append(name)
    return names, str(PurePosixPath(place).parents[len(file.parts) - 1])


def begin_import(path: Path, options: Mapping[str, Any], tell: Watcher) -> Steps[tuple[JobRecord, list[str]]]:
    """Begin the import of a file or folder, which is sent first where the stack cannot read it itself; the job, and the names of what was sent.

    Raises: ValueError where it does not exist.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a file or a folder")
    body = {**options, "path": str(path.resolve())}
    try:
        return (yield from submit("/v1/imports", body)), []
    except StackError as error:
        # The stack may live elsewhere, or may not read that folder.
        if error.status not in (403, 404):
            raise
    if path.is_file():
        name, place = yield from upload(path, None, tell)
        names = [name]
    else:
        names, place = yield from upload_folder(path, tell)
    return (yield from submit("/v1/imports", {**body, "path": place})), names


def end_import(record: JobRecord, names: Sequence[str], tell: Watcher, timeout_seconds: float | None) -> Steps[JobRecord]:
    """Follow an import to its end, and take away what was sent for it."""
    record = yield from followed(record, tell, timeout_seconds)
    yield from forget_uploads(names)
    return record


def forget_uploads(names: Sequence[str]) -> Steps[None]:
    """Take uploaded files away; those that are gone are no matter."""
    for name in names:
        try:
            yield Call("DELETE", f"/v1/uploads/{name}")
        except StackError as error:
            if error.status != 404:
                raise
