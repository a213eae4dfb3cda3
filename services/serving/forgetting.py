"""Drops what this process keeps in memory of users who are forgotten: their last prompts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from semantide.shared.forgetting import MISSED_SECONDS, Forgetting
from semantide.shared.models.prompt_cache import PromptCache


class ForgettingWatch:
    """Looks who is being forgotten. As long as an id is there it is dropped again: a request that began before the deletion may have put its prompt back."""

    def __init__(self, forgetting: Forgetting, caches: Callable[[], Iterable[PromptCache]], clock: Callable[[], float] = time.monotonic) -> None:
        self._forgetting, self._caches, self._clock = forgetting, caches, clock
        self._looked = clock()

    def poll(self) -> None:
        """Drop their prompts; everybody's, where some of them may have been missed.

        Raises: RedisError.
        """
        begun = self._clock()
        users = self._forgetting.users().values()
        missed = self._clock() - self._looked > MISSED_SECONDS
        for cache in self._caches():
            if missed:
                cache.clear()
            for user in users:
                cache.drop(user)
        self._looked = begun
