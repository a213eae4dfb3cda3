"""Values in the broker that are forgotten after a while, or before, the oldest first, where all of them need more than their bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# One step for the server: the value, its place in the order of those that are kept, and the sum of their bytes. The oldest go where the sum is too large; what
# has expired is forgotten on the way.
_KEEP = """
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
redis.call('RPUSH', KEYS[2], #ARGV[1] .. ' ' .. KEYS[1])
local sum, most = redis.call('INCRBY', KEYS[3], #ARGV[1]), tonumber(ARGV[3])
while true do
  local oldest = redis.call('LINDEX', KEYS[2], 0)
  if not oldest then break end
  local size, key = string.match(oldest, '^(%d+) (.*)$')
  if sum <= most and redis.call('EXISTS', key) == 1 then break end
  redis.call('LPOP', KEYS[2])
  redis.call('DEL', key)
  sum = redis.call('DECRBY', KEYS[3], size)
end
"""


class BoundedValues:
    """Values below one prefix. Each is forgotten ``ttl_seconds`` after it was kept or renewed, or before, where all of them need ``max_bytes``. A name is kept once."""

    def __init__(self, broker: Any, prefix: str, ttl_seconds: int, max_bytes: int) -> None:
        self._broker, self._ttl_seconds, self._max_bytes = broker, ttl_seconds, max_bytes
        self._prefix, self._order, self._sum = f"{prefix}:", f"{prefix}s", f"{prefix}s:bytes"

    def keep(self, values: Mapping[str, bytes]) -> None:
        """Keep some values, in one round trip.

        Raises: RedisError.
        """
        pipe = self._broker.pipeline(transaction=False)
        for name, value in values.items():
            pipe.eval(_KEEP, 3, self._prefix + name, self._order, self._sum, value, self._ttl_seconds, self._max_bytes)
        pipe.execute()

    def get(self, names: Sequence[str]) -> list[bytes | None]:
        """The values of these names, None where there is none.

        Raises: RedisError.
        """
        return list(self._broker.mget([self._prefix + name for name in names])) if names else []

    def renew(self, name: str) -> bytes | None:
        """A value, kept for as long again; None where there is none.

        Raises: RedisError.
        """
        value: bytes | None = self._broker.getex(self._prefix + name, ex=self._ttl_seconds)
        return value
