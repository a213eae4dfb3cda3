"""How many real targets a second the retriever learns from on Beauty, beside RecTools' HSTU of the same shape.

D = 64, 2 blocks, 2 heads, at most 50 items, 64 sampled negatives. RecTools draws them for each target, so that is the row which counts (``target``); negatives that
a batch shares (``batch``) are given too. Both sides train batches of about 128 users, load them included; runs alternate.
First our loss and gradients are compared with those of plain padded torch.
Usage: python tests/benchmarks/retriever_rate.py --data DIR [--peer PYTHON] [--quick] [--json]
DIR holds beauty.seq; PYTHON is an interpreter that has rectools 0.19 and pytorch-lightning. Without it the peer's row is missing, which is said.
Legend: T items of a batch, B sequences, n length of a sequence, H heads, D hidden size, S negatives.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import public_data  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F
from stopwatch import arguments_parser, finish  # type: ignore[import-not-found]
from torch import Tensor

from semantide.services.training.batches import Epoch, HistoryBatch, Sampler
from semantide.services.training.objective import TableRows
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import ITEMS, NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.shared.dataset import Dataset
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import HSTULayer, Retriever

NEGATIVES, PEER = 64, "RecTools 0.19 HSTU"
WARM = 2


def config_of(layer: str, scope: str, dropout: float = 0.2) -> TrainConfig:
    """The shape that both sides train; RecTools has plain products and no time here."""
    shape = {
        "layer": layer,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 2,
        "dropout": dropout,
        "embedding_dropout": dropout,
        "time_buckets": 0,
        "cosine": False,
    }
    return recipe(
        "retriever-small",
        {"retriever": shape, "max_items": 50, "crop": "last", "items_per_batch": 128 * 7, "num_negatives": NEGATIVES, "negative_scope": scope},
    )


def objective_of(dataset: Dataset, config: TrainConfig) -> NextItemSampled:
    """A fresh model with its table."""
    torch.manual_seed(0)
    counts = torch.bincount(torch.from_numpy(np.concatenate([*dataset.train_histories()]).astype(np.int64)), minlength=len(dataset.item_ids))
    table = LocalTable(len(counts), config.retriever.hidden_size, std=config.retriever.initializer_range)
    return NextItemSampled(Retriever(config.retriever), table, counts, config)


def padded_loss(model: Retriever, batch: HistoryBatch, vectors_UD: Tensor, targets_T: Tensor, negatives: Tensor, log_items: float) -> Tensor:
    """The same sum of losses, each sequence by plain torch with its n x n matrix of scores."""
    total = vectors_UD.new_zeros(())
    bounds = batch.items.offsets_B1.tolist()
    for begin, end in pairwise(bounds):
        targets_n = targets_T[begin:end]
        n = end - begin
        x_nD = torch.cat([model.begin.unsqueeze(0), vectors_UD[targets_n[:-1]]]) * model.config.input_scale
        assert model.places is not None
        x_nD = x_nD + model.places.weight[:n]
        distance_nn = (torch.arange(n)[:, None] - torch.arange(n)).clamp_min(0)
        for layer in model.layers:
            assert isinstance(layer, HSTULayer) and layer.biases.position_1P is not None
            u, v, q, k = F.silu(layer.uvqk(layer.input_norm(x_nD))).chunk(4, -1)
            q_Hnd, k_Hnd, v_Hnd = (part.unflatten(-1, (layer.num_heads, -1)).transpose(0, 1) for part in (q, k, v))
            weights_Hnn = F.silu(q_Hnd @ k_Hnd.mT + layer.biases.position_1P[0][distance_nn]).tril()
            mixed_nD = (weights_Hnn @ v_Hnd).transpose(0, 1).flatten(1) / torch.arange(1, n + 1).unsqueeze(1)
            x_nD = x_nD + layer.output(layer.attention_norm(mixed_nD) * u)
        hidden_nD = model.norm(x_nD)
        positive_n = (hidden_nD * vectors_UD[targets_n]).sum(-1)
        rows_nS = negatives[begin:end] if negatives.ndim == 2 else negatives.expand(n, -1)
        logits_nS = torch.einsum("nd,nsd->ns", hidden_nD, vectors_UD[rows_nS]) + log_items - np.log(NEGATIVES)
        logits_nS = logits_nS.masked_fill(rows_nS == targets_n.unsqueeze(1), -torch.inf)
        total = total + (torch.logaddexp(positive_n, logits_nS.logsumexp(1)) - positive_n).sum()
    return total


def differs(dataset: Dataset, scope: str) -> list[str]:
    """Where our loss or gradients are not those of plain torch."""
    objective = objective_of(dataset, config_of("hstu", scope, dropout=0.0))
    batch = HistoryBatch.of(Sampler([*dataset.train_histories()][:40], objective._config, 0).epoch(0).batch(0).items)
    model, table = objective.model, objective.tables[ITEMS]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    route = table.route(objective.draw(batch, torch.Generator().manual_seed(0))[ITEMS])
    found = []
    for ours in (True, False):
        vectors_UD = table.fetch(route).clone().requires_grad_()
        model.zero_grad()
        targets, others = route.inverse_T[: len(batch.items.values)], route.inverse_T[len(batch.items.values) :]
        others = others.view(len(targets), -1) if scope == "target" else others
        total = objective.loss(batch, {ITEMS: TableRows(route.ids_U, vectors_UD, route.inverse_T)}).sums_K.sum() if ours else padded_loss(
            model, batch, vectors_UD, targets, others, float(np.log(len(dataset.item_ids)))
        )  # fmt: skip
        total.backward()
        found.append([total.detach(), vectors_UD.grad, *(parameter.grad for parameter in model.parameters())])
    names = ["loss", "gradient of vectors", *(f"gradient of {name}" for name, _ in model.named_parameters())]
    return [
        f"{scope}: {name}"
        for name, one, two in zip(names, *found, strict=True)
        if one is None or two is None or not torch.allclose(one, two, rtol=1e-3, atol=1e-3 * float(two.abs().max()))
    ]


class Few(Sampler):
    """Some batches of an epoch at a time, each run's after the last one's."""

    at = 0

    def take(self, batches: int) -> None:
        self._batches = batches

    def epoch(self, number: int) -> Epoch:
        whole = super().epoch(0)
        places = [(self.at + one) % len(whole) for one in range(self._batches)]
        self.at += self._batches
        return replace(whole, batches=tuple(whole.batches[place] for place in places))


class Ours:
    """The trainer itself, an epoch of few batches at a time."""

    def __init__(self, dataset: Dataset, layer: str, scope: str, folder: Path) -> None:
        self._config = replace(config_of(layer, scope), epochs=1, log_every=1)
        self._objective = objective_of(dataset, self._config)
        self._sampler = Few(dataset.train_histories(), self._config, 0)
        self._folder, self._runs = folder, 0

    def rate(self, batches: int) -> float:
        """Targets a second over some batches, from the end of one step to that of another."""
        ends: list[tuple[float, float]] = []

        def metric(step: int, values: dict[str, float]) -> None:
            if "tokens_per_second" in values:
                now = time.perf_counter()
                ends.append((now, values["tokens_per_second"]))

        self._sampler.take(WARM + batches)
        self._runs += 1
        listener = Listener(time.perf_counter, metric=metric)
        Trainer(self._config, self._objective, self._sampler, None, listener, self._folder / str(self._runs), seed=0, checkpoint_seconds=1e9).run()
        counted = ends[WARM - 1 :]
        targets = sum(rate * (now - before) for (before, _), (now, rate) in pairwise(counted))
        return targets / (counted[-1][0] - counted[0][0])


class Peer:
    """RecTools in its own process, which keeps its data set between runs."""

    def __init__(self, python: str, sequences: Path, threads: int) -> None:
        script = Path(__file__).with_name("rectools_hstu.py")
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""}
        self._process = subprocess.Popen([python, str(script), str(sequences), str(threads)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True)  # fmt: skip
        assert self._process.stdout is not None and self._process.stdin is not None
        self._out, self._in = self._process.stdout, self._process.stdin
        while (line := self._out.readline()) != "ready\n":
            if not line:
                raise RuntimeError(f"{python} cannot run rectools_hstu.py: give an interpreter that has rectools 0.19 and pytorch-lightning")

    def rate(self, batches: int) -> float:
        """Targets a second over some batches."""
        self._in.write(f"{batches}\n")
        self._in.flush()
        while not (line := self._out.readline()).startswith("{"):
            if not line:
                raise RuntimeError("the peer's process ended")
        answer = json.loads(line)
        return float(answer["targets"] / answer["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.stdin and self._process.stdin.close()
        self._process.wait(30)


def main() -> int:
    """Compare answers, alternate runs, print."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--peer", default="", help="interpreter with rectools 0.19 and pytorch-lightning")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dataset = public_data.beauty(options.data, 4000 if options.quick else None)
    wrong = [difference for scope in ("target", "batch") for difference in differs(dataset, scope)]
    rounds, batches = (3, 12) if options.quick else (9, 40)
    rows = [("hstu", "target"), ("hstu", "batch"), ("fuxi", "target")]
    rates: dict[str, list[float]] = {f"{layer}_{scope}": [] for layer, scope in rows}
    ratios: dict[str, list[float]] = {name: [] for name in rates}
    with tempfile.TemporaryDirectory() as scratch:
        ours = {f"{layer}_{scope}": Ours(dataset, layer, scope, Path(scratch) / f"{layer}{scope}") for layer, scope in rows}
        peer = Peer(options.peer, options.data / "beauty.seq", options.threads) if options.peer else None
        if peer is None:
            sys.stderr.write("NO PEER: give --peer PYTHON with rectools 0.19 and pytorch-lightning; ratios are missing\n")
        theirs: list[float] = []
        for _ in range(rounds):
            if peer is not None:
                theirs.append(peer.rate(batches // 2))
            for name, side in ours.items():
                rates[name].append(side.rate(batches))
                if theirs:
                    ratios[name].append(rates[name][-1] / theirs[-1])
        if peer is not None:
            peer.close()
    measures: dict[str, dict[str, Any]] = {}
    for name, values in rates.items():
        measures[f"targets_per_second_{name}"] = {"value": statistics.median(values) / options.threads, "unit": "1/s/core", "better": "higher", "runs": rounds}
        if ratios[name]:
            bound = {"at_least": 5, "aim": 10} if name == "hstu_target" else {}
            measures[f"speedup_{name}"] = {
                "value": statistics.median(ratios[name]),
                "unit": "ratio",
                "better": "higher",
                "baseline": PEER,
                "runs": rounds,
                **bound,
            }
    if theirs:
        measures["targets_per_second_rectools"] = {"value": statistics.median(theirs) / options.threads, "unit": "1/s/core", "better": "higher", "runs": rounds}
    return int(finish("retriever_rate", options, measures, wrong))


if __name__ == "__main__":
    sys.exit(main())
