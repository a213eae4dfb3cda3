"""Jagged fused attention, forward and backward, against what torch offers for sequences of different lengths.

Lengths: a sample of 256 users of Amazon Beauty, times 4; and 32 users at even steps of KuaiRand-27K's distribution, divided by 20. Four heads of 64. Useful
work is that of the pairs a causal attention needs: two products forward and five backward (one of them the scores again), 2 * 64 operations each.
The long row is one sequence with the bias of times and positions: padding plays no part in it; its baseline writes bucket, bias and scores as [n, n] matrices.
Peak memory is what a step adds to a process that holds its inputs.

    python tests/benchmarks/jagged_attention.py [--quick] [--json] [--threads 1] [--data ../shared/data]
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from public_data import read_sequences  # type: ignore[import-not-found]
from stopwatch import alternate, arguments, finish  # type: ignore[import-not-found]

from semantide.kernels.attention import jagged_attention_by_length
from semantide.kernels.jagged_fusion_attention import BUCKET_LOG, jagged_fusion_attention

HEADS, SIZE, BUCKETS = 4, 64, 128
PRODUCT = 1024  # rows of the square product that stands for the processor's peak

Leaves = tuple[Tensor, ...]


def beauty_lengths(folder: Path) -> list[int]:
    """Of 256 users, times 4."""
    lengths = [len(sequence) for sequence in read_sequences(folder / "amazon" / "beauty.seq")]
    return (np.random.default_rng(0).choice(lengths, 256) * 4).tolist()


def kuairand_lengths(folder: Path) -> list[int]:
    """Of 32 users at the middles of even steps, by interpolation in logarithms, divided by 20."""
    percent, exposures = np.loadtxt(folder / "kuairand" / "kuairand27k_len_quantiles.csv", delimiter=",", skiprows=1).T
    lengths = np.exp(np.interp((np.arange(32) + 0.5) / 32 * 100, percent, np.log(exposures)))
    return (lengths.clip(100, 228000) / 20).astype(int).tolist()


def useful_operations(lengths: list[int]) -> float:
    """Of a step, forward and backward."""
    return sum(n * (n + 1) / 2 for n in lengths) * HEADS * SIZE * 14


def inputs(lengths: list[int], heads: int = HEADS, bias: bool = False) -> tuple[Leaves, Tensor, Tensor, Tensor]:
    """Queries, keys, values (and the tables of times and positions) that want gradients; the output's gradient, offsets, and times of bursts."""
    generator, tokens = torch.Generator().manual_seed(len(lengths)), sum(lengths)
    leaves = [torch.randn(tokens, heads, SIZE, generator=generator) for _ in range(3)]
    leaves += [0.1 * torch.randn(heads, count, generator=generator) for count in (BUCKETS, max(lengths))] if bias else []
    gradient = torch.randn(tokens, heads, SIZE, generator=generator)
    times = torch.cat([(torch.rand(n, generator=generator) * 12).exp().long().cumsum(0) for n in lengths])
    return tuple(x.requires_grad_() for x in leaves), gradient, torch.tensor([0, *accumulate(lengths)]), times


def by_sequence(leaves: Leaves, lengths: list[int]) -> Tensor:
    """Torch's fused attention of each sequence by itself, over one split of each tensor."""
    parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in leaves), strict=True)
    return torch.cat([F.scaled_dot_product_attention(q, k, v, is_causal=True)[0] for q, k, v in parts], 1).transpose(0, 1)


def padded(leaves: Leaves, lengths: list[int]) -> Tensor:
    """Torch's fused attention of all sequences at the longest one's length."""
    batch = [torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True).transpose(1, 2) for x in leaves]
    out = F.scaled_dot_product_attention(*batch, is_causal=True).transpose(1, 2)
    return torch.cat([row[:n] for row, n in zip(out, lengths, strict=True)])


def materialised(leaves: Leaves, times: Tensor, softmax: bool) -> Tensor:
    """One sequence with all of its [n, n] matrices."""
    q, k, v, time_weights, position_weights = leaves
    n = len(q)
    buckets = ((times[:, None] - times[None, :]).abs().clamp(min=1).log() / BUCKET_LOG).long().clamp(max=BUCKETS - 1)
    places = torch.arange(n)
    bias = time_weights[:, buckets] + position_weights[:, (places[:, None] - places[None, :]).clamp(min=0)]
    future = torch.ones(n, n, dtype=torch.bool).triu(1)
    scores = q.transpose(0, 1) @ k.permute(1, 2, 0)
    masked = (scores / SIZE**0.5 + bias).masked_fill(future, -torch.inf) if softmax else (F.silu(scores + bias) / n).masked_fill(future, 0)
    weights = masked.softmax(-1) if softmax else masked
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


def step(function: Callable[[], Tensor], leaves: Leaves, gradient: Tensor) -> list[Tensor]:
    """Forward and backward: the output and all gradients."""
    output = function()
    output.backward(gradient)
    found = [output.detach(), *(x.grad for x in leaves if x.grad is not None)]
    for x in leaves:
        x.grad = None
    return found


def long_functions(leaves: Leaves, offsets: Tensor, times: Tensor, softmax: bool) -> dict[str, Callable[[], Tensor]]:
    """Ours and the baseline of the long row."""
    q, k, v, *tables = leaves
    form = "softmax" if softmax else "silu"
    return {
        "ours": lambda: jagged_fusion_attention(q, k, v, offsets, times, *tables, activation=form),
        "materialised": lambda: materialised(leaves, times, softmax),
    }


def peak_bytes(name: str, length: int, heads: int, threads: int) -> int:
    """What a step of the long row adds to this process at its highest."""
    torch.set_num_threads(threads)
    for n in (64, length):  # the short one loads what is loaded once
        leaves, gradient, offsets, times = inputs([n], heads, bias=True)
        function = long_functions(leaves, offsets, times, False)[name]
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        step(function, leaves, gradient)
    return memory("VmHWM") - before


def memory(field: str) -> int:
    """A size from this process's status, bytes."""
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


def differences(found: list[Tensor], expected: list[Tensor]) -> float:
    """The largest, relative to the largest number of its tensor."""
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-6)) for a, b in zip(found, expected, strict=True))


def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "", data=True)
    measures: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    jagged_rows(options, measures, wrong)
    long_rows(options, measures, wrong)
    return finish("jagged_attention", options, measures, wrong)


def jagged_rows(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Beauty and KuaiRand lengths, and the share of the processor's peak."""
    runs = 3 if options.quick else 11
    square = torch.randn(PRODUCT, PRODUCT, generator=torch.Generator().manual_seed(0))
    for name, read, bounds, share in (
        ("beauty_x4", beauty_lengths, {"at_least": 4, "aim": 8}, {}),
        ("kuairand_over_20", kuairand_lengths, {"at_least": 1.3, "aim": 1.7}, {"at_least": 50, "aim": 70}),
    ):
        try:
            lengths = read(options.data)
        except OSError as error:
            print(f"WITHOUT THE ROWS OF {name}: {error}; give --data a folder that holds amazon/ and kuairand/", file=sys.stderr)
            continue
        leaves, gradient, offsets, times = inputs(lengths)
        tables = [x.detach().requires_grad_() for x in inputs(lengths, bias=True)[0][3:]]
        functions: dict[str, Callable[[], Tensor]] = {
            "softmax": lambda leaves=leaves, offsets=offsets: jagged_fusion_attention(*leaves, offsets, activation="softmax"),
            "silu": lambda leaves=leaves, offsets=offsets: jagged_fusion_attention(*leaves, offsets),  # type: ignore[call-arg]
            "silu_bias": lambda leaves=leaves, offsets=offsets, times=times, tables=tables: jagged_fusion_attention(*leaves, offsets, times, *tables),  # type: ignore[call-arg]
            "by_sequence": lambda leaves=leaves, lengths=lengths: by_sequence(leaves, lengths),
            "by_length": lambda leaves=leaves, offsets=offsets: jagged_attention_by_length(*leaves, offsets),  # type: ignore[call-arg]
        }
        rare: dict[str, Callable[[], Tensor]] = {} if options.quick else {"padded": lambda leaves=leaves, lengths=lengths: padded(leaves, lengths)}
        torch_forms = ["by_sequence", "by_length", *rare]
        steps = {key: lambda f=f, leaves=leaves, gradient=gradient: step(f, leaves, gradient) for key, f in (functions | rare).items()}
        answer = steps["softmax"]()
        for other in torch_forms:
            if (apart := differences(answer, steps[other]())) > 1e-4:
                wrong.append(f"{name}: {apart:.1e} away from {other}")
        often = {key: f for key, f in steps.items() if key not in rare}
        seconds = alternate({**often, "peak": lambda: square @ square}, runs) | alternate({key: steps[key] for key in rare}, 1)
        peak = 2 * PRODUCT**3 / seconds["peak"] / 1e9
        fastest = min(torch_forms, key=seconds.__getitem__)
        told = ", ".join(f"{seconds[other] * 1e3:.1f} ms {other}" for other in torch_forms)
        rate = useful_operations(lengths) / 1e9
        measures[f"speedup_{name}"] = entry(seconds[fastest] / seconds["softmax"], "ratio", "higher", f"fastest of torch: {told}", runs, bounds)
        for form in ("softmax", "silu", "silu_bias"):
            measures[f"ms_{form}_{name}"] = entry(seconds[form] * 1e3, "ms", "lower", told, runs)
            of_peak = f"peak {peak:.0f} GFLOP/s of a {PRODUCT} x {PRODUCT} product; {rate / seconds[form]:.1f} here"
            measures[f"peak_share_{form}_{name}"] = entry(100 * rate / seconds[form] / peak, "%", "higher", of_peak, runs, share if form == "softmax" else {})


def long_rows(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Time and memory of one long sequence with its bias."""
    length, heads = (2048, 2) if options.quick else (8192, 2)
    runs = 3
    for softmax in (False, True):
        form = "softmax" if softmax else "silu"
        leaves, gradient, offsets, times = inputs([600], heads, bias=True)
        small = [step(function, leaves, gradient) for function in long_functions(leaves, offsets, times, softmax).values()]
        if (apart := differences(*small)) > 1e-4:
            wrong.append(f"{form} with bias: {apart:.1e} away from materialised")
        leaves, gradient, offsets, times = inputs([length], heads, bias=True)
        functions = long_functions(leaves, offsets, times, softmax)
        seconds = alternate({key: lambda f=f, leaves=leaves, gradient=gradient: step(f, leaves, gradient) for key, f in functions.items()}, runs)
        told = f"materialised bias: {seconds['materialised'] * 1e3:.0f} ms, {seconds['ours'] * 1e3:.0f} here"
        bounds = {"at_least": 2.2, "aim": 4}
        measures[f"speedup_{form}_bias_{length}"] = entry(seconds["materialised"] / seconds["ours"], "ratio", "higher", told, runs, bounds)
    if not Path("/proc/self/clear_refs").exists():
        print("WITHOUT THE MEMORY ROW: it needs Linux's /proc", file=sys.stderr)
        return
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = {key: pool.apply(peak_bytes, (key, length, heads, options.threads)) for key in ("ours", "materialised")}
    told = f"materialised bias: {found['materialised'] / 1e6:.0f} MB, {found['ours'] / 1e6:.0f} here"
    measures[f"memory_saved_silu_bias_{length}"] = entry(100 * (1 - found["ours"] / found["materialised"]), "%", "higher", told, 1, {"at_least": 70, "aim": 90})


def entry(value: float, unit: str, better: str, baseline: str, runs: int, bounds: dict[str, float] | None = None) -> dict[str, Any]:
    """One measure of the JSON object."""
    return {"value": round(value, 3), "unit": unit, "better": better, "baseline": baseline, **(bounds or {}), "runs": runs}


if __name__ == "__main__":
    sys.exit(main())
