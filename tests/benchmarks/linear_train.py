"""Training of the gated delta rule, forward and backward, against the chunked reference of transformers, on the lengths of real histories.

Lengths: 256 users of Amazon Beauty, three codes an item; and 32 users at even steps of KuaiRand-27K's distribution, divided by 20. transformers pads: it gets the
histories in order of length in 1, 4, 16 and 64 batches, and the fastest of these, found by one run of each, is the baseline. The layer is all of Qwen3-Next's mixer (projections, short
convolution, gates, norm), with the same weights, beside ours. Prompts are read by a layer's mixer, of linear attention and of softmax with about as many parameters.

With --quick every eighth history. With one thread processor time is measured, so that the machine may do other things beside; with more the time that passes.

    python tests/benchmarks/linear_train.py [--quick] [--json] [--threads 1] [--parts beauty kuairand_over_20 prompts] [--data ../shared/data]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from jagged_attention import beauty_lengths, differences, entry, kuairand_lengths, step  # type: ignore[import-not-found]
from stopwatch import alternate, arguments_parser, clock, finish  # type: ignore[import-not-found]

from semantide.kernels.attention import jagged_attention
from semantide.kernels.linear_attention import Rule, linear_attention, linear_attention_by_chunks
from semantide.shared.models.generator import GeneratorConfig
from semantide.shared.models.generator_layers import Attention
from semantide.shared.models.hybrid_weights import to_ours
from semantide.shared.models.linear_layer import FORMS, LinearAttention, LinearConfig

HEADS, HIDDEN = 4, 256
RULE = Rule(delta=True, per_channel=False)
BATCHES = (1, 4, 16, 64)
PARTS = ("beauty", "kuairand_over_20", "prompts")


def inputs(lengths: list[int], size: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """Queries and keys of length 1, values, decays and shares of writing that want gradients; the output's gradient."""
    generator, tokens = torch.Generator().manual_seed(size), sum(lengths)
    q, k, v, gradient = (torch.randn(tokens, HEADS, size, generator=generator) for _ in range(4))
    q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
    g, beta = -torch.rand(tokens, HEADS, generator=generator), torch.rand(tokens, HEADS, generator=generator)
    return tuple(x.requires_grad_() for x in (q, k, v, g, beta)), gradient


def padded(lengths: list[int], batches: int, call: Callable[[list[Tensor]], Tensor], leaves: tuple[Tensor, ...]) -> Tensor:
    """Sequences in order of length, in so many batches, each padded to its longest; the answer is in the order of the pack."""
    parts = [x.split(lengths) for x in leaves]
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    size = -(-len(order) // batches)
    rows: dict[int, Tensor] = {}
    for begin in range(0, len(order), size):
        chosen = order[begin : begin + size]
        out = call([nn.utils.rnn.pad_sequence([part[i] for i in chosen], batch_first=True) for part in parts])
        rows |= {i: row[: lengths[i]] for i, row in zip(chosen, out, strict=True)}
    return torch.cat([rows[i] for i in range(len(lengths))])


def operator_rows(name: str, lengths: list[int], options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """The operator alone, for heads of 64 and 128."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    offsets = torch.tensor([0, *accumulate(lengths)])
    for size in (64,) if options.quick else (64, 128):
        leaves, gradient = inputs(lengths, size)
        q, k, v, g, beta = leaves
        scale = size**-0.5  # theirs scales queries itself

        def theirs(batch: list[Tensor]) -> Tensor:
            return torch_chunk_gated_delta_rule(*batch)[0]

        functions: dict[str, Callable[[], Tensor]] = {
            "ours": lambda: linear_attention(q * scale, k, v, g, beta, offsets, None, RULE)[0],  # noqa: B023
            "chunks": lambda: linear_attention_by_chunks(q * scale, k, v, g, beta, offsets, None, RULE)[0],  # noqa: B023
        }
        functions |= {f"padded_{many}": lambda many=many, leaves=leaves: padded(lengths, many, theirs, leaves) for many in BATCHES}
        run(f"{name}_{size}", functions, leaves, gradient, options, measures, wrong, {"at_least": 3, "aim": 8})


def layer_rows(name: str, lengths: list[int], options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """The whole mixer of a layer."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    size = 64
    shape = LinearConfig(HEADS, HEADS, size, size)
    torch.manual_seed(0)
    theirs = Qwen3NextGatedDeltaNet(
        Qwen3NextConfig(
            hidden_size=HIDDEN, num_hidden_layers=1, layer_types=["linear_attention"], linear_num_key_heads=HEADS, linear_num_value_heads=HEADS,
            linear_key_head_dim=size, linear_value_head_dim=size,
        ),
        0,
    )  # fmt: skip
    config = GeneratorConfig((8,), num_layers=1, hidden_size=HIDDEN, layer_types=("linear_attention",), linear=shape)
    at = "model.layers.0.linear_attn."
    weights = to_ours({at + name: x.detach() for name, x in theirs.state_dict().items()}, config, "qwen3_next")
    mixer = LinearAttention(shape, FORMS["linear_attention"], HIDDEN, 1e-6)
    mixer.load_state_dict({name.removeprefix(at): x for name, x in weights.items()})
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(sum(lengths), HIDDEN, generator=generator) for _ in range(2))
    leaves, offsets = (x.requires_grad_(),), torch.tensor([0, *accumulate(lengths)])
    functions: dict[str, Callable[[], Tensor]] = {"ours": lambda: mixer.output(x, mixer.read(x, offsets)[0])}
    functions |= {f"padded_{many}": lambda many=many: padded(lengths, many, lambda batch: theirs(batch[0]), leaves) for many in BATCHES}
    run(f"layer_{name}", functions, leaves, gradient, options, measures, wrong, {})
    for module in (mixer, theirs):
        module.zero_grad()


@torch.inference_mode()
def prompt_rows(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Reading one prompt: the mixer of a layer of linear attention beside a softmax one of as many parameters (hidden size 512, heads of 128)."""
    size = 512
    torch.manual_seed(0)
    shape = LinearConfig(2, 4, 128, 128)
    config = GeneratorConfig((8,), num_layers=1, hidden_size=size, num_heads=4, num_kv_heads=4, head_dim=128, linear=shape)
    softmax, linear = Attention(config).eval(), LinearAttention(shape, FORMS["linear_attention"], size, 1e-6).eval()
    lengths = (2048, 8192) if options.quick else (2048, 8192, 32768)
    x = torch.randn(lengths[-1], size, generator=torch.Generator().manual_seed(2))
    whole, part = (linear.read(x[:length], torch.tensor([0, length]))[0][:500] for length in (1000, 500))
    if (apart := float((whole - part).abs().max())) > 1e-4:
        wrong.append(f"the beginning of a prompt is read {apart:.1e} apart from a prompt that ends there")
    seconds: dict[int, dict[str, float]] = {}
    for length in lengths:
        angles = torch.arange(length)[:, None, None] * 10000.0 ** (-torch.arange(0, 128, 2) / 128)
        offsets = torch.tensor([0, length])

        turns = angles.cos(), angles.sin()

        def attended(x_TD: Tensor = x[:length], turns: tuple[Tensor, Tensor] = turns, offsets: Tensor = offsets) -> Tensor:
            return softmax.output(x_TD, jagged_attention(*softmax.project(x_TD, *turns), offsets))

        def read(x_TD: Tensor = x[:length], offsets: Tensor = offsets) -> Tensor:
            return linear.output(x_TD, linear.read(x_TD, offsets)[0])

        runs = 1 if length > 8192 else 3
        seconds[length] = alternate({"softmax": attended, "linear": read}, runs, clock=clock())
        told = f"softmax: {seconds[length]['softmax'] * 1e3:.1f} ms, {seconds[length]['linear'] * 1e3:.1f} here"
        measures[f"prompt_speedup_{length}"] = entry(seconds[length]["softmax"] / seconds[length]["linear"], "ratio", "higher", told, runs, {"at_least": 1})
    growth = seconds[lengths[-1]]["linear"] / seconds[lengths[0]]["linear"] / (lengths[-1] / lengths[0])
    measures[f"prompt_cost_a_token_{lengths[-1]}_over_{lengths[0]}"] = entry(growth, "ratio", "lower", "1 is linear", 1, {"at_least": 1.2, "aim": 1})


def run(
    name: str,
    functions: dict[str, Callable[[], Tensor]],
    leaves: tuple[Tensor, ...],
    gradient: Tensor,
    options: Any,
    measures: dict[str, dict[str, Any]],
    wrong: list[str],
    bounds: dict[str, float],
) -> None:
    """Compare answers and gradients, then time forward and backward."""
    runs = 3 if options.quick else 9
    steps = {key: lambda f=f: step(f, leaves, gradient) for key, f in functions.items()}
    answer = steps["ours"]()
    for other in [key for key in functions if key != "ours"]:
        if (apart := differences(answer, steps[other]())) > 2e-4:
            wrong.append(f"{name}: {apart:.1e} away from {other}")
    # How many batches are best for the baseline is found first; only the best is then measured often.
    once = alternate(steps, 1, clock=clock())
    fastest = min((key for key in functions if key.startswith("padded")), key=once.__getitem__)
    seconds = alternate({key: steps[key] for key in ("ours", fastest)}, runs, clock=clock())
    told = f"transformers, {fastest.removeprefix('padded_')} padded batches: {seconds[fastest] * 1e3:.1f} ms; {seconds['ours'] * 1e3:.1f} here"
    if "chunks" in once:
        told += f", {once['chunks'] * 1e3:.1f} our torch form"
    measures[f"speedup_{name}"] = entry(seconds[fastest] / seconds["ours"], "ratio", "higher", told, runs, bounds)
    one = once["padded_1"]
    measures[f"speedup_one_batch_{name}"] = entry(one / seconds["ours"], "ratio", "higher", f"one padded batch: {one * 1e3:.1f} ms", 1)


def main() -> int:
    """Measure and print."""
    warnings.filterwarnings("ignore")
    parser = arguments_parser(__doc__ or "", data=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measures: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for name, read in (
        each
        for each in (("beauty", lambda folder: [3 * n // 4 for n in beauty_lengths(folder)]), ("kuairand_over_20", kuairand_lengths))
        if each[0] in options.parts
    ):
        try:
            lengths = read(options.data)
        except OSError as error:
            print(f"WITHOUT THE ROWS OF {name}: {error}; give --data a folder that holds amazon/ and kuairand/", file=sys.stderr)
            continue
        lengths = lengths[:: 8 if options.quick else 1]
        operator_rows(name, lengths, options, measures, wrong)
        if name == "beauty":
            layer_rows(name, lengths, options, measures, wrong)
    if "prompts" in options.parts:
        prompt_rows(options, measures, wrong)
    return finish("linear_train", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
