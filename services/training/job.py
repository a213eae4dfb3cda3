"""Long work of this room: ``train`` a model, ``align`` one with a reward model, ``evaluate`` models side by side."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from semantide.services.training.alignment_job import align
from semantide.services.training.batches import Sampler
from semantide.services.training.evaluate import cases_of, evaluate
from semantide.services.training.evaluation_job import evaluate_models
from semantide.services.training.flops import StepMeter, measured_peak, work_of
from semantide.services.training.generator_job import assemble as assemble_generator
from semantide.services.training.heartbeat import Heartbeat, Watch, beats_folder
from semantide.services.training.item_tables import ItemTables
from semantide.services.training.job_inputs import input_of as _input
from semantide.services.training.job_inputs import promotion_of
from semantide.services.training.launch import Launch, launch
from semantide.services.training.negatives import BatchNegatives, mix_of
from semantide.services.training.objective import NextItem
from semantide.services.training.page_batches import PageSampler
from semantide.services.training.rankers import Ranker, SASRecRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retriever_job import assemble, publication_of, write_retriever
from semantide.services.training.row_matching import rows_of
from semantide.services.training.starting_point import checkpoint_folder
from semantide.services.training.trainer import Listener, RunState, Trainer
from semantide.services.training.world import World
from semantide.shared.allocator import keep_freed_memory, peak_memory_bytes
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import ModelTrained, NegativesWanted, Promotion
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.event_actions import EventActions
from semantide.shared.job_ranks import forget_ranks, rank_failure, rank_outcome
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.models.generator import Generator
from semantide.shared.models.sasrec import SASRec
from semantide.shared.negative_sampling import Rows
from semantide.shared.negative_shards import NegativeShards
from semantide.shared.negative_source import NegativeSource, codes_of
from semantide.shared.pages import Pages
from semantide.shared.telemetry import logger

_PATIENCE_SECONDS = 60.0
_CASES, _TABLE_CASES = 64, 1024  # users whose lists a validation makes at a time; of a table each time all rows are read


def run(job: JobContext) -> JobOutcome:
    """Dispatch on the job's kind."""
    keep_freed_memory()
    try:
        if job.spec.kind == "align":
            return _together(job, lambda world, heartbeat: align(job, ranks=world, beat=heartbeat.beat if heartbeat is not None else lambda: None))
        return train(job) if job.spec.kind == "train" else evaluate_models(job)
    except ValueError as error:
        raise BadData(f"job {job.id}: {error}") from error


def train(job: JobContext) -> JobOutcome:
    """Train the recipe's model, by several processes where ``processes`` says so, and store it with all that serving it needs.

    Raises: BadData for a wrong config, Conflict for a catalog without the data set's items, PermanentError when the loss is not a number.
    """
    changes = dict(job.spec.config)
    promote = promotion_of(changes)
    changes.pop("processes", None)
    config = recipe(job.spec.recipe or "small", changes)
    if "RANK" not in os.environ:
        job.configured(config)
    if promote == "if-not-worse" and config.model_type == "sasrec":
        raise BadData("config promote is 'if-not-worse' for a sasrec: only generators and retrievers go live; give false")
    return _together(job, lambda world, heartbeat: _train(job, config, promote, world, heartbeat), alone=not config.epochs)


def _together(job: JobContext, work: Callable[[World, Heartbeat | None], JobOutcome], alone: bool = False) -> JobOutcome:
    """Let as many processes do it as the config's ``processes`` says, or this one ``alone``; each calls ``work`` with the world and its signs of life."""
    processes = _processes(job.spec.config.get("processes", job.settings.training_processes))
    if processes > 1 and not alone and "RANK" not in os.environ:
        return _by_ranks(job, processes)
    # Longer than the watch waits: it knows which rank hangs.
    world = World.join(timeout_seconds=job.settings.training_timeout_seconds + _PATIENCE_SECONDS, clock=time.monotonic)
    heartbeat = Heartbeat(beats_folder(job.workdir, int(os.environ.get("GROUP_RANK") or 0)), world.rank) if world.size > 1 else None
    try:
        return work(world, heartbeat)
    finally:
        if heartbeat is not None:
            heartbeat.close()
        world.close()


def _processes(said: Any) -> int:
    if isinstance(said, bool) or not isinstance(said, int) or said < 0:
        raise BadData(f"config processes is {said!r}: give a whole number, or 0 for one per accelerator")
    return said or max(1, torch.accelerator.device_count())


def _by_ranks(job: JobContext, processes: int) -> JobOutcome:
    """The job in several processes, all of which start again when one is lost."""
    log = logger("training")

    def lost(attempt: int, how: str) -> None:
        log.warning("a rank was lost, all start again from the last checkpoint", job=job.id, attempt=attempt, how=how)
        forget_ranks(job.workdir)

    job.check_cancelled()
    forget_ranks(job.workdir)
    command = [sys.executable, "-m", "semantide.services.local", "rank", job.id]
    watch = Watch(beats_folder(job.workdir, 0), job.settings.training_timeout_seconds, time.time)
    # Less than this process has itself, which is to say how it ended.
    plan = Launch(processes, job.settings.job_attempts, max(1, int(0.75 * job.settings.job_stop_seconds)))
    launch(command, plan, failed=lambda: rank_failure(job.workdir), lost=lost, watch=watch)
    outcome = rank_outcome(job.workdir)
    for folder in ("checkpoints", "model", "base", "link", "ranks", "beats"):
        job.discard(job.workdir / folder)
    return outcome


@dataclass(frozen=True)
class _Built:
    """What a recipe is made of; ``tables`` only for a retriever, ``events`` where what was done in them counts."""

    model: Any
    objective: Any
    ranker: Ranker
    tables: ItemTables | None = None
    events: EventActions | None = None


def _train(job: JobContext, config: TrainConfig, promote: Promotion, world: World, heartbeat: Heartbeat | None) -> JobOutcome:
    dataset = Dataset.load(job.store.get(_input(job, "dataset")))
    catalog = Catalog.load(job.store.get(_input(job, "catalog"))) if config.model_type == "generator" else None
    torch.manual_seed(job.spec.seed)

    def check() -> None:
        if heartbeat is not None:
            heartbeat.beat()
        job.check_cancelled()

    built = _assemble(config, dataset, catalog, job, world, check)
    events = built.events
    valid = cases_of(dataset, "valid", config.valid_users, job.spec.seed, None if events is None else events.numbers_E)

    def tick(done: int, total: int) -> None:
        check()
        if world.leads:
            job.progress(done, total, "users", "validating")

    def validate() -> dict[str, float]:
        # Every rank ranks for its share of the users.
        mine, together = valid[world.rank :: world.size], _CASES if built.tables is None else _TABLE_CASES
        figures = evaluate(built.ranker, mine, ks=(10,), num_items=len(dataset.item_ids), exclude_seen=False, cases_per_batch=together, tick=tick)
        if world.size > 1 and built.tables is not None:
            # The others read rows of this rank for as long as they have users.
            for _ in range(-(-len(valid[:: world.size]) // together) - -(-len(mine) // together)):
                built.ranker.rank([], 10, False)
        names = ("ndcg@10", "hr@10")
        if world.size == 1:
            return {name: figures[name] for name in names}
        sums = world.all_reduce_sum(torch.tensor([len(mine), *(len(mine) * figures.get(name, 0.0) for name in names)], dtype=torch.float64))
        return {name: float(total / sums[0]) for name, total in zip(names, sums[1:], strict=True)}

    def store(name: str, metrics: dict[str, Any], curves: dict[str, Any]) -> str:
        """The model as it is, with all that serving needs: its reference, on the leading rank. All ranks call this."""
        folder = job.workdir / name
        if world.leads:
            shutil.rmtree(folder, ignore_errors=True)
        if built.tables is not None:
            write_retriever(folder if world.leads else None, built.objective, built.tables, config, dataset.item_ids)
        elif world.leads:
            built.model.save_pretrained(folder)
        if not world.leads:
            return ""
        card = _model_card(job, config, dataset, catalog, metrics)
        if isinstance(built.model, Generator) and built.model.config.merger.enabled:
            card["merger"] = built.model.config.merger.to_json()
        (folder / "semantide.json").write_text(json.dumps(card, indent=1, sort_keys=True) + "\n")
        if config.model_type == "sasrec":
            (folder / "items.json").write_text(json.dumps(list(dataset.item_ids)))
        (folder / "training.json").write_text(json.dumps(curves))
        return job.store.put("models", folder, config=asdict(config), inputs=job.spec.inputs, seed=job.spec.seed)

    listener = Listener(
        time.monotonic,
        check_cancelled=check,
        memory_bytes=lambda: peak_memory_bytes(world.device),
        step_seconds=lambda seconds: job.step_seconds(world.rank, seconds),
    )
    if world.leads:
        listener = replace(listener, progress=job.progress, metric=lambda step, values: job.metric(step, **values))
    epochs: Sampler | PageSampler
    if config.pages.on:
        epochs = PageSampler(dataset, Pages.of(dataset, job.store.get(_input(job, "dataset"))), config, job.spec.seed)
    else:
        epochs = Sampler(dataset.train_histories(), config, job.spec.seed, dataset.train_times(), (world.rank, world.size))
    publication = None
    if config.publish_every:
        card = _model_card(job, config, dataset, catalog, {})
        publication = publication_of(
            job, config, dataset.item_ids, built.objective, world, card, promote is True, lambda step: store("base", {"steps": step}, {})
        )
    trainer = Trainer(
        config,
        built.objective,
        epochs,
        validate if valid else None,
        listener,
        job.workdir / "checkpoints",
        seed=job.spec.seed,
        identity=json.dumps(job.spec.inputs, sort_keys=True),
        world=world,
        meter=StepMeter(work_of(built.model, config, len(dataset.item_ids)), measured_peak(world.device, _dtype(config, world.device), time.perf_counter)),
        publication=publication,
    )
    # Without epochs, a checkpoint that is trained already is measured and stored as it is.
    state = trainer.run() if config.epochs else RunState(validations=[{"epoch": 0, **validate()}] if valid else [], best_epoch=0)
    if heartbeat is not None:
        heartbeat.close()
    best = next((figures for figures in state.validations if figures["epoch"] == state.best_epoch), {})
    metrics = {"valid": best, "epochs": state.epoch, "steps": state.step, "loss": state.losses[-1] if state.losses else None}
    if built.tables is not None:
        metrics["table"] = built.tables.figures
    if isinstance(epochs, PageSampler):
        metrics["pages"] = epochs.figures
    ref = store("model", metrics, {"losses": state.losses, "validations": state.validations})
    if not world.leads:
        return JobOutcome()
    if config.model_type == "retriever":
        job.send(ModelTrained(job_id=job.id, model=ref, promote=promote))
    if catalog is not None:
        job.send(ModelTrained(job_id=job.id, model=ref, catalog=job.spec.inputs["catalog"], promote=promote))
    for name in ("checkpoints", "model", "base", "link"):
        job.discard(job.workdir / name)
    return JobOutcome({"model": ref}, metrics)


def _model_card(job: JobContext, config: TrainConfig, dataset: Dataset, catalog: Catalog | None, metrics: dict[str, Any]) -> dict[str, Any]:
    card: dict[str, Any] = {
        "model_type": config.model_type,
        "recipe": config.recipe,
        "config": asdict(config),
        "dataset": job.spec.inputs["dataset"],
        "catalog": job.spec.inputs.get("catalog"),
        "max_items": config.max_items,
        # Serving makes histories of events in the same way.
        "history": {name: dataset.header["config"][name] for name in ("positive_intensity", "deduplicate") if name in dataset.header.get("config", {})},
        "metrics": metrics,
    }
    if catalog is not None:
        card |= {"tokenizer_digest": catalog.tokenizer_digest, "level_sizes": list(catalog.level_sizes), "item_id_levels": len(catalog.level_sizes)}
    return card


def _assemble(config: TrainConfig, dataset: Dataset, catalog: Catalog | None, job: JobContext, world: World, beat: Callable[[], None]) -> _Built:
    device = world.device
    if config.model_type == "retriever":
        events = EventActions.load(job.store.get(_input(job, "dataset"))) if "actions" in config.features else None
        before = checkpoint_folder(job, config.checkpoint) if config.checkpoint else None
        retriever, objective, exact, tables = assemble(
            config,
            dataset,
            world,
            job.spec.seed,
            lambda counts_N: _negatives(config, dataset, counts_N, job, world.leads),
            before=before,
            events=events,
            beat=beat,
        )
        return _Built(retriever, objective, exact, tables, events)
    if catalog is None:
        sasrec = SASRec(replace(config.sasrec, num_items=len(dataset.item_ids), max_items=config.max_items)).to(device)
        rows = rows_of(dataset.item_ids, {item: row for row, item in enumerate(dataset.item_ids)}, "the data set", "")
        return _Built(sasrec, NextItem(sasrec, config), SASRecRanker(sasrec, rows, config.max_items))
    run = assemble_generator(config, dataset, catalog, job, device)
    return _Built(run.model, run.objective, run.ranker, events=run.events)


def _negatives(config: TrainConfig, dataset: Dataset, counts_N: Rows, job: JobContext, leads: bool) -> BatchNegatives:
    """What the retriever's targets are compared with: drawn here, or with ``ahead`` by the negatives room."""
    mix, ahead = mix_of(config), config.negatives.ahead
    catalog = _input(job, "catalog") if mix is not None and mix.prefix else None
    codes_NL = codes_of(dataset.item_ids, Catalog.load(job.store.get(catalog))) if catalog else None
    if mix is None or not (ahead or mix.beams):
        return BatchNegatives.of(config, counts_N, codes_NL)
    beams = _input(job, "beams") if mix.beams else None
    wanted = NegativesWanted(dataset=_input(job, "dataset"), catalog=catalog, beams=beams, mix=mix.values(), seed=job.spec.seed)
    source = NegativeSource.of(wanted, job.store)
    shards = NegativeShards(
        source,
        wanted,
        job.store,
        job.broker,
        job.send if ahead else lambda _: None,
        clock=time.monotonic,
        pause=time.sleep,
        wait_seconds=job.settings.negatives_wait_seconds if ahead else 0.0,
        leader=leads,
    )
    return BatchNegatives.of(config, counts_N, codes_NL, shards)


def _dtype(config: TrainConfig, device: torch.device) -> torch.dtype:
    short = config.dtype == "bfloat16" or (config.dtype == "auto" and device.type == "cuda" and torch.cuda.is_bf16_supported())
    return torch.bfloat16 if short else torch.float32
