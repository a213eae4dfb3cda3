"""Exposures with all of their feedback: what was shown, where, how it came to be shown, and everything that the user did with it.

An exposure is one item on one page (``pages.py``). Its signals are the actions of all its events; an order that comes back as an event of its own belongs to
the exposure on the page that it names, or in whose session it happened, however much later it comes.
Legend: E events, X exposures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.services.ingestion.pages import IntArray
from semantide.services.ingestion.signals import Masks, Numbers, Signals

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Told:
    """What events say of the exposure they belong to, in order of user, time, event.

    Shapes: all [E]. Units: ``time`` milliseconds. ``position`` -1, ``propensity`` and ``value`` NaN where nothing is said; ``signals`` are sets of actions.
    """

    item: npt.NDArray[np.int32]
    time: IntArray
    action: Numbers
    position: npt.NDArray[np.int32]
    propensity: Floats
    value: Floats
    signals: Masks


@dataclass(frozen=True)
class Exposures:
    """Exposures in order of user, page and place.

    Shapes: all [X]. ``first`` and ``last`` are the first and the last event of each; ``page`` numbers pages from 0; ``position`` is the place that was said,
    of a page of which none is said the place by time, -1 where several came in the same millisecond; ``action`` is the strongest action, a dislike before all
    others; ``signals`` are sets of actions.
    """

    first: IntArray
    last: IntArray
    page: IntArray
    action: Numbers
    position: npt.NDArray[np.int32]
    propensity: Floats
    value: Floats
    signals: Masks


def exposures(events: Told, page: IntArray, signals: Signals) -> Exposures:
    """Fold events into exposures; ``page`` numbers each event's page.

    Of several places or propensities the first that is said counts, of several values the last.
    """
    if not len(page):
        return Exposures(page, page, page, events.action, events.position, events.propensity, events.value, events.signals)
    key = page * (int(events.item.max()) + 1) + events.item
    order = np.argsort(key, kind="stable")  # each exposure's events together, in their order
    starts = np.flatnonzero(np.append(True, key[order[1:]] != key[order[:-1]]))
    # Pages in the order of their first events, and within them the items in that of theirs.
    page_first = np.full(int(page.max()) + 1, len(page), dtype=np.int64)
    np.minimum.at(page_first, page, np.arange(len(page)))
    by_place = np.argsort(page_first[page[order[starts]]] * len(page) + order[starts])
    first = order[starts][by_place]
    ends = np.append(starts[1:], len(order))
    said_position = _first_said(events.position >= 0, order, starts)[by_place]
    said_propensity = _first_said(~np.isnan(events.propensity), order, starts)[by_place]
    last_value = _first_said(~np.isnan(events.value), order[::-1], len(order) - ends[::-1])[::-1][by_place]

    begins = np.flatnonzero(np.append(True, np.diff(page[first]) != 0))
    lengths = np.diff(np.append(begins, len(first)))
    together = (np.diff(events.time[first]) == 0) & (np.diff(page[first]) == 0)
    place = np.arange(len(first)) - np.repeat(begins, lengths)
    place[np.append(together, False) | np.append(False, together)] = -1
    # Beside places that are said those by time count something else.
    place[np.repeat(np.logical_or.reduceat(said_position >= 0, begins), lengths)] = -1
    return Exposures(
        first=first,
        last=order[ends - 1][by_place],
        page=np.repeat(np.arange(len(begins)), lengths),
        action=signals.strongest(events.action[order], starts, dislike_first=True)[by_place],
        position=np.where(said_position >= 0, events.position[said_position], place).astype(np.int32),
        propensity=np.where(said_propensity >= 0, events.propensity[said_propensity], np.float32(np.nan)),
        value=np.where(last_value >= 0, events.value[last_value], np.float32(np.nan)),
        signals=np.bitwise_or.reduceat(events.signals[order], starts)[by_place],
    )


def _first_said(said: npt.NDArray[np.bool_], order: IntArray, starts: IntArray) -> IntArray:
    """Of each stretch of ``order`` the first event that says something, -1 where none does."""
    places = np.minimum.reduceat(np.where(said[order], np.arange(len(order)), len(order)), starts)
    return np.append(order, -1)[places]
