"""The audit log: what admins did, when, from where, and what came of it. A stream in the broker, to which one only appends; what is older than the retention is dropped."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict

from semantide.shared.errors import Corrupt

_STREAM = "semantide:audit"
_DAY_MS = 86_400_000
_SAID_CHARACTERS = 2000
_PART = 500


class AuditEntry(BaseModel):
    """One action. ``who`` is the name of the key, ``action`` method and path (a user in it is a digest), ``said`` the body's beginning, ``outcome`` the HTTP status. ``time`` in milliseconds since 1970-01-01 UTC."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str = ""
    time: int = 0
    who: str
    role: str
    origin: str
    action: str
    said: str = ""
    outcome: int


class AuditLog:
    """The log of one deployment."""

    def __init__(self, broker: Any, days: int) -> None:
        self._broker, self._days = broker, days

    def append(self, entry: AuditEntry, now_ms: int) -> None:
        """Add an entry.

        Raises: RedisError.
        """
        kept = entry.model_copy(update={"said": entry.said[:_SAID_CHARACTERS]}).model_dump(exclude={"id", "time"})
        # Dropped by the broker's own clock, which made the ids.
        self._broker.xadd(_STREAM, {"entry": json.dumps(kept)}, minid=max(0, now_ms - self._days * _DAY_MS), approximate=True)

    def read(self, *, limit: int, since: int = 0, until: int | None = None, who: str | None = None) -> list[AuditEntry]:
        """The newest entries first.

        Raises: RedisError, Corrupt.
        """
        found: list[AuditEntry] = []
        last = "+" if until is None else str(until)
        while len(found) < limit and (rows := self._broker.xrevrange(_STREAM, max=last, min=since, count=_PART)):
            for raw_id, fields in rows:
                entry_id = raw_id.decode()
                try:
                    entry = AuditEntry.model_validate({**json.loads(fields[b"entry"]), "id": entry_id, "time": int(entry_id.partition("-")[0])})
                except (KeyError, ValueError) as error:
                    raise Corrupt(f"entry {entry_id} of the audit log cannot be read ({type(error).__name__}): something else wrote to {_STREAM}") from error
                if who is None or entry.who == who:
                    found.append(entry)
            last = f"({rows[-1][0].decode()}"
        return found[:limit]
