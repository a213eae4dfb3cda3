"""What it costs that only ids of the catalog can come out: 256 beams over 300,000 items.

Ours is the select step over the item trie less the same step with every code allowed below every beam. The baseline is the same difference for a dense mask
that is filled from the trie and added to the logits. A filter on top (a mask of items and an exclude list) is measured in the same way.

    python tests/benchmarks/constraint.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from stopwatch import alternate, arguments, finish  # type: ignore[import-not-found]

from semantide.kernels.beam_select import beam_select
from semantide.shared.decoding.search_trie import ItemFilter, SearchTrie
from semantide.shared.trie import Trie

ITEMS, WIDTH = 300_000, 256


def catalog(num_codes: int, levels: int) -> SearchTrie:
    """Random distinct ids."""
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, num_codes, (ITEMS + ITEMS // 4, levels)), axis=0)
    return SearchTrie.build(Trie.build(codes[rng.permutation(len(codes))[:ITEMS]]))


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "")
    runs = 7 if options.quick else 31
    measures: dict[str, dict[str, Any]] = {}
    wrong = []
    widths, owners = torch.tensor([WIDTH]), torch.tensor([0])
    for num_codes, levels in [(256, 3)] if options.quick else [(256, 3), (256, 4), (2048, 3)]:
        trie = catalog(num_codes, levels)
        rng = np.random.default_rng(1)
        mask = trie.prefix_counts(rng.random(ITEMS) < 0.9)
        node_filter = ItemFilter.build(trie, [mask], [0], [rng.integers(0, ITEMS, 1000)])
        scores, nodes, live = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        for level in range(levels):
            offsets, codes = trie.offsets[level], trie.tokens[level]
            logits = torch.randn(1, nodes.shape[1], num_codes, generator=torch.Generator().manual_seed(level)) * 2.5
            every = torch.arange(nodes.shape[1])[None]
            full_offsets, full_codes = torch.arange(nodes.shape[1] + 1) * num_codes, torch.arange(num_codes).repeat(nodes.shape[1])
            leaves = node_filter.leaves(level + 1, owners)
            dense = torch.full((nodes.shape[1], num_codes), -1e4)

            def constrained(logits=logits, nodes=nodes, live=live, scores=scores, offsets=offsets, codes=codes) -> Any:  # type: ignore[no-untyped-def]
                return beam_select(logits, nodes, live, scores, widths, offsets, codes)

            def filtered(logits=logits, nodes=nodes, live=live, scores=scores, offsets=offsets, codes=codes, leaves=leaves) -> Any:  # type: ignore[no-untyped-def]
                return beam_select(logits, nodes, live, scores, widths, offsets, codes, leaves)

            def free(logits=logits, every=every, live=live, scores=scores, offsets=full_offsets, codes=full_codes) -> Any:  # type: ignore[no-untyped-def]
                return beam_select(logits, every, live, scores, widths, offsets, codes)

            def masked(logits=logits, nodes=nodes, offsets=offsets, codes=codes, dense=dense) -> torch.Tensor:  # type: ignore[no-untyped-def]
                first = offsets[nodes[0]]
                counts = offsets[nodes[0] + 1] - first
                rows = torch.repeat_interleave(torch.arange(len(first)), counts)
                children = torch.arange(len(rows)) + (first - (counts.cumsum(0) - counts))[rows]
                cells = rows * dense.shape[1] + codes[children]
                dense.view(-1)[cells] = 0
                sums: torch.Tensor = logits[0] + dense
                dense.view(-1)[cells] = -1e4  # undone where it was set
                return sums

            name = f"{num_codes}codes_{levels}levels_level{level}"
            for label, ours, theirs in (
                ("constrained", constrained(), beam_select.reference(logits, nodes, live, scores, widths, offsets, codes)),
                ("filtered", filtered(), beam_select.reference(logits, nodes, live, scores, widths, offsets, codes, leaves)),
            ):
                if not torch.equal(ours.nodes_RW, theirs.nodes_RW):
                    wrong.append(f"{name}, {label}")
            if level:
                seconds = alternate({"constrained": constrained, "filtered": filtered, "free": free, "masked": masked}, runs)
                measures[f"constraint_ms_{name}"] = {
                    "value": round((seconds["constrained"] - seconds["free"]) * 1e3, 4),
                    "unit": "ms",
                    "better": "lower",
                    "baseline": f"{seconds['masked'] * 1e3:.4f} dense mask; whole select {seconds['constrained'] * 1e3:.4f}",
                    "at_least": 0.1,
                    "aim": 0.03,
                    "runs": runs,
                }
                measures[f"filter_ms_{name}"] = {
                    "value": round((seconds["filtered"] - seconds["constrained"]) * 1e3, 4),
                    "unit": "ms",
                    "better": "lower",
                    "baseline": "the same step without a filter",
                    "runs": runs,
                }
            chosen = constrained()
            nodes, live, scores = chosen.nodes_RW, chosen.kept_R, chosen.scores_RW
    return finish("constraint", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
