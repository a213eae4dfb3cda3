"""Which artifacts somebody needs: what serves or may be promoted, what processes say that they have loaded, what jobs and messages name, and what rooms keep in the broker."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import RegistryState
from semantide.shared.catalog import Lineages
from semantide.shared.contracts import ENDED, JobRecord
from semantide.shared.lineage import Lineage, references_in

_LOADED = "semantide:loaded"  # sorted set: reference -> when a serving process said last that it has it
_SILENT_SECONDS = 86_400
_SCAN = 500
# Keys of users, batches and jobs: many, and none is the only one to name an artifact. What serving keeps is read by its registry.
_PASSED_OVER = ("semantide:history:", "semantide:ingestion:", "semantide:job:", "semantide:serving:", "semantide:audit", _LOADED)
_BODY = re.compile(r'"body": ?"([A-Za-z0-9+/=]+)"')


def note_loaded(broker: Any, state: RegistryState, now: float) -> None:
    """Say what a process serves; one that is pinned to a model serves what no registry knows of."""
    refs = [*([state.live.model, state.live.catalog] if state.live else []), *filter(None, [state.retriever])]
    if refs:
        broker.zadd(_LOADED, dict.fromkeys(refs, now))
    # A model that is pinned may rest for long; of catalogs there is a new one with every new item.
    silent = [ref for ref in broker.zrangebyscore(_LOADED, "-inf", now - _SILENT_SECONDS) if ref.startswith(b"catalogs/")]
    if silent:
        broker.zrem(_LOADED, *silent)
    broker.zremrangebyscore(_LOADED, "-inf", now - 30 * _SILENT_SECONDS)


def registered(state: RegistryState) -> set[str]:
    """What the registry may still make live, and what its candidates were or are compared with."""
    pairs = [*filter(None, [state.live]), *state.previous, *(variant.pair for variant in state.split.variants)]
    candidates = {candidate.model for candidate in state.candidates}
    return {
        *(ref for pair in pairs for ref in (pair.model, pair.catalog)),
        *candidates,
        *filter(None, (candidate.catalog for candidate in state.candidates)),
        *filter(None, (decision.against for decision in state.decisions if decision.model in candidates)),
        *filter(None, [state.retriever]),
    }


def needed(broker: Any, lineage: Lineage, records: Sequence[JobRecord], since: float) -> set[str]:
    """All that is needed, with what it was made of. A job that ended before ``since``, and a process that was not heard of since, in seconds since 1970, need nothing more."""
    late = [record for record in records if record.state not in ENDED or (record.finished or 0) / 1000 >= since]
    roots = registered(Registry(broker).read()).union(*(references_in(record.model_dump_json()) for record in late))
    roots |= {ref.decode() for ref in broker.zrangebyscore(_LOADED, since, "+inf")}
    for text in _kept(broker):
        roots |= references_in(text)
        for body in _BODY.findall(text):
            with suppress(ValueError):
                roots |= references_in(base64.b64decode(body).decode(errors="replace"))
    # Whoever is trained on a catalog is served with its newest: the way there leads by those in between. A job that names a model alone ends with the catalog of that one,
    # and what one that has just ended made may still be on its way to the registry.
    ends = lineage.closure(ref for record in late for ref in references_in(record.spec.model_dump_json()))
    for each in Lineages(broker).all() if ends else ():
        way = lineage.chain(each.catalog)
        roots |= set(way[: max((place + 1 for place, ref in enumerate(way) if ref in ends), default=0)])
    return lineage.closure(roots)


def _kept(broker: Any) -> Iterator[str]:
    readers = {
        b"string": lambda key: [broker.get(key) or b""],
        b"list": lambda key: broker.lrange(key, 0, -1),
        b"set": lambda key: list(broker.smembers(key)),
        b"zset": lambda key: broker.zrange(key, 0, -1),
        b"hash": lambda key: list(broker.hgetall(key).values()),
    }
    for key in broker.scan_iter(match="semantide:*", count=_SCAN):
        if not key.decode(errors="replace").startswith(_PASSED_OVER) and (read := readers.get(broker.type(key))):
            for value in read(key):
                yield value.decode(errors="replace")
