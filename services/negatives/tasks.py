"""Queue door: shards of negatives are drawn ahead of the runs that wait for them."""

from __future__ import annotations

import json
import time
from functools import lru_cache

from semantide.services.negatives.newest_models import NewestModels
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import ModelTrained, NegativesWanted
from semantide.shared.errands import Errands
from semantide.shared.negative_shards import store_shard
from semantide.shared.negative_source import NegativeSource
from semantide.shared.queues import handler
from semantide.shared.room import Room
from semantide.shared.telemetry import logger, meter

_shards = meter("negatives").create_counter("negative_shards", description="Shards of negatives that were drawn")


@handler(NegativesWanted)
def draw_shard(message: NegativesWanted, room: Room) -> None:
    """Draw one shard and say where it is; one that is there already is not drawn again.

    Raises: PermanentError for a mixture or artifacts that cannot be used.
    """
    errands = Errands(NegativesWanted, room.broker, room.store)
    swept = errands.sweep(time.time())
    if swept:
        logger(room.name).info("shards of runs that are gone were taken away", shards=swept)
    found = errands.find(message)
    if found is not None and room.store.exists(found):
        return
    source = _source(message.model_copy(update={"seed": 0, "epoch": 0, "shard": 0}).model_dump_json(), room.store)
    rows = source.shard(message.seed, message.epoch, message.shard)
    errands.put(message, store_shard(message, rows, room.store), time.time())
    _shards.add(1)


@handler(ModelTrained)
def note_model(message: ModelTrained, room: Room) -> None:
    """Remember the newest generator of each tokenizer, whose beams a negatives job searches; a retriever has none."""
    if message.catalog is None:
        return
    header = json.loads((room.store.get(message.catalog) / "catalog.json").read_text())
    NewestModels(room.broker).put(header["tokenizer_digest"], message.model)


@lru_cache(maxsize=1)
def _source(wanted: str, store: ArtifactStore) -> NegativeSource:
    # The shards of a run follow one another: its data set is read once.
    return NegativeSource.of(NegativesWanted.model_validate_json(wanted), store)
