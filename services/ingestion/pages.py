"""Sessions and pages: what a user saw together.

A page is what the sender called one (page id), else what a session showed on one tab; a session are events of one user with no longer silence between them
than the gap. An answer that comes later belongs to the page that it names: no part of a data set cuts a page, see ``datasetparts.finish``.
Legend: E events, X exposures, G groups of pages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shown:
    """Events in order of user, time, event.

    Shapes: all [E]. ``page`` and ``tab`` number page ids and tabs, -1 where there is none.
    """

    user: npt.NDArray[np.int32]
    item: npt.NDArray[np.int32]
    time: IntArray
    page: npt.NDArray[np.int32]
    tab: npt.NDArray[np.int32]


def page_numbers(events: Shown, session_gap_ms: int) -> IntArray:
    """A number for each event's page [E]."""
    user, time = events.user, events.time
    if not len(user):
        return np.zeros(0, np.int64)
    turns = (user[1:] != user[:-1]) | (time[1:] - time[:-1] > session_gap_ms)
    session: IntArray = np.cumsum(np.append(0, turns), dtype=np.int64) * (int(events.tab.max()) + 2) + events.tab + 1
    named = events.page >= 0
    if not named.any():
        return session
    keys = user[named].astype(np.int64) * (int(events.page.max()) + 1) + events.page[named]
    session[named] = int(session.max()) + 1 + np.unique(keys, return_inverse=True)[1]
    return session


def group_begins(events: Shown, first_X: IntArray, page_X: IntArray) -> IntArray:
    """First events [G] of the groups of pages that were seen at the same time, as two tabs are; of one group all items had been shown before the next one began.

    Shapes: ``first_X`` the first event of each exposure, ``page_X`` its page, ascending, in the order of the pages' first events.
    """
    begins = np.flatnonzero(np.append(True, np.diff(page_X) != 0))[: len(page_X)]
    if not len(begins):
        return begins
    # When the last item of all pages so far was first shown: what is answered later does not make a page longer.
    until = np.maximum.accumulate(np.maximum.reduceat(first_X, begins))
    first = first_X[begins]
    apart = (events.user[first[1:]] != events.user[until[:-1]]) | (events.time[first[1:]] > events.time[until[:-1]])
    found: IntArray = first[np.append(True, apart)]
    return found


def group_times(events: Shown, begins_G: IntArray, user: npt.NDArray[np.int32], time: IntArray) -> IntArray:
    """When the group began in which each moment of a user lies; one that lies before all of them lies in the first of all users."""
    moments = np.unique(np.concatenate([events.time[begins_G], time]))
    keys_G = events.user[begins_G].astype(np.int64) * len(moments) + np.searchsorted(moments, events.time[begins_G])
    keys = user.astype(np.int64) * len(moments) + np.searchsorted(moments, time)
    found: IntArray = events.time[begins_G[np.maximum(np.searchsorted(keys_G, keys, side="right") - 1, 0)]]
    return found
