"""Keys and values of users' last prompts, under a byte budget, so that a user who returns has only the new items read.

One cache belongs to one model and is dropped with it. What is found is never trusted to fit: ``GeneratorDecoder.begin`` uses no more of it than the
tokens agree, so a wrong or an old entry costs time and never an answer.
Legend: N items of a history.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from semantide.shared.models.generator_decoder import PromptKV
from semantide.shared.trie import IntArray

_BLOCKS = 4  # of which a full window may give up the oldest
_TOGETHER = 4  # items in a row that are hashed as one: a single item that comes again and again would move the cut each time


@dataclass(frozen=True)
class CacheUse:
    """What a cache did so far; ``tokens_known`` of ``tokens_asked`` prompt tokens were not read again, a merged item counting as one."""

    users: int
    in_use_bytes: int
    hits: int
    misses: int
    tokens_asked: int
    tokens_known: int


class PromptCache:
    """The least recently seen users go first; safe to use from several threads.

    A budget of 0 keeps nothing.
    """

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 0:
            raise ValueError(f"budget_bytes is {budget_bytes}: give at least 0, which keeps nothing")
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._prompts: OrderedDict[str, PromptKV] = OrderedDict()
        self._in_use = self._hits = self._misses = self._asked = self._known = 0

    def get(self, user: str) -> PromptKV | None:
        """The user's last prompt."""
        with self._lock:
            prompt = self._prompts.get(user)
            if prompt is not None:
                self._prompts.move_to_end(user)
            return prompt

    def put(self, user: str, prompt: PromptKV, tokens_read: int | None = None) -> None:
        """Remember the user's prompt in place of an older one; ``tokens_read`` of its places had to be read, which is only counted."""
        size = prompt.num_places
        read = size if tokens_read is None else tokens_read
        with self._lock:
            self._asked += size
            self._known += size - read
            self._hits += read < size
            self._misses += read >= size
            self._drop(user)
            if prompt.num_bytes > self.budget_bytes:
                return
            self._prompts[user] = prompt
            self._in_use += prompt.num_bytes
            while self._in_use > self.budget_bytes:
                self._drop(next(iter(self._prompts)))

    def drop(self, user: str) -> None:
        """Forget one user."""
        with self._lock:
            self._drop(user)

    def clear(self) -> None:
        """Forget everybody."""
        with self._lock:
            self._prompts.clear()
            self._in_use = 0

    def use(self) -> CacheUse:
        """What it holds and how often it helped."""
        with self._lock:
            return CacheUse(len(self._prompts), self._in_use, self._hits, self._misses, self._asked, self._known)

    def _drop(self, user: str) -> None:
        prompt = self._prompts.pop(user, None)
        if prompt is not None:
            self._in_use -= prompt.num_bytes


def history_window(rows_N: IntArray, max_items: int) -> IntArray:
    """The last items of a history, at most ``max_items``, cut where the next items of the same user will most likely have it cut as well.

    Were the window to slide by one item each time, a returning user's prompt would begin with another item and nothing of it could be kept. The cut is
    therefore put before the place of the smallest hash (of the items that begin there) among the oldest quarter of a full window: it depends on these items
    alone, so it is the same with and without a cache and wherever the stored history was cut, and stays until that place leaves the window or a smaller
    hash enters the quarter.

    Raises: ValueError for a window below 1.
    """
    if max_items < 1:
        raise ValueError(f"max_items is {max_items}: give at least 1")
    total, block = len(rows_N), max_items // _BLOCKS
    first, last = max(0, total - max_items), total - (max_items - block)
    if last - first < 2:
        return rows_N[first:]
    hashes = np.zeros(last - first, np.uint64)
    with np.errstate(over="ignore"):
        for ahead in range(_TOGETHER):
            hashes = (hashes ^ rows_N[first + ahead : last + ahead].astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            hashes ^= hashes >> np.uint64(29)
    return rows_N[last - 1 - int(np.argmin(hashes[::-1])) :]
