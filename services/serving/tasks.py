"""Queue door of serving: trained models become candidates, new items reach the live catalog."""

from __future__ import annotations

import threading
import time

from semantide.services.serving.bundle import read_card, read_header
from semantide.services.serving.publishing import compare
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Following, Pair
from semantide.services.serving.retention import Policy
from semantide.services.serving.retrieval import LoadedRetriever
from semantide.services.serving.service import load_and_warm
from semantide.shared.broker import RedisError
from semantide.shared.catalog import Catalog, Lineages
from semantide.shared.contracts import CandidateJudged, CatalogReady, JobSpec, ModelTrained, TablePublished
from semantide.shared.errors import Conflict, NotFound, PermanentError, TransientError
from semantide.shared.jobs import Jobs
from semantide.shared.queues import handler
from semantide.shared.retention_account import RetentionAccount
from semantide.shared.room import Room
from semantide.shared.telemetry import logger

_RETENTION_SECONDS = 60.0  # between two looks at the time of the last one


def background(room: Room, stop: threading.Event) -> None:
    """Ask for a look for what need not be kept, whenever its time has come, until ``stop`` is set; several workers ask for the same one."""
    account, jobs = RetentionAccount(room.broker), Jobs(room.broker, room.queues)
    while room.settings.retention_hours and Policy.of(room.settings):
        try:
            looked = account.looked(now := time.time())
            if now - looked >= room.settings.retention_hours * 3600 or looked > now + 3600:  # a clock that was wrong must not stop it for ever
                since = int((now - looked) // (room.settings.retention_hours * 3600))  # one that failed or was cancelled is asked for again in the next period
                jobs.submit(JobSpec(kind="retention"), once=f"retention after {looked!r}, {since}")
        except (RedisError, TransientError) as error:
            logger("serving").warning("retention could not be asked for, it will be", error=str(error))
        if stop.wait(_RETENTION_SECONDS):
            return


def _newest(room: Room, catalog: str, tokenizer: str) -> str:
    """The catalog as it is now, found from its end: it may have been extended more often during a training than the registry remembers."""
    for lineage in Lineages(room.broker).all():
        ref: str | None = lineage.catalog if lineage.tokenizer == tokenizer else None
        while ref is not None and ref != catalog:
            try:
                ref = room.store.manifest(ref)["config"].get("extends")
            except NotFound:
                ref = None
        if ref == catalog:
            return lineage.catalog
    return catalog


@handler(ModelTrained)
def keep_candidate(message: ModelTrained, room: Room) -> None:
    """Register a trained model; promote it when its job asked for that, once. Why one is not promoted that should be is kept as a decision."""
    registry = Registry(room.broker)
    known = registry.register(_candidate(message, room)).candidate(message.model)
    # A message may come twice; the second must not undo a rollback made in between.
    if not message.promote or known is None or known.promoted:
        return
    wait = message.promote == "if-not-worse"
    if wait and (known.judging or known.judged):
        return
    try:
        if wait and compare(registry, known, room.store, room.settings, Jobs(room.broker, room.queues).submit):
            return
        _load(room, known.model, known.catalog)
    except PermanentError as error:
        registry.hold(known.model, f"{type(error).__name__}: {error}")
        logger("serving").error("model cannot be promoted", model=known.model, job=message.job_id, error=str(error), exc_info=True)
        return
    reason = f"asked for by job {message.job_id}"
    if known.catalog is None:
        registry.retrieve(known.model, reason)
    else:
        registry.promote(Pair(model=known.model, catalog=known.catalog), reason=reason)
    logger("serving").info("model promoted", model=known.model, catalog=known.catalog, job=message.job_id)


def _candidate(message: ModelTrained, room: Room) -> Candidate:
    folder = room.store.get(message.model)
    card = read_card(folder) if message.catalog is None else read_header(folder)
    return Candidate(
        model=message.model,
        catalog=None if message.catalog is None else _newest(room, message.catalog, str(card["tokenizer_digest"])),
        job_id=message.job_id,
        recipe=str(card.get("recipe") or ""),
        metrics=card["metrics"] if isinstance(card.get("metrics"), dict) else {},
    )


def _load(room: Room, model: str, catalog: str | None) -> None:
    """Let a model answer once, so that a broken one is refused before anything changes.

    Raises: NotFound, Corrupt, Conflict; PermanentError where the model's numbers are broken.
    """
    if catalog is None:
        LoadedRetriever.load(room.store, model)
    else:
        load_and_warm(room.store, Pair(model=model, catalog=catalog))


@handler(CandidateJudged)
def decide(message: CandidateJudged, room: Room) -> None:
    """Promote a candidate that is not worse than the live model; keep the figures either way. Where another model has gone live meanwhile, it is compared with that."""
    registry = Registry(room.broker)
    state = registry.read()
    if state.undecided.get(message.model) == message.job_id and _resumed(room, message.job_id):
        state = registry.reopened(message.model, message.job_id)
    known = state.candidate(message.model)
    if known is None or known.judging != message.job_id:
        logger("serving").info("nobody waits for this verdict", model=message.model, job=message.job_id)
        return
    try:
        if message.not_worse:
            _load(room, message.model, message.catalog and state.newest(message.catalog))
    except PermanentError as error:
        message = message.model_copy(update={"not_worse": False, "reason": f"it is not worse, but cannot be served: {error}"})
    try:
        state = registry.judged(message)
    except Conflict:
        try:
            compare(registry, known, room.store, room.settings, Jobs(room.broker, room.queues).submit)
        except PermanentError as error:
            registry.hold(known.model, str(error), message.job_id)
        return
    live = state.rival(known) or ("", None)
    logger("serving").info(
        "candidate was judged", model=message.model, live=live[0] == message.model, job=message.job_id, reason=message.reason, figures=message.figures
    )


def _resumed(room: Room, job_id: str) -> bool:
    """Whether a job that ended without a verdict has been resumed, so that a verdict is no late one of its first run."""
    try:
        return Jobs(room.broker).get(job_id).resumes > 0
    except NotFound:
        return False


@handler(TablePublished)
def follow_table(message: TablePublished, room: Room) -> None:
    """Let serving follow the table of a run that still trains, when its job asked for that."""
    if message.promote and message.model.startswith("models/"):
        LoadedRetriever.load(room.store, message.model)
    before = Registry(room.broker).read()
    after = Registry(room.broker).advance(message.model, Following(job_id=message.job_id, step=message.step), message.promote)
    if after.retriever != before.retriever:
        logger("serving").info("retriever follows its training", model=message.model, job=message.job_id, step=message.step)


@handler(CatalogReady)
def extend_catalog(message: CatalogReady, room: Room) -> None:
    """Let a catalog that adds items take the place of the one it extends, so that the new items can be recommended.

    Raises: Conflict when it spells items in another way.
    """
    if message.extends is None:
        return
    old, new = Catalog.load(room.store.get(message.extends)), Catalog.load(room.store.get(message.catalog))
    new.check_model(old.tokenizer_digest, old.level_sizes)
    moved = [item for item, codes in zip(old.item_ids, old.codes.tolist(), strict=True) if item in new.row_of and codes != new.codes[new.row_of[item]].tolist()]
    if moved:
        raise Conflict(
            f"catalog {message.catalog} gives item {moved[0]!r} and {len(moved) - 1} more other codes than {message.extends}, which it should only extend: "
            "publish it as a new catalog and train on it"
        )
    state = Registry(room.broker).extend(message.extends, message.catalog)
    logger("serving").info("catalog extended", old=message.extends, new=message.catalog, live=state.live.catalog if state.live else None)
