"""Sessions and pages: what a user saw together.

A page is what the sender called one (page id), else a session: events of one user with no longer silence between them than the gap.
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

    Shapes: all [E]. ``page`` numbers page ids, -1 where there is none.
    """

    user: npt.NDArray[np.int32]
    item: npt.NDArray[np.int32]
    time: IntArray
    action: Numbers
    page: npt.NDArray[np.int32]


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
    """What was shown together; the two times of each user [U] are those of the first validation and first test event, the highest number where there is none.

    An item shown several times on a page counts once, at its first place, with its strongest signal; dislike outweighs all.
    """
    if not len(events.user):
        return Pages(events.user, events.time, np.zeros(1, np.int32), events.item, events.action)
    page = _page_numbers(events, valid_time, test_time, session_gap_ms)
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


def _page_numbers(events: Shown, valid_time: IntArray, test_time: IntArray, session_gap_ms: int) -> IntArray:
    """A number for each page [E]."""
    part = (events.time >= valid_time[events.user]).astype(np.int8) + (events.time >= test_time[events.user])
    return page_of(events.user, events.time, events.page, part, session_gap_ms=session_gap_ms)


def page_of(
    user: npt.NDArray[np.integer], time: IntArray, page: npt.NDArray[np.int32], part: npt.NDArray[np.int8] | None = None, *, session_gap_ms: int
) -> IntArray:
    """A number for the page [E] of each event, in order of user and time: what the sender called it, else the session; events of two parts never share one."""
    if not len(user):
        return np.zeros(0, np.int64)
    part = np.zeros(len(user), np.int8) if part is None else part
    turns = (user[1:] != user[:-1]) | (time[1:] - time[:-1] > session_gap_ms) | (part[1:] != part[:-1])
    session = np.cumsum(np.append(0, turns))
    named = page >= 0
    if not named.any():
        return session
    keys = (user[named].astype(np.int64) * 3 + part[named]) * (int(page.max()) + 1) + page[named]
    session[named] = int(session[-1]) + 1 + np.unique(keys, return_inverse=True)[1]
    return session
