"""The gate before what is live: a candidate is compared with the live model, user by user, and goes live only if it is not worse.

The comparison is an ``evaluate`` job of the training room, on the held-out part of the candidate's own data set, which neither model has seen; its verdict comes back as a message.
"""

from __future__ import annotations

from collections.abc import Callable

from semantide.services.serving.bundle import read_header
from semantide.services.serving.registry import Pair, Registry
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import Conflict
from semantide.shared.telemetry import logger


def compare(registry: Registry, pair: Pair, store: ArtifactStore, settings: Settings, submit: Callable[[JobSpec], JobRecord]) -> str | None:
    """Let a pair be compared with what is live: the job that does it, or None where nothing else is live.

    Raises: Conflict for a model that does not say which data set it was trained on.
    """
    state = registry.read()
    if state.live is None or state.live.model == pair.model:
        return None
    dataset = read_header(store.get(pair.model, verify=False)).get("dataset")
    if not isinstance(dataset, str):
        raise Conflict(
            f"model {pair.model} does not say which data set it was trained on, so it cannot be compared with the live one: promote it without `if_not_worse`"
        )
    config: dict[str, object] = {"bounds": dict(settings.promotion_bounds), "publish": True}
    if settings.promotion_users:
        config["max_users"] = settings.promotion_users
    inputs = {"dataset": dataset, "model": pair.model, "catalog": pair.catalog, "live": state.live.model, "live_catalog": state.live.catalog}
    record = submit(JobSpec(kind="evaluate", config=config, inputs=inputs))
    registry.judging(pair.model, record.id)
    logger("serving").info("candidate is compared with the live model", model=pair.model, live=state.live.model, job=record.id)
    return record.id
