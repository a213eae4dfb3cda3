"""The ``evaluate`` job: models side by side on held-out users, or a candidate against the live model.

evaluate {dataset, model[, catalog][, baseline][, retriever]} -> {evaluation}    a table, and every user's own figures
evaluate {dataset, model, live[, catalog][, live_catalog]} -> {evaluation}       with config ``bounds``: whether the candidate is not worse; with ``publish`` serving is told, and promotes it where so.
                                                                                 Items that one of the two lacks it cannot hit, as when it serves.
evaluate {dataset, model[, ...]} -> {evaluation}                                 with config ``logged``: what each would have earned in the log, see ``logged_choices``
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from semantide.kernels.device import best_device
from semantide.services.training.evaluate import Case, EvaluateConfig, cases_of, evaluate
from semantide.services.training.job_inputs import TOKENIZE_AGAIN, card_of, input_of
from semantide.services.training.judgement import Judgement, judge
from semantide.services.training.logged_choices import LoggedPages, choices, earned
from semantide.services.training.rankers import GeneratorRanker, PopularityRanker, Ranker, RetrieverRanker, SASRecRanker
from semantide.services.training.row_matching import rows_of
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import CandidateJudged
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.models.generator import Generator
from semantide.shared.models.popularity import Popularity
from semantide.shared.models.quantised import Weights, shorten
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.sasrec import SASRec
from semantide.shared.table_snapshots import TableSnapshot

_COMPARED = ("baseline", "retriever", "live", "model")  # inputs of an evaluation
_LEAST_KNOWN = 0.5  # of a data set's items, by both models of a paired test: what knows fewer is of another catalog


def evaluate_models(job: JobContext) -> JobOutcome:
    """Rank the held-out items by popularity, and by the models of the inputs ``baseline``, ``retriever``, ``live`` and ``model``, with the seen filter off and on.

    With ``bounds`` only the live model and the candidate rank, with the filter off.

    Raises: BadData for a wrong config, Conflict for a model of another catalog.
    """
    config = EvaluateConfig.of(dict(job.spec.config))
    job.configured(config)
    dataset = Dataset.load(job.store.get(input_of(job, "dataset")))
    looks = any(_looks_at_actions(card_of(job, job.spec.inputs[name])) for name in _COMPARED if name in job.spec.inputs)
    events = EventActions.load(job.store.get(input_of(job, "dataset"))) if looks else None
    if config.logged:
        return _logged(job, config, dataset, events)
    cases = cases_of(dataset, config.part, config.max_users, job.spec.seed, None if events is None else events.numbers_E, min_targets=config.min_targets)
    if not cases:
        least = "something" if config.min_targets == 1 else f"{config.min_targets} items"
        raise BadData(f"the data set has no users with {least} to predict in part {config.part!r}: take another part or another split")
    table = _Table(job, config, dataset, cases)
    if config.bounds:
        pair = {name: input_of(job, name) for name in ("live", "model")}
        try:
            rankers = {
                name: load_ranker(job, dataset, ref, config.beam_width, events=events, name=name, least_known=_LEAST_KNOWN)[1] for name, ref in pair.items()
            }
        except Conflict as error:
            return _judged(job, config, table, Judgement(False, f"the two cannot be compared: {error}"))
        rows = table.filled([(name, pair[name], ranker, False) for name, ranker in rankers.items()])
        found = judge(table.figures(1), table.figures(0), config.bounds)
        return _judged(job, config, table, found.noting(_unknown(rankers, len(dataset.item_ids))), rows)
    compared = _side_by_side(job, config, dataset, events)
    return table.outcome(table.filled([(name, ref, ranker, seen) for name, (ref, ranker) in compared.items() for seen in (False, True)]))


def _side_by_side(job: JobContext, config: EvaluateConfig, dataset: Dataset, events: EventActions | None) -> dict[str, tuple[str | None, Ranker]]:
    """What ranks, by its name, with the reference of its model."""
    popularity = PopularityRanker(Popularity.fit(dataset.train_histories(), len(dataset.item_ids)))
    rankers: dict[str, tuple[str | None, Ranker]] = {"popularity": (None, popularity)}
    for name in _COMPARED:
        if name in job.spec.inputs:
            ref = job.spec.inputs[name]
            label, ranker = load_ranker(job, dataset, ref, config.beam_width, events=events, name=name)
            rankers[label if label not in rankers else f"{label} ({name})"] = ref, ranker
            if config.weights != "float32" and label == "generator":
                rankers[f"{label} ({config.weights})"] = ref, load_ranker(job, dataset, ref, config.beam_width, config.weights, events, name)[1]
    return rankers


def _logged(job: JobContext, config: EvaluateConfig, dataset: Dataset, events: EventActions | None) -> JobOutcome:
    """What the models would have earned in the log of the data set."""
    assert config.logged
    question = config.logged
    feedback = Feedback.load(job.store.get(input_of(job, "dataset")))
    pages = LoggedPages.of(dataset, feedback, config.part, question, max_users=config.max_users, seed=job.spec.seed, events=events)
    rankings = [(name, ref, ranker, seen) for name, (ref, ranker) in _side_by_side(job, config, dataset, events).items() for seen in (False, True)]
    rows: list[dict[str, Any]] = []
    for name, ref, ranker, seen in rankings:

        def tick(done: int, total: int, name: str = name) -> None:
            job.check_cancelled()
            job.progress(len(rows) + done / total, len(rankings), "rankings", f"asking the log of {name}")

        chosen_C = choices(pages, ranker, question, config.beam_width, seen, tick)
        rows.append({"model": name, "ref": ref, "exclude_seen": seen, **earned(pages, chosen_C, question)})
    return _stored(job, {"logged": question, "part": config.part, "beam_width": config.beam_width, "estimates": rows})


def _unknown(rankers: Mapping[str, Ranker], num_items: int) -> str:
    """Which items the two models lack, in words."""
    names = {"live": "the live model", "model": "the candidate"}
    return "; ".join(f"{names[name]} lacks {ranker.num_unknown} of the {num_items} items" for name, ranker in rankers.items() if ranker.num_unknown)


def _catalog_of(job: JobContext, name: str, ref: str) -> str:
    """The catalog of a generator that is the input ``name``: the live model has one of its own."""
    return str(job.spec.inputs.get("live_catalog" if name == "live" else "catalog") or card_of(job, ref)["catalog"])


def _judged(job: JobContext, config: EvaluateConfig, table: _Table, found: Judgement, rows: list[dict[str, Any]] | None = None) -> JobOutcome:
    """Tell serving what came out, where it waits for that."""
    outcome = table.outcome(rows or [], judgement=found.as_dict())
    if config.publish:
        model = input_of(job, "model")
        job.send(
            CandidateJudged(
                job_id=job.id,
                model=model,
                catalog=_catalog_of(job, "model", model) if card_of(job, model)["model_type"] == "generator" else None,
                against=input_of(job, "live"),
                not_worse=found.not_worse,
                reason=found.reason,
                cases=found.cases,
                figures={name: dict(figures) for name, figures in found.figures.items()},
            )
        )
    return outcome


class _Table:
    """Figures of rankings one after another; what a killed evaluation had finished is not computed again."""

    def __init__(self, job: JobContext, config: EvaluateConfig, dataset: Dataset, cases: list[Case]) -> None:
        self._job, self._config, self._dataset, self._cases = job, config, dataset, cases

    def filled(self, rankings: list[tuple[str, str | None, Ranker, bool]]) -> list[dict[str, Any]]:
        """A row for each ranking (name, reference of its model, ranker, seen filter)."""
        job, kept = self._job, self._job.workdir / "rows.json"
        rows: list[dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else []
        for index, (name, ref, ranker, seen) in enumerate(rankings):
            if index < len(rows):
                continue

            def tick(done: int, total: int, index: int = index, name: str = name) -> None:
                job.check_cancelled()
                job.progress(index + done / total, len(rankings), "rankings", f"evaluating {name}")

            own: dict[str, list[float]] = {}
            figures = evaluate(ranker, self._cases, ks=self._config.ks, num_items=len(self._dataset.item_ids), exclude_seen=seen, tick=tick, own=own)
            counts = {name: figures.pop(name) for name in ("cases", "repeat_share", "short_share")}
            rows.append({"model": name, "ref": ref, "exclude_seen": seen, "metrics": figures, **counts})
            job.metric(index, **figures)
            users = [self._dataset.user_ids[int(user)] for user in own.pop("user")]
            columns = {"user": pa.array(users, pa.string()), "ranking": pa.array([index] * len(users), pa.int32())}
            columns |= {metric: pa.array(values, pa.float32()) for metric, values in own.items()}
            _replaced(self._file(index), lambda path, columns=columns: pq.write_table(pa.table(columns), path))
            _replaced(kept, lambda path: path.write_text(json.dumps(rows)))
        return rows

    def figures(self, index: int) -> Mapping[str, Any]:
        """Every user's own figures of a ranking, the users in one order for all of them."""
        table = pq.read_table(self._file(index)).drop_columns(["user", "ranking"])
        return {name: table[name].to_numpy().astype("float64") for name in table.column_names}

    def outcome(self, rows: list[dict[str, Any]], **more: Any) -> JobOutcome:
        """The table as a result, and with every user's own figures as an artifact."""
        result = {
            "rows": rows,
            "part": self._config.part,
            "ks": list(self._config.ks),
            "beam_width": self._config.beam_width,
            "ranking": "full",
            "users": len(self._cases),
            "items": len(self._dataset.item_ids),
            **more,
        }
        return _stored(self._job, result, [self._file(index) for index in range(len(rows)) if self._file(index).exists()])

    def _file(self, index: int) -> Path:
        return self._job.workdir / f"cases-{index}.parquet"


def _stored(job: JobContext, result: dict[str, Any], cases: Sequence[Path] = ()) -> JobOutcome:
    """The result as an artifact, with every user's own figures where there are such."""
    folder = job.workdir / "evaluation"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1, sort_keys=True) + "\n")
    if cases:
        pq.write_table(pa.concat_tables([pq.read_table(path) for path in cases]), folder / "cases.parquet", compression="zstd")
    ref = job.store.put("evaluations", folder, config=job.spec.config, inputs=job.spec.inputs, seed=job.spec.seed)
    return JobOutcome({"evaluation": ref}, result)


def _replaced(path: Path, write: Any) -> None:
    aside = path.with_suffix(".incoming")
    write(aside)
    aside.replace(path)


def load_ranker(
    job: JobContext,
    dataset: Dataset,
    ref: str,
    beam_width: int,
    weights: Weights = "float32",
    events: EventActions | None = None,
    name: str = "model",
    least_known: float = 1.0,
) -> tuple[str, Ranker]:
    """A stored model as a ranker of the data set's items, of which it must know the share ``least_known``, and its name; ``weights`` is the form that a
    generator's layers are kept in, ``name`` the input that it came as.
    """
    folder, card = job.store.get(ref), card_of(job, ref)
    if card["model_type"] == "sasrec":
        items = json.loads((folder / "items.json").read_text())
        rows = rows_of(
            dataset.item_ids, {item: row for row, item in enumerate(items)}, f"the SASRec model {ref[:24]}...", "train it on this data set", least_known
        )
        return "sasrec", SASRecRanker(SASRec.from_pretrained(folder).to(best_device()), rows, card["max_items"])
    if card["model_type"] == "retriever":
        known = TableSnapshot.load(job.store.get, ref)
        rows = rows_of(dataset.item_ids, known.row_of, f"the retriever {ref[:24]}...", "train it on this data set", least_known)
        retriever = Retriever.from_pretrained(folder).to(best_device())
        actions = None if events is None else events.among(retriever.config.actions)
        return "retriever", RetrieverRanker(retriever, lambda rows_T: known.vectors_ND[rows_T], rows, card["max_items"], model_actions=actions)
    catalog_ref = _catalog_of(job, name, ref)
    catalog = Catalog.load(job.store.get(catalog_ref))
    catalog.check_model(card["tokenizer_digest"], tuple(card["level_sizes"]))
    rows = rows_of(dataset.item_ids, catalog.row_of, f"catalog {catalog_ref[:26]}...", TOKENIZE_AGAIN, least_known)
    model = shorten(Generator.from_pretrained(folder).to(best_device()), weights, time.perf_counter)
    actions = None if events is None else events.among(model.config.merger.actions)
    return "generator", GeneratorRanker(model, catalog.trie, catalog.codes, rows, card["max_items"], beam_width, actions)


def _looks_at_actions(card: Mapping[str, Any]) -> bool:
    return "actions" in (*card.get("config", {}).get("features", ()), *card.get("merger", {}).get("features", ()))
