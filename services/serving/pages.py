"""Page by page through one ranking: the whole list is kept in the broker for a while, and a cursor says where the next page begins.

So a later page neither repeats nor reshuffles an earlier one, whatever the user does and whichever model is live by then. Items that may not be shown any more are left out, and the
page is filled up from what follows.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import zlib
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from pydantic import Field, ValidationError

from semantide.shared.bounded_values import BoundedValues
from semantide.shared.broker import RedisError
from semantide.shared.errors import BrokerUnavailable, NotFound
from semantide.shared.recommendation import Body, RecommendationAnswer, RecommendedItem

_TOKEN_BYTES, _PLACE_BYTES = 12, 3


class Ranking(Body):
    """What was found for the first page: its answer with all the items, the user whose dislikes count, and how many items a page has."""

    answer: RecommendationAnswer
    user: str | None = None
    n: int = Field(ge=1)


class Page(NamedTuple):
    """Items, and the place in the ranking where the next page begins, if there is one."""

    items: list[RecommendedItem]
    following: int | None


def turn(items: Sequence[RecommendedItem], place: int, n: int, hidden: Set[str]) -> Page:
    """The next n items from a place on that may be shown."""
    shown = [number for number in range(place, len(items)) if items[number].item not in hidden]
    return Page([items[number] for number in shown[:n]], shown[n - 1] + 1 if len(shown) > n else None)


def write_cursor(token: bytes, place: int) -> str:
    """Token of a kept ranking and a place in it, as one opaque word."""
    return base64.urlsafe_b64encode(token + place.to_bytes(_PLACE_BYTES, "big")).decode()


def read_cursor(cursor: str) -> tuple[bytes, int]:
    """Token and place.

    Raises: ValueError for a word that is no cursor.
    """
    try:
        raw = base64.b64decode(cursor, altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != _TOKEN_BYTES + _PLACE_BYTES:
        raise ValueError(f"`cursor` is {cursor[:40]!r}, which is none of ours: send the `cursor` of an answer unchanged, or ask for a first page without one")
    return raw[:_TOKEN_BYTES], int.from_bytes(raw[_TOKEN_BYTES:], "big")


class Pages:
    """Rankings in the broker. Each is forgotten when no page of it was asked for during ``ttl_seconds``, or before, where all of them need ``max_bytes``."""

    def __init__(self, broker: Any, ttl_seconds: int, max_bytes: int, deployment: str = "default") -> None:
        self._values, self._ttl_seconds = BoundedValues(broker, f"semantide:serving:{deployment}:page", ttl_seconds, max_bytes), ttl_seconds

    def keep(self, ranking: Ranking) -> bytes:
        """Keep a ranking; its token.

        Raises: BrokerUnavailable.
        """
        token = secrets.token_bytes(_TOKEN_BYTES)
        packed = zlib.compress(ranking.model_dump_json(exclude_none=True).encode(), 1)
        try:
            self._values.keep({token.hex(): packed})
        except RedisError as error:
            raise BrokerUnavailable(f"the ranking cannot be kept for later pages, the broker is away ({error}): try again, or leave `depth` out") from error
        return token

    def read(self, token: bytes) -> Ranking:
        """A kept ranking; it is kept for as long again.

        Raises: NotFound, BrokerUnavailable.
        """
        try:
            raw = self._values.renew(token.hex())
        except RedisError as error:
            raise BrokerUnavailable(f"the ranking of this cursor cannot be read, the broker is away ({error}): try again") from error
        try:
            # One that another version of this software kept may say what this one does not know.
            return Ranking.model_validate_json(zlib.decompress(raw or b""))
        except (zlib.error, ValidationError) as error:
            raise NotFound(
                f"the ranking of this `cursor` is no longer kept (it goes {self._ttl_seconds} s after its last page, or earlier where many are kept): "
                "ask for a first page again, with `user` or `history` and `depth`"
            ) from error
