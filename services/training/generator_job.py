"""What a job that trains a generator is made of: the model, new or going on from a checkpoint, its objective, and its ranker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from semantide.services.training.initialisation import begin_at_checkpoint, begin_at_codebooks, read_codebooks
from semantide.services.training.job_inputs import TOKENIZE_AGAIN
from semantide.services.training.objective import NextToken
from semantide.services.training.page_objective import PageWise
from semantide.services.training.rankers import GeneratorRanker
from semantide.services.training.recipes import TrainConfig
from semantide.services.training.row_matching import rows_of
from semantide.services.training.side_features import SideFeatures
from semantide.services.training.starting_point import checkpoint_folder
from semantide.shared.catalog import Catalog
from semantide.shared.dataset import Dataset
from semantide.shared.event_actions import EventActions
from semantide.shared.jobs import JobContext
from semantide.shared.models.generator import Generator


@dataclass(frozen=True)
class GeneratorRun:
    """``events`` where the model looks at what was done in them."""

    model: Generator
    objective: NextToken | PageWise
    ranker: GeneratorRanker
    events: EventActions | None


def assemble(config: TrainConfig, dataset: Dataset, catalog: Catalog, job: JobContext, device: torch.device) -> GeneratorRun:
    """A generator of the catalog's codes for the data set's items.

    Raises: ValueError for a config that asks for too little; Conflict for a catalog without the items, or a checkpoint of other codes.
    """
    rows = rows_of(dataset.item_ids, catalog.row_of, f"catalog {job.spec.inputs['catalog'][:26]}...", TOKENIZE_AGAIN)
    if config.recipe == "pretrained" and not config.checkpoint:
        raise ValueError("recipe pretrained goes on from a checkpoint: name its folder with config checkpoint (`--set checkpoint=FOLDER`)")
    fresh, shape, events = True, config.generator, None
    if "actions" in shape.merger.features:
        events = _events(job)
        shape = replace(shape, merger=replace(shape.merger, actions=tuple(sorted(events.names))))
    if config.checkpoint:
        folder = checkpoint_folder(job, config.checkpoint)
        generator, fresh = begin_at_checkpoint(folder, shape, catalog.level_sizes, config.keep_text, job.spec.seed)
        if fresh and not config.epochs:
            raise ValueError(f"epochs is 0 and checkpoint {config.checkpoint} knows no codes yet: train it for at least 1 epoch")
    else:
        generator = Generator(replace(shape, level_sizes=catalog.level_sizes, vocab_size=0))
    if config.codebook_share and fresh:
        begin_at_codebooks(generator, read_codebooks(job.store.get(job.spec.inputs["catalog"])), config.codebook_share, job.spec.seed)
    generator, merger = generator.to(device), generator.config.merger
    if events is None and "actions" in merger.features:
        events = _events(job)  # a checkpoint whose merger knows actions
    tokens = torch.from_numpy(generator.vocabulary.item_tokens(catalog.codes)[rows]).to(device)
    actions = None if events is None else events.among(merger.actions)
    ranker = GeneratorRanker(generator, catalog.trie, catalog.codes, rows, config.max_items, config.valid_beam_width, actions)
    objective = PageWise if config.pages.on else NextToken
    return GeneratorRun(generator, objective(generator, tokens, config, SideFeatures.of(merger, dataset, events)), ranker, events)


def _events(job: JobContext) -> EventActions:
    return EventActions.load(job.store.get(job.spec.inputs["dataset"]))
