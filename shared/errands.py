"""Errands: work that a run asks a room to do ahead of it, and what came of it.

    run    note, send the wish (a message) -> ... -> find, use, remove        room   handle the wish: find, or do the work and put; or refuse

What came of a wish is an artifact, and stands in Redis under the wish. What is not there in time the run does itself, and the same: a room takes work off a run, and never decides
what a run computes. A room that refuses says why, so that nobody waits for what will not come. What nobody took away for a day belongs to a run that is gone, and is swept.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from semantide.shared import broker as broker_door
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import Message
from semantide.shared.errors import BrokerUnavailable, Conflict, Corrupt, NotFound, StoreUnavailable

M = TypeVar("M", bound=Message)

KEPT_SECONDS = 86400
AWAY = (broker_door.RedisError, BrokerUnavailable, StoreUnavailable, NotFound, Corrupt, OSError)
"""What a run does not fail of: it does the work itself."""
_PAUSE_SECONDS = 0.02
_REFUSED = b"refused:"


def store_made(kind: str, wanted: Message | str, write: Callable[[Path], None], store: ArtifactStore, **said: Any) -> str:
    """Store what ``write`` puts into a folder as an artifact of its own for this wish, or of this run; ``said`` goes into its manifest.

    Equal content may answer several wishes, and each run takes its own away: the wish makes them differ.
    """
    with tempfile.TemporaryDirectory(prefix=f"semantide-{kind}-") as scratch:
        folder = Path(scratch)
        write(folder)
        (folder / "wanted.json").write_text(json.dumps(wanted if isinstance(wanted, str) else wanted.model_dump(mode="json"), sort_keys=True) + "\n")
        return store.put(kind, folder, **said)


class Errands(Generic[M]):
    """The errands of one kind of wish."""

    def __init__(self, wish: type[M], broker: Any, store: ArtifactStore) -> None:
        self._broker, self._store = broker, store
        self._prefix = f"semantide:errands:{wish.__name__}"
        self._made = f"{self._prefix}:made"

    def key(self, wanted: M) -> str:
        """Where the reference stands in Redis."""
        return f"{self._prefix}:{hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()}"

    def find(self, wanted: M) -> str | None:
        """The reference of what came of it, where the work has been done.

        Raises: Conflict where the room has refused.
        """
        value = self._broker.get(self.key(wanted))
        if value is not None and value.startswith(_REFUSED):
            raise Conflict(value[len(_REFUSED) :].decode(errors="replace"))
        return value.decode() if value else None

    def fetched(self, wanted: M, until: float, clock: Callable[[], float], pause: Callable[[float], None]) -> Path | None:
        """The folder of what came of it; None where it does not come ``until`` then, or broker or store are away.

        Raises: Conflict where the room has refused.
        """
        try:
            while (ref := self.find(wanted)) is None and clock() < until:
                pause(_PAUSE_SECONDS)
            return None if ref is None else self._store.get(ref)
        except AWAY:
            return None

    def note(self, ref: str, now: float) -> None:
        """Note an artifact that goes with a wish, so that it is swept should its run be gone; ``now`` in seconds."""
        self._broker.zadd(self._made, {ref: now})

    def put(self, wanted: M, ref: str, now: float) -> None:
        """Note what came of a wish."""
        pipe = self._broker.pipeline()
        pipe.set(self.key(wanted), ref, ex=KEPT_SECONDS)
        pipe.zadd(self._made, {ref: now})
        pipe.execute()

    def refuse(self, wanted: M, why: str) -> None:
        """Note that nothing will come of it."""
        self._broker.set(self.key(wanted), _REFUSED + why.encode(), ex=KEPT_SECONDS)

    def remove(self, wanted: M, *others: str) -> None:
        """Take away what has been used, and other artifacts that went with the wish."""
        value = self._broker.get(self.key(wanted))
        self._broker.delete(self.key(wanted))
        for ref in (*others, *([value.decode()] if value and not value.startswith(_REFUSED) else [])):
            self._drop(ref)

    def sweep(self, now: float) -> int:
        """Take away what runs have left behind; how many artifacts."""
        left: list[bytes] = self._broker.zrangebyscore(self._made, "-inf", now - KEPT_SECONDS)
        for ref in left:
            self._drop(ref.decode())
        return len(left)

    def waiting(self) -> int:
        """Artifacts that are kept."""
        return int(self._broker.zcard(self._made))

    def _drop(self, ref: str) -> None:
        self._store.remove(ref)
        self._broker.zrem(self._made, ref)  # last: what could not be taken away is swept
