"""The client that awaits: the same steps as in ``synchronous.py``."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import anyio
import anyio.to_thread
import httpx

from semantide.client import calls
from semantide.client.answers import Deletion, History, Live, Sent
from semantide.client.calls import Call, Pause, Row, Steps
from semantide.client.connection import Connection
from semantide.client.progress import Shown, watching
from semantide.client.refusal import StackError, Unreachable
from semantide.client.retries import Retries
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.recommendation import RecommendationAnswer, RecommendationRequest
from semantide.shared.scores import ScoreAnswer, ScoreRequest

T = TypeVar("T")


async def _batches(rows: Iterable[Row] | AsyncIterable[Row], size: int) -> AsyncIterator[list[Row]]:
    if not isinstance(rows, AsyncIterable):
        for whole in calls.batches(rows, size):
            yield whole
        return
    batch: list[Row] = []
    async for row in rows:
        batch.append(row)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


async def _read_aside(chunks: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A file is read by a thread: others need not wait for a disk."""
    while block := await anyio.to_thread.run_sync(next, chunks, b""):
        yield block


class AsyncClient:
    """One connection to a stack; ``async with AsyncClient(url, key=...) as client`` closes it. Without arguments SEMANTIDE_URL and SEMANTIDE_API_KEY say where and who.

    Raises (any method): StackError, Unreachable.
    """

    def __init__(self, url: str | None = None, *, key: str | None = None, timeout_seconds: float = 60.0, retries: Retries | None = None) -> None:
        self._connection = Connection(url, key, timeout_seconds, retries or Retries())
        self.url = self._connection.url
        self._http = httpx.AsyncClient(**self._connection.options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back."""
        await self._http.aclose()

    async def _send(self, call: Call) -> Any:
        attempt, lost = 0, False
        while True:
            try:
                answer = await self._http.request(call.method, call.path, **self._connection.request(call, call.content and _read_aside(call.content())))
            except httpx.HTTPError as error:
                pause: float | None = self._connection.after_silence(call, error, attempt)
                lost = True
            else:
                pause = self._connection.after_answer(call, answer, attempt)
                if pause is None:
                    return self._connection.value(call, answer, lost=lost)
            attempt += 1
            await anyio.sleep(pause or 0.0)

    @staticmethod
    async def _rest(pause: Pause) -> Any:
        await anyio.sleep(pause.seconds)

    async def _run(self, steps: Steps[T]) -> T:
        try:
            step = next(steps)
            while True:
                try:
                    given = await self._send(step) if isinstance(step, Call) else await self._rest(step)
                except (StackError, Unreachable) as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(given)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]

    async def get(self, path: str, **parameters: Any) -> Any:
        """GET with query parameters, those that are None left out; the decoded answer."""
        return await self.call("GET", path, parameters=parameters)

    async def post(self, path: str, body: Any = None) -> Any:
        """POST a JSON body, once; the decoded answer."""
        return await self.call("POST", path, json=body)

    async def call(self, method: str, path: str, *, json: Any = None, parameters: Mapping[str, Any] | None = None, timeout_seconds: float | None = None) -> Any:
        """Any other request; the decoded answer. ``timeout_seconds`` is for one that takes longer than others."""
        return await self._run(calls.ask(method, path, body=json, parameters=parameters, timeout_seconds=timeout_seconds))

    async def recommend(self, user: str | None = None, **wish: Any) -> RecommendationAnswer:
        """Items for a user or a ``history``, best first; the fields of ``RecommendationRequest``.

        Raises: ValueError for what no stack would take.
        """
        body = RecommendationRequest(user=user, **wish).model_dump(mode="json", exclude_unset=True)
        return await self._run(calls.read(RecommendationAnswer, "POST", "/v1/recommendations", body=body, again=True))

    async def score(self, items: Sequence[str], user: str | None = None, **wish: Any) -> ScoreAnswer:
        """Log-probabilities of given items for a user or a ``history``, in the order given; the fields of ``ScoreRequest``.

        Raises: ValueError for what no stack would take.
        """
        body = ScoreRequest(items=list(items), user=user, **wish).model_dump(mode="json", exclude_unset=True)
        return await self._run(calls.read(ScoreAnswer, "POST", "/v1/scores", body=body, again=True))

    async def send_interactions(self, rows: Iterable[Row] | AsyncIterable[Row], *, batch_rows: int = 1000, progress: Shown = None) -> Sent:
        """Send interactions as they come, batch by batch, each durable once it is answered. A repeated row is stored once: its ``event_id`` says so, or all it consists of."""
        return await self._stream("interactions", rows, batch_rows, progress)

    async def send_items(self, rows: Iterable[Row] | AsyncIterable[Row], *, batch_rows: int = 1000, progress: Shown = None) -> Sent:
        """Send items as they come; a field left out keeps its value."""
        return await self._stream("items", rows, batch_rows, progress)

    async def _stream(self, name: str, rows: Iterable[Row] | AsyncIterable[Row], batch_rows: int, progress: Shown) -> Sent:
        sent = Sent()
        with watching(progress) as tell:
            async for batch in _batches(rows, batch_rows):
                sent = await self._run(calls.send_next(name, batch, sent, tell))
        return sent

    async def history(self, user: str) -> History:
        """What serving remembers of a user."""
        return await self._run(calls.read(History, "GET", calls.user_path(user, "/history")))

    async def forget_user(self, user: str, *, accept: Literal["never", "later"] = "never") -> Deletion:
        """Forget a user: at once for recommendations, everywhere once the job of the answer has ended. With ``later`` events that happen from now on are taken again."""
        return await self._run(calls.read(Deletion, "DELETE", calls.user_path(user), parameters={"accept": accept}))

    async def export_user(self, user: str) -> Mapping[str, Any]:
        """All that is stored of a user: ``events``, online ``history``, and the ``datasets`` that hold them."""
        return dict(await self.get(calls.user_path(user, "/export")))

    async def import_path(self, path: Path | str, *, progress: Shown = None, timeout_seconds: float | None = None, **options: Any) -> JobRecord:
        """Import a file or folder, which is sent to the stack first where it cannot read it itself; the job's record once it has ended. ``options`` as in ``POST /v1/imports``."""
        with watching(progress) as tell:
            record, names = await self._run(calls.begin_import(Path(path), options, tell))
            return await self._run(calls.end_import(record, names, tell, timeout_seconds))

    async def begin_import(self, path: Path | str, *, progress: Shown = None, **options: Any) -> tuple[JobRecord, list[str]]:
        """Begin an import as ``import_path`` does; its job, and the names of the files that were sent for it: ``forget_uploads`` once it has ended."""
        with watching(progress) as tell:
            return await self._run(calls.begin_import(Path(path), options, tell))

    async def forget_uploads(self, names: Sequence[str]) -> None:
        """Take uploaded files away."""
        await self._run(calls.forget_uploads(names))

    async def upload(self, path: Path | str, folder: str | None = None, *, progress: Shown = False) -> tuple[str, str]:
        """Stream a file to the stack, into a folder of its own or that one; the name it has there, and the path under which an import finds it."""
        with watching(progress) as tell:
            return await self._run(calls.upload(Path(path), folder, tell))

    async def upload_folder(self, folder: Path | str, *, progress: Shown = False) -> tuple[list[str], str]:
        """Stream a folder's files, below the same names; these, and the path under which an import finds them all."""
        with watching(progress) as tell:
            return await self._run(calls.upload_folder(Path(folder), tell))

    async def submit(self, spec: JobSpec) -> JobRecord:
        """Submit a job; sent twice, it is still one."""
        return await self._run(calls.submit_spec(spec))

    async def jobs(self, kind: str | None = None, state: str | None = None, limit: int = 50) -> list[JobRecord]:
        """Jobs, the newest first."""
        return await self._run(calls.jobs(kind, state, limit))

    async def job(self, job_id: str) -> JobRecord:
        """One job's record."""
        return await self._run(calls.read(JobRecord, "GET", f"/v1/jobs/{job_id}"))

    async def wait(self, record: JobRecord, *, timeout_seconds: float | None = None, progress: Shown = None) -> JobRecord:
        """A job's record once it has ended.

        Raises: TimeoutError; the job goes on.
        """
        with watching(progress) as tell:
            return await self._run(calls.followed(record, tell, timeout_seconds))

    async def cancel(self, job_id: str) -> JobRecord:
        """Ask a job to stop; its checkpoint stays."""
        return await self._run(calls.read(JobRecord, "POST", f"/v1/jobs/{job_id}/cancel"))

    async def resume(self, job_id: str) -> JobRecord:
        """Go on with a failed or cancelled job."""
        return await self._run(calls.read(JobRecord, "POST", f"/v1/jobs/{job_id}/resume"))

    async def live(self) -> Live:
        """What is live."""
        return await self._run(calls.read(Live, "GET", "/v1/serving/live"))

    async def artifacts(self, kind: str | None = None) -> list[str]:
        """References of all artifacts, of one kind or of all."""
        return [str(ref) for ref in await self.get("/v1/artifacts", kind=kind)]

    async def manifest(self, ref: str) -> Mapping[str, Any]:
        """What made an artifact."""
        return dict(await self.get(f"/v1/artifacts/{ref}"))
