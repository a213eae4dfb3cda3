"""The operator's process: kopf's watches feed what is known, threads lead, act, measure and answer.

kopf (asyncio)  watches jobs, services, pods and nodes -> ObjectCache, and wakes the turns
lead            keeps the lease
turns           one round after the other while this process leads
measure         asks services' replicas for their load
page            /metrics, /cluster, /healthz, /readyz
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import kopf

from semantide.operators.cluster import KINDS, KubernetesApi
from semantide.operators.cluster_view import view
from semantide.operators.lease import Lease
from semantide.operators.loads import Loads
from semantide.operators.meters import Meters
from semantide.operators.page import Page
from semantide.operators.resources import JOB_KIND, SERVICE_KIND
from semantide.operators.rounds import Rounds
from semantide.operators.settings import OperatorSettings
from semantide.operators.snapshot import WATCHED
from semantide.shared.api_keys import configured_keys, strongest
from semantide.shared.errors import PermanentError, SemantideError

_GATHER_SECONDS = 0.05  # events come in swarms: a round for each would do the same again
_AGAIN_SECONDS = 2.0
_HEED_SECONDS = 0.5
_SILENT_SECONDS = 120.0
_WATCH_SECONDS = 300  # a real server takes whole seconds only
_log = logging.getLogger("semantide.operator")


class Operator:
    """One process of the operator."""

    def __init__(self, settings: OperatorSettings) -> None:
        self._settings = settings
        self._identity = settings.identity or f"{socket.gethostname()}-{os.getpid()}"
        api = KubernetesApi()
        self._meters = Meters()
        self._lease = Lease(api, settings.own_namespace, self._identity, settings.lease_seconds, time.monotonic, time.time)
        self._rounds = Rounds(api, settings, time.time, self._lease.held, self._meters, steady=time.monotonic)
        key = strongest(configured_keys(settings.api_keys)) or ""
        self._loads = Loads(key, settings.own_namespace, time.monotonic, release=settings.release, look_seconds=settings.load_seconds)
        self._api = api
        self._wake, self._stop = threading.Event(), threading.Event()
        self._breath = self._renewed = time.monotonic()
        self._held = self._listening = False

    def run(self) -> None:
        """Until SIGTERM or SIGINT, which kopf listens to once it runs."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        page = Page(self._settings.port, self._meters.page, self._view, self._alive, lambda: self._listening) if self._settings.port else None
        if page is not None:
            page.start()
        threads = [threading.Thread(target=work, name=work.__name__.strip("_"), daemon=True) for work in (self._lead, self._turns, self._measure)]
        try:
            if not self._await_resources():
                return
            for thread in threads:
                thread.start()
            _log.info("%s watches %s", self._identity, self._settings.namespace or "all namespaces")
            self._listening = True
            asyncio.run(self._listen())
        finally:
            self._stop.set()
            self._wake.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join(_AGAIN_SECONDS)
            self._lease.release()
            if page is not None:
                page.stop()

    def _view(self) -> dict[str, Any]:
        return view(self._rounds.last if self._lease.held() else None)

    def _alive(self) -> bool:
        now = time.monotonic()
        turns = now - max(self._breath, self._rounds.breath) < _SILENT_SECONDS
        return turns and now - self._renewed < _SILENT_SECONDS + self._renewal_seconds

    @property
    def _renewal_seconds(self) -> float:
        return self._settings.lease_seconds / 4

    def _await_resources(self) -> bool:
        """Wait for the custom resources to be known: a watch that begins before them would never begin. False where this process is told to end first."""
        while not self._stop.is_set():
            try:
                for kind in (JOB_KIND, SERVICE_KIND):
                    self._api.list(kind, self._settings.namespace)
                return True
            except SemantideError as error:
                _log.warning("jobs and services cannot be listed, are their definitions installed? %s", error)
                self._breath = self._renewed = time.monotonic()
                self._stop.wait(_AGAIN_SECONDS)
        return False

    async def _listen(self) -> None:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(kopf.login_via_client)
        for kind in WATCHED:
            self._watch(registry, kind)
        settings = kopf.OperatorSettings()
        settings.posting.enabled = False
        settings.scanning.disabled = True
        settings.watching.server_timeout = _WATCH_SECONDS
        settings.watching.client_timeout = _WATCH_SECONDS + 10
        namespace = self._settings.namespace
        told = asyncio.Event()
        heeding = asyncio.create_task(self._heed(told))  # a signal that came before kopf's own handlers were there
        try:
            scope: dict[str, Any] = {"clusterwide": False, "namespaces": [namespace]} if namespace else {"clusterwide": True}
            await kopf.operator(registry=registry, settings=settings, standalone=True, stop_flag=told, **scope)
        finally:
            heeding.cancel()

    async def _heed(self, told: asyncio.Event) -> None:
        while not self._stop.is_set():
            await asyncio.sleep(_HEED_SECONDS)
        told.set()

    def _watch(self, registry: kopf.OperatorRegistry, kind: str) -> None:
        group, _, version = KINDS[kind].api_version.rpartition("/")

        # Only raw events: kopf's other handlers write finalizers and annotations, and a finalizer blocks deletion while the operator is away.
        @kopf.on.event(group, version, KINDS[kind].plural, registry=registry)
        async def heard(event: Any, **_: Any) -> None:
            body = {**event["object"], "kind": kind}
            if event["type"] == "DELETED":
                self._rounds.cache.drop(body)
                self._wake.set()
            elif self._rounds.cache.put(body):
                self._wake.set()

    def _lead(self) -> None:
        while not self._stop.is_set():
            self._renewed = time.monotonic()
            self._carefully("keeping the lease", self._lead_once)
            self._stop.wait(self._renewal_seconds)

    def _lead_once(self) -> None:
        held = self._lease.renew()
        if held and not self._held:
            _log.info("%s leads", self._identity)
            self._rounds.forget()
            self._wake.set()
        self._held = held
        self._meters.lead(held)

    def _turns(self) -> None:
        while not self._stop.is_set():
            self._wake.wait(self._settings.round_seconds)
            self._stop.wait(_GATHER_SECONDS)
            self._wake.clear()
            self._breath = time.monotonic()
            self._carefully("a round", self._rounds.turn)

    def _measure(self) -> None:
        while not self._stop.wait(self._settings.load_seconds):
            if self._lease.held():
                self._carefully("measuring services", self._measure_once)

    def _measure_once(self) -> None:
        if self._rounds.last is not None:
            self._rounds.measured(self._loads.measure(self._rounds.last), self._loads.unmeasured)

    def _carefully(self, what: str, work: Callable[[], object]) -> None:
        """Whatever goes wrong with one turn, the next one begins anew."""
        try:
            work()
        except PermanentError as error:
            _log.error("%s failed: %s", what, error)
            self._stop.wait(_AGAIN_SECONDS)
        except SemantideError as error:
            _log.warning("%s failed and is done again: %s", what, error)
            self._stop.wait(_AGAIN_SECONDS)
        except Exception:
            _log.exception("%s stumbled and goes on", what)
            self._stop.wait(_AGAIN_SECONDS)


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as JSON."""
        line = {"time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S"), "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def start_log(level: str) -> None:
    """Log to standard error; kopf's own chatter only where it is a warning."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
