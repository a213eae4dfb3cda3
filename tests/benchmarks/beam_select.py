"""The select step: the best children of all beams, against a sort of all candidates.

The baseline takes the log-softmax of every row, adds the beams' scores and a mask of valid codes that already lies there, and lets torch.topk find the best.
Beside it stand the two forms of early termination over sorted lists, without a catalog: what they look at, and what sorting the lists and the faster form
take when ours may choose every code too. Scores and beams follow from level to level as in a search.

    python tests/benchmarks/beam_select.py [--quick] [--json] [--threads 1]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from sorted_lists import Chosen, best_by_heap, best_by_threshold  # type: ignore[import-not-found]
from stopwatch import alternate, arguments, finish  # type: ignore[import-not-found]

from semantide.kernels.beam_select import beam_select
from semantide.shared.decoding.ancestry import Ancestry
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.trie import Trie

LEVELS = 3
LAYERS, KEY_HEADS, HEAD_SIZE = 4, 4, 64  # of the model whose copied keys and values the index replaces


def catalog(items: int, num_codes: int) -> SearchTrie:
    """Random distinct ids."""
    rng = np.random.default_rng(0)
    codes = np.unique(rng.integers(0, num_codes, (items + items // 4, LEVELS)), axis=0)
    return SearchTrie.build(Trie.build(codes[rng.permutation(len(codes))[:items]]))


def mask_of(trie: SearchTrie, level: int, nodes: torch.Tensor, num_codes: int) -> torch.Tensor:
    """-inf where a beam's node has no such child."""
    mask = torch.full((len(nodes), num_codes), -torch.inf)
    for row, node in enumerate(nodes.tolist()):
        mask[row, trie.tokens[level][trie.offsets[level][node] : trie.offsets[level][node + 1]]] = 0
    return mask


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    options = arguments(__doc__ or "")
    shapes = [(12_101, 256, 256), (12_101, 256, 512)] if options.quick else [(12_101, 256, w) for w in (10, 50, 128, 256, 512)] + [(300_000, 1024, 512)]
    runs = 5 if options.quick else 15
    measures: dict[str, dict[str, Any]] = {}
    wrong = []
    for items, num_codes, width in shapes:
        trie = catalog(items, num_codes)
        name = f"{items}items_{num_codes}codes_width{width}"
        wide = width >= 256
        scores, nodes, live = torch.zeros(1, 1, dtype=torch.float64), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        total = {"ours": 0.0, "topk": 0.0}
        visited = children = cells = 0
        for level in range(LEVELS):
            logits = torch.randn(1, nodes.shape[1], num_codes, generator=torch.Generator().manual_seed(level)) * 2.5
            mask = mask_of(trie, level, nodes[0], num_codes)
            keep = min(width, int(torch.isfinite(mask).sum()))
            given = (logits, nodes, live, scores, torch.tensor([width]), trie.offsets[level], trie.tokens[level])

            def ours(given: tuple[torch.Tensor, ...] = given) -> Any:
                return beam_select(*given)

            def everything(logits: torch.Tensor = logits, mask: torch.Tensor = mask, before: torch.Tensor = scores, keep: int = keep) -> torch.Tensor:
                return torch.topk((torch.log_softmax(logits[0], -1) + mask + before[0, :, None]).flatten(), keep).indices

            chosen = ours()
            places = (chosen.parents_RW * num_codes + chosen.codes_RW)[0]
            if set(places.tolist()) != set(everything().tolist()):
                wrong.append(f"{name}, level {level}")
            seconds = alternate({"ours": ours, "topk": everything}, runs)
            if level:
                for key in total:
                    total[key] += seconds[key]
                visited, children, cells = visited + chosen.visited, children + chosen.children, cells + logits.numel()
            measures[f"speedup_{name}_level{level}"] = {
                "value": round(seconds["topk"] / seconds["ours"], 2),
                "unit": "ratio",
                "better": "higher",
                "baseline": f"log-softmax, mask and torch.topk {seconds['topk'] * 1e3:.4f} ms, ours {seconds['ours'] * 1e3:.4f} ms",
                "runs": runs,
            }
            nodes, live, scores = chosen.nodes_RW, chosen.kept_R, chosen.scores_RW
        bounds: dict[str, float] = {"at_least": 3, "aim": 8} if wide else {}
        measures[f"speedup_{name}"] = {
            "value": round(total["topk"] / total["ours"], 2),
            "unit": "ratio",
            "better": "higher",
            "baseline": "log-softmax, mask and torch.topk; levels 1 and 2",
            "runs": runs,
        } | bounds
        bounds = {"at_least": 5, "aim": 1.5} if wide else {}
        measures[f"visited_{name}"] = {"value": round(100 * visited / cells, 3), "unit": "% of W x K", "better": "lower", "baseline": "100"} | bounds
        measures[f"children_{name}"] = {"value": round(100 * children / cells, 3), "unit": "% of W x K", "better": "lower", "baseline": "100"}
    for width in (256, 512):
        logits = torch.randn(width, width, generator=torch.Generator().manual_seed(width)) * 2.5
        lists = torch.log_softmax(logits, -1).sort(1, descending=True).values
        before = -torch.rand(width, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 4
        best = torch.topk((lists.double() + before[:, None]).flatten(), width).values
        for label, found in (("heap", best_by_heap(before, lists, width)), ("threshold", best_by_threshold(before, lists, width, probe=4))):
            if not torch.equal(found.scores_N, best):
                wrong.append(f"{label}, width {width}")
            measures[f"visited_sorted_lists_{label}_width{width}"] = {
                "value": round(100 * found.visited / lists.numel(), 3),
                "unit": "% of W x K",
                "better": "lower",
                "baseline": "100",
            }
        every = (
            torch.arange(width)[None],
            torch.tensor([width]),
            before[None],
            torch.tensor([width]),
            torch.arange(width + 1) * width,
            torch.arange(width).repeat(width),
        )

        def free(logits: torch.Tensor = logits, every: tuple[torch.Tensor, ...] = every) -> Any:
            return beam_select(logits[None], *every)

        def listed(logits: torch.Tensor = logits, before: torch.Tensor = before, width: int = width) -> Chosen:
            return best_by_threshold(before, torch.log_softmax(logits, -1).sort(1, descending=True).values, width, probe=4)

        if not torch.allclose(free().scores_RW[0].sort(descending=True).values, best, atol=1e-5):
            wrong.append(f"every code allowed, width {width}")
        seconds = alternate({"ours": free, "listed": listed}, runs)
        measures[f"sorted_lists_over_ours_width{width}"] = {
            "value": round(seconds["listed"] / seconds["ours"], 2),
            "unit": "ratio",
            "better": "higher",
            "baseline": f"log-softmax, sort, threshold {seconds['listed'] * 1e3:.4f} ms, ours {seconds['ours'] * 1e3:.4f} ms, every code allowed",
            "runs": runs,
        }
        ancestry = Ancestry(1)
        ancestry.extend(torch.zeros(1, width, dtype=torch.int64))
        ancestry.extend(torch.arange(width)[None])
        index = ancestry.rows_BS.numel() * ancestry.rows_BS.element_size()
        copied = width * 2 * LAYERS * 2 * KEY_HEADS * HEAD_SIZE * 4
        measures[f"reorder_bytes_width{width}"] = {
            "value": index,
            "unit": "bytes",
            "better": "lower",
            "baseline": f"{copied} of copied keys and values of two steps, {LAYERS} layers",
        }
    return finish("beam_select", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
