"""Queue door: new items get an id in the catalogs that are in use, within seconds and without training."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.tokenization import spelling
from semantide.services.tokenization.job import put
from semantide.services.tokenization.spelling import Spelled
from semantide.shared.catalog import Lineage, Lineages
from semantide.shared.contracts import CatalogReady, ItemsChanged, JobSpec
from semantide.shared.errors import BadData, Corrupt, NotFound, PermanentError, TransientError
from semantide.shared.jobs import Jobs
from semantide.shared.queues import handler
from semantide.shared.room import Room
from semantide.shared.telemetry import logger

FEW_ITEMS = 2000  # more new items than this are a job's work: a handler must end within a minute


@handler(ItemsChanged)
def spell_new_items(message: ItemsChanged, room: Room) -> None:
    """Spell what is new into every catalog in use; withdrawn items keep their id, for availability hides them.

    Whoever comes first does the work of all that wait, so that a burst of changes makes one catalog and not hundreds.
    Raises: TransientError when a catalog was extended by somebody else meanwhile, PermanentError for items that cannot be spelled.
    """
    lineages = Lineages(room.broker)
    lineages.wait([message.items])
    tables: dict[str, pa.Table] = {}
    problems: list[PermanentError] = []
    for ref in lineages.waiting():
        try:
            tables[ref] = pq.read_table(room.store.get(ref) / "items.parquet")
        except (NotFound, Corrupt) as error:
            lineages.done([ref])
            problems.append(error)
    for lineage in lineages.all():
        problems += _extend(room, lineages, lineage, tables)
    lineages.done(tables)
    if problems:
        raise problems[0] if len(problems) == 1 else BadData(f"{len(problems)} problems: " + "; ".join(str(problem) for problem in problems[:20]))


def _extend(room: Room, lineages: Lineages, lineage: Lineage, tables: dict[str, pa.Table]) -> list[PermanentError]:
    log = logger(room.name)
    spelled = Spelled.load(room.store.get(lineage.catalog))
    known = spelled.catalog.row_of
    problems: list[PermanentError] = []
    brought: list[str] = []
    small: list[pa.Table] = []
    for ref, table in tables.items():
        new = {item for item in table["item"].to_pylist() if item not in known}
        if len(new) > FEW_ITEMS:
            record = Jobs(room.broker, room.queues).submit(JobSpec(kind="tokenize", inputs={"catalog": lineage.catalog, "items": ref}))
            log.info("many new items: a job spells them", items=len(new), job=record.id)
            continue
        small.append(table)
        if new:
            brought.append(ref)
    if not small:
        return problems
    header = {"extends": lineage.catalog, "items": [*spelled.header.get("items", []), *brought]}
    try:
        extended = spelling.extend(spelled, pa.concat_tables(small, promote_options="permissive"), header)
    except BadData as error:
        return [*problems, error]
    problems += [BadData(text) for text in extended.rejected]
    if extended.changed:
        with tempfile.TemporaryDirectory(prefix="semantide-catalog-") as scratch:
            ref = put(room.store, extended.spelled, Path(scratch) / "catalog", inputs={"catalog": lineage.catalog}, seed=spelled.tokenizer.seed)
        if not lineages.extend(lineage.catalog, ref):
            raise TransientError(f"catalog {lineage.catalog} was extended by another worker meanwhile: try again on its successor")
        room.send(CatalogReady(catalog=ref, extends=lineage.catalog))
        log.info("catalog extended", added=extended.added, updated=extended.updated, catalog=ref)
    return problems
