"""What a log's pages are like, and whether training by pages can pay on them.

Every figure is a sum over pages, so parts of a log are counted apart and added up.
Legend: P pages, S items shown on them, N positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from semantide.shared.pages import CLICKED, DISLIKED, EXPOSED, ORDERED

IntArray = npt.NDArray[np.int64]

POSITIONS = 10
"""First places of a page that are told apart."""
SIZES = (1, 2, 3, 5, 10, 20, 50)
"""Least sizes of the classes that pages are counted in."""
WORTHWHILE = 0.1
"""Share of positives on pages with several from which on training by pages can pay."""
_PARTS = 1 << 20
_TOTALS = ("pages", "shown", "ordered", "clicked", "exposed", "disliked", "pages_with_positive", "pages_with_two", "positives_together", "pages_with_exposed")


@dataclass(frozen=True)
class PageCounts:
    """Sums over pages. A positive is an item that was clicked or ordered.

    Shapes: ``totals`` as ``_TOTALS``; ``sizes`` pages of each class; ``positions_N3`` over pages with both positives and others on which the places of all items
    are known: items shown at a place, positives among them, and positives to be expected if places made no difference.
    Units: the expected positives are counted in ``_PARTS``; whole numbers add up to the same whatever the parts of a log.
    """

    totals: IntArray
    sizes: IntArray
    positions_N3: IntArray

    @classmethod
    def of(cls, offsets_P1: npt.NDArray[np.integer], answers_S: npt.NDArray[np.int8], places_S: npt.NDArray[np.integer]) -> PageCounts:
        """Count pages; ``places_S`` from 0, -1 where nobody knows the place."""
        lengths = np.diff(offsets_P1).astype(np.int64)
        page = np.repeat(np.arange(len(lengths)), lengths)
        positive_S = answers_S >= CLICKED
        positives_P = np.bincount(page[positive_S], minlength=len(lengths))
        exposed_P = np.bincount(page[answers_S == EXPOSED], minlength=len(lengths))
        by_answer = [int((answers_S == answer).sum()) for answer in (ORDERED, CLICKED, EXPOSED, DISLIKED)]
        several = positives_P >= 2
        totals = [
            len(lengths),
            len(answers_S),
            *by_answer,
            (positives_P > 0).sum(),
            several.sum(),
            positives_P[several].sum(),
            ((exposed_P > 0) & (positives_P > 0)).sum(),
        ]
        sizes = np.bincount(np.maximum(np.searchsorted(SIZES, lengths, side="right") - 1, 0), minlength=len(SIZES))
        unknown_P = np.bincount(page[places_S < 0], minlength=len(lengths))
        mixed = ((positives_P > 0) & (positives_P < lengths) & (unknown_P == 0))[page] & (places_S < POSITIONS)
        share = positives_P * _PARTS // np.maximum(lengths, 1)
        positions = np.zeros((POSITIONS, 3), dtype=np.int64)
        np.add.at(positions, places_S[mixed], np.stack([np.ones(mixed.sum(), np.int64), positive_S[mixed], share[page[mixed]]], 1))
        return cls(np.array(totals, dtype=np.int64), sizes.astype(np.int64), positions)

    def __add__(self, other: PageCounts) -> PageCounts:
        return PageCounts(self.totals + other.totals, self.sizes + other.sizes, self.positions_N3 + other.positions_N3)

    def flat(self) -> IntArray:
        """All sums as one row of numbers, for a table."""
        return np.concatenate([self.totals, self.sizes, self.positions_N3.reshape(-1)])

    @classmethod
    def from_flat(cls, numbers: IntArray) -> PageCounts:
        """What ``flat`` gave."""
        totals, sizes, positions = np.split(np.asarray(numbers, dtype=np.int64), [len(_TOTALS), len(_TOTALS) + len(SIZES)])
        return cls(totals, sizes, positions.reshape(POSITIONS, 3))

    @classmethod
    def nothing(cls) -> PageCounts:
        """No pages."""
        return cls(*(np.zeros(shape, dtype=np.int64) for shape in (len(_TOTALS), len(SIZES), (POSITIONS, 3))))

    def report(self) -> dict[str, Any]:
        """The figures that a person reads, and a verdict."""
        total = {name: int(number) for name, number in zip(_TOTALS, self.totals, strict=True)}
        positives = total["ordered"] + total["clicked"]
        rates = {name: _share(total[name], total["shown"]) for name in ("ordered", "clicked", "exposed", "disliked")}
        together = _share(total["positives_together"], positives)
        lifts = [
            {"position": place + 1, "shown": int(shown), "rate": _share(found, shown), "lift": _share(found, expected / _PARTS)}
            for place, (shown, found, expected) in enumerate(self.positions_N3.tolist())
            if shown
        ]
        return {
            **total,
            "positives": positives,
            "items_per_page": round(total["shown"] / max(total["pages"], 1), 3),
            "positives_per_page_with_positive": round(positives / max(total["pages_with_positive"], 1), 3),
            "share_of_pages_with_two": _share(total["pages_with_two"], total["pages"]),
            "share_of_positives_together": together,
            "label_rates": rates,
            "pages_by_size": {_size_name(index): int(count) for index, count in enumerate(self.sizes)},
            "positions": lifts,
            "can_pay": together >= WORTHWHILE,
            "verdict": _verdict(positives, total["exposed"], together, lifts),
        }


def _verdict(positives: int, exposed: int, together: float, lifts: list[dict[str, Any]]) -> str:
    if not positives:
        return "nothing was clicked or ordered on any page: there is nothing to train on"
    if together < WORTHWHILE:
        first = (
            f"training by pages has little to gain: {together:.1%} of the positives stand on a page with another one (from {WORTHWHILE:.0%} on it can pay); send page ids, "
            "or make the data set with a longer session_gap_seconds"
        )
    else:
        first = f"training by pages can pay: {together:.1%} of the positives stand on a page with another one"
    if not exposed:
        return f"{first}; nothing is known of what was shown and not taken, so exposed items cannot serve and a bias by position cannot be told"
    if not lifts:
        return f"{first}; of no page with positives and others the places of all items are known, so a bias by position cannot be told: send `position`"
    strongest = max((entry for entry in lifts if entry["shown"] >= 100), key=lambda entry: abs(entry["lift"] - 1), default=None)
    if strongest is not None and abs(strongest["lift"] - 1) >= 0.1:
        return f"{first}; answers depend on the place: at position {strongest['position']} {strongest['lift']:.2f} times as often as on the page's average"
    return first


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0


def _size_name(index: int) -> str:
    low = SIZES[index]
    if index + 1 == len(SIZES):
        return f"{low} or more"
    return str(low) if SIZES[index + 1] == low + 1 else f"{low} to {SIZES[index + 1] - 1}"
