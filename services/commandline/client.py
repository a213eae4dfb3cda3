"""Talks REST to a stack; every answer that is an error becomes a ``StackError`` with the stack's own words."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import httpx

from semantide.services.commandline.stack import running_stack
from semantide.shared.api_keys import local_key
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import NotFound, PermanentError, TransientError

_CHUNK_BYTES = 1 << 20
NO_GENERATORS = ("sasrec", "retriever-", "fuxi-")
"""How recipes begin that need no catalog."""


def _as_sent(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".")[-200:] or "file"


class StackError(PermanentError):
    """The stack answered with an error."""

    def __init__(self, message: str, status: int, details: Any = None) -> None:
        super().__init__(message)
        self.status, self.details = status, details


def stack_url(settings: Settings) -> str:
    """Address of the stack to talk to.

    Raises: NotFound when none is configured and none runs here.
    """
    if settings.url:
        return settings.url.rstrip("/")
    if (state := running_stack(settings.data_dir.absolute())) is not None:
        return str(state["url"])
    raise NotFound(f"no stack runs in {settings.data_dir.absolute()}: start one with `semantide up`, or name one in SEMANTIDE_URL")


class Client:
    """One connection to a stack."""

    def __init__(self, settings: Settings) -> None:
        self.url = stack_url(settings)
        key = settings.key_list[0] if settings.key_list else local_key(settings.data_dir.absolute())
        self._http = httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key or ''}"}, timeout=httpx.Timeout(60, connect=5))

    def call(self, method: str, path: str, **options: Any) -> Any:
        """One request; the decoded answer.

        Raises: StackError, TransientError when nobody answers.
        """
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise TransientError(f"{self.url} does not answer ({type(error).__name__}: {error}): is the stack up? (`semantide status`)") from error
        if answer.is_success:
            if answer.headers.get("content-type", "").startswith("text/"):
                return answer.text
            return answer.json() if answer.content else None
        try:
            body = answer.json()["error"]
        except (ValueError, KeyError, TypeError):
            raise StackError(f"{method} {path}: status {answer.status_code}", answer.status_code) from None
        raise StackError(body["message"], answer.status_code, body.get("details"))

    def get(self, path: str, **parameters: Any) -> Any:
        """GET with query parameters; those that are None are left out."""
        return self.call("GET", path, params={name: value for name, value in parameters.items() if value is not None})

    def post(self, path: str, body: Any = None) -> Any:
        """POST a JSON body."""
        return self.call("POST", path, json=body)

    def upload(self, path: Path, folder: str | None = None) -> tuple[str, str]:
        """Stream a file to the stack, into a folder of its own or that one; the name it has there, and the path under which an import finds it."""
        # Two uploads of one file name must not meet.
        name = f"{folder or uuid.uuid4().hex[:12]}/{_as_sent(path.name)}"

        def chunks() -> Iterator[bytes]:
            with path.open("rb") as stream:
                while block := stream.read(_CHUNK_BYTES):
                    yield block

        answer = self.call("PUT", f"/v1/uploads/{name}", content=chunks(), headers={"Content-Length": str(path.stat().st_size)}, timeout=None)
        return name, str(answer["path"])

    def upload_folder(self, folder: Path) -> tuple[list[str], str]:
        """Stream a folder's files, below the same names; the names they have there, and the path under which an import finds them all.

        Raises: ValueError where it has none.
        """
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        if not (files := [file for file in files if not any(part.startswith(".") for part in file.parts)]):
            raise ValueError(f"{folder} holds no files: name a folder with data in it, or a file")
        there, names, place = uuid.uuid4().hex[:12], list[str](), ""
        for file in files:
            inside = "/".join([there, *map(_as_sent, file.parts[:-1])])
            name, place = self.upload(folder / file, inside)
            names.append(name)
        return names, str(PurePosixPath(place).parents[len(file.parts) - 1])

    def submit(self, spec: JobSpec) -> JobRecord:
        """Submit a job."""
        return JobRecord.model_validate(self.post("/v1/jobs", spec.model_dump(mode="json")))

    def job(self, job_id: str) -> JobRecord:
        """One job's record."""
        return JobRecord.model_validate(self.get(f"/v1/jobs/{job_id}"))

    def current_catalog(self) -> str:
        """Reference of the newest tokenizer's catalog, with the items that came since.

        Raises: NotFound.
        """
        try:
            return str(self.get("/v1/catalogs/current/report")["catalog"])
        except StackError as error:
            if error.status != 404:
                raise
            raise NotFound("no catalog yet: run `semantide tokenize` first, or name one with --catalog") from None

    def promote(self, model: str, catalog: str | None = None, *, if_not_worse: bool = False, patience_seconds: float = 0.0) -> dict[str, Any]:
        """Make a model live. One that has just been trained is announced by a message, for which one may have to wait.

        Raises: StackError.
        """
        deadline = time.monotonic() + patience_seconds
        body = {"model": model} | ({"catalog": catalog} if catalog else {}) | ({"if_not_worse": True} if if_not_worse else {})
        while True:
            try:
                answer: dict[str, Any] = self.post("/v1/serving/promote", body)
                return answer
            except StackError as error:
                if error.status != 404 or time.monotonic() >= deadline:
                    raise
                time.sleep(0.3)

    def latest(self, kind: str, artifact: str, recipe: str | None = None) -> str:
        """Reference of the artifact that the newest successful job of a kind made.

        Raises: NotFound.
        """
        for raw in self.get("/v1/jobs", kind=kind, state="succeeded", limit=1000):
            record = JobRecord.model_validate(raw)
            if artifact in record.artifacts and (recipe is None or record.spec.recipe == recipe):
                return record.artifacts[artifact]
        raise NotFound(f"no {artifact} yet: run `semantide {kind}` first, or name one with --{artifact}")

    def latest_generator(self) -> str:
        """Reference of the newest generator.

        Raises: NotFound.
        """
        found = [JobRecord.model_validate(raw) for kind in ("train", "align") for raw in self.get("/v1/jobs", kind=kind, state="succeeded", limit=1000)]
        for record in sorted(found, key=lambda record: record.created, reverse=True):
            if "model" in record.artifacts and not record.spec.recipe.startswith(NO_GENERATORS):
                return record.artifacts["model"]
        raise NotFound("no generator yet: run `semantide train` first, or name one with --model")
