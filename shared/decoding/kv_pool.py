"""How many bytes of keys and values are in use, and room for those of a request before it is admitted.

A request's bytes are known in advance: its prompt, and its beams at every step. So it reserves them all or does not begin, and no search that runs
is ever short of memory. What a decoder allocates is drawn from the requests' leases, which checks the sum that they were admitted with.
"""

from __future__ import annotations

import threading
from types import TracebackType

from semantide.shared.errors import PermanentError, TransientError


class KVExhausted(TransientError):
    """Running requests hold the bytes that this one needs."""


class KVLease:
    """Bytes reserved for one request, given back by ``release`` or at the end of a ``with`` block, however it ends."""

    def __init__(self, pool: KVPool, num_bytes: int) -> None:
        self._pool = pool
        self.num_bytes = num_bytes
        self.drawn_bytes = 0
        self.released = False

    def draw(self, num_bytes: int) -> None:
        """Say that this many of the reserved bytes are allocated now.

        Raises: ValueError when the lease is released, or smaller than what was drawn of it.
        """
        if self.released:
            raise ValueError(f"{num_bytes} bytes are asked of a lease that is released: release it after the decoder's last step")
        if self.drawn_bytes + num_bytes > self.num_bytes:
            raise ValueError(f"{self.drawn_bytes + num_bytes} bytes are asked of a lease of {self.num_bytes}: reserve what `kv_bytes` says")
        self.drawn_bytes += num_bytes

    def release(self) -> None:
        """Give the bytes back; a second time changes nothing."""
        self._pool._give_back(self)

    def __enter__(self) -> KVLease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


class KVPool:
    """The budget of one process; safe to use from several threads."""

    def __init__(self, budget_bytes: int) -> None:
        if budget_bytes < 1:
            raise ValueError(f"budget_bytes is {budget_bytes}: give at least 1")
        self.budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self._in_use = self._high_water = self._leases = 0

    def reserve(self, num_bytes: int) -> KVLease:
        """Take bytes for one request.

        Raises: KVExhausted when running requests hold them; PermanentError when the whole budget is smaller.
        """
        if num_bytes < 0:
            raise ValueError(f"num_bytes is {num_bytes}: give 0 or more")
        if num_bytes > self.budget_bytes:
            raise PermanentError(
                f"the request needs {num_bytes} bytes of keys and values and the budget is {self.budget_bytes}: ask for a smaller width, or raise the budget"
            )
        with self._lock:
            if self._in_use + num_bytes > self.budget_bytes:
                raise KVExhausted(f"the request needs {num_bytes} bytes of keys and values, {self._in_use} of {self.budget_bytes} are in use: try again")
            self._in_use += num_bytes
            self._leases += 1
            self._high_water = max(self._high_water, self._in_use)
        return KVLease(self, num_bytes)

    def fits(self, num_bytes: int) -> bool:
        """Whether ``reserve`` would succeed now."""
        return self._in_use + num_bytes <= self.budget_bytes

    @property
    def in_use_bytes(self) -> int:
        """Bytes that are reserved now."""
        return self._in_use

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were ever reserved at once."""
        return self._high_water

    @property
    def leases(self) -> int:
        """Leases that are not released."""
        return self._leases

    def _give_back(self, lease: KVLease) -> None:
        with self._lock:
            if not lease.released:
                lease.released = True
                self._in_use -= lease.num_bytes
                self._leases -= 1
