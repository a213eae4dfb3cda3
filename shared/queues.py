"""The door to Celery: one message type, one queue, one handler.

``queues.send(message)`` puts a frozen pydantic message on the queue of its type (for ``RunJob``: of its room). A room's
``tasks.py`` registers handlers with ``@handler(MessageType)``. A handler that raises TransientError (or loses the broker or the disk)
is run again with growing pauses; any other error parks the message in a dead-letter list with its cause. Delivery is at least once, handlers are idempotent.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from celery import Celery
from celery.exceptions import Retry as CeleryRetry
from celery.signals import setup_logging, worker_ready, worker_shutdown
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError

from semantide.shared import broker as broker_door
from semantide.shared.contracts import (
    ROOMS,
    CandidateJudged,
    CatalogReady,
    ItemsChanged,
    Message,
    ModelTrained,
    NegativesWanted,
    RolloutsToScore,
    RunJob,
    TablePublished,
)
from semantide.shared.errors import BrokerUnavailable, NotFound, TransientError
from semantide.shared.telemetry import logger

if TYPE_CHECKING:
    from semantide.shared.room import Room

M = TypeVar("M", bound=Message)
Handler = Callable[[Any, "Room"], None]

# Which rooms hear a message. A message with several readers has one queue a reader.
READERS: dict[type[Message], tuple[str, ...]] = {
    RunJob: (),
    ItemsChanged: ("tokenization",),
    CatalogReady: ("serving",),
    ModelTrained: ("serving", "negatives"),
    CandidateJudged: ("serving",),
    NegativesWanted: ("negatives",),
    RolloutsToScore: ("reward",),
    TablePublished: ("serving",),
}
MAX_ATTEMPTS = 8
_LETTERS_SHOWN = 50
_LETTER_TEXT = 4000
VISIBILITY_SECONDS = 60  # a handler ends well within it; what a killed worker held comes back after it

_handlers: dict[type[Message], Handler] = {}


def handler(message_type: type[M]) -> Callable[[Callable[[M, Room], None]], Callable[[M, Room], None]]:
    """Register the decorated function as this process's handler of a message type."""

    def register(function: Callable[[M, Room], None]) -> Callable[[M, Room], None]:
        _handlers[message_type] = function
        return function

    return register


def queue_name(message_type: type[Message], room: str) -> str:
    """As in ``semantide.training.RunJob``."""
    return f"semantide.{room}.{message_type.__name__}"


def dead_letter_key(queue: str) -> str:
    """The Redis list that keeps what a queue's handler could not do."""
    return f"semantide:dead:{queue}"


def _queue_kinds() -> dict[str, type[Message]]:
    names: dict[str, type[Message]] = {queue_name(RunJob, room): RunJob for room in ROOMS}
    return names | {queue_name(kind, room): kind for kind, rooms in READERS.items() for room in rooms}


def _keep_logging(**_: Any) -> None:
    pass


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shortened(entry) for name, entry in value.items()}
    return f"{value[:_LETTER_TEXT]}... ({len(value)} characters)" if isinstance(value, str) and len(value) > _LETTER_TEXT else value


class Queues:
    """Sends messages, runs a room's worker, shows depths and dead letters."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        found = broker_door.watched(redis_url)
        # With sentinels Celery asks them again whenever it has lost the server.
        named = {} if found is None else {"master_name": found.name, "sentinel_kwargs": {"socket_timeout": 2.0, "socket_connect_timeout": 2.0}}
        self.app = Celery("semantide", broker=redis_url if found is None else found.queue_urls)
        self.app.conf.update(
            task_acks_late=True,
            task_reject_on_worker_lost=True,
            task_ignore_result=True,
            worker_prefetch_multiplier=1,
            worker_hijack_root_logger=False,
            worker_redirect_stdouts=False,
            worker_send_task_events=False,
            worker_enable_remote_control=False,
            worker_cancel_long_running_tasks_on_connection_loss=False,
            task_serializer="json",
            accept_content=["json"],
            broker_connection_retry_on_startup=True,
            broker_connection_max_retries=None,
            broker_transport_options={
                "visibility_timeout": VISIBILITY_SECONDS,
                "socket_keepalive": True,
                "global_keyprefix": "semantide:queue:",
                **named,
            },
            task_create_missing_queues=True,
        )

    def send(self, message: Message) -> None:
        """Put the message on its queue(s).

        Raises: BrokerUnavailable.
        """
        kind = type(message)
        rooms = (message.room,) if isinstance(message, RunJob) else READERS[kind]
        for room in rooms:
            self._put(kind.__name__, queue_name(kind, room), message.model_dump(mode="json"))

    def _put(self, name: str, queue: str, body: dict[str, Any]) -> None:
        try:
            self.app.send_task(name, kwargs={"body": body}, queue=queue, retry=True, retry_policy={"max_retries": 3})
        except (OSError, OperationalError, *broker_door.ConnectionLost) as error:
            raise BrokerUnavailable(f"message {name} could not be queued ({error}): the broker is away, try again") from error

    @staticmethod
    def trace() -> None:
        """Carry this process's traces in the headers of the messages that it sends and handles."""
        from opentelemetry.instrumentation.celery import CeleryInstrumentor

        CeleryInstrumentor().instrument()

    def depths(self, client: Any) -> dict[str, int]:
        """Waiting messages of every queue that ever held one."""
        return {name: int(client.llen(f"semantide:queue:{name}")) for name in _queue_kinds()}

    def parked(self, client: Any) -> dict[str, int]:
        """How many messages each queue has parked."""
        return {key.decode().removeprefix("semantide:dead:"): int(client.llen(key)) for key in sorted(client.scan_iter("semantide:dead:*"))}

    def dead_letters(self, client: Any) -> dict[str, list[dict[str, Any]]]:
        """The newest parked messages with their causes, by queue; long values are cut, the list in Redis has them whole."""
        letters = {}
        for key in sorted(client.scan_iter("semantide:dead:*")):
            entries = client.lrange(key, -_LETTERS_SHOWN, -1)
            letters[key.decode().removeprefix("semantide:dead:")] = [_shortened(json.loads(entry)) for entry in entries]
        return letters

    def requeue(self, client: Any, queue: str) -> int:
        """Put a queue's parked messages back on it, oldest first; how many. One that fails again is parked again.

        A message leaves the dead-letter list after it was queued: a crash in between repeats it, and handlers are idempotent.
        Raises: NotFound for a queue that holds no messages of ours, BrokerUnavailable.
        """
        kind = _queue_kinds().get(queue)
        if kind is None:
            raise NotFound(f"queue {queue!r} has no messages that can be put back: name one of {', '.join(_queue_kinds())}")
        entries = client.lrange(dead_letter_key(queue), 0, -1)
        for entry in entries:
            self._put(kind.__name__, queue, json.loads(entry)["message"])
            client.lrem(dead_letter_key(queue), 1, entry)
        return len(entries)

    def work(self, room: Room, *, ready: Callable[[], None] | None = None, shutdown: Callable[[], None] | None = None) -> None:
        """Run the room's registered handlers until the process is asked to end."""
        self.prepare(room)
        # With a receiver Celery leaves logging alone; else it would set the root's level, and ours would be lost.
        setup_logging.connect(_keep_logging, weak=False)
        if ready is not None:
            worker_ready.connect(lambda **_: ready(), weak=False)
        if shutdown is not None:
            worker_shutdown.connect(lambda **_: shutdown(), weak=False)
        options = ["--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=WARNING"]
        self.app.worker_main(["--quiet", "worker", f"--hostname={room.name}@%h", *options])

    def prepare(self, room: Room) -> None:
        """Bind the registered handlers to the room's queues."""
        queues = []
        for kind, function in _handlers.items():
            name = queue_name(kind, room.name)
            queues.append(Queue(name, Exchange(name), routing_key=name))
            self._register(kind, function, room, name)
        self.app.conf.task_queues = queues

    def _register(self, kind: type[Message], function: Handler, room: Room, queue: str) -> None:
        log = logger(room.name)

        def run(task: Any, body: dict[str, Any]) -> None:
            try:
                function(kind.model_validate(body), room)
            except CeleryRetry:
                raise
            except Exception as error:
                transient = isinstance(error, (TransientError, OSError, *broker_door.ConnectionLost))
                if transient and task.request.retries < MAX_ATTEMPTS:
                    log.warning("message will be tried again", message_type=kind.__name__, attempt=task.request.retries + 1, error=str(error))
                    raise task.retry(exc=error, countdown=min(30.0, 0.5 * 2**task.request.retries), max_retries=MAX_ATTEMPTS) from error
                log.error("message parked", message_type=kind.__name__, error=str(error), exc_info=True)
                letter = {
                    "message": body,
                    "error": f"{type(error).__name__}: {error}",
                    "traceback": traceback.format_exc()[-4000:],
                    "time": int(time.time() * 1000),
                }
                pipe = room.broker.pipeline()
                pipe.rpush(dead_letter_key(queue), json.dumps(letter))
                pipe.ltrim(dead_letter_key(queue), -1000, -1)
                pipe.execute()

        self.app.task(run, bind=True, name=kind.__name__, shared=False)
