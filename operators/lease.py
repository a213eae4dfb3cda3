"""One of several operators leads: the one whose name stands in a Lease that it keeps renewing.

Clocks of machines are never compared. A lease counts as left when this process has seen it unchanged for its whole duration by its own clock; the holder
itself stops to act earlier, when it could not renew for most of that time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from semantide.operators.cluster import Api, Body
from semantide.operators.pods import time_of
from semantide.shared.errors import Conflict, NotFound, SemantideError

LEASE_NAME = "semantide-operator"
_SURE_SHARE = 0.7
_log = logging.getLogger("semantide.operator")


class Lease:
    """``clock`` counts seconds from anywhere and never back; ``now`` is seconds since 1970-01-01 UTC, for people to read."""

    def __init__(self, api: Api, namespace: str, identity: str, seconds: float, clock: Callable[[], float], now: Callable[[], float]) -> None:
        self._api, self._namespace, self._identity, self._seconds = api, namespace, identity, seconds
        self._clock, self._now = clock, now
        self._sure_until = float("-inf")
        self._seen: tuple[str, float] | None = None

    def held(self) -> bool:
        """Whether this process may act at this moment."""
        return self._clock() < self._sure_until

    def renew(self) -> bool:
        """Take the lease, or keep it; to be called several times within its duration. Whether it is held then."""
        began = self._clock()
        try:
            if self._try(began):
                self._sure_until = began + _SURE_SHARE * self._seconds
        except Conflict:
            self._sure_until = float("-inf")  # somebody else was faster
        except SemantideError as error:
            _log.warning("the lease cannot be renewed: %s", error)
        return self.held()

    def release(self) -> None:
        """Let another one lead at once."""
        if not self.held():
            return
        self._sure_until = float("-inf")
        try:
            lease = self._api.get("Lease", self._namespace, LEASE_NAME)
            if lease["spec"].get("holderIdentity") == self._identity:
                self._api.replace(self._written(lease, ""))
        except SemantideError as error:
            _log.info("the lease runs out by itself: %s", error)

    def _try(self, began: float) -> bool:
        try:
            lease = self._api.get("Lease", self._namespace, LEASE_NAME)
        except NotFound:
            empty = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": LEASE_NAME, "namespace": self._namespace}, "spec": {}}
            self._api.create(self._written(empty, self._identity))
            return True
        holder = lease["spec"].get("holderIdentity") or ""
        if holder not in ("", self._identity):
            version = lease["metadata"]["resourceVersion"]
            if self._seen is None or self._seen[0] != version:
                # After the answer: it may have been written while the question was on its way.
                self._seen = version, self._clock()
            if began - self._seen[1] < float(lease["spec"].get("leaseDurationSeconds") or self._seconds):
                self._sure_until = float("-inf")
                return False
            _log.warning("%s no longer renews its lease: %s leads now", holder, self._identity)
        self._api.replace(self._written(lease, self._identity))
        return True

    def _written(self, lease: Body, holder: str) -> Body:
        time = time_of(self._now())
        spec = {**lease["spec"], "holderIdentity": holder, "leaseDurationSeconds": max(1, round(self._seconds)), "renewTime": time}
        if holder and lease["spec"].get("holderIdentity") != holder:
            spec |= {"acquireTime": time, "leaseTransitions": int(lease["spec"].get("leaseTransitions") or 0) + 1}
        return {**lease, "spec": spec}
