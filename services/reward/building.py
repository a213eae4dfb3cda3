"""From a data set to a reward model: spaces, examples, network, calibration, preference, gate, and the report of what it is worth.

Legend: X exposures, S signals, N items, F features of relevance.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from semantide.services.reward.examples import HELD_OUT, TEST, TRAIN, Batches, Examples, examples, learned_from, totals
from semantide.services.reward.fitting import fit, logits_of
from semantide.services.reward.item_spaces import crossed_search_vectors, halved_spaces, item_spaces
from semantide.services.reward.recipes import RewardTraining
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback
from semantide.shared.models.calibration import Calibration, area_under_curve, calibration_error, fit_calibration, log_loss, mean_of, reliability, sigmoid
from semantide.shared.models.interest_search import FloatArray, IntArray, search
from semantide.shared.models.item_spaces import ItemSpaces
from semantide.shared.models.preference import PreferenceModel, combined
from semantide.shared.models.relevance_gate import FEATURES, RelevanceGate, relevance_features
from semantide.shared.models.reward import RewardConfig, RewardNetwork

_GATE_PAIRS = 20_000
_SPREAD = 1e-6
_TELLING = 500  # exposures of a place from which on its rates are more than chance
Calibrated = tuple[np.ndarray, tuple[Calibration, ...]]
"""Logits [X, S], and how each signal's become probabilities."""

Tick = Callable[[str, float], None]


def build(
    dataset: Dataset,
    feedback: Feedback,
    events: EventActions,
    config: RewardTraining,
    preference: Mapping[str, float],
    seed: int,
    workdir: Path,
    *,
    backbone_NB: FloatArray | None = None,
    device: torch.device | None = None,
    tick: Tick = lambda stage, share: None,
    metric: Callable[[int, dict[str, float]], None] = lambda step, figures: None,
) -> PreferenceModel:
    """Train a reward model; ``preference`` are the weights of signals that the deployment has, where ``config`` has none.

    Raises: BadData where there is no feedback to learn from, or the rewards are all the same; PermanentError when the loss is not a number.
    """
    tick("reading feedback", 0.0)
    found = examples(dataset, feedback, config)
    tick("spaces of items", 0.02)
    train_E = _train_events(dataset, found, config)
    spaces = item_spaces(dataset, train_E, config, seed)
    halves = halved_spaces(dataset, train_E, spaces, config, seed)
    shape = RewardConfig(
        num_items=len(dataset.item_ids),
        signals=found.signals,
        actions=events.names,
        tabs=feedback.tab_names,
        content_size=spaces.content_NC.shape[1],
        backbone_size=0 if backbone_NB is None else backbone_NB.shape[1],
        **{
            name: getattr(config, name)
            for name in ("hidden_size", "num_heads", "layer_sizes", "num_found", "num_recent", "max_history", "dropout", "id_dropout")
        },
    )
    torch.manual_seed(seed)
    network = RewardNetwork(shape)
    # Training begins where nothing is known but how often each signal is given.
    network.heads.bias.data.copy_(torch.logit(torch.from_numpy(found.usual_S), eps=1e-4))
    network.content_NC.copy_(torch.from_numpy(spaces.content_NC))
    if backbone_NB is not None:
        network.backbone_NB.copy_(torch.from_numpy(backbone_NB))
    network.to(device or torch.device("cpu"))
    batches = Batches.of(
        found, shape, dataset, events, spaces.search_vectors(), crossed_search_vectors(halves), debias_position=config.debias in ("position", "both")
    )

    def told(done: float, figures: dict[str, float]) -> None:
        tick("training", 0.05 + 0.8 * done / config.epochs)
        if figures:
            metric(round(done), figures)

    progress = fit(network, batches, config, seed, workdir, told)
    tick("calibrating", 0.87)
    held_out = found.rows(HELD_OUT)
    if not len(held_out):
        raise BadData("no exposures are held out to calibrate with: make the data set with later validation exposures, or raise held_out")
    # What is scored later is shown nowhere yet, so probabilities come true over the places of the log together; where places are known is for the report alone.
    placeless = replace(batches, debias_position=False)
    logits_XS = logits_of(network, placeless, held_out)
    calibrations = _calibrations(logits_XS, found, config, seed)
    placed = _calibrations(logits_of(network, batches, held_out), found, config, seed)
    measured = HELD_OUT if not len(found.rows(TEST)) else TEST
    report = _report(
        (logits_of(network, placeless, found.rows(measured)), calibrations), (logits_of(network, batches, found.rows(measured)), placed), found, measured
    )
    network.cpu()
    weights = _weights(config, preference, found.signals)
    items, users = totals(found, len(dataset.item_ids), dataset.user_ids)
    tick("relevance", 0.9)
    gate, gate_report = _gate(dataset, found, batches, (spaces, spaces), weights, config, seed)
    past_gate, past_report = _gate(dataset, found, batches, halves, weights, config, seed)
    model = PreferenceModel(network, dataset.item_ids, items, spaces, halves, users, found.usual_S, calibrations, weights, gate, past_gate, {})
    tick("report", 0.95)
    figures = {
        "exposures": {name: len(found.rows(use)) for name, use in (("train", TRAIN), ("held_out", HELD_OUT), ("test", TEST))},
        "epochs": progress.epoch,
        "best_epoch": progress.best_epoch,
        "curve": progress.curve,
        "gate": gate_report,
        "past_gate": past_report,
        "signals": report,
        "measured_on": "held_out, which it was calibrated on" if measured == HELD_OUT else "test",
        "debiased": {
            "propensities": float((~np.isnan(feedback.propensities[found.use_X == TRAIN])).mean()),
            "estimated": config.propensities == "estimated" and config.debias in ("propensity", "both"),
            "effective_share": _effective_share(found.weights_X[found.use_X == TRAIN]),
            "effective_share_measured": _effective_share(found.weights_X[found.use_X == measured]),
            "places": float((feedback.positions[found.use_X == TRAIN] >= 0).mean()),
            "tabs": len(feedback.tab_names),
        },
    }
    spread = float(combined(np.stack([each(logits_XS[:, column]) for column, each in enumerate(calibrations)], 1), found.signals, weights).std())
    if not spread > _SPREAD:
        raise BadData(
            f"all rewards are the same (spread {spread:.3g} over {len(held_out)} exposures): nothing was learned, send more feedback or choose other signals"
        )
    figures["spread"] = spread
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(config).items()}
    # Scoring makes histories of events in the same way.
    history = {name: dataset.header["config"][name] for name in ("positive_intensity", "deduplicate") if name in dataset.header.get("config", {})}
    times = feedback.times[found.use_X == TRAIN]
    counted = {"from": int(times.min()), "until": int(times.max())}
    return replace(model, header={"config": plain, "metrics": figures, "history": history, "counted": counted})


def _train_events(dataset: Dataset, found: Examples, config: RewardTraining) -> np.ndarray:
    """Which events of the histories the spaces of items are made of: of the users that the model learns from, before all that is held out, or in the training part where nothing is."""
    lengths_U = np.diff(dataset.offsets)
    places_E = np.arange(len(dataset.items)) - np.repeat(dataset.offsets[:-1], lengths_U)
    train_E: np.ndarray = (places_E < np.repeat(dataset.train_end, lengths_U)) & np.repeat(learned_from(dataset, config), lengths_U)
    later = found.feedback.times[(found.use_X == HELD_OUT) | (found.use_X == TEST)]
    return train_E & (dataset.times < later.min()) if len(later) else train_E


def _weights(config: RewardTraining, deployed: Mapping[str, float], signals: tuple[str, ...]) -> dict[str, float]:
    """The preference's weights of the signals that the model knows.

    Raises: BadData for a job's own preference with signals that it does not know, or without a positive weight.
    """
    wanted = deployed if config.preference is None else config.preference
    unknown = sorted(set(wanted) - set(signals))
    if config.preference is not None and unknown:
        raise BadData(f"the preference weighs {', '.join(unknown)}, and this feedback lets the model foresee {', '.join(signals)}: weigh some of these")
    weights = {name: float(wanted.get(name, 0.0)) for name in signals}
    try:
        combined(np.zeros((1, len(signals))), signals, weights)
    except ValueError as error:
        raise BadData(str(error)) from error
    return weights


def _gate(
    dataset: Dataset,
    found: Examples,
    batches: Batches,
    halves: tuple[ItemSpaces, ItemSpaces],
    weights: Mapping[str, float],
    config: RewardTraining,
    seed: int,
) -> tuple[RelevanceGate, dict[str, float]]:
    """Fit on half of the held-out positives, and set the threshold on the other half; ``halves`` are the spaces for users of even and odd rows."""
    rng = np.random.default_rng([seed, 77])
    liked = [column for column, name in enumerate(found.signals) if weights[name] > 0]
    rows = found.rows(HELD_OUT)
    rows = rows[found.labels_XS[rows][:, liked].any(1) & (found.ends_X[rows] > found.begins_X[rows])]
    rows = rng.permutation(rows)[:_GATE_PAIRS]
    fitted, kept = rows[::2], rows[1::2] if len(rows) > 1 else rows
    items = found.feedback.items.astype(np.int64)

    def features(rows: IntArray, items_X: IntArray) -> FloatArray:
        begins, ends = np.maximum(found.begins_X[rows], found.ends_X[rows] - config.max_history), found.ends_X[rows]
        items_E, found_XF = batches.histories.items_E, np.zeros((len(rows), len(FEATURES)), np.float32)
        for half, spaces in enumerate(halves):
            mine = np.flatnonzero(found.feedback.users[rows] % 2 == half)
            stretch = begins[mine], ends[mine], items_X[mine]
            places, _ = search(spaces.search_vectors(), items_E, *stretch, config.num_found)
            events = np.where(places >= 0, items_E[places.clip(0)] if len(items_E) else 0, -1)
            found_XF[mine] = relevance_features((spaces.content_NC, spaces.collaborative_NG), items_E, *stretch, events)
        return found_XF

    others = [features(part, rng.integers(len(dataset.item_ids), size=len(part))) for part in (fitted, kept)]
    held_out = features(kept, items[kept])
    counts = None if found.weights(rows) is None else (found.weights_X[fitted], found.weights_X[kept])
    gate = RelevanceGate.fit(features(fitted, items[fitted]), others[0], held_out, config.gate_quantile, counts)
    told = gate.report(held_out, others[1], None if counts is None else counts[1])
    return gate, {**told, "positives": float(len(kept)), "threshold": gate.threshold}


def _calibrations(logits_XS: np.ndarray, found: Examples, config: RewardTraining, seed: int) -> tuple[Calibration, ...]:
    """One for each signal, from the logits of the held-out examples."""
    rows = found.rows(HELD_OUT)
    return tuple(
        fit_calibration(logits_XS[:, column], found.labels_XS[rows, column], config.calibration, weights_X=found.weights(rows), seed=seed)
        for column in range(len(found.signals))
    )


def _report(deployed: Calibrated, placed: Calibrated, found: Examples, use: int) -> dict[str, Any]:
    """What each signal is worth: as it is deployed, without effects of place and tab, and where the log says the items were shown.

    Exposures count as in training and calibration, by their inverse propensities; ``shown`` is of what the log's recommender chose to show, each exposure counting the same.
    """
    rows, report = found.rows(use), {}
    counts = found.weights(rows)
    for column, name in enumerate(found.signals):
        labels = found.labels_XS[rows, column]
        (logits, p), (placed_logits, placed_p) = ((logits_XS[:, column], maps[column](logits_XS[:, column])) for logits_XS, maps in (deployed, placed))
        report[name] = {
            "rate": mean_of(labels, counts),
            "auc": _number(area_under_curve(placed_logits, labels, counts)),
            "auc_deployed": _number(area_under_curve(logits, labels, counts)),
            "calibration_error": calibration_error(p, labels, weights_X=counts),
            "calibration_error_placed": calibration_error(placed_p, labels, weights_X=counts),
            "calibration_error_before": calibration_error(sigmoid(logits), labels, weights_X=counts),
            "places": _by_place(placed_p, labels, found, rows),
            "log_loss": log_loss(p, labels, counts),
            "calibration": deployed[1][column].as_dict()["kind"],
            "reliability": [list(entry) for entry in reliability(p, labels, 10, counts)],
            "shown": {
                "rate": mean_of(labels),
                "auc": _number(area_under_curve(placed_logits, labels)),
                "calibration_error": calibration_error(p, labels),
            },
        }
    return report


def _by_place(p: np.ndarray, labels: np.ndarray, found: Examples, rows: IntArray) -> list[dict[str, Any]]:
    """How far off predictions are on each place and each tab with exposures enough to tell."""
    feedback, places = found.feedback, []
    for kind, numbers, names in (("tab", feedback.tabs[rows], feedback.tab_names), ("position", feedback.positions[rows], None)):
        for number, count in zip(*np.unique(numbers[numbers >= 0], return_counts=True), strict=True):
            if count >= _TELLING:
                inside = numbers == number
                weights = found.weights(rows[inside])
                error = calibration_error(p[inside], labels[inside], min(20, int(count) // (_TELLING // 5)), weights)
                rate = mean_of(labels[inside], weights)
                places.append({kind: names[number] if names else int(number), "exposures": int(count), "rate": rate, "calibration_error": error})
    return places


def _effective_share(weights_X: FloatArray) -> float:
    """How many equally weighted exposures would say as much, as a share: what inverse propensities cost."""
    total = float(np.square(weights_X.astype(np.float64)).sum())
    return float(weights_X.astype(np.float64).sum() ** 2 / (total * len(weights_X))) if total else 0.0


def _number(value: float) -> float | None:
    """NaN is no JSON."""
    return None if np.isnan(value) else value
