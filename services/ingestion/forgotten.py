"""Users who are forgotten: a tombstone for each, by which late events of theirs are known and kept out.

A tombstone has no id in it but a digest under a key of this log's own, so it tells nobody who it was; only who comes with the id finds it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from semantide.services.ingestion.manifest import Manifest

_DIGEST_BYTES = 16
_KEY = "forgotten users"
_PER_QUERY = 900


@dataclass(frozen=True)
class Tombstone:
    """One forgotten user. ``accept_later``: events that happened after ``since`` are taken again. ``swept`` is when the last trace was gone, None until then. Units: milliseconds since 1970."""

    digest: str
    since: int
    accept_later: bool
    swept: int | None
    found: dict[str, Any]


class Forgotten:
    """The tombstones of one manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest

    def _key(self) -> bytes:
        row = self._manifest.connection.execute("SELECT value FROM keys WHERE name = ?", (_KEY,)).fetchone()
        if row is None:
            self._manifest.connection.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (_KEY, secrets.token_bytes(32)))
            return self._key()
        return bytes(row[0])

    def _digests(self, users: Iterable[str]) -> dict[str, bytes]:
        key = self._key()
        return {user: blake2b(user.encode(errors="surrogatepass"), key=key, digest_size=_DIGEST_BYTES).digest() for user in users}

    def add(self, user: str, since: int, *, accept_later: bool) -> str:
        """Set a tombstone, or anew; its digest. Whoever was forgotten before is swept again."""
        with self._manifest.writing() as connection:
            digest = self._digests([user])[user]
            connection.execute(
                "INSERT INTO forgotten VALUES (?1, ?2, ?3, NULL, '{}') ON CONFLICT (digest) DO UPDATE SET since = ?2, accept_later = ?3, swept = NULL",
                (digest, since, int(accept_later)),
            )
        return digest.hex()

    def tombstones(self, *, waiting: bool = False) -> list[Tombstone]:
        """All of them, the newest first, or those whose traces are still to be swept."""
        rows = self._manifest.connection.execute(
            f"SELECT digest, since, accept_later, swept, found FROM forgotten {'WHERE swept IS NULL' if waiting else ''} ORDER BY since DESC, digest"
        )
        return [Tombstone(digest.hex(), since, bool(later), swept, json.loads(found)) for digest, since, later, swept, found in rows.fetchall()]

    def note(self, tombstones: Iterable[Tombstone], saw: Sequence[str]) -> None:
        """Keep the names of what learned from these users: once the data sets are gone nobody could tell."""
        with self._manifest.writing() as connection:
            connection.executemany(
                "UPDATE forgotten SET found = ? WHERE digest = ?", [(json.dumps({"saw": saw}), bytes.fromhex(stone.digest)) for stone in tombstones]
            )

    def swept(self, tombstones: Iterable[Tombstone], found: Mapping[str, Any], now: int) -> None:
        """Note that these users are gone from everywhere, and what was found of them; one that was set anew meanwhile stays to be swept."""
        with self._manifest.writing() as connection:
            rows = [(now, json.dumps(found), bytes.fromhex(stone.digest), stone.since) for stone in tombstones]
            connection.executemany("UPDATE forgotten SET swept = ?, found = ? WHERE digest = ? AND since = ?", rows)

    def refused(self, users: pa.ChunkedArray | pa.Array, times: pa.ChunkedArray | pa.Array) -> npt.NDArray[np.bool_] | None:
        """Which rows are of forgotten users; None where none is.

        Shapes: N users and times in, N flags out.
        """
        connection = self._manifest.connection
        if not connection.execute("SELECT 1 FROM forgotten LIMIT 1").fetchone():
            return None
        names = {digest: user for user, digest in self._digests(pc.unique(users).to_pylist()).items()}
        keys, until = list(names), dict[str, int | None]()
        for begin in range(0, len(keys), _PER_QUERY):
            part = keys[begin : begin + _PER_QUERY]
            marks = ",".join("?" * len(part))
            for digest, since, later in connection.execute(f"SELECT digest, since, accept_later FROM forgotten WHERE digest IN ({marks})", part):
                until[names[bytes(digest)]] = since if later else None
        if not until:
            return None
        found = _array(users)
        flags = np.zeros(len(found), dtype=np.bool_)
        for row in np.flatnonzero(pc.is_in(found, pa.array(list(until), pa.string())).to_numpy(zero_copy_only=False)):
            last = until[found[int(row)].as_py()]
            flags[row] = last is None or times[int(row)].as_py() <= last
        return flags if flags.any() else None


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
