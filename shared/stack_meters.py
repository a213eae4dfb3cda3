"""What the broker holds, as metrics of the API that is asked: waiting and parked messages, open jobs and how those that ended did.

Every API of one stack shows the same figures: take their maximum, not their sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Observation

from semantide.shared.broker import RedisError
from semantide.shared.contracts import ROOMS
from semantide.shared.jobs import ended_jobs, open_jobs_key
from semantide.shared.retention_account import RetentionAccount
from semantide.shared.room import Room
from semantide.shared.telemetry import meter


def observe(room: Room) -> None:
    """Add the figures to this process's metrics."""
    made, broker, queues, account = meter("stack"), room.broker, room.queues, RetentionAccount(room.broker)

    def quietly(read: Callable[[], Iterable[Observation]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def answer(_: CallbackOptions) -> Iterable[Observation]:
            # Without the broker there is nothing to say; the other metrics must still be shown.
            try:
                return list(read())
            except RedisError:
                return []

        return answer

    def waiting() -> Iterable[Observation]:
        return (Observation(count, {"queue": queue}) for queue, count in queues.depths(broker).items())

    def parked() -> Iterable[Observation]:
        return (Observation(count, {"queue": queue}) for queue, count in queues.parked(broker).items())

    def unfinished() -> Iterable[Observation]:
        return (Observation(int(broker.scard(open_jobs_key(each))), {"room": each}) for each in ROOMS)

    def ended() -> Iterable[Observation]:
        return (Observation(count, {"room": of, "state": state}) for (of, state), count in ended_jobs(broker).items())

    def removed() -> Iterable[Observation]:
        return (Observation(count, {"what": what}) for what, count in account.read()[0].items())

    def removed_bytes() -> Iterable[Observation]:
        return [Observation(account.read()[1])]

    def looked() -> Iterable[Observation]:
        moment = account.read()[2]
        return [] if moment is None else [Observation(moment)]

    def due() -> Iterable[Observation]:
        settings, moment = room.settings, account.read()[2]
        wanted = settings.retention_hours and (settings.artifact_days or settings.job_days or settings.upload_days)
        return [] if moment is None or not wanted else [Observation(moment + settings.retention_hours * 3600)]

    made.create_observable_counter("semantide_retention_removed", [quietly(removed)], description="What retention has removed, by kind of thing")
    made.create_observable_counter("semantide_retention_bytes", [quietly(removed_bytes)], unit="By", description="Bytes that retention has removed")
    made.create_observable_gauge("semantide_retention_looked", [quietly(looked)], unit="s", description="When retention looked last, since 1970")
    made.create_observable_gauge(
        "semantide_retention_due", [quietly(due)], unit="s", description="When retention has to look next, since 1970; nothing where it is off"
    )
    made.create_observable_gauge("semantide_queue_messages", [quietly(waiting)], description="Messages that wait, by queue")
    made.create_observable_gauge("semantide_parked_messages", [quietly(parked)], description="Messages that could not be handled, by queue")
    made.create_observable_gauge("semantide_jobs_open", [quietly(unfinished)], description="Jobs that have not ended, by room")
    made.create_observable_counter("semantide_jobs_ended", [quietly(ended)], description="Jobs that have ended, by room and state")
