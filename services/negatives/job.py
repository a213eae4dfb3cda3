"""The long work of this room: what a model would recommend at many places of all training histories; and the shards of whole epochs.

negatives {dataset, catalog, model} -> {beams}   ``config``: fields of BeamConfig. A generator's beams are searched, of a retriever the best items are taken.
                                                 Without ``model`` the newest generator that was trained for the catalog's tokenizer is taken; without
                                                 ``catalog`` the one it was trained for. A retriever needs none.
negatives {dataset, catalog, beams} -> {}        ``config``: ``epochs``, how many, and ``mix``, fields of NegativeMix; ``catalog`` and ``beams`` where the
                                                 mixture needs them. A run with ``negatives.ahead``, that mixture and the same seed finds them drawn.
"""

from __future__ import annotations

import json
import shutil
import time

import numpy as np

from semantide.kernels.device import best_device
from semantide.services.negatives.beam_search import BeamConfig, BeamSearcher
from semantide.services.negatives.cuts import cut_events
from semantide.services.negatives.newest_models import NewestModels
from semantide.services.negatives.top_items import TopItems
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import NegativesWanted
from semantide.shared.dataset import Dataset
from semantide.shared.errands import Errands
from semantide.shared.errors import BadData, Conflict
from semantide.shared.executors import Steps, executor
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.models.generator import Generator
from semantide.shared.negative_sampling import NegativeMix
from semantide.shared.negative_shards import store_shard
from semantide.shared.negative_source import BeamLists, NegativeSource, TrainingEvents
from semantide.shared.table_snapshots import TableSnapshot

_CHUNK_CUTS = 1024  # searched before they are kept: what a killed job has found is not searched again


def run(job: JobContext) -> JobOutcome:
    """Run a ``negatives`` job.

    Raises: BadData for wrong inputs or config, Conflict when model, catalog and data set do not belong together, JobCancelled.
    """
    if "epochs" in job.spec.config:
        return _draw(job)
    try:
        config = BeamConfig.of(dict(job.spec.config))
        job.configured(config)
    except (ValueError, TypeError) as error:
        raise BadData(f"job {job.id}: {error}") from error
    inputs = dict(job.spec.inputs)
    if "dataset" not in inputs or not set(inputs) <= {"dataset", "catalog", "model"}:
        raise BadData(f"a negatives job got inputs {', '.join(sorted(inputs)) or 'none'}: give dataset, and perhaps catalog and model")
    # Kept, so that a job that is started again goes on with the model that it began with.
    pinned = job.workdir / "inputs.json"
    if not pinned.exists():
        aside = pinned.with_suffix(".incoming")
        aside.write_text(json.dumps(_complete(job, inputs)))
        aside.replace(pinned)
    inputs = json.loads(pinned.read_text())
    job.progress(0, 1, stage="reading")
    dataset = Dataset.load(job.store.get(inputs["dataset"]))
    events = TrainingEvents.of(dataset)
    searcher = _searcher(job, inputs, dataset, events, config.width)
    lists = _search(job, searcher, cut_events(events, config.points), config)
    target = job.workdir / "beams"
    shutil.rmtree(target, ignore_errors=True)
    lists.save(target)
    figures = {
        "histories": len(lists.cuts_C),
        "users": len(np.unique(events.users_E[lists.cuts_C])),
        "beams_per_history": float((lists.rows_CW >= 0).sum(1).mean()) if len(lists.cuts_C) else 0.0,
        # A beam that holds the item that came next is right, and no negative for it.
        "next_item_among_beams": float((lists.rows_CW == events.rows_E[lists.cuts_C][:, None]).any(1).mean()) if len(lists.cuts_C) else 0.0,
    }
    (target / "beams.json").write_text(json.dumps({"width": config.width, "points": config.points, **inputs, **figures}, indent=1, sort_keys=True) + "\n")
    ref = job.store.put("beams", target, config={"width": config.width, "points": config.points}, inputs=inputs, seed=job.spec.seed)
    job.discard(target)
    job.progress(1, 1, stage="done")
    return JobOutcome({"beams": ref}, {**figures, "model": inputs["model"], "catalog": inputs.get("catalog")})


def _draw(job: JobContext) -> JobOutcome:
    """Every shard of the first epochs, by the executor of the deployment."""
    config, inputs = dict(job.spec.config), dict(job.spec.inputs)
    epochs, mix = config.pop("epochs"), config.pop("mix", {})
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1 or not isinstance(mix, dict) or config:
        raise BadData(
            f"job {job.id}: config {dict(job.spec.config)} draws no shards: give epochs, a whole number from 1, and mix, such as {{'popularity': 64}}"
        )
    if "dataset" not in inputs or not set(inputs) <= {"dataset", "catalog", "beams"}:
        raise BadData(f"drawing shards got inputs {', '.join(sorted(inputs)) or 'none'}: give dataset, and catalog or beams where the mixture needs them")
    try:
        wanted = NegativesWanted(
            dataset=inputs["dataset"], catalog=inputs.get("catalog"), beams=inputs.get("beams"), mix=NegativeMix.of(mix).values(), seed=job.spec.seed
        )
    except (ValueError, TypeError) as error:
        raise BadData(f"job {job.id}: {error}") from error
    settings = job.settings
    source, errands = NegativeSource.of(wanted, job.store), Errands(NegativesWanted, job.broker, job.store)
    total = epochs * source.num_shards
    for epoch in range(epochs):
        wishes = [wanted.model_copy(update={"epoch": epoch, "shard": shard}) for shard in range(source.num_shards)]
        if all((found := errands.find(wish)) and job.store.exists(found) for wish in wishes):
            continue  # before the job was started again

        def tick(done: int, parts: int, name: str, epoch: int = epoch) -> None:
            job.check_cancelled()
            job.progress((epoch + done / parts) * source.num_shards, total, "shards", "drawing")

        folder = job.workdir / f"epoch-{epoch}-{settings.data_part_rows}"
        steps = Steps(executor(settings.data_executor, settings.ray_address), folder, tick)
        for wish, rows in zip(wishes, source.epoch(steps, job.spec.seed, epoch, part_events=settings.data_part_rows), strict=True):
            job.check_cancelled()
            errands.put(wish, store_shard(wish, rows, job.store), time.time())
        shutil.rmtree(folder, ignore_errors=True)
    job.progress(total, total, "shards", "done")
    return JobOutcome({}, {"shards": total, "epochs": epochs, "events": source.num_events, "negatives": source.mix.size})


def _complete(job: JobContext, inputs: dict[str, str]) -> dict[str, str]:
    """The inputs with the model and the catalog that were left out."""
    if "model" not in inputs:
        newest = NewestModels(job.broker).find(_tokenizer(job, inputs["catalog"]) if "catalog" in inputs else None)
        if newest is None:
            raise Conflict("no generator has been trained yet whose beams could be searched: train one, or name it or a retriever with the input `model`")
        inputs = {**inputs, "model": newest}
    card = json.loads((job.store.get(inputs["model"]) / "semantide.json").read_text())
    if card["model_type"] == "retriever":
        return {name: ref for name, ref in inputs.items() if name != "catalog"}
    if card["model_type"] != "generator":
        raise Conflict(f"the model {inputs['model'][:24]}... is a {card['model_type']}: name a generator, which has beams, or a retriever")
    if "catalog" not in inputs and not card.get("catalog"):
        raise Conflict(f"the model {inputs['model'][:24]}... was trained without a catalog: name one with the input `catalog`")
    return {"catalog": card.get("catalog"), **inputs}


def _searcher(job: JobContext, inputs: dict[str, str], dataset: Dataset, events: TrainingEvents, width: int) -> BeamSearcher | TopItems:
    """What finds the lists of the model that the inputs name."""
    folder = job.store.get(inputs["model"])
    card = json.loads((folder / "semantide.json").read_text())
    if card["model_type"] == "retriever":
        return TopItems(folder, TableSnapshot.load(job.store.get, inputs["model"]), dataset, events, card["max_items"], width)
    catalog = Catalog.load(job.store.get(inputs["catalog"]))
    catalog.check_model(card["tokenizer_digest"], tuple(card["level_sizes"]))
    model = Generator.from_pretrained(folder).to(best_device())
    return BeamSearcher(model, catalog, dataset, events, card["max_items"], width)


def _tokenizer(job: JobContext, catalog: str) -> str:
    digest: str = json.loads((job.store.get(catalog) / "catalog.json").read_text())["tokenizer_digest"]
    return digest


def _search(job: JobContext, searcher: BeamSearcher | TopItems, cuts_C: np.ndarray, config: BeamConfig) -> BeamLists:
    kept = job.workdir / "searched"
    kept.mkdir(exist_ok=True)
    parts = [np.zeros((0, config.width), dtype=np.int32)]
    for begin in range(0, len(cuts_C), _CHUNK_CUTS):
        path = kept / f"{begin:09d}.npy"
        if not path.exists():
            chunk, rows = cuts_C[begin : begin + _CHUNK_CUTS], []
            for first in range(0, len(chunk), config.batch):
                job.check_cancelled()
                job.progress(begin + first, len(cuts_C), "histories", "searching")
                rows.append(searcher.search(chunk[first : first + config.batch]))
            aside = path.with_suffix(".incoming.npy")
            np.save(aside, np.concatenate(rows))
            aside.replace(path)
        parts.append(np.load(path))
    job.discard(kept)
    return BeamLists(cuts_C, np.concatenate(parts))
