"""The first of two stages of a long-history interest model: which events of a history are most like the item that is judged.

The search runs over fixed item vectors (what items are, and who likes them together), so it costs one product a history event and can be done ahead of training.
Source: Pi et al., Search-based User Interest Modeling with Lifelong Sequential Behavior Data, CIKM 2020 (the soft search, over vectors that are not trained here).
Legend: N items, D width of their vectors, E events of all histories, X judged pairs, K found events.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]

_PRODUCTS = 1 << 18  # events that are compared at a time: what is in memory at once


def search(
    vectors_ND: FloatArray, items_E: npt.NDArray[np.integer], begins_X: IntArray, ends_X: IntArray, targets_X: npt.NDArray[np.integer], num_found: int
) -> tuple[IntArray, FloatArray]:
    """The events most like each target among those from ``begins_X`` to before ``ends_X``, in the order of time; later ones first where two are alike.

    A target without a vector (-1, or a row of zeros) finds the latest events; an event without one (-1) is like nothing.
    Shapes: returns places in ``items_E`` [X, K], -1 where a history has fewer events, and their likeness [X, K], 0 there.
    """
    lengths_X = ends_X - begins_X
    found_XK = np.full((len(targets_X), num_found), -1, dtype=np.int64)
    alike_XK = np.zeros((len(targets_X), num_found), dtype=np.float32)
    for part in _parts(lengths_X):
        lengths = lengths_X[part]
        width = int(lengths.max())
        if not width:
            continue
        places_XW = begins_X[part, None] + np.arange(width)
        inside_XW = np.arange(width) < lengths[:, None]
        places_XW = np.where(inside_XW, places_XW, 0)
        targets = targets_X[part]
        wanted_XD = np.where((targets >= 0)[:, None], vectors_ND[targets.clip(0)], 0)
        events_XW = items_E[places_XW]
        alike_XW = np.where(events_XW >= 0, np.einsum("xwd,xd->xw", vectors_ND[events_XW.clip(0)], wanted_XD, optimize=True), 0)
        # A little more for what is later: order among equals, and all there is where nothing is known of the target.
        score_XW = np.where(inside_XW, alike_XW + 1e-6 * np.arange(width), -np.inf)
        taken = min(num_found, width)
        best_XK = np.sort(np.argpartition(-score_XW, taken - 1, axis=1)[:, :taken], axis=1)
        there = np.take_along_axis(inside_XW, best_XK, 1)
        found_XK[part, :taken] = np.where(there, np.take_along_axis(places_XW, best_XK, 1), -1)
        alike_XK[part, :taken] = np.where(there, np.take_along_axis(alike_XW, best_XK, 1), 0)
    return found_XK, alike_XK


def _parts(lengths_X: IntArray) -> Iterator[IntArray]:
    """Pairs with histories of about the same length together, so that little is computed for nothing."""
    order = np.argsort(lengths_X, kind="stable")
    begin = 0
    while begin < len(order):
        end = begin + max(1, min(4096, _PRODUCTS // max(1, int(lengths_X[order[begin]]))))
        # The longest of them decides the width.
        while end - begin > 1 and int(lengths_X[order[min(end, len(order)) - 1]]) * (min(end, len(order)) - begin) > 2 * _PRODUCTS:
            end = begin + (end - begin) // 2
        yield order[begin:end]
        begin = end
