"""Embedding look-ups of jagged sequences against padded ``nn.Embedding``, and the whole step against fbgemm's table-batched embedding.

    python tests/benchmarks/jagged_embedding.py [--quick] [--json] [--slots 1000000] [--rows 1000000] [--size 64] [--fbgemm-python PYTHON]

A million slots of which 50.43 % are padding (TurboGR's workload); ids follow a power law as items do, and are uniform in a second pass. Ours is timed as the
trainer calls it: ids once (unique), rows gathered, vectors back to their places; gradients summed per row; row-wise Adagrad. Answers are compared first.
Training processes keep the memory that tensors give back (shared/allocator.py); the padded baseline runs as torch comes, and once more with the same memory
(same_memory), so that both causes can be told apart.
With --fbgemm-python (an environment with fbgemm-gpu-cpu 1.8) its SUM pooling of one id a bag and row-wise Adagrad does the same step on the same ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from stopwatch import alternate

from semantide.kernels.jagged_embedding import adagrad_rows, gather_rows, segment_order, segment_sum, unique_ids
from semantide.shared.allocator import keep_freed_memory
from semantide.shared.version import code_version

PADDING = 0.5043
RATE = 0.05

FBGEMM = """
import json, sys, time
import numpy as np, torch
import fbgemm_gpu
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
torch.set_num_threads(int(sys.argv[3]))
data, runs = np.load(sys.argv[1]), int(sys.argv[2])
weight, grads = torch.from_numpy(data["weight"]), torch.from_numpy(data["grads"])
ids = torch.from_numpy(data["ids"])
table = SplitTableBatchedEmbeddingBagsCodegen([(*weight.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    pooling_mode=PoolingMode.SUM, learning_rate=float(sys.argv[4]), eps=1e-8)
table.split_embedding_weights()[0].copy_(weight)
offsets = torch.arange(len(ids) + 1)
times = []
for run in range(runs + 1):
    begin = time.perf_counter()
    table(ids, offsets).backward(grads)
    times.append(time.perf_counter() - begin)
    if run == 0:
        rows = torch.from_numpy(data["probe"])
        probe = table.split_embedding_weights()[0][rows].tolist()
print(json.dumps({"seconds": times[1:], "probe": probe}))
"""


def ids_of(kind: str, slots: int, rows: int, seed: int) -> torch.Tensor:
    """Asked ids without padding; row 0 is kept for padding."""
    rng = np.random.default_rng(seed)
    count = round(slots * (1 - PADDING))
    if kind == "uniform":
        return torch.from_numpy(rng.integers(1, rows, count))
    ranks = rng.permutation(rows - 1) + 1
    return torch.from_numpy(ranks[np.minimum((rng.random(count) ** 4 * (rows - 1)).astype(np.int64), rows - 2)])


class Work:
    """One set of ids, a table, and gradients of the looked-up vectors."""

    def __init__(self, kind: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.ids_T = ids_of(kind, options.slots, options.rows, 1)
        self.padded_S = torch.zeros(options.slots, dtype=torch.int64)
        self.places_T = torch.from_numpy(np.sort(np.random.default_rng(2).permutation(options.slots)[: len(self.ids_T)]))
        self.padded_S[self.places_T] = self.ids_T
        self.module = torch.nn.Embedding(options.rows, options.size, padding_idx=0)
        self.weight_ND = self.module.weight.detach().clone()
        self.sums_N = torch.zeros(options.rows)
        self.grads_TD = torch.randn(len(self.ids_T), options.size)
        self.grads_SD = torch.zeros(options.slots, options.size)
        self.grads_SD[self.places_T] = self.grads_TD
        self.rate = RATE
        self.unique = unique_ids(self.ids_T, options.rows)  # known since the forward pass
        self.leaf = self.module(self.padded_S)  # what the padded backward pass starts from

    def padded_forward(self) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = self.module(self.padded_S)
        return found

    def padded_backward(self) -> torch.Tensor:
        self.module.weight.grad = None
        torch.autograd.backward(self.leaf, self.grads_SD, retain_graph=True)
        gradient: torch.Tensor = self.module.weight.grad
        return gradient

    def forward(self) -> torch.Tensor:
        unique = unique_ids(self.ids_T, len(self.weight_ND))
        return gather_rows(gather_rows(self.weight_ND, unique.ids_U), unique.inverse_T)

    def direct_forward(self) -> torch.Tensor:
        return gather_rows(self.weight_ND, self.ids_T)

    def backward(self) -> torch.Tensor:
        return segment_sum(self.grads_TD, segment_order(self.unique.inverse_T, len(self.unique.ids_U)))

    def step(self) -> None:
        """Ids once, vectors to their places, gradients summed and rows stepped in one pass."""
        unique = unique_ids(self.ids_T, len(self.weight_ND))
        gather_rows(gather_rows(self.weight_ND, unique.ids_U), unique.inverse_T)
        order = segment_order(unique.inverse_T, len(unique.ids_U))
        adagrad_rows(self.weight_ND, self.sums_N, unique.ids_U, self.grads_TD, self.rate, order)


def wrong(work: Work) -> list[str]:
    """What differs between the two."""
    found = []
    padded_TD = work.padded_forward()[work.places_T]
    if not torch.equal(work.forward(), padded_TD) or not torch.equal(work.direct_forward(), padded_TD):
        found.append("vectors")
    ids_U, sums_UD = work.unique.ids_U, work.backward()
    gradient_ND = work.padded_backward()
    if not torch.allclose(gradient_ND[ids_U], sums_UD, rtol=1e-4, atol=1e-4) or int((gradient_ND.abs().sum(1) > 0).sum()) > len(ids_U):
        found.append("gradients")
    return found


def fbgemm(work: Work, options: argparse.Namespace) -> dict[str, Any] | None:
    """Seconds of fbgemm's steps and, after the first, some rows of its table; None where it cannot run."""
    probe = work.ids_T[:200].unique()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        np.savez(path, weight=work.weight_ND.numpy(), grads=work.grads_TD.numpy(), ids=work.ids_T.numpy(), probe=probe.numpy())
        script = Path(folder) / "fbgemm_step.py"
        script.write_text(FBGEMM)
        command = [options.fbgemm_python, "-W", "ignore", str(script), str(path), str(options.runs), str(torch.get_num_threads()), str(RATE)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.stderr.write(f"fbgemm could not run: {done.stderr.strip().splitlines()[-1:]}\n")
        return None
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    work.sums_N.zero_()  # as theirs begin
    work.step()
    answer["equal"] = torch.allclose(work.weight_ND[probe], torch.tensor(answer["probe"]), rtol=1e-3, atol=1e-4)
    return answer


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the size, few runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--slots", type=int, help="places with padding; default 1,000,000")
    parser.add_argument("--rows", type=int, help="rows of the table; default 1,000,000")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--runs", type=int)
    parser.add_argument("--fbgemm-python", help="interpreter of an environment with fbgemm-gpu-cpu 1.8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--padded", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.slots = options.slots or (50_000 if options.quick else 1_000_000)
    options.rows = options.rows or (50_000 if options.quick else 1_000_000)
    options.runs = options.runs or (3 if options.quick else 9)
    if options.padded:
        work = Work(options.padded, options)
        print(json.dumps(alternate({"forward": work.padded_forward, "backward": work.padded_backward}, options.runs)))
        return 0
    keep_freed_memory()
    measures: dict[str, Any] = {}
    for kind in ("power_law", "uniform"):
        work = Work(kind, options)
        if differences := wrong(work):
            sys.stderr.write(f"{kind}: {', '.join(differences)} differ\n")
            return 1
        unique = len(work.unique.ids_U)
        note = f"padded nn.Embedding; {unique} of {len(work.ids_T)} ids are different"
        begun = padded_alone(kind, options)
        for part, functions, theirs, bounds in (
            ("forward", {"ours": work.direct_forward, "unique": work.forward}, work.padded_forward, (6, 8)),
            ("backward", {"ours": work.backward}, work.padded_backward, (4, 8)),
        ):
            times = alternate({**functions, "same_memory": theirs}, options.runs)
            times["padded"] = begun[part]
            measures[f"{kind}_{part}"] = ratio(times, "padded", "ours", note, options.runs, *bounds)
            measures[f"{kind}_{part}_same_memory"] = ratio(times, "same_memory", "ours", note, options.runs)
            if "unique" in times:
                measures[f"{kind}_{part}_through_unique_rows"] = ratio(times, "padded", "unique", note, options.runs)
        seconds = alternate({"ours": work.step}, options.runs)["ours"]
        measures[f"{kind}_step_ms"] = {"value": round(seconds * 1e3, 2), "unit": "ms", "better": "lower", "baseline": note, "runs": options.runs}
        if options.fbgemm_python and (theirs := fbgemm(work, options)):
            if not theirs["equal"]:
                sys.stderr.write(f"{kind}: the tables differ after a step of fbgemm and one of ours\n")
                return 1
            median = float(np.median(theirs["seconds"]))
            measures[f"{kind}_step_over_fbgemm"] = {
                "value": round(median / seconds, 2), "unit": "ratio", "better": "higher", "baseline": f"fbgemm, unpadded, {median * 1e3:.1f} ms",
                "at_least": 1, "aim": 2, "runs": options.runs,
            }  # fmt: skip
    setting = {"slots": options.slots, "rows": options.rows, "size": options.size, "padding": PADDING, "threads": torch.get_num_threads()}
    result = {"benchmark": "jagged_embedding", "commit": code_version(), "machine": machine(), "setting": setting, "measures": measures}
    if options.json:
        print(json.dumps(result))
    else:
        for name, entry in measures.items():
            print(f"{name:36} {entry['value']:>9} {entry['unit']:6} at least {entry.get('at_least', '-'):>3}  {entry['baseline']}")
    return 0


def padded_alone(kind: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of the padded baseline in a process that handles memory as torch and the system do by themselves."""
    command = [sys.executable, __file__, "--padded", kind]
    for name in ("slots", "rows", "size", "runs", "threads"):
        command += [f"--{name}", str(getattr(options, name))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds: dict[str, float] = json.loads(done.stdout)
    return seconds


def ratio(times: dict[str, float], theirs: str, ours: str, note: str, runs: int, at_least: float | None = None, aim: float | None = None) -> dict[str, Any]:
    """One measure."""
    detail = f"{note}: {times[theirs] * 1e3:.1f} ms against {times[ours] * 1e3:.1f}"
    bound = {} if at_least is None else {"at_least": at_least, "aim": aim}
    return {"value": round(times[theirs] / times[ours], 2), "unit": "ratio", "better": "higher", "baseline": detail, "runs": runs, **bound}


if __name__ == "__main__":
    sys.exit(main())
