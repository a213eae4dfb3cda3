"""Users under pseudonyms: at the door every user's id becomes its keyed digest, so that nothing behind it holds an id that anybody else knows.

    SEMANTIDE_USER_ID_KEY=...    callers go on using their own ids; logs, histories, data sets and models have pseudonyms

Without the key nobody tells from a pseudonym who it is, nor which pseudonym somebody has. With another key everybody would be somebody else: the stack keeps a
digest of its key, and a process whose key is missing or another one refuses to work.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from semantide.shared.config import Settings

_BROKERS_KEY = "semantide:user_ids"
_SHORTEST = 16
_DIGITS = 40  # of hexadecimal: 160 bits
_HIDDEN = "(hidden: users are kept under pseudonyms)"


class Pseudonyms:
    """The pseudonyms of one deployment. Without a key every id is its own."""

    def __init__(self, key: str) -> None:
        if key and len(key) < _SHORTEST:
            raise ValueError(f"SEMANTIDE_USER_ID_KEY has {len(key)} characters: give at least {_SHORTEST}, for example what `openssl rand -hex 32` prints")
        self._key = key.encode()

    @classmethod
    def of(cls, settings: Settings) -> Pseudonyms:
        """Those of a deployment.

        Raises: ValueError for a key that is too short.
        """
        return cls(settings.user_id_key)

    def __bool__(self) -> bool:
        return bool(self._key)

    def __repr__(self) -> str:
        return f"Pseudonyms({'with' if self else 'without'} a key)"

    def of_user(self, user: str) -> str:
        """A user's pseudonym."""
        if not self._key:
            return user
        return "u-" + hmac.new(self._key, b"user\0" + user.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()[:_DIGITS]

    def column(self, users: pa.ChunkedArray | pa.Array) -> pa.ChunkedArray | pa.Array:
        """A column of users as one of their pseudonyms."""
        if not self._key or not len(users):
            return users
        array = users.combine_chunks() if isinstance(users, pa.ChunkedArray) else users
        encoded = array.dictionary_encode()
        names = pa.array([self.of_user(user) for user in encoded.dictionary.to_pylist()], pa.string())
        return pc.take(names, encoded.indices)

    def quoted(self, field: str, value: str, fields: tuple[str, ...]) -> str:
        """What a refused row may quote of itself in what is stored: of a user, and of a row that could not be told apart into ``fields``, nothing."""
        return _HIDDEN if self._key and value and (field == "user" or field not in fields) else value

    @property
    def fingerprint(self) -> str:
        """By which the key is known again; it tells nothing of the key. Empty without one."""
        return hmac.new(self._key, b"fingerprint", hashlib.sha256).hexdigest()[:16] if self._key else ""

    def check(self, known: str) -> None:
        """Compare with the fingerprint of what is stored; "" where none is known.

        Raises: ValueError.
        """
        if known and not self._key:
            raise ValueError(f"this stack keeps users under pseudonyms, and SEMANTIDE_USER_ID_KEY is not set: set it to the key with the fingerprint {known}")
        if known and known != self.fingerprint:
            raise ValueError(
                f"SEMANTIDE_USER_ID_KEY has the fingerprint {self.fingerprint}, and this stack's users are kept under the key with the fingerprint {known}: "
                "set that one; with another key everybody would be a new user"
            )

    def agree(self, broker: Any) -> None:
        """Compare with what the broker knows of the stack.

        Raises: ValueError.
        """
        found = broker.get(_BROKERS_KEY)
        self.check(found.decode() if found else "")

    def settle(self, broker: Any) -> None:
        """Let the stack be known to keep users under this key from now on.

        Raises: ValueError where it is another one.
        """
        if self:
            broker.set(_BROKERS_KEY, self.fingerprint, nx=True)
        self.agree(broker)
