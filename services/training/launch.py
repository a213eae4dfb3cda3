"""Starts the ranks of a job on this machine, as torchrun does, and starts all of them again when one is lost.

    launch(command) -> elastic agent -> one process per rank: ``command`` with RANK, WORLD_SIZE, LOCAL_RANK and the address of the rendezvous

Every attempt is a rendezvous of its own, so nothing of a lost attempt can meet the next. Ranks go on from the last checkpoint by themselves.
"""

from __future__ import annotations

import signal
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from semantide.services.training.heartbeat import Watch
from semantide.shared.errors import BrokerUnavailable, JobCancelled, PermanentError
from semantide.shared.jobs import AGAIN


@dataclass(frozen=True)
class Launch:
    """How many processes, and how often they may be lost before that counts as failure; asked to stop they may take ``stop_seconds`` for a last checkpoint."""

    processes: int
    attempts: int
    stop_seconds: int = 15


def launch(
    command: Sequence[str], plan: Launch, *, failed: Callable[[], Exception | None], lost: Callable[[int, str], None], watch: Watch | None = None
) -> None:
    """Run ``command`` in every rank until all have ended well.

    ``failed`` says what a rank itself has said of its end, where that is no reason to try again; ``lost`` hears of each attempt that is made again; ``watch``
    ends ranks that hang.

    Raises: what ``failed`` says, JobCancelled when this process is asked to stop, BrokerUnavailable when a rank ended for want of it, which is no attempt,
    PermanentError after the last attempt.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for attempt in range(1, plan.attempts + 1):
            try:
                with watch or nullcontext():
                    _once(command, plan)
                return
            except SignalException as error:
                raise JobCancelled(f"asked to stop by signal {int(error.sigval)}") from error
            except ChildFailedError as error:
                if cause := failed():
                    raise cause from error
                if any(failure.exitcode == AGAIN for failure in error.failures.values()):
                    raise BrokerUnavailable("a rank found the broker away: all ranks start again from the last checkpoint") from error
                how = (watch.said if watch is not None else "") or _how(error)
                if attempt == plan.attempts:
                    raise PermanentError(f"{how}, in the last of {attempt} attempts: see the job's log; the last good checkpoint stays") from error
                lost(attempt, how)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _once(command: Sequence[str], plan: Launch) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=plan.processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        # An agent that restarts ranks by itself would also restart what cannot succeed.
        max_restarts=0,
        signals_to_handle="SIGTERM,SIGINT",
        local_addr="127.0.0.1",
        shutdown_timeout=plan.stop_seconds,
    )
    elastic_launch(config, command[0])(*command[1:])


def _how(error: ChildFailedError) -> str:
    rank, failure = error.get_first_failure()
    if failure.exitcode < 0:
        return f"rank {rank} was killed by signal {-failure.exitcode} (out of memory?)"
    return f"rank {rank} ended with status {failure.exitcode}"
