"""Attention of beams over one shared prompt, against flattened beams that each have a copy of it.

The flattened baseline is torch's fused attention over keys and values that already lie there once per beam: the copying that a reorder would cost is not
counted against it. The staged form in torch is measured too. One request; own tokens of two steps.

    python tests/benchmarks/staged_attention.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stopwatch import alternate, arguments, finish  # type: ignore[import-not-found]

from semantide.kernels.attention import beam_attention, beam_attention_by_length

SIZE, STEPS = 64, 2
HEADS = {"d256": (4, 4), "d512": (8, 8), "d512_grouped": (8, 2)}
MOST_BYTES = 2 << 30  # of the flattened copies


def inputs(prompt: int, width: int, heads: int, groups: int) -> tuple[torch.Tensor, ...]:
    """Random queries, keys, values and ancestors."""
    generator = torch.Generator().manual_seed(prompt + width)
    q = torch.randn(1, width, heads, SIZE, generator=generator)
    prompt_k, prompt_v = torch.randn(2, prompt, groups, SIZE, generator=generator)
    own_k, own_v = torch.randn(2, width * STEPS, groups, SIZE, generator=generator)
    ancestors = torch.randint(width * STEPS, (1, width, STEPS), generator=generator)
    return q, prompt_k, prompt_v, torch.tensor([0, prompt]), own_k, own_v, ancestors


def flatten(prompt: torch.Tensor, own: torch.Tensor, ancestors: torch.Tensor) -> torch.Tensor:
    """The prompt once per beam, and the beam's own tokens after it: [W, G, T + S, D]."""
    width = ancestors.shape[1]
    copies = prompt.transpose(0, 1).expand(width, -1, -1, -1)
    return torch.cat([copies, own[ancestors[0]].transpose(1, 2)], 2).contiguous()


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "")
    shapes = [(150, 128), (600, 10), (600, 128), (600, 256), (2000, 128)]
    models = ["d256", "d512_grouped"] if options.quick else list(HEADS)
    if not options.quick:
        shapes += [(150, 10), (150, 512), (600, 50), (600, 512), (2000, 10), (2000, 256), (2000, 512)]
    runs = 5 if options.quick else 9
    measures: dict[str, dict[str, Any]] = {}
    wrong = []
    for model in models:
        heads, groups = HEADS[model]
        for prompt, width in sorted(shapes):
            if 2 * width * (prompt + STEPS) * groups * SIZE * 4 > MOST_BYTES:
                continue
            given = inputs(prompt, width, heads, groups)
            q, prompt_k, prompt_v, _, own_k, own_v, ancestors = given
            flat_k, flat_v = flatten(prompt_k, own_k, ancestors), flatten(prompt_v, own_v, ancestors)
            flat_q = q[0].unsqueeze(2)

            def flattened(q: torch.Tensor = flat_q, k: torch.Tensor = flat_k, v: torch.Tensor = flat_v) -> torch.Tensor:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=k.shape[1] != q.shape[1])

            def ours(given: tuple[torch.Tensor, ...] = given) -> torch.Tensor:
                return beam_attention(*given)

            def staged(given: tuple[torch.Tensor, ...] = given) -> torch.Tensor:
                return beam_attention_by_length(*given)

            name = f"{model}_prompt{prompt}_width{width}"
            for other, answer in (("flattened", flattened().squeeze(2)), ("staged in torch", staged()[0])):
                if not torch.allclose(ours()[0], answer, rtol=1e-4, atol=1e-5):
                    wrong.append(f"{name}: {float((ours()[0] - answer).abs().max()):.2e} away from {other}")
            seconds = alternate({"ours": ours, "staged": staged, "flattened": flattened}, runs)
            entry = {"value": round(seconds["flattened"] / seconds["ours"], 2), "unit": "ratio", "better": "higher", "baseline": "flattened beams, torch"}
            bounds = {"at_least": 6.6, "aim": 10} if prompt >= 600 and width >= 128 else {}
            measures[f"speedup_{name}"] = entry | bounds | {"runs": runs}
            measures[f"over_torch_staged_{name}"] = {
                "value": round(seconds["staged"] / seconds["ours"], 2),
                "unit": "ratio",
                "better": "higher",
                "baseline": "staged attention, torch",
                "runs": runs,
            }
            measures[f"ms_{name}"] = {
                "value": round(seconds["ours"] * 1e3, 4),
                "unit": "ms",
                "better": "lower",
                "baseline": f"{seconds['flattened'] * 1e3:.3f} flattened, {seconds['staged'] * 1e3:.3f} staged in torch",
                "runs": runs,
            }
    return finish("staged_attention", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
