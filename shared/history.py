"""Online history of each user: the last N interactions, kept in Redis for serving.

One list a user, oldest first; each entry is ``time<TAB>action<TAB>item``. Idle lists expire.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from semantide.shared.broker import ResponseError
from semantide.shared.contracts import Interaction
from semantide.shared.errors import Corrupt

# One step for the server, so that events appended meanwhile are not lost.
_MERGE = """
local seen, all = {}, {}
local function take(entry)
  if not seen[entry] then
    seen[entry] = true
    all[#all + 1] = entry
  end
end
for _, entry in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do take(entry) end
for index = 3, #ARGV do take(ARGV[index]) end
local function time(entry) return tonumber(string.match(entry, '^-?%d+')) or 0 end
table.sort(all, function(a, b) local x, y = time(a), time(b); if x ~= y then return x < y end; return a < b end)
redis.call('DEL', KEYS[1])
for index = math.max(1, #all - tonumber(ARGV[1]) + 1), #all do redis.call('RPUSH', KEYS[1], all[index]) end
redis.call('EXPIRE', KEYS[1], ARGV[2])
"""


class HistoryEvent(NamedTuple):
    """One remembered interaction; ``time`` in milliseconds since 1970."""

    item: str
    time: int
    action: str


class Histories:
    """Reads and appends online histories."""

    def __init__(self, broker: Any, length: int, ttl_seconds: int) -> None:
        self._broker, self._length, self._ttl_seconds = broker, length, ttl_seconds

    @staticmethod
    def key(user: str) -> str:
        """The Redis key of one user's list."""
        return f"semantide:history:{user}"

    def append(self, rows: Iterable[Interaction], pipe: Any = None) -> None:
        """Add interactions (chronological within a user), keep the last N, renew the expiry.

        With ``pipe`` the commands join the caller's transaction, and the caller executes it.
        """
        by_user: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            by_user[row.user].append(f"{row.time}\t{row.action}\t{row.item}")
        own = pipe is None
        pipe = self._broker.pipeline(transaction=False) if own else pipe
        for user, entries in by_user.items():
            pipe.rpush(self.key(user), *entries[-self._length :])
            pipe.ltrim(self.key(user), -self._length, -1)
            pipe.expire(self.key(user), self._ttl_seconds)
        if own:
            pipe.execute()

    def merge(self, events: Mapping[str, Sequence[HistoryEvent]]) -> None:
        """Bring past events of some users in, each once, wherever they belong in time; doing it again changes nothing."""
        pipe = self._broker.pipeline(transaction=False)
        for user, rows in events.items():
            entries = [f"{row.time}\t{row.action}\t{row.item}" for row in rows]
            pipe.eval(_MERGE, 1, self.key(user), self._length, self._ttl_seconds, *entries)
        pipe.execute()

    def get(self, user: str) -> list[HistoryEvent]:
        """The user's events in order of time; empty for a user never seen.

        Raises: Corrupt for what is no history.
        """
        found = self.get_many([user])[user]
        if isinstance(found, Corrupt):
            raise found
        return found

    def get_many(self, users: Iterable[str]) -> dict[str, list[HistoryEvent] | Corrupt]:
        """What ``get`` gives or raises, of several users in one round trip: one unreadable history costs the others nothing."""
        names = list(users)
        pipe = self._broker.pipeline(transaction=False)
        for user in names:
            pipe.lrange(self.key(user), 0, -1)
        return {user: self._read(user, entries) for user, entries in zip(names, pipe.execute(raise_on_error=False), strict=True)}

    def _read(self, user: str, entries: Any) -> list[HistoryEvent] | Corrupt:
        events = []
        try:
            if isinstance(entries, Exception):
                raise entries
            for entry in entries:
                time, action, item = entry.decode().split("\t", 2)
                events.append(HistoryEvent(item, int(time), action))
        except (ResponseError, ValueError) as error:
            return Corrupt(f"the history stored under {self.key(user)!r} cannot be read ({error}): delete that key of the broker, or send a `history` along")
        return sorted(events, key=lambda event: event.time)

    def forget(self, user: str) -> None:
        """Drop one user's history."""
        self._broker.delete(self.key(user))
