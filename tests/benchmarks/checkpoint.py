"""How long training stands still for a checkpoint, against the step it is taken in and against one that is waited for.

The state is a retriever's: dense parameters with Adam's moments, and an item table with its own. Both ways are read back and compared first. A step is that
of the retriever itself on a batch of ``--items``; its time while a checkpoint is being written is told too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from stopwatch import finish
from torch import Tensor

from semantide.services.training.checkpoint import Checkpoints
from semantide.shared.models.retriever import Retriever, RetrieverConfig


def state_of(model: torch.nn.Module, table_ND: Tensor) -> dict[str, Tensor]:
    tensors = {"table.items.weight": table_ND, "table.items.first": table_ND * 0.1, "table.items.second": table_ND**2}
    for name, parameter in model.named_parameters():
        tensors |= {
            f"model.{name}": parameter.detach(),
            f"optimiser.exp_avg.{name}": parameter.detach() * 0.1,
            f"optimiser.exp_avg_sq.{name}": parameter.detach() ** 2,
        }
    return tensors


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=400_000, help="of the item table")
    parser.add_argument("--items", type=int, default=8192, help="of a batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, runs = (100_000, 3) if options.quick else (options.rows, 7)
    model = Retriever(RetrieverConfig("fuxi", 128, 4, 4, 512))
    tensors = state_of(model, torch.randn(rows, 128))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    lengths_B = torch.full((options.items // 256,), 256)
    offsets_B1 = torch.cat([torch.zeros(1, dtype=torch.int64), lengths_B.cumsum(0)])
    begins_T = torch.zeros(int(offsets_B1[-1]), dtype=torch.bool)
    begins_T[offsets_B1[:-1]] = True
    inputs_TD, times_T = torch.randn(len(begins_T), 128), torch.arange(len(begins_T)) * 60

    def step() -> float:
        began = time.perf_counter()
        model.zero_grad()
        model(inputs_TD, begins_T, offsets_B1, times_T).square().sum().backward()
        return time.perf_counter() - began

    wrong: list[str] = []
    found: dict[str, list[float]] = {"step": [], "stall": [], "whole": [], "busy": []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = {kind: Checkpoints(Path(folder) / kind, background=kind == "background") for kind in ("background", "waited")}
        for kind, opened in checkpoints.items():
            opened.save(0, tensors, {})
            saved = opened.latest()
            if saved is None or any(not torch.equal(saved.tensors[name], tensor) for name, tensor in tensors.items()):
                wrong.append(f"what {kind} wrote is not what was given")
        step()
        for run in range(1, runs + 1):
            found["step"].append(step())
            began = time.perf_counter()
            checkpoints["background"].save(run, tensors, {})
            found["stall"].append(time.perf_counter() - began)
            found["busy"].append(step())
            checkpoints["background"].wait()
            began = time.perf_counter()
            checkpoints["waited"].save(run, tensors, {})
            found["whole"].append(time.perf_counter() - began)
    seconds = {name: statistics.median(values) for name, values in found.items()}
    baseline = f"waited for: {seconds['whole']:.3f} s, {num_bytes / 1e6:.0f} MB"
    measures = {
        "stall_over_step": {
            "value": seconds["stall"] / seconds["step"], "unit": "steps", "better": "lower", "baseline": baseline, "at_least": 1.0, "aim": 0.5, "runs": runs,
        },
        "stall_seconds": {"value": seconds["stall"], "unit": "s", "better": "lower", "baseline": baseline, "runs": runs},
        "step_seconds": {"value": seconds["step"], "unit": "s", "better": "lower", "baseline": f"while one is written: {seconds['busy']:.3f} s", "runs": runs},
        "whole_over_stall": {"value": seconds["whole"] / seconds["stall"], "unit": "ratio", "better": "higher", "baseline": baseline, "runs": runs},
    }  # fmt: skip
    return finish("checkpoint", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
