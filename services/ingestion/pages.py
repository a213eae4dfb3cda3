"""Sessions and pages: what a user saw together.

A page is what the sender called one (page id), else what a session showed on one tab; a session are events of one user with no longer silence between them
than the gap.
A page never reaches over the ends of the user's training or validation part: it is cut there, so its time tells its part.
Legend: E events, S items shown on pages, P pages, U users.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from semantide.services.ingestion.signals import Numbers, Signals

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Shown:
    """Events in order of user, time, event.

    Shapes: all [E]. ``page`` and ``tab`` number page ids and tabs, -1 where there is none.
    """

    user: npt.NDArray[np.int32]
    item: npt.NDArray[np.int32]
    time: IntArray
    action: Numbers
    page: npt.NDArray[np.int32]
    tab: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pages:
    """Pages in order of user and time.

    Shapes: ``user``, ``time`` [P]; ``offsets`` [P + 1]; ``items``, ``actions`` [S].
    """

    user: npt.NDArray[np.int32]
    time: IntArray
    offsets: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    actions: Numbers


def pages(events: Shown, valid_time: IntArray, test_time: IntArray, signals: Signals, *, session_gap_ms: int) -> Pages:
    """What was shown together; the two times of each user [U] are those from which on he validates and tests, the highest number where he never does.

    An item shown several times on a page counts once, at its first place, with its strongest signal; dislike outweighs all.
    """
    if not len(events.user):
        return Pages(events.user, events.time, np.zeros(1, np.int32), events.item, events.action)
    page = page_numbers(events, valid_time, test_time, session_gap_ms)
    key = page * (int(events.item.max()) + 1) + events.item
    order = np.argsort(key)  # each page's items together
    starts = np.flatnonzero(np.append(True, key[order[1:]] != key[order[:-1]]))
    place, strongest = np.minimum.reduceat(order, starts), signals.strongest(events.action[order], starts, dislike_first=True)
    in_page = page[place]
    begins = np.flatnonzero(np.append(True, in_page[1:] != in_page[:-1]))
    first, lengths = np.minimum.reduceat(place, begins), np.diff(np.append(begins, len(place)))
    by_place = np.argsort(np.repeat(first, lengths) * len(page) + place)
    by_first = np.argsort(first)
    first = first[by_first]
    offsets = np.append(0, np.cumsum(lengths[by_first])).astype(np.int32)
    return Pages(events.user[first], events.time[first], offsets, events.item[place[by_place]], strongest[by_place])


def page_numbers(events: Shown, valid_time: IntArray, test_time: IntArray, session_gap_ms: int) -> IntArray:
    """A number for each event's page [E]; see ``pages``."""
    user, time = events.user, events.time
    part = (time >= valid_time[user]).astype(np.int8) + (time >= test_time[user])
    new_user = user[1:] != user[:-1]
    turns = new_user | (time[1:] - time[:-1] > session_gap_ms) | (part[1:] != part[:-1])
    session: IntArray = np.cumsum(np.append(0, turns), dtype=np.int64) * (int(events.tab.max()) + 2) + events.tab + 1
    named = events.page >= 0
    if not named.any():
        return session
    keys = (user[named].astype(np.int64) * 3 + part[named]) * (int(events.page.max()) + 1) + events.page[named]
    session[named] = int(session.max()) + 1 + np.unique(keys, return_inverse=True)[1]
    return session
