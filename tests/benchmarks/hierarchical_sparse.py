"""Exchange of embeddings on a network of two tiers: tables sharded inside a node and kept alike across nodes, against one table sharded over all ranks.

Real processes, one rank each, on nodes that are network namespaces with links held to their rates (``two_tier_network``; needs root). Every step each rank looks up the rows of its
targets (Zipf 1.0) and of R negatives a target (popularity^0.75), and sends gradients back; then all ranks add up dense gradients. The forms alternate step block by step
block on the same ids:

    flat        one table over all ranks (our own code with one group)
    exact       one group a node; copies that act as one table, equal to flat
    periodic    one group a node; copies that meet every --every steps

Times are seconds in collectives, waiting included, mean over ranks; bytes are what the nodes' links sent. Before anything is timed flat and exact must
give the vectors of a single table.

    python tests/benchmarks/hierarchical_sparse.py [--quick] [--json] [--nodes 2] [--ranks-per-node 8] [--link-mbit 200] [--inside 8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stopwatch import finish  # type: ignore[import-not-found]
from two_tier_network import TwoTierNetwork  # type: ignore[import-not-found]

from semantide.services.training.hierarchical_sparse import ExactReplicas, PeriodicReplicas
from semantide.services.training.sharded_table import ShardedTable, rows_of_share
from semantide.services.training.world import World
from semantide.shared.models.item_table import LocalTable

FORMS = ("flat", "exact", "periodic")
INSIDE = ("ids", "vectors", "gradients")
RATE = 0.05


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one block of steps: about a minute")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--link-mbit", type=int, default=200, help="of a node's link, Mbit/s")
    parser.add_argument("--inside", type=float, default=8.0, help="a node's inside is this many times as fast as its link")
    parser.add_argument("--rows", type=int, default=100_000, help="items in the table")
    parser.add_argument("--size", type=int, default=64, help="of a vector")
    parser.add_argument("--targets", type=int, default=512, help="a rank and step")
    parser.add_argument("--negatives", type=int, default=128, help="a target")
    parser.add_argument("--every", type=int, default=8, help="steps from one meeting to the next; also the steps of a block")
    parser.add_argument("--dense", type=int, default=1_000_000, help="dense parameters, whose gradients all ranks add up every step")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


class Ids:
    """The ids that a rank looks up in each step."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self._options, self._rank = options, rank
        popularity = 1 / np.arange(1, options.rows + 1)
        self._targets, self._negatives = (np.cumsum(share / share.sum()) for share in (popularity, popularity**0.75))

    def step(self, number: int, targets: int) -> Tensor:
        """Rows of targets and negatives."""
        rng = np.random.default_rng([self._rank, number])
        drawn = [np.searchsorted(self._targets, rng.random(targets)), np.searchsorted(self._negatives, rng.random(targets * self._options.negatives))]
        return torch.from_numpy(np.minimum(np.concatenate(drawn), self._options.rows - 1))


def gradients(rows: int, size: int, rank: int, number: int) -> Tensor:
    """Gradients of a rank's unique rows in one step."""
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rank + 1000 * number))


class Form:
    """One way to spread the table, and what its steps took."""

    def __init__(self, name: str, options: argparse.Namespace, world: World) -> None:
        grid = world.grid(world.size if name == "flat" else options.ranks_per_node)
        first_ND = initial(options)
        share = LocalTable(rows_of_share(options.rows, grid.shards), options.size, optimiser="adagrad")
        share.weight_ND.copy_(first_ND[grid.shards.rank :: grid.shards.size])
        self.copy: Any = {
            "flat": lambda: share,
            "exact": lambda: ExactReplicas(share, grid.replicas),
            "periodic": lambda: PeriodicReplicas(share, grid.replicas, options.every),
        }[name]()
        self.name, self.table, self.local, self.grid = name, ShardedTable(self.copy, options.rows, grid.shards), share, grid

    def step(self, ids: Tensor, rank: int, number: int) -> Tensor:
        """The vectors of the step's unique ids, before its update."""
        route = self.table.route(ids)
        vectors = self.table.fetch(route)
        self.table.update(route, gradients(len(vectors), vectors.shape[1], rank, number), RATE)
        return vectors

    def seconds(self) -> dict[str, float]:
        """Seconds in collectives so far, by what was exchanged."""
        return {what: traffic.seconds for what, traffic in self.table.traffic().items()}


def initial(options: argparse.Namespace) -> Tensor:
    """The table's first vectors."""
    return torch.randn(options.rows, options.size, generator=torch.Generator().manual_seed(5))


def differences(options: argparse.Namespace, world: World, forms: dict[str, Form], ids: Ids) -> list[str]:
    """What flat and exact give that one table does not, and copies that differ from each other."""
    wrong = []
    single = LocalTable(options.rows, options.size, optimiser="adagrad")
    single.weight_ND.copy_(initial(options))
    for number in range(3):
        own = ids.step(number, max(options.targets // 16, 1))
        vectors = {name: forms[name].step(own, world.rank, number) for name in ("flat", "exact")}
        everyone = [part.unique() for part in world.all_gather(own)]
        all_ids = torch.cat(everyone)
        route = single.route(all_ids)
        expected = single.fetch(single.route(own))
        wrong += [
            f"{name}, step {number}, rank {world.rank}: {float((got - expected).abs().max()):.1e} away from one table"
            for name, got in vectors.items()
            if not torch.allclose(got, expected, rtol=1e-4, atol=1e-5)
        ]
        sums = torch.zeros(len(route.ids_U), options.size)
        sums.index_add_(0, route.inverse_T, torch.cat([gradients(len(part), options.size, rank, number) for rank, part in enumerate(everyone)]))
        single.update(route, sums, RATE)
    forms["exact"].copy.settle()
    copies = forms["exact"].grid.replicas.all_gather(forms["exact"].local.weight_ND)
    return wrong + [f"rank {world.rank}: copy {group} differs" for group, other in enumerate(copies) if not torch.equal(other, copies[0])]


def sent_bytes() -> int:
    """What this node's link has sent."""
    return int(Path("/sys/class/net/uplink/statistics/tx_bytes").read_text())


def worker(options: argparse.Namespace) -> None:
    """One rank; the first writes what all of them found."""
    torch.set_num_threads(options.threads)
    world = World.join("cpu", clock=time.perf_counter)
    forms, ids = {name: Form(name, options, world) for name in FORMS}, Ids(options, world.rank)
    dense = world.channel()
    wrong = differences(options, world, forms, ids)
    blocks: list[dict[str, Any]] = []
    number = 10
    for _ in range(1 if options.quick else 5):
        block: dict[str, Any] = {}
        steps = [ids.step(number + place, options.targets) for place in range(options.every)]
        for name, form in forms.items():
            world.barrier()
            before, bytes_before, started = form.seconds(), sent_bytes(), time.perf_counter()
            for place, own in enumerate(steps):
                form.step(own, world.rank, number + place)
            world.barrier()
            block[name] = {what: (after - before[what]) / options.every for what, after in form.seconds().items()}
            block[name] |= {"wall": (time.perf_counter() - started) / options.every, "bytes": (sent_bytes() - bytes_before) / options.every}
        before_dense = dense.traffic.seconds
        for _ in range(2):
            dense.all_reduce_sum(torch.ones(options.dense))
        block["dense"] = (dense.traffic.seconds - before_dense) / 2
        block["unique"], block["drift"] = len(steps[0].unique()), forms["periodic"].copy.drift
        blocks.append(block)
        number += options.every
    everyone = world.gather_json({"blocks": blocks, "wrong": wrong})
    if world.leads:
        options.worker.write_text(json.dumps(everyone))
    world.barrier()
    world.close()


def run(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Start all ranks on their nodes and wait for what they found."""
    result, size = folder / "result.json", options.nodes * options.ranks_per_node
    with TwoTierNetwork(options.nodes, options.link_mbit * 10**6, int(options.link_mbit * 10**6 * options.inside)) as network:
        processes = []
        for rank in range(size):
            environment = dict(os.environ) | {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank % options.ranks_per_node), "MASTER_ADDR": network.address(0), "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "uplink", "OMP_NUM_THREADS": str(options.threads),
            }  # fmt: skip
            command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(result)]
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(network.start(rank // options.ranks_per_node, command, environment, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [process.wait(600) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(codes):
        rank = next(rank for rank, code in enumerate(codes) if code)
        raise SystemExit(f"rank {rank} ended with {codes[rank]}:\n{(folder / f'rank{rank}.log').read_text()[-3000:]}")
    found: list[dict[str, Any]] = json.loads(result.read_text())
    return found


def main() -> int:
    """Measure and print."""
    options = parse()
    if options.worker:
        worker(options)
        return 0
    if missing := TwoTierNetwork.missing():
        raise SystemExit(f"no network of two tiers here ({missing}): run this as root on Linux with iproute2")
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(options, Path(folder))
    wrong = [line for rank in ranks for line in rank["wrong"]]
    leaders = ranks[:: options.ranks_per_node]

    def median(values: list[float]) -> float:
        return statistics.median(values)

    num_blocks = len(ranks[0]["blocks"])

    def mean(form: str, whats: tuple[str, ...], block: int) -> float:
        return sum(rank["blocks"][block][form][what] for rank in ranks for what in whats) / len(ranks)

    def inside(form: str, block: int) -> float:
        return mean(form, INSIDE, block)

    def sparse(form: str, block: int) -> float:
        return mean(form, tuple(what for what in ranks[0]["blocks"][0][form] if what not in ("wall", "bytes")), block)

    def dense(block: int) -> float:
        return sum(float(rank["blocks"][block]["dense"]) for rank in ranks) / len(ranks)

    def link(form: str, block: int) -> float:
        return sum(float(rank["blocks"][block][form]["bytes"]) for rank in leaders) / len(leaders)

    rows = range(num_blocks)
    measures: dict[str, dict[str, Any]] = {}

    def saved(name: str, values: list[float], at_least: float, aim: float, baseline: str) -> None:
        bounds = {"at_least": at_least, "aim": aim} if at_least else {}
        measures[name] = {"value": round(100 * median(values), 1), "unit": "%", "better": "higher", "baseline": baseline, **bounds, "runs": num_blocks}

    for form in FORMS[1:]:
        saved(
            f"all_to_all_saved_{form}",
            [1 - inside(form, b) / inside("flat", b) for b in rows],
            75,
            85,
            f"flat, {median([inside('flat', b) for b in rows]):.3f} s a step",
        )
        total = [1 - (sparse(form, b) + dense(b)) / (sparse("flat", b) + dense(b)) for b in rows]
        saved(f"communication_saved_{form}", total, 39, 55, f"flat with the dense sum, {median([sparse('flat', b) + dense(b) for b in rows]):.3f} s a step")
        saved(f"sparse_communication_saved_{form}", [1 - sparse(form, b) / sparse("flat", b) for b in rows], 0, 0, "flat without the dense sum")
        saved(
            f"link_bytes_saved_{form}",
            [1 - link(form, b) / link("flat", b) for b in rows],
            0,
            0,
            f"flat, {median([link('flat', b) for b in rows]) / 1e6:.1f} MB a node and step",
        )
    for form in FORMS:
        seconds = {what: median([mean(form, (what,), b) for b in rows]) for what in ranks[0]["blocks"][0][form] if what != "bytes"}
        split = ", ".join(f"{what} {value * 1e3:.0f}" for what, value in seconds.items() if what != "wall")
        measures[f"wall_ms_{form}"] = {
            "value": round(seconds["wall"] * 1e3, 1),
            "unit": "ms",
            "better": "lower",
            "baseline": f"of it in collectives: {split}",
            "runs": num_blocks,
        }
    measures["dense_ms"] = {
        "value": round(1e3 * median([dense(b) for b in rows]), 1),
        "unit": "ms",
        "better": "lower",
        "baseline": f"{options.dense} parameters",
        "runs": num_blocks,
    }
    drift = median([sum(float(rank["blocks"][b]["drift"]) for rank in ranks) / len(ranks) for b in rows])
    measures["drift_periodic"] = {
        "value": round(drift, 5),
        "unit": "of the mean",
        "better": "lower",
        "baseline": f"copies after {options.every} steps apart",
        "runs": num_blocks,
    }
    measures["unique_rows"] = {
        "value": ranks[0]["blocks"][0]["unique"],
        "unit": "a rank",
        "better": "lower",
        "baseline": f"of {options.targets * (1 + options.negatives)} ids",
    }
    return finish("hierarchical_sparse", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
