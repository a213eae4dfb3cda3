"""Queue door of serving: trained models become candidates, new items reach the live catalog."""

from __future__ import annotations

from semantide.services.serving.bundle import read_header
from semantide.services.serving.publishing import compare
from semantide.services.serving.registry import Candidate, Following, Pair, Registry
from semantide.services.serving.retrieval import LoadedRetriever
from semantide.services.serving.service import load_and_warm
from semantide.shared.catalog import Catalog, Lineages
from semantide.shared.contracts import CandidateJudged, CatalogReady, ModelTrained, TablePublished
from semantide.shared.errors import Conflict, NotFound
from semantide.shared.jobs import Jobs
from semantide.shared.queues import handler
from semantide.shared.room import Room
from semantide.shared.telemetry import logger


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
    """Register a trained model; promote it when its job asked for that, once."""
    registry = Registry(room.broker)
    if message.catalog is None:
        if message.promote and registry.read().retriever != message.model:
            LoadedRetriever.load(room.store, message.model)
            registry.retrieve(message.model)
            logger("serving").info("retriever promoted", model=message.model, job=message.job_id)
        return
    header = read_header(room.store.get(message.model))
    candidate = Candidate(
        model=message.model,
        catalog=_newest(room, message.catalog, str(header["tokenizer_digest"])),
        job_id=message.job_id,
        recipe=str(header.get("recipe") or ""),
        metrics=header["metrics"] if isinstance(header.get("metrics"), dict) else {},
    )
    known = registry.register(candidate).candidate(message.model)
    # A message may come twice; the second must not undo a rollback made in between.
    if message.promote and known is not None and not known.promoted:
        pair = registry.resolve(message.model, None)
        wait = message.promote == "if-not-worse"
        if wait and (known.judging or known.judged or compare(registry, pair, room.store, room.settings, Jobs(room.broker, room.queues).submit)):
            return
        load_and_warm(room.store, pair)
        registry.promote(pair, reason=f"asked for by job {message.job_id}")
        logger("serving").info("model promoted", model=pair.model, catalog=pair.catalog, job=message.job_id)


@handler(CandidateJudged)
def decide(message: CandidateJudged, room: Room) -> None:
    """Promote a candidate that is not worse than the live model; keep the figures either way. Where another model has gone live meanwhile, it is compared with that."""
    registry = Registry(room.broker)
    pair = Pair(model=message.model, catalog=registry.read().newest(message.catalog))
    if message.not_worse:
        load_and_warm(room.store, pair)
    try:
        state = registry.judged(pair, message)
    except Conflict:
        compare(registry, pair, room.store, room.settings, Jobs(room.broker, room.queues).submit)
        return
    live = state.live is not None and state.live.model == pair.model
    logger("serving").info("candidate was judged", model=pair.model, live=live, job=message.job_id, reason=message.reason, figures=message.figures)


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
