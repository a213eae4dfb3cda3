"""The gate before what is live: a candidate is compared with what answers in its place, user by user, and goes live only if it is not worse.

The comparison is an ``evaluate`` job of the training room, on the held-out part of the candidate's own data set, which neither model has seen; its verdict comes back as a message.
A comparison that ends without a verdict holds the candidate back, with the reason; one that is resumed then decides as it would have.
"""

from __future__ import annotations

from collections.abc import Callable

from semantide.services.serving.bundle import read_card
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import Conflict, NotFound
from semantide.shared.jobs import Jobs
from semantide.shared.telemetry import logger

_AGAIN = "the live model stays; `semantide promote --if-not-worse` compares them again"


def compare(registry: Registry, candidate: Candidate, store: ArtifactStore, settings: Settings, submit: Callable[[JobSpec], JobRecord]) -> str | None:
    """Let a candidate be compared with what is live: the job that does it, or None where nothing else is live.

    Raises: Conflict for a model that does not say which data set it was trained on.
    """
    state = registry.register(candidate)  # one that was forced: its verdict has to find it
    rival = state.rival(candidate)
    if rival is None or rival[0] == candidate.model:
        return None
    dataset = read_card(store.get(candidate.model, files=("semantide.json",))).get("dataset")
    if not isinstance(dataset, str):
        raise Conflict(
            f"model {candidate.model} does not say which data set it was trained on, so it cannot be compared with the live one: promote it without `if_not_worse`"
        )
    config: dict[str, object] = {"bounds": dict(settings.promotion_bounds), "publish": True}
    if settings.promotion_users:
        config["max_users"] = settings.promotion_users
    inputs = {"dataset": dataset, "model": candidate.model, "catalog": candidate.catalog, "live": rival[0], "live_catalog": rival[1]}
    record = submit(JobSpec(kind="evaluate", config=config, inputs={name: ref for name, ref in inputs.items() if ref}))
    registry.judging(candidate.model, record.id)
    logger("serving").info("candidate is compared with the live model", model=candidate.model, live=rival[0], job=record.id)
    return record.id


class Comparisons:
    """Looks after comparisons that are under way: one that failed, was cancelled or is known to nobody any more comes to no verdict, and its candidate is held back. One that
    was resumed since is waited for again."""

    def __init__(self, registry: Registry, jobs: Jobs) -> None:
        self._registry, self._jobs = registry, jobs
        self._seen: int | None = None
        self._waiting: list[tuple[str, str]] = []
        self._undecided: dict[str, str] = {}

    def poll(self) -> None:
        """Look once."""
        version = self._registry.version()
        if version != self._seen:
            state = self._registry.read()
            self._waiting = [(one.model, one.judging) for one in state.candidates if one.judging]
            self._undecided = state.undecided
            self._seen = version
        for model, job_id in self._undecided.items():
            if self._ended(job_id) is None:
                self._registry.reopened(model, job_id)
                logger("serving").info("candidate is compared again", model=model, job=job_id)
        for model, job_id in self._waiting:
            if (reason := self._ended(job_id)) is not None:
                self._registry.hold(model, reason, job_id)
                logger("serving").warning("candidate is held back", model=model, job=job_id, reason=reason)

    def _ended(self, job_id: str) -> str | None:
        """Why there will be no verdict; None as long as one may come."""
        try:
            record = self._jobs.get(job_id)
        except NotFound:
            return f"nothing is known of its comparison {job_id}: {_AGAIN}"
        resume = f"{_AGAIN}, and `semantide jobs resume {job_id}` goes on with this comparison"
        if record.state == "failed":
            return f"its comparison failed ({record.error}): {resume}"
        return f"its comparison was cancelled: {resume}" if record.state == "cancelled" else None
