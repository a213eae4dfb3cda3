"""The one user of the Kubernetes client: objects in and out as plain dictionaries, and actions carried out.

Api       the verbs that the operator needs of an API server; tests have one in memory with the same contract
Cluster   carries out actions over an Api
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

Body = dict[str, Any]


@dataclass(frozen=True)
class Listing:
    """All objects of a kind at one moment, which ``version`` names."""

    items: list[Body]
    version: str


class Api(Protocol):
    """The verbs. ``kind`` is one of ``KINDS``; objects are dictionaries as the API server writes them.

    Raises: NotFound, Conflict (the name is taken, or somebody has written since), PermanentError (refused, invalid), TransientError (not reached, overloaded).
    """

    def list(self, kind: str, namespace: str = "", labels: str = "") -> Listing:
        """All objects of a kind, in one namespace or (empty) everywhere."""

    def get(self, kind: str, namespace: str, name: str) -> Body:
        """One object."""

    def create(self, body: Mapping[str, Any]) -> Body:
        """A new object."""

    def replace(self, body: Mapping[str, Any]) -> Body:
        """Write an object whose ``resourceVersion`` is still the one in ``body``."""

    def replace_status(self, body: Mapping[str, Any]) -> Body:
        """Write an object's status if its ``resourceVersion`` is still the one in ``body``."""

    def annotate(self, kind: str, namespace: str, name: str, annotations: Mapping[str, str | None], uid: str = "") -> Body:
        """Write some annotations of an object (None removes one), of this ``uid`` alone where one is given."""

    def delete(self, kind: str, namespace: str, name: str, *, uid: str = "", grace_seconds: int | None = None) -> None:
        """Ask for an object's deletion, of this ``uid`` alone where one is given."""
