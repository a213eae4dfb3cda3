"""The reward model on KuaiRand-Pure beside a logistic regression and a DIN-like network: AUC of clicks and long views, and how well probabilities come true.

Split by time: the last three days of the log test, the one before is held out (early stopping, calibration, gate), the rest trains. All three are given the same:
histories before each exposure, tab, how user and item have fared so far, what items are; the logistic regression has ids of users and items and the items' categories as
one-hot columns besides, the DIN-like network item embeddings, the same content vectors as ours, and its attention unit over the latest 50 events. The rate of scoring is that
of 64 prompts x 16 rollouts. Calibration: as deployed (without effects of tab and place), where the log says items were shown, and in the worst tab. ``--propensities``
trains ours a second time with estimated propensities: what it costs where the log's recommender chose, and brings where every item counts alike.

    python tests/benchmarks/reward.py --data DIR [--seeds 3] [--users 3000] [--propensities] [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

import kuairand_feedback  # type: ignore[import-not-found]
from stopwatch import finish  # type: ignore[import-not-found]

from semantide.services.reward.building import build
from semantide.services.reward.examples import HELD_OUT, TEST, TRAIN, Batches, Examples, examples
from semantide.services.reward.fitting import logits_of
from semantide.services.reward.item_spaces import item_spaces
from semantide.services.reward.recipes import RewardTraining, recipe
from semantide.shared.dataset import Dataset
from semantide.shared.models.calibration import area_under_curve
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.reward import RewardBatch, RewardConfig
from semantide.shared.models.reward_pairs import Histories

JUDGED = ("click", "long_view")
WEIGHTS = {"click": 1.0, "long_view": 1.5, "like": 2.0, "hate": -1.0}
DIN_EVENTS, BATCH = 50, 1024


def shared_batches(dataset: Dataset, feedback: Any, events: Any, config: RewardTraining) -> tuple[Examples, Batches]:
    """What the baselines see: the latest events and all dense columns. Their search finds nothing, for they have none."""
    found = examples(dataset, feedback, config)
    shape = RewardConfig(
        num_items=len(dataset.item_ids), signals=found.signals, actions=events.names, tabs=feedback.tab_names, num_found=1, num_recent=DIN_EVENTS
    )
    return found, Batches.of(found, shape, dataset, events, np.zeros((len(dataset.item_ids), 1), np.float32))


def logistic(dataset: Dataset, found: Examples, batches: Batches) -> dict[str, np.ndarray]:
    """Logits of the test's exposures, by signal; how strongly it is held back is chosen on the held-out ones."""
    feedback = found.feedback
    categories = sorted({category for row in dataset.item_table["categories"].to_pylist() for category in row})
    number = {name: column for column, name in enumerate(categories)}
    lists = dataset.item_table["categories"].to_pylist()
    of_items = sp.csr_matrix((np.ones(sum(map(len, lists))), np.array([number[name] for row in lists for name in row], dtype=np.int64), np.cumsum([0, *map(len, lists)])), shape=(len(lists), len(number)))  # fmt: skip

    def columns(rows: np.ndarray) -> sp.csr_matrix:
        dense = [torch.cat([batch.user_XU, batch.item_XI], 1).numpy() for _, batch in batches.parts(rows, 8192)]
        ones = np.ones(len(rows))
        users = sp.csr_matrix((ones, (np.arange(len(rows)), feedback.users[rows] + 1)), shape=(len(rows), len(dataset.user_ids) + 1))
        items = sp.csr_matrix((ones, (np.arange(len(rows)), feedback.items[rows])), shape=(len(rows), len(dataset.item_ids)))
        tabs = sp.csr_matrix((ones, (np.arange(len(rows)), feedback.tabs[rows] + 1)), shape=(len(rows), len(feedback.tab_names) + 1))
        return sp.hstack([np.concatenate(dense), users, items, tabs, of_items[feedback.items[rows]]]).tocsr()

    train, held_out, test = (found.rows(use) for use in (TRAIN, HELD_OUT, TEST))
    x_train, x_held, x_test = columns(train), columns(held_out), columns(test)
    answers = {}
    for name in JUDGED:
        column = found.signals.index(name)
        best, answers[name] = -1.0, np.zeros(len(test))
        for strength in (0.003, 0.01, 0.03, 0.1):
            fitted = LogisticRegression(C=strength, max_iter=200).fit(x_train, found.labels_XS[train, column])
            auc = area_under_curve(fitted.decision_function(x_held), found.labels_XS[held_out, column])
            if auc > best:
                best, answers[name] = auc, fitted.decision_function(x_test)
    return answers


class DIN(nn.Module):
    """Deep interest network: an attention unit over the latest events, one sum, and layers over everything."""

    def __init__(self, config: RewardConfig, content_NC: Tensor, size: int = 32) -> None:
        super().__init__()
        self.content_NC, self.content = content_NC, nn.Linear(content_NC.shape[1], size, bias=False)
        self.items, self.actions = nn.Embedding(config.num_items + 1, size), nn.Embedding(len(config.actions) + 1, size)
        self.tabs = nn.Embedding(len(config.tabs) + 1, size)
        self.unit = nn.Sequential(nn.Linear(4 * size, 36), nn.PReLU(), nn.Linear(36, 1))
        self.layers = nn.Sequential(
            nn.Linear(4 * size + config.user_features + config.item_features, 200), nn.PReLU(), nn.Dropout(0.1), nn.Linear(200, 80), nn.PReLU(), nn.Dropout(0.1),
            nn.Linear(80, len(config.signals)),
        )  # fmt: skip
        for embedding in (self.items, self.actions, self.tabs):
            nn.init.normal_(embedding.weight, std=0.02)

    def item(self, rows: Tensor) -> Tensor:
        """Vectors of items, -1 for none."""
        vectors: Tensor = self.items(rows + 1) + torch.where((rows >= 0).unsqueeze(-1), self.content(self.content_NC[rows.clamp(min=0)]), 0)
        return vectors

    def forward(self, batch: RewardBatch) -> Tensor:
        assert batch.tabs_X is not None
        latest = slice(1, None)
        item = self.item(batch.items_X)
        events = self.item(batch.events_XM[:, latest]) + self.actions(batch.actions_XM[:, latest])
        query = item[:, None].expand_as(events)
        weights = self.unit(torch.cat([query, events, query - events, query * events], -1)) * batch.there_XM[:, latest, None]
        interest = (weights * events).sum(1)
        x = torch.cat([item, interest, item * interest, self.tabs(batch.tabs_X + 1), batch.user_XU, batch.item_XI], 1)
        logits: Tensor = self.layers(x)
        return logits


def din(found: Examples, batches: Batches, content_NC: Tensor, config: RewardTraining, seed: int) -> dict[str, np.ndarray]:
    """Logits of the test's exposures by signal, of the pass with the best held-out AUC."""
    torch.manual_seed(seed)
    model = DIN(batches.config, content_NC)
    optimiser = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=1e-4)
    train, held_out, test = (found.rows(use) for use in (TRAIN, HELD_OUT, TEST))
    columns = [found.signals.index(name) for name in JUDGED]

    def logits(rows: np.ndarray) -> np.ndarray:
        model.eval()
        with torch.no_grad():
            return np.concatenate([model(batch).numpy() for _, batch in batches.parts(rows, 8192)])

    best, answer, since = -1.0, np.zeros((len(test), len(found.signals))), 0
    for epoch in range(config.epochs):
        model.train()
        for rows, batch in batches.parts(np.random.default_rng([seed, epoch]).permutation(train), BATCH):
            loss = F.binary_cross_entropy_with_logits(model(batch), torch.from_numpy(found.labels_XS[rows]).float())
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()
        held = logits(held_out)
        auc = float(np.mean([area_under_curve(held[:, column], found.labels_XS[held_out, column]) for column in columns]))
        since += 1
        if auc > best:
            best, answer, since = auc, logits(test), 0
        if since >= config.patience:
            break
    return {name: answer[:, column] for name, column in zip(JUDGED, columns, strict=True)}


def ours(dataset: Dataset, feedback: Any, events: Any, config: RewardTraining, seed: int) -> tuple[PreferenceModel, dict[str, np.ndarray], Examples]:
    """The model, and its logits of the test's exposures where they were shown."""
    with tempfile.TemporaryDirectory() as scratch:
        model = build(dataset, feedback, events, config, WEIGHTS, seed, Path(scratch))
    found = examples(dataset, feedback, config)
    batches = Batches.of(found, model.network.config, dataset, events, model.spaces.search_vectors())
    logits = logits_of(model.network.float(), batches, found.rows(TEST))
    return model, {name: logits[:, found.signals.index(name)] for name in JUDGED}, found


def alike(found: Examples, logits: dict[str, np.ndarray], rows: np.ndarray) -> dict[str, float]:
    """AUC where each item counts alike, however often it was shown: mean over the items' own shares of the test, by weights of their exposures."""
    shown = np.bincount(found.feedback.items[rows])
    weights = np.minimum(1 / shown[found.feedback.items[rows]], 1.0)
    return {name: float(roc_auc_score(found.labels_XS[rows, found.signals.index(name)], logits[name], sample_weight=weights)) for name in JUDGED}


def rate(model: PreferenceModel, dataset: Dataset, runs: int) -> float:
    """Items that are scored in a second, of 64 prompts x 16 rollouts."""
    rng = np.random.default_rng(0)
    users = rng.integers(len(dataset.user_ids), size=64)
    histories = [dataset.history(int(user)).astype(np.int64) for user in users]
    offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])])
    events = Histories(np.concatenate(histories), np.ones(int(offsets[-1]), np.int64))
    group_X, items_X = np.repeat(np.arange(64), 16), rng.integers(len(dataset.item_ids), size=1024)
    seconds = []
    for _ in range(runs + 1):
        begin = time.perf_counter()
        model.judge(users, events, offsets, group_X, items_X)
        seconds.append(time.perf_counter() - begin)
    return 1024 / float(np.median(seconds[1:]))


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with kuairand/")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, help="only so many users")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--propensities", action="store_true", help="with estimated propensities too")
    parser.add_argument("--quick", action="store_true", help="600 users, one seed, one pass")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    seeds = 1 if options.quick else options.seeds
    dataset, feedback, events = kuairand_feedback.load(options.data / "kuairand", 600 if options.quick else options.users)
    config = recipe("standard", {"epochs": 1 if options.quick else options.epochs})
    plain, batches = shared_batches(dataset, feedback, events, config)
    content_NC = torch.from_numpy(item_spaces(dataset, np.zeros(len(dataset.items), np.bool_), config, 0).content_NC)
    test = plain.rows(TEST)
    counts = {"train": len(plain.rows(TRAIN)), "held out": len(plain.rows(HELD_OUT)), "test": len(test), "users": len(dataset.user_ids)}
    sys.stderr.write(", ".join(f"{count:,} {name}" for name, count in counts.items()) + "\n")
    aucs: dict[str, dict[str, list[float]]] = {name: {} for name in JUDGED}
    reports: list[dict[str, Any]] = []
    estimated: dict[str, list[float]] = {}
    gates: list[dict[str, float]] = []
    answers = {"logistic": [logistic(dataset, plain, batches)]}
    speed = 0.0
    for seed in range(seeds):
        begin = time.monotonic()
        answers.setdefault("din", []).append(din(plain, batches, content_NC, config, seed))
        model, logits, found = ours(dataset, feedback, events, config, seed)
        # All are judged on the same exposures, or nothing is compared.
        if not (np.array_equal(found.rows(TEST), test) and np.array_equal(found.labels_XS[test], plain.labels_XS[test])):
            sys.stderr.write("the models were tested on different exposures\n")
            return 1
        answers.setdefault("semantide", []).append(logits)
        gates.append(model.header["metrics"]["gate"])
        reports.append(model.header["metrics"]["signals"])
        if options.propensities:
            _, others, _ = ours(dataset, feedback, events, replace(config, propensities="estimated"), seed)
            for name in JUDGED:
                labels = found.labels_XS[test, found.signals.index(name)]
                estimated.setdefault(f"shown_{name}", []).append(area_under_curve(others[name], labels) - area_under_curve(logits[name], labels))
                estimated.setdefault(f"alike_{name}", []).append(alike(found, others, test)[name] - alike(found, logits, test)[name])
        speed = rate(model, dataset, 3 if options.quick else 9)
        sys.stderr.write(f"seed {seed}: {time.monotonic() - begin:.0f} s\n")
    for who, runs in answers.items():
        for name in JUDGED:
            labels = plain.labels_XS[test, plain.signals.index(name)]
            aucs[name][who] = [area_under_curve(run[name], labels) for run in runs]
    measures: dict[str, Any] = {}
    for name in JUDGED:
        mine = float(np.mean(aucs[name]["semantide"]))
        for who in ("logistic", "din"):
            theirs = float(np.mean(aucs[name][who]))
            noise = float(np.std(aucs[name][who] + aucs[name]["semantide"] if len(aucs[name][who]) > 1 else aucs[name]["semantide"]))
            measures[f"auc_{name}_over_{who}"] = {
                "value": mine - theirs, "unit": "AUC", "better": "higher", "at_least": 0.0, "baseline": f"{who}: {theirs:.4f}", "runs": seeds, "spread": noise,
            }  # fmt: skip
        measures[f"auc_{name}"] = {"value": mine, "unit": "AUC", "better": "higher", "runs": seeds, "spread": float(np.std(aucs[name]["semantide"]))}
        for what, told in (
            ("", [report[name]["calibration_error"] for report in reports]),
            ("_placed", [report[name]["calibration_error_placed"] for report in reports]),
            ("_worst_tab", [max((place["calibration_error"] for place in report[name]["places"]), default=0.0) for report in reports]),
        ):
            measures[f"calibration_error_{name}{what}"] = {
                "value": 100 * float(np.mean(told)), "unit": "%", "better": "lower", "baseline": "0: rates are as foretold", "runs": seeds,
                **({} if what == "_worst_tab" else {"at_least": 2.0}),
            }  # fmt: skip
    for what, changes in estimated.items():
        measures[f"estimated_propensities_auc_{what}"] = {
            "value": float(np.mean(changes)), "unit": "AUC", "better": "higher", "baseline": "each exposure counts 1", "runs": seeds, "spread": float(np.std(changes)),
        }  # fmt: skip
    for what in ("positives_pass", "others_pass", "auc"):
        measures[f"gate_{what}"] = {
            "value": float(np.mean([gate[what] for gate in gates])),
            "unit": "share",
            "better": "lower" if what == "others_pass" else "higher",
            "runs": seeds,
        }
    measures["scored_per_second"] = {
        "value": speed,
        "unit": "items/s",
        "better": "higher",
        "at_least": 1024.0,
        "baseline": "64 prompts x 16 rollouts within a second",
        "runs": 9,
    }
    return int(finish("reward", options, measures, []))


if __name__ == "__main__":
    sys.exit(main())
