"""Is the tokenizer good enough? Figures before and after the resolver, and a verdict with reasons.

Legend: N items, L levels, K codes, D dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from semantide.services.tokenization.clusters import Spelling
from semantide.shared.models.linear_map import FloatArray
from semantide.shared.models.residual_codes import IntArray

_RANK_ROWS = 4096


@dataclass(frozen=True)
class QualityLimits:
    """From where on a tokenizer is refused."""

    min_effective_rank: float = 3.0
    """Exponential of the entropy of the vectors' spectrum, at most half their width is asked for."""
    min_first_level_used: float = 0.5
    """Share of first-level codes in use, of those that the number of items allows."""
    min_first_level_entropy: float = 0.5
    """Entropy of the first level over the largest possible."""
    min_distinct_ids: float = 0.02
    """Plain ids over items: below it the ids come from the resolver, not from the vectors."""
    warn_collision_rate: float = 0.75
    """Share of items that share a plain id with another, from where on the report advises larger levels."""
    min_items: int = 16
    """Smaller catalogs are told what is amiss and get their ids all the same."""


def effective_rank(vectors: FloatArray) -> float:
    """Exponential of the entropy of the normalised spectrum; 0 for constant vectors."""
    rows = vectors[:: -(-len(vectors) // _RANK_ROWS) or 1].astype(np.float64)
    rows = rows - rows.mean(axis=0)
    # An identical row repeated leaves rounding behind: what is below it is no variance.
    scale = max(float(np.abs(vectors).max(initial=0.0)), 1e-30)
    gram = rows.T @ rows if rows.shape[0] > rows.shape[1] else rows @ rows.T
    spectrum = np.maximum(np.linalg.eigvalsh(gram), 0) if len(gram) else np.zeros(0)
    total = float(spectrum.sum())
    if total <= 1e-9 * scale**2 * max(len(rows), 1):
        return 0.0
    share = spectrum[spectrum > 1e-12 * total] / total
    return float(np.exp(-(share * np.log(share)).sum()))


def level_figures(codes: IntArray, level_sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Utilisation, entropy and the largest group that shares a prefix, for every level."""
    figures = []
    prefix = np.zeros(len(codes), np.int64)
    for level, size in enumerate(level_sizes):
        counts = np.bincount(codes[:, level], minlength=size)
        share = counts[counts > 0] / max(counts.sum(), 1)
        entropy = float(-(share * np.log2(share)).sum()) + 0.0
        _, prefix, groups = np.unique(prefix * size + codes[:, level], return_inverse=True, return_counts=True)
        figures.append(
            {
                "level": level,
                "size": size,
                "used": int((counts > 0).sum()),
                "utilisation": round(float((counts > 0).mean()), 6),
                "entropy_bits": round(entropy, 6),
                "normalised_entropy": round(entropy / np.log2(size), 6),
                "perplexity": round(float(2**entropy), 4),
                "prefixes": len(groups),
                "largest_prefix_group": int(groups.max(initial=0)),
            }
        )
    return figures


def collisions(codes: IntArray) -> dict[str, Any]:
    """How many items share their whole id with another, and the largest such group."""
    _, counts = np.unique(codes, axis=0, return_counts=True) if len(codes) else (None, np.zeros(0, np.int64))
    sharing = int(counts[counts > 1].sum())
    return {"items": sharing, "rate": round(sharing / max(len(codes), 1), 6), "ids": len(counts), "largest_group": int(counts.max(initial=0))}


def reconstruction(vectors: FloatArray, decoded: FloatArray) -> dict[str, float]:
    """Mean squared error, and its share of the vectors' variance."""
    error = float(((vectors - decoded) ** 2).sum(axis=1, dtype=np.float64).mean()) if len(vectors) else 0.0
    variance = float(((vectors - vectors.mean(axis=0)) ** 2).sum(axis=1, dtype=np.float64).mean()) if len(vectors) else 0.0
    return {"squared_error": round(error, 8), "share_of_variance": round(error / variance, 6) if variance > 0 else 0.0}


def describe(vectors: FloatArray, spelling: Spelling, rank: float) -> dict[str, Any]:
    """The figures of a fitted tokenizer; ``rank`` is the vectors' effective rank."""
    sizes = spelling.codes.level_sizes
    plain, placed = spelling.plain, spelling.placed
    return {
        "items": len(vectors),
        "level_sizes": list(sizes),
        "vectors": {
            "width": int(vectors.shape[1]),
            "distinct": len({row.tobytes() for row in vectors}),
            "effective_rank": round(rank, 4),
        },
        "collisions": {"before": collisions(plain), "after": collisions(placed)},
        "levels": level_figures(placed, sizes),
        "levels_before": level_figures(plain, sizes),
        "moved_items": int((plain != placed).any(axis=1).sum()),
        "reconstruction": {"before": reconstruction(vectors, spelling.codes.decode(plain)), "after": reconstruction(vectors, spelling.codes.decode(placed))},
    }


def judge(figures: dict[str, Any], limits: QualityLimits) -> dict[str, Any]:
    """The verdict: ``passed``, the reasons where it is not, and warnings."""
    reasons, warnings = [], []
    vectors, first, before = figures["vectors"], figures["levels_before"][0], figures["collisions"]["before"]
    possible = max(2, min(first["size"], figures["items"]))
    asked = min(limits.min_effective_rank, vectors["width"] / 2)
    if vectors["effective_rank"] < asked:
        reasons.append(
            f"the vectors of {figures['items']} items have effective rank {vectors['effective_rank']:.2f} (at least {asked:g}), {vectors['distinct']} are distinct: "
            "they are constant or of low rank; check what the items say (title, text, categories, embedding)"
        )
    content = figures.get("content", {})
    if content.get("source") == "embedding" and content["effective_rank"] < min(limits.min_effective_rank, content["width"] / 2):
        reasons.append(
            f"the given embeddings have effective rank {content['effective_rank']:.2f} in {content['width']} numbers: they are constant or of low rank; "
            "correct the encoder, or set content to 'text'"
        )
    if first["used"] < limits.min_first_level_used * possible:
        reasons.append(
            f"the first level uses {first['used']} of {possible} possible codes ({first['used'] / possible:.1%}, at least {limits.min_first_level_used:.0%})"
        )
    if first["entropy_bits"] < limits.min_first_level_entropy * np.log2(possible):
        reasons.append(
            f"the first level has {first['entropy_bits']:.2f} bits of entropy of {np.log2(possible):.2f} possible (at least {limits.min_first_level_entropy:.0%})"
        )
    if before["ids"] < limits.min_distinct_ids * min(figures["items"], np.prod([float(size) for size in figures["level_sizes"]])):
        reasons.append(
            f"{figures['items']} items have only {before['ids']} different plain ids (at least {limits.min_distinct_ids:.0%}), "
            f"{before['largest_group']} items share one: give larger or more level_sizes, or items that differ"
        )
    if figures["items"] < limits.min_items:
        warnings = [f"only {figures['items']} items: {reason}" for reason in reasons]
        reasons = []
    if before["rate"] > limits.warn_collision_rate:
        warnings.append(
            f"{before['rate']:.1%} of the items shared a plain id, the resolver told them apart: larger or more level_sizes would keep more of what items are"
        )
    if figures["collisions"]["after"]["items"]:
        reasons.append(f"{figures['collisions']['after']['items']} items share an id after the resolver")
    return {"passed": not reasons, "reasons": reasons, "warnings": warnings}


def summary(report: dict[str, Any]) -> list[str]:
    """The report as lines for a terminal."""
    before, after = report["collisions"]["before"], report["collisions"]["after"]
    error, content, collaborative = report["reconstruction"], report["content"], report["collaborative"]
    lines = [
        f"items {report['items']}, levels {' x '.join(map(str, report['level_sizes']))}, vectors {report['vectors']['width']} wide, "
        f"effective rank {report['vectors']['effective_rank']:.1f}",
        "content: " + ", ".join(f"{count} from {way}" if way != "nothing" else f"{count} without any" for way, count in content["counts"].items() if count),
        f"collaborative: {collaborative['seen']} from histories, {collaborative['predicted']} predicted from content",
        f"collisions: {before['items']} items ({before['rate']:.1%}, largest group {before['largest_group']}) before the resolver, {after['items']} after; "
        f"{report['moved_items']} items moved",
        f"left over of the variance: {error['before']['share_of_variance']:.3f} before, {error['after']['share_of_variance']:.3f} after",
    ]
    lines += [
        f"level {row['level'] + 1}: {row['used']} of {row['size']} codes used ({row['utilisation']:.1%}), entropy {row['entropy_bits']:.2f} bits "
        f"({row['normalised_entropy']:.1%}), largest group with one prefix {row['largest_prefix_group']}"
        for row in report["levels"]
    ]
    verdict = report["verdict"]
    return [
        *lines,
        "verdict: " + ("pass" if verdict["passed"] else "FAIL: " + "; ".join(verdict["reasons"])),
        *(f"note: {text}" for text in verdict["warnings"]),
    ]
