"""The long work of this room: train a reward model, or weigh the signals of one anew.

reward {dataset}            -> {reward}   ``recipe``, ``config``: see recipes.py; optional input ``retriever``: a trained retriever (models/...) whose item
                                          vectors the network sees too
reward {reward}             -> {reward}   ``config``: ``preference`` and ``gate_quantile`` are not trained, and so the first may be changed: the same model
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from semantide.kernels.device import best_device
from semantide.services.reward.building import build
from semantide.services.reward.newest_rewards import NewestRewards
from semantide.services.reward.recipes import RewardTraining, recipe
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback
from semantide.shared.jobs import JobContext, JobOutcome, now_ms
from semantide.shared.models.interest_search import FloatArray
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.table_snapshots import TableSnapshot


def run(job: JobContext) -> JobOutcome:
    """Run a ``reward`` job.

    Raises: BadData for wrong inputs or config and for feedback that nothing can be learned from, PermanentError when the loss is not a number, JobCancelled.
    """
    inputs = dict(job.spec.inputs)
    try:
        if set(inputs) == {"reward"}:
            return _weighed(job)
        if "dataset" not in inputs or not set(inputs) <= {"dataset", "retriever"}:
            raise BadData(f"a reward job got inputs {', '.join(sorted(inputs)) or 'none'}: give dataset (and perhaps retriever), or a reward to weigh anew")
        return _train(job, recipe(job.spec.recipe, job.spec.config))
    except ValueError as error:
        raise BadData(f"job {job.id}: {error}") from error


def _train(job: JobContext, config: RewardTraining) -> JobOutcome:
    job.configured(config)
    job.progress(0, 1, stage="reading the data set")
    folder = job.store.get(job.spec.inputs["dataset"])
    dataset = Dataset.load(folder)
    deployed = job.settings.reward_preference or job.settings.actions

    def tick(stage: str, share: float) -> None:
        job.check_cancelled()
        job.progress(share, 1, stage=stage)

    model = build(
        dataset,
        Feedback.load(folder),
        EventActions.load(folder),
        config,
        deployed,
        job.spec.seed,
        job.workdir,
        backbone_NB=_backbone(job, dataset),
        device=best_device(),
        tick=tick,
        metric=lambda step, figures: job.metric(step, **figures),
    )
    return _stored(job, model)


def _weighed(job: JobContext) -> JobOutcome:
    """The same model with another preference: nothing is trained."""
    changes = dict(job.spec.config)
    unknown = sorted(set(changes) - {"preference"})
    if unknown or "preference" not in changes:
        raise BadData(
            f"weighing a reward model anew takes config preference alone, and got {', '.join(sorted(changes)) or 'nothing'}: give its signals weights"
        )
    weights = recipe("", changes).preference
    model = PreferenceModel.load(job.store.get(job.spec.inputs["reward"]))
    assert isinstance(weights, Mapping)
    strange = sorted(set(weights) - set(model.signals))
    if strange:
        raise BadData(f"the preference weighs {', '.join(strange)}, and the model foresees {', '.join(model.signals)}: weigh some of these")
    return _stored(job, model.weighted(weights))


def _stored(job: JobContext, model: PreferenceModel) -> JobOutcome:
    inputs = {**model.header.get("inputs", {}), **job.spec.inputs}
    seed = model.header.get("seed", job.spec.seed) if "reward" in job.spec.inputs else job.spec.seed
    model = replace(
        model,
        header={**model.header, "model_type": "reward", "inputs": inputs, "recipe": job.spec.recipe or model.header.get("recipe") or "standard", "seed": seed},
    )
    target = job.workdir / "reward"
    shutil.rmtree(target, ignore_errors=True)
    model.save(target)
    ref = job.store.put(
        "rewards", target, config={"preference": dict(model.weights), "signals": list(model.signals)}, inputs=job.spec.inputs, seed=job.spec.seed
    )
    NewestRewards(job.broker).put(ref, now_ms())
    for name in ("reward", "checkpoint", "best.safetensors"):
        job.discard(job.workdir / name)
    job.progress(1, 1, stage="done")
    metrics = json.loads(json.dumps(model.header["metrics"]))
    return JobOutcome({"reward": ref}, {**metrics, "preference": dict(model.weights)})


def _backbone(job: JobContext, dataset: Dataset) -> FloatArray | None:
    """Item vectors of the retriever that the inputs name, zero for items that it does not know."""
    ref = job.spec.inputs.get("retriever")
    if ref is None:
        return None
    card = json.loads((job.store.get(ref) / "semantide.json").read_text())
    if card.get("model_type") != "retriever":
        raise Conflict(f"input retriever {ref[:24]}... is a {card.get('model_type')}: name a retriever (models/...)")
    table = TableSnapshot.load(job.store.get, ref)
    rows = np.array([table.row_of.get(item, -1) for item in dataset.item_ids])
    if not (rows >= 0).any():
        raise Conflict(f"retriever {ref[:24]}... knows none of the {len(rows)} items of this data set: it is of another one")
    vectors = np.zeros((len(rows), table.vectors_ND.shape[1]), np.float32)
    vectors[rows >= 0] = table.vectors_ND[torch.from_numpy(rows[rows >= 0])].float().numpy()
    # On the scale of the other inputs, whatever that of the retriever is.
    vectors /= max(float(np.linalg.norm(vectors[rows >= 0], axis=1).mean()), 1e-6)
    return vectors
