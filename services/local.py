"""The rooms' process entry: ``python -m semantide.services.local api|worker|job|rank|pod|route ...``.

``api all console`` mounts every room and the console in one process for a laptop; ``api all``, ``api ROOM``, ``api console`` and ``worker ROOM`` are what
compose and the chart run apart.
The only file that may import several rooms.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from semantide.shared import broker, telemetry
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS, RunJob
from semantide.shared.errors import BrokerUnavailable, PermanentError
from semantide.shared.job_process import run_job
from semantide.shared.jobs import AGAIN, FAILED, Jobs
from semantide.shared.queues import Queues, handler
from semantide.shared.room import Room

_ORPHAN_SECONDS = 60.0
_ROUTE_SECONDS = 5.0  # beyond the deadline that replicas keep themselves


def open_room(name: str, settings: Settings) -> Room:
    """Connect one room to its broker and store.

    Raises: BrokerUnavailable.
    """
    return Room(
        name, settings, broker.connect(settings.redis_url), ArtifactStore(settings.artifacts_root, settings.data_dir / "cache"), Queues(settings.redis_url)
    )


def _door(room: str, door: str) -> ModuleType | None:
    name = f"semantide.services.{room}.{door}"
    return importlib.import_module(name) if importlib.util.find_spec(name) else None


def serve(names: list[str], settings: Settings, console: bool = False) -> None:
    """Run the APIs of some rooms on one port, and the console beside them."""
    from semantide.shared import operations_api, stack_meters
    from semantide.shared.http import build_app

    telemetry.start("api" if len(names) > 1 else f"{names[0]}-api", settings)
    Queues.trace()
    rooms = [open_room(name, settings) for name in names]
    stack_meters.observe(rooms[0])
    routers, ready, start, failed = [operations_api.build(rooms[0])], [], [], []
    for room in rooms:
        door = _door(room.name, "api")
        if door is None:
            continue
        routers.append(door.build(room))
        if hook := getattr(door, "ready", None):
            ready.append(lambda hook=hook, room=room: hook(room))
        if hook := getattr(door, "failed", None):
            failed.append(lambda hook=hook, room=room: hook(room))
        if hook := getattr(door, "start", None):
            start.append(lambda hook=hook, room=room: hook(room))
    app = build_app(rooms, routers, ready, start, failed)
    if console:
        from semantide.services.console.api import open_console

        _listen(open_console(app, settings), settings)
    else:
        _listen(app, settings)


def show(settings: Settings) -> None:
    """Run the console alone. It knows the APIs' address and their keys, and neither broker nor data."""
    from semantide.services.console.api import open_alone

    telemetry.start("console", settings)
    _listen(open_alone(settings), settings)


def _listen(app: Any, settings: Settings) -> None:
    from semantide.shared.server import Server

    server = Server(app, settings.host, settings.port)
    with suppress(KeyboardInterrupt):
        server.run()
    if not server.started:
        sys.exit(3)


def route(settings: Settings) -> None:
    """Run the router in front of serving's replicas."""
    from semantide.services.serving.router import Router
    from semantide.shared.api_keys import api_keys
    from semantide.shared.gate import Gate
    from semantide.shared.rate_limits import RateLimits

    telemetry.start("router", settings)
    names = [name.strip() for name in settings.route_to.split(",") if name.strip()]
    answer_seconds = settings.serving_deadline_seconds + _ROUTE_SECONDS
    router = Router(names, settings.route_patience_seconds, answer_seconds, settings.max_body_bytes, time.monotonic)
    limits = RateLimits(settings.rate_limit, settings.rate_limit_burst, time.monotonic)
    _listen(Gate(router, api_keys(settings), settings.max_body_bytes, settings.body_seconds, limits), settings)


def work(name: str, settings: Settings) -> None:
    """Run one room's worker: its queues, its jobs, its background thread."""
    from semantide.shared.cluster_jobs import ClusterRunner
    from semantide.shared.job_runner import JobRunner

    telemetry.start(f"{name}-worker", settings)
    # Celery warns about root because of pickle; only JSON is accepted here, and containers often run one process as root.
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    Queues.trace()
    room = open_room(name, settings)
    tasks = _door(name, "tasks")
    runner = ClusterRunner(room) if settings.job_runner == "cluster" else JobRunner(room)

    @handler(RunJob)
    def run(message: RunJob, room: Room) -> None:
        runner.wake()

    stop = threading.Event()
    threads: list[threading.Thread] = []
    background: Callable[[Room, threading.Event], None] | None = getattr(tasks, "background", None)
    if background is not None:
        threads.append(threading.Thread(target=background, args=(room, stop), name="background", daemon=True))

    def begin() -> None:
        runner.start()
        for thread in threads:
            thread.start()

    def end() -> None:
        stop.set()
        runner.stop()
        for thread in threads:
            thread.join(20)

    room.queues.work(room, ready=begin, shutdown=end)


def work_on(job_id: str, settings: Settings) -> int:
    """Run one job in this process."""
    # The worker that started this process holds the metrics port.
    telemetry.start("job", settings.model_copy(update={"metrics_port": 0}))
    Queues.trace()
    client = broker.connect(settings.redis_url)
    queues = Queues(settings.redis_url)
    record = Jobs(client).get(job_id)
    door = _door(record.spec.room, "job")
    if door is None:
        raise ValueError(f"room {record.spec.room} runs no jobs")
    _keep_what_was_imported()
    return run_job(job_id, door.run, settings, ArtifactStore(settings.artifacts_root, settings.data_dir / "cache"), client, queues)


def work_as_rank(job_id: str, settings: Settings) -> int:
    """Do one rank's part of a job in this process; torchrun's environment says which."""
    from semantide.shared.job_ranks import run_rank

    telemetry.start("rank", settings.model_copy(update={"metrics_port": 0}))
    Queues.trace()
    client = broker.connect(settings.redis_url)
    door = _door(Jobs(client).get(job_id).spec.room, "job")
    assert door is not None
    store = ArtifactStore(settings.artifacts_root, settings.data_dir / "cache")
    _keep_what_was_imported()
    return run_rank(job_id, int(os.environ["RANK"]), door.run, settings, store, client, Queues(settings.redis_url))


def work_as_pod(job_id: str, settings: Settings) -> int:
    """Do the part of a job that is this pod's, by processes of its own; the operator's environment says which."""
    from semantide.services.training.heartbeat import Watch, beats_folder
    from semantide.shared.followed_jobs import FollowedJobs
    from semantide.shared.pod import Place, adopted, run_pod

    telemetry.start("pod", settings.model_copy(update={"metrics_port": 0}))
    Queues.trace()
    client = broker.connect(settings.redis_url)
    place = Place.of(os.environ)
    try:
        adopted(job_id, os.environ, FollowedJobs(client))
    except PermanentError as error:
        sys.stderr.write(f"semantide: {error}\n")
        return FAILED

    @contextmanager
    def watching(folder: Path) -> Iterator[None]:
        with Watch(beats_folder(folder, place.pod), settings.training_timeout_seconds, time.time) as watch:
            yield
        if watch.said:
            telemetry.logger("jobs").warning(watch.said, job=job_id)

    store = ArtifactStore(settings.artifacts_root, settings.data_dir / "cache")
    return run_pod(job_id, place, [sys.executable, "-m", "semantide.services.local"], watching, settings, store, client, Queues(settings.redis_url))


def _keep_what_was_imported() -> None:
    """Modules are never garbage: to look through theirs takes a fifth of a second, for which the other ranks of a job would wait."""
    gc.collect()
    gc.freeze()


def _end_with_parent() -> None:
    """End this process when its parent does: the parent holds the other end of standard input."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        # Nobody is left to insist: what does not end in time must not stay as an orphan.
        time.sleep(_ORPHAN_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    """Parse and run; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m semantide.services.local")
    parser.add_argument("--with-parent", action="store_true", help="end when standard input closes")
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("api").add_argument("rooms", nargs="+", choices=[*ROOMS, "console", "all"])
    verbs.add_parser("worker").add_argument("room", choices=ROOMS)
    verbs.add_parser("job").add_argument("id")
    verbs.add_parser("rank").add_argument("id")
    verbs.add_parser("pod").add_argument("id")
    verbs.add_parser("route")
    options = parser.parse_args(arguments)
    settings = Settings()
    # Idle OpenMP threads that spin make a busy machine ten times slower; set before torch loads its runtime.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if options.verb == "rank":
        # Ranks of one machine share its cores.
        cores = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    # A rank that an agent on a host without a terminal starts has nobody at the other end.
    if options.with_parent or (options.verb in ("job", "rank") and stat.S_ISFIFO(os.fstat(0).st_mode)):
        _end_with_parent()
    try:
        if options.verb == "api":
            rooms = list(ROOMS) if "all" in options.rooms else [room for room in options.rooms if room != "console"]
            if rooms:
                serve(rooms, settings, "console" in options.rooms)
            else:
                show(settings)
        elif options.verb == "route":
            route(settings)
        elif options.verb == "worker":
            work(options.room, settings)
        elif options.verb == "rank":
            return work_as_rank(options.id, settings)
        elif options.verb == "pod":
            return work_as_pod(options.id, settings)
        else:
            return work_on(options.id, settings)
    except (BrokerUnavailable, ValueError) as error:
        sys.stderr.write(f"semantide: {error}\n")
        return AGAIN if options.verb in ("job", "rank", "pod") and isinstance(error, BrokerUnavailable) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
