"""The operator's work without its clients: listen, look at everything, decide, carry out, again.

Rounds are level-triggered: each looks at all that is, so a lost event, a failed write or a death half-way costs the time to the next round and nothing else.
Only the holder of the lease acts, and it stops in the middle of a round when it can no longer be sure of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from semantide.operators.actions import Action
from semantide.operators.balancing import ReplicaLoad
from semantide.operators.cluster import Api, Body, carry_out
from semantide.operators.device_health import CONFIG_MAP_PREFIX
from semantide.operators.extracts import extract_of
from semantide.operators.meters import Meters
from semantide.operators.pods import time_of
from semantide.operators.reconcile import Round, reconcile_all
from semantide.operators.resources import JOB_KIND, MANAGED_BY, MANAGED_BY_LABEL, SERVICE_KIND
from semantide.operators.settings import OperatorSettings
from semantide.operators.snapshot import WATCHED, DeviceReports, ObjectCache, Snapshot
from semantide.shared.errors import Conflict, NotFound, PermanentError, SemantideError

_LOAD_AGES = 3  # measurements may be so many of their intervals old
_log = logging.getLogger("semantide.operator")


class Rounds:
    """Looks at the cluster through ``api`` and what ``cache`` has heard. ``clock`` is seconds since 1970-01-01 UTC, ``steady`` counts seconds from anywhere and never
    back; ``leads`` says whether this process may act at this moment; ``writers`` resources are written to at the same time. ``breath`` is when it last got on."""

    def __init__(
        self,
        api: Api,
        settings: OperatorSettings,
        clock: Callable[[], float],
        leads: Callable[[], bool] = lambda: True,
        meters: Meters | None = None,
        writers: int = 8,
        steady: Callable[[], float] | None = None,
    ) -> None:
        self._steady = steady or clock
        self.api, self.settings, self.cache = api, settings, ObjectCache(self._steady)
        self._clock, self._leads = clock, leads
        self.breath = self._steady()
        self._stumbles: dict[str, str] = {}
        self._meters = meters or Meters()
        self._devices = DeviceReports()
        self._listed = self._asked_devices = float("-inf")
        self._loads: Mapping[str, tuple[ReplicaLoad, ...]] = {}
        self._unmeasured: Mapping[str, str] = {}
        self._measured = float("-inf")
        self._refusals: dict[str, str] = {}
        self.last: Snapshot | None = None
        self._turn = Lock()
        self._writers = ThreadPoolExecutor(writers, "writer") if writers > 1 else None

    def forget(self) -> None:
        """Read everything anew before the next round: somebody else may have acted since, and what was measured or refused before is old."""
        self._listed = float("-inf")
        self._loads, self._unmeasured, self._refusals = {}, {}, {}

    def measured(self, loads: Mapping[str, tuple[ReplicaLoad, ...]], unmeasured: Mapping[str, str] | None = None) -> None:
        """What services' replicas say of their load, and why those of some say nothing; used from the next round on."""
        self._loads, self._unmeasured, self._measured = loads, unmeasured or {}, self._steady()

    def turn(self) -> Round | None:
        """One round; None where this process does not lead.

        Raises: TransientError, PermanentError when the cluster cannot be read.
        """
        with self._turn:
            self.breath = began = self._steady()
            if not self._leads():
                return None
            now = self._clock()
            self._refresh(began)
            loads = self._loads if began - self._measured <= _LOAD_AGES * self.settings.load_seconds else {}
            snapshot = self.cache.snapshot(self.settings, now, self._devices, loads, dict(self._refusals), self._unmeasured)
            self.last = snapshot
            there = {f"{JOB_KIND} {job.key}" for job in snapshot.jobs} | {f"{SERVICE_KIND} {service.key}" for service in snapshot.services}
            self._refusals = {resource: said for resource, said in self._refusals.items() if resource in there}
            decided = reconcile_all(snapshot, self.settings)
            self._tell(decided.stumbles)
            self._meters.saw(snapshot, decided)
            spread = map if self._writers is None else self._writers.map
            failures = sum(spread(lambda entry: self._carry_out(*entry), decided.actions.items()))
            self._meters.did(decided, failures, self._steady() - began)
            return decided

    def _refresh(self, now: float) -> None:
        """Read anew what is due; ``now`` is by the steady clock, for a machine's own may be set back by hours."""
        settings = self.settings
        if now - self._listed >= settings.relist_seconds:
            for kind in WATCHED:
                self.cache.settle(kind, self.api.list(kind, "" if kind == "Node" else settings.namespace, keep=extract_of))
            self.cache.settle("Service", self.api.list("Service", settings.namespace, f"{MANAGED_BY_LABEL}={MANAGED_BY}", keep=extract_of))
            self._listed = now
        if now - self._asked_devices >= settings.device_info_seconds:
            self._asked_devices = now
            try:
                self._devices = self._reports()
            except SemantideError as error:
                # What was last known of the devices is better than nothing.
                _log.warning("what is said of devices cannot be read: %s", error)

    def _reports(self) -> DeviceReports:
        settings = self.settings
        config_maps = self.api.list("ConfigMap", settings.device_info_namespace, keep=_device_info).items if settings.device_info_namespace else []
        claimed = settings.dynamic_resources
        return DeviceReports(
            tuple(config_maps),
            tuple(self.api.list("ResourceSlice").items if claimed else ()),
            tuple(self.api.list("ResourceClaim", settings.namespace).items if claimed else ()),
        )

    def _tell(self, stumbles: Mapping[str, Exception]) -> None:
        """Where the operator stumbled, with the way there; once, and not in every round that does the same."""
        told = {resource: f"{type(error).__name__}: {error}" for resource, error in stumbles.items()}
        for resource, error in stumbles.items():
            if self._stumbles.get(resource) != told[resource]:
                _log.warning("%s cannot be looked at and is left as it is: %s", resource, error, exc_info=error)
        self._stumbles = told

    def _carry_out(self, resource: str, actions: tuple[Action, ...]) -> bool:
        """One resource's actions; whether they failed."""
        kind, key = resource.split(" ", 1)
        self.breath = self._steady()
        try:
            for action in actions:
                if not self._leads():
                    return True
                carry_out((action,), self.api, self.cache.put, lambda: time_of(self._clock()))
            self._refusals.pop(resource, None)
            return False
        except (Conflict, NotFound) as error:
            # Somebody has written since, or it is gone: the next round begins with what is there now.
            _log.info("%s changed meanwhile: %s", resource, error)
            self._reread(kind, *key.split("/", 1))
            return True
        except PermanentError as error:
            if self._refusals.get(resource) != str(error):
                _log.error("%s is refused: %s", resource, error)
            self._refusals[resource] = str(error)
            return True
        except SemantideError as error:
            _log.warning("%s is tried again: %s", resource, error)
            return True
        except Exception:
            # What one resource makes this process stumble over must not stop what others wait for.
            _log.exception("%s cannot be written and is tried again", resource)
            return True

    def _reread(self, kind: str, namespace: str, name: str) -> None:
        if kind not in (JOB_KIND, SERVICE_KIND):
            return
        try:
            self.cache.put(self.api.get(kind, namespace, name))
        except NotFound:
            self._listed = float("-inf")
        except SemantideError as error:
            _log.info("%s %s/%s cannot be read: %s", kind, namespace, name, error)


def _device_info(body: Body) -> Body | None:
    """What a device plugin says of a node; any other ConfigMap is nobody's business here."""
    return body if body["metadata"]["name"].startswith(CONFIG_MAP_PREFIX) else None
