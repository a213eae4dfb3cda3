"""Processes of a stack: what compose, the chart and the operator run; each takes the place of the command line's."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from semantide.services.commandline import stack
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS


def worker(room: Annotated[str, typer.Argument(help=" | ".join(ROOMS))]) -> None:
    """Run one room's worker in this process (what compose and the chart run)."""
    _become("worker", room)


def api(rooms: Annotated[list[str], typer.Argument(help=" | ".join((*ROOMS, "all", "console")))]) -> None:
    """Run the APIs of some rooms, or of all, or the console, in this process."""
    settings = Settings()
    stack.check_port(settings.host, settings.port)
    _become("api", *rooms)


def pod(job_id: Annotated[str, typer.Argument(help="Id of the job")]) -> None:
    """Do a pod's part of a job in this process (what the pods of an NPUJob run)."""
    _become("pod", job_id)


def replica() -> None:
    """Serve recommendations as one replica of several (what the pods of an NPUService run)."""
    _become("api", "serving")


def route() -> None:
    """Forward requests to serving replicas, those of one user to the same one (SEMANTIDE_ROUTE_TO names them)."""
    settings = Settings()
    stack.check_port(settings.host, settings.port)
    _become("route")


def _become(verb: str, *arguments: str) -> None:
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "semantide.services.local", verb, *arguments])
