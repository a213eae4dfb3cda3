"""The long work of this room: make a catalog from a data set, or extend one by many new items.

tokenize {dataset}          -> {catalog}   ``config``: fields of TokenizerConfig and QualityLimits; ``recipe``: see recipes.py;
                                           optional input ``vectors``: vectors.parquet (item, vector) of a trained model, used in
                                           the place of the collaborative vectors that are computed here
tokenize {catalog, items}   -> {catalog}   the same tokenizer, rows appended
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from semantide.services.tokenization import spelling
from semantide.services.tokenization.quality import QualityLimits
from semantide.services.tokenization.recipes import recipe
from semantide.services.tokenization.spelling import Spelled
from semantide.shared.catalog import Lineages
from semantide.shared.contracts import CatalogReady, ItemsChanged
from semantide.shared.dataset import StoredDataset
from semantide.shared.errors import BadData
from semantide.shared.executors import executor
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.models.tokenizer import TokenizerConfig


def run(job: JobContext) -> JobOutcome:
    """Run a ``tokenize`` job.

    Raises: BadData when inputs are missing or the codebook collapsed, JobCancelled.
    """
    inputs = job.spec.inputs
    if set(inputs) == {"catalog", "items"}:
        return _extend(job)
    if "dataset" in inputs and set(inputs) <= {"dataset", "vectors"}:
        return _make(job)
    raise BadData(f"a tokenize job got inputs {', '.join(sorted(inputs)) or 'none'}: give dataset (and perhaps vectors), or catalog and items")


def _configuration(job: JobContext) -> tuple[TokenizerConfig, QualityLimits]:
    changes = dict(job.spec.config)
    limits: dict[str, float] = {}
    for name in (field.name for field in fields(QualityLimits)):
        if name in changes:
            value = changes.pop(name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise BadData(f"tokenizer limit {name} is {value!r}: give a number")
            limits[name] = value
    return recipe(job.spec.recipe).overridden(changes), QualityLimits(**limits)  # type: ignore[arg-type]


def put(store: Any, spelled: Spelled, folder: Path, *, inputs: dict[str, str], seed: int) -> str:
    """Store a catalog by way of a scratch folder, with its key figures in the manifest."""
    shutil.rmtree(folder, ignore_errors=True)
    spelled.save(folder)
    catalog = spelled.catalog
    config = {
        **asdict(spelled.tokenizer.config),
        "num_items": len(catalog),
        "level_sizes": list(catalog.level_sizes),
        "tokenizer_digest": catalog.tokenizer_digest,
        "extends": spelled.header.get("extends"),
        "dataset": spelled.header.get("dataset"),
    }
    ref: str = store.put("catalogs", folder, config=config, inputs=inputs, seed=seed)
    shutil.rmtree(folder, ignore_errors=True)
    return ref


def _make(job: JobContext) -> JobOutcome:
    config, limits = _configuration(job)
    job.configured({**asdict(config), **asdict(limits)})
    inputs = dict(job.spec.inputs)

    def tick(stage: str, done: float, total: float) -> None:
        job.check_cancelled()
        job.progress(done, total, stage=stage)

    tick("reading the data set", 0, 1)
    dataset = StoredDataset(job.store.get(inputs["dataset"]))
    vectors = job.store.get(inputs["vectors"]) / "vectors.parquet" if "vectors" in inputs else None
    settings = job.settings
    steps = job.workdir / f"steps-{settings.data_part_rows}"
    spelled = spelling.build(
        dataset,
        config,
        job.spec.seed,
        limits=limits,
        header={"dataset": inputs["dataset"]},
        vectors=vectors,
        tick=tick,
        executor=executor(settings.data_executor, settings.ray_address),
        workdir=steps,
        part_rows=settings.data_part_rows,
    )
    job.discard(steps)
    job.check_cancelled()
    ref = put(job.store, spelled, job.workdir / "catalog", inputs=inputs, seed=job.spec.seed)
    lineages = Lineages(job.broker)
    _carry_over(job, lineages, spelled)
    lineages.begin(spelled.catalog.tokenizer_digest, ref)
    job.send(CatalogReady(catalog=ref))
    if waiting := lineages.waiting():
        job.send(ItemsChanged(items=waiting[-1]))
    job.progress(1, 1, stage="done")
    return JobOutcome({"catalog": ref}, {"report": spelled.report, "tokenizer_digest": spelled.catalog.tokenizer_digest})


def _carry_over(job: JobContext, lineages: Lineages, spelled: Spelled) -> None:
    # Items that came after the data set was made were spelled into the catalog that has been current so far, and can be
    # recommended: the new catalog gets them too, from the artifacts that brought them.
    current = lineages.current()
    if current is None or not job.store.exists(current):
        return
    brought = Spelled.load(job.store.get(current)).header.get("items", [])
    lineages.wait(ref for ref in brought if job.store.exists(ref))


def _extend(job: JobContext) -> JobOutcome:
    lineages = Lineages(job.broker)
    inputs = dict(job.spec.inputs)
    items = pq.read_table(job.store.get(inputs["items"]) / "items.parquet")
    asked = Spelled.load(job.store.get(inputs["catalog"]))
    while True:
        job.check_cancelled()
        job.progress(0, 1, stage="spelling new items")
        # Somebody may have extended this catalog since: what they added must stay.
        head = next((entry.catalog for entry in lineages.all() if entry.tokenizer == asked.catalog.tokenizer_digest), inputs["catalog"])
        spelled = asked if head == inputs["catalog"] else Spelled.load(job.store.get(head))
        extended = spelling.extend(spelled, items, {"extends": head, "items": [*spelled.header.get("items", []), inputs["items"]]})
        ref = head
        if extended.changed:
            ref = put(job.store, extended.spelled, job.workdir / "catalog", inputs={"catalog": head, "items": inputs["items"]}, seed=spelled.tokenizer.seed)
            live = any(entry.catalog == head for entry in lineages.all())
            if live and not lineages.extend(head, ref):
                continue
            job.send(CatalogReady(catalog=ref, extends=head))
        result = {"added": extended.added, "updated": extended.updated, "rejected": list(extended.rejected[:1000]), "report": extended.spelled.report}
        job.progress(1, 1, stage="done")
        return JobOutcome({"catalog": ref}, result)
