"""What a job that trains a retriever needs beyond any other: tables over all ranks, a ranker that reads them, a model written in pieces, links to serving."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semantide.services.training.item_tables import ItemTables, drained, item_tables, pieces, write_rows
from semantide.services.training.negatives import BatchNegatives
from semantide.services.training.publication import Link, Publication, Store
from semantide.services.training.rankers import RetrieverRanker
from semantide.services.training.recipes import TrainConfig
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.world import World
from semantide.shared.contracts import TablePublished
from semantide.shared.dataset import Dataset
from semantide.shared.errors import Conflict, TransientError
from semantide.shared.event_actions import EventActions, of_training
from semantide.shared.jobs import JobContext
from semantide.shared.models.retriever import ItemVectors, Retriever
from semantide.shared.negative_sampling import Rows
from semantide.shared.table_snapshots import SNAPSHOTS
from semantide.shared.telemetry import logger


def assemble(
    config: TrainConfig,
    dataset: Dataset,
    world: World,
    seed: int,
    negatives: Callable[[Rows], BatchNegatives],
    *,
    before: Path | None = None,
    events: EventActions | None = None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Retriever, NextItemSampled, RetrieverRanker, ItemTables]:
    """A retriever with its tables, new or going on from the one in the folder ``before``; with ``events`` it looks at what was done. All ranks call this.

    Raises: Conflict for an earlier one of another shape.
    """
    earlier = None if before is None else Retriever.from_pretrained(before)
    names = () if events is None else tuple(sorted(events.names)) if earlier is None else earlier.config.actions
    shape = replace(config.retriever, max_items=config.max_items, actions=names)
    retriever = Retriever(shape)
    if earlier is not None:
        if events is not None and not names:
            raise Conflict(f"checkpoint {config.checkpoint} has no vectors for actions: leave `actions` out of features, or begin anew")
        # Dropout may be another; what decides the tensors may not.
        if replace(shape, dropout=earlier.config.dropout, embedding_dropout=earlier.config.embedding_dropout) != earlier.config:
            raise Conflict(
                f"checkpoint {config.checkpoint} has the shape {asdict(earlier.config)}: give config retriever and max_items the same, or begin anew"
            )
        retriever.load_state_dict(earlier.state_dict())
    retriever = retriever.to(world.device)
    counts_N = torch.bincount(torch.from_numpy(np.concatenate([*dataset.train_histories()]).astype(np.int64)), minlength=len(dataset.item_ids))
    tables = item_tables(dataset, counts_N, config, world, seed, before)
    model_actions = None if events is None else events.among(names)
    actions_E = None if events is None or model_actions is None else torch.from_numpy(model_actions[of_training(dataset, events.numbers_E)])
    objective = NextItemSampled(retriever, tables.items, counts_N, config, negatives(counts_N.numpy()), tables.featured, actions_E)

    def agree(number: int) -> int:
        return max(map(int, world.gather_json(number)))

    rows = np.arange(len(dataset.item_ids))
    ranker = RetrieverRanker(retriever, objective.read, rows, config.max_items, model_actions=model_actions, agree=agree, beat=beat)
    return retriever, objective, ranker, tables


def write_retriever(folder: Path | None, objective: NextItemSampled, tables: ItemTables, config: TrainConfig, item_ids: Sequence[str]) -> None:
    """Into the folder that the leading rank gives; the others give their rows of the tables. All ranks call this, and it ends on all of them where the
    leading rank cannot write.

    Raises: OSError, TransientError where the disk did not take it.
    """
    vectors = pieces(len(item_ids), objective.read, folder is not None)
    try:
        if folder is not None:
            objective.model.save_pretrained(folder, vectors, item_ids)
    except (OSError, TransientError):
        drained(vectors)
        write_rows(None, tables, config)  # the others give these rows too
        raise
    drained(vectors)
    write_rows(folder, tables, config)


def publication_of(
    job: JobContext,
    config: TrainConfig,
    item_ids: Sequence[str],
    objective: NextItemSampled,
    world: World,
    card: dict[str, Any],
    promote: bool,
    base: Callable[[int], str],
) -> Publication:
    """What tells serving of the table; a run that goes on from a retriever whose items have rows of their own begins at that one."""

    def put(folder: Path, step: int) -> str:
        (folder / "semantide.json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")
        return job.store.put(SNAPSHOTS, folder, config={"job": job.id, "step": step}, inputs=job.spec.inputs, seed=job.spec.seed)

    store = Store(
        put,
        job.store.remove,
        lambda ref, step: job.send(TablePublished(job_id=job.id, model=ref, step=step, promote=promote)),
        lambda step, why: logger("training").warning("the table could not be published, what changed goes with the next", job=job.id, step=step, why=why),
    )
    begun: Link = Link()
    items: tuple[str, ...] = ()
    if config.checkpoint.startswith("models/"):
        folder = job.store.get(config.checkpoint)
        earlier = json.loads((folder / "semantide.json").read_text())["config"]
        # Where rows are shared, or features join in, vectors may change without a step.
        if (
            config.growth.rows == "own" == earlier.get("growth", {}).get("rows", "own")
            and not config.item_features
            and not {*earlier.get("features", ())} - {"actions"}
        ):
            begun, items = Link(config.checkpoint), ItemVectors.load(folder).item_ids
    return Publication(world, objective, item_ids, job.workdir / "link", base, store, begun=begun, begun_items=items)
