"""Lists whose making had a part of chance: what was shown under each request id, kept in the broker for a while, so that feedback needs to name no more than that id.

Serving keeps a list where a split chose the model or a draw chose items; ingestion joins exposures and feedback with it before they reach the log. The oldest go where all need more than their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from semantide.shared.bounded_values import BoundedValues

_TOGETHER = 1000  # ids of one look-up


@dataclass(frozen=True)
class ShownList:
    """One answer: its items by place, and the chance with which each came there, None where nobody knows it.

    ``variant`` answered, which ``share`` of the users had at that moment. Both are None outside of a split; ``share`` also where the request named the variant.
    """

    request_id: str
    items: tuple[str, ...]
    propensities: tuple[float | None, ...]
    variant: str | None = None
    share: float | None = None


class ShownLists:
    """The lists of one deployment."""

    def __init__(self, broker: Any, ttl_seconds: int, max_bytes: int, deployment: str = "default") -> None:
        self._values = BoundedValues(broker, f"semantide:shown:{deployment}", ttl_seconds, max_bytes)

    def keep(self, lists: Sequence[ShownList]) -> None:
        """Keep some lists, in one round trip.

        Raises: RedisError.
        """
        self._values.keep({shown.request_id: _packed(shown) for shown in lists})

    def get(self, request_ids: Iterable[str]) -> dict[str, ShownList]:
        """Those that are kept; ids that are not known are not in what comes back.

        Raises: RedisError.
        """
        wanted, found = list(dict.fromkeys(request_ids)), {}
        for begin in range(0, len(wanted), _TOGETHER):
            some = wanted[begin : begin + _TOGETHER]
            for name, raw in zip(some, self._values.get(some), strict=True):
                shown = None if raw is None else _unpacked(raw)
                if shown is not None:
                    found[name] = shown
        return found


def _packed(shown: ShownList) -> bytes:
    return json.dumps(asdict(shown), separators=(",", ":")).encode()


def _unpacked(raw: bytes) -> ShownList | None:
    try:
        fields = json.loads(raw)
        return ShownList(**{**fields, "items": tuple(fields["items"]), "propensities": tuple(fields["propensities"])})
    except (ValueError, TypeError, KeyError):
        return None  # another version of this software kept it
