"""The command line's client: that of ``semantide.client``, for the stack that the settings name or that runs here."""

from __future__ import annotations

import time
from typing import Any

from semantide import client
from semantide.client import Retries, StackError
from semantide.client.retries import REFUSED
from semantide.services.commandline.stack import running_stack
from semantide.shared.api_keys import own_key
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord
from semantide.shared.errors import NotFound

__all__ = ["NO_GENERATORS", "Client", "StackError", "stack_url"]

NO_GENERATORS = ("sasrec", "retriever-", "fuxi-")
"""How recipes begin that need no catalog."""

# A person who waits wants to hear soon that no stack runs, or that no model is live.
_RETRIES = Retries(attempts=3, first_seconds=0.1, statuses=frozenset({REFUSED}))


def stack_url(settings: Settings) -> str:
    """Address of the stack to talk to.

    Raises: NotFound when none is configured and none runs here.
    """
    if settings.url:
        return settings.url.rstrip("/")
    if (state := running_stack(settings.data_dir.absolute())) is not None:
        return str(state["url"])
    raise NotFound(f"no stack runs in {settings.data_dir.absolute()}: start one with `semantide up`, or name one in SEMANTIDE_URL")


class Client(client.Client):
    """One connection to a stack."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(stack_url(settings), key=own_key(settings) or "", retries=_RETRIES)

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
        for record in self.jobs(kind, "succeeded", 1000):
            if artifact in record.artifacts and (recipe is None or record.spec.recipe == recipe):
                return record.artifacts[artifact]
        raise NotFound(f"no {artifact} yet: run `semantide {kind}` first, or name one with --{artifact}")

    def latest_generator(self) -> str:
        """Reference of the newest generator.

        Raises: NotFound.
        """
        found: list[JobRecord] = [record for kind in ("train", "align") for record in self.jobs(kind, "succeeded", 1000)]
        for record in sorted(found, key=lambda record: record.created, reverse=True):
            if "model" in record.artifacts and not record.spec.recipe.startswith(NO_GENERATORS):
                return record.artifacts["model"]
        raise NotFound("no generator yet: run `semantide train` first, or name one with --model")
