"""What the operator measures of itself and of the cluster, for Prometheus."""

from __future__ import annotations

from collections import Counter as Tally
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from semantide.operators.actions import PatchStatus
from semantide.operators.pods import seconds_of
from semantide.operators.reconcile import Round
from semantide.operators.resources import JOB_KIND, SERVICE_KIND, JobPhase, ServicePhase
from semantide.operators.snapshot import Snapshot

_ROUND_BOUNDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_WAIT_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0)


class Meters:
    """One process's figures."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._jobs = Gauge("semantide_operator_jobs", "NPUJobs by phase", ["phase"], registry=self.registry)
        self._services = Gauge("semantide_operator_services", "NPUServices by phase", ["phase"], registry=self.registry)
        self._replicas = Gauge("semantide_operator_replicas", "Replicas of a service that are ready", ["namespace", "service"], registry=self.registry)
        self._wished = Gauge("semantide_operator_wished_replicas", "Replicas that a service should have", ["namespace", "service"], registry=self.registry)
        self._outdated = Gauge(
            "semantide_operator_outdated_replicas", "Replicas that a rollout or a move has yet to replace", ["namespace", "service"], registry=self.registry
        )
        self._unmeasured = Gauge(
            "semantide_operator_unmeasured", "1 for a service of which no replica shows its load", ["namespace", "service"], registry=self.registry
        )
        self._of_services = (self._replicas, self._wished, self._outdated, self._unmeasured)
        self._npus = Gauge("semantide_operator_npus", "NPUs by state: free, held, or unhealthy", ["state"], registry=self.registry)
        self._unreadable = Gauge("semantide_operator_unreadable", "Resources that make no sense and are left as they are", ["kind"], registry=self.registry)
        self._oldest = Gauge("semantide_operator_longest_wait_seconds", "Wait of the job that has been longest in line", registry=self.registry)
        self._leads = Gauge("semantide_operator_leads", "1 while this process leads", registry=self.registry)
        self._rounds = Histogram("semantide_operator_round_seconds", "Time of a round", buckets=_ROUND_BOUNDS, registry=self.registry)
        self._waits = Histogram("semantide_operator_wait_seconds", "Time in line of gangs that were placed", buckets=_WAIT_BOUNDS, registry=self.registry)
        self._actions = Counter("semantide_operator_actions", "Actions that rounds decided on", ["action"], registry=self.registry)
        self._failures = Counter("semantide_operator_failures", "Resources whose actions could not all be carried out", registry=self.registry)
        self._restarts = Counter("semantide_operator_restarts", "Gangs that started again after a loss", registry=self.registry)
        self._preemptions = Counter("semantide_operator_preemptions", "Gangs that made room", registry=self.registry)

    def lead(self, leads: bool) -> None:
        """Whether this process leads now; one that does not says nothing of the cluster, for what it saw last is no longer so."""
        self._leads.set(leads)
        if not leads:
            for gauge in (self._jobs, self._services, *self._of_services, self._unreadable, self._npus):
                gauge.clear()
            self._oldest.set(0)

    def saw(self, snapshot: Snapshot, decided: Round) -> None:
        """What a round looked at, and what it decided."""
        jobs = Tally(job.status.phase for job in snapshot.jobs)
        for phase in get_args(JobPhase):
            self._jobs.labels(phase).set(jobs[phase])
        services = Tally(service.status.phase for service in snapshot.services)
        for phase in get_args(ServicePhase):
            self._services.labels(phase).set(services[phase])
        wrong = Tally(invalid.body["kind"] for invalid in snapshot.invalid)
        for kind in (JOB_KIND, SERVICE_KIND):
            self._unreadable.labels(kind).set(wrong[kind])
        for gauge in self._of_services:
            gauge.clear()
        for service in snapshot.services:
            status = service.status
            self._replicas.labels(service.namespace, service.name).set(status.ready_replicas)
            self._wished.labels(service.namespace, service.name).set(0 if service.spec.suspend else status.wish)
            self._outdated.labels(service.namespace, service.name).set(max(0, status.replicas - status.updated_replicas))
            self._unmeasured.labels(service.namespace, service.name).set(service.key in snapshot.unmeasured)
        free = held = unhealthy = 0
        for node in snapshot.nodes:
            usable = node.free.bit_count() if not node.unusable else 0
            free, held = free + usable, held + len(node.held)
            unhealthy += node.capacity - usable - len(node.held)
        for state, npus in (("free", free), ("held", held), ("unhealthy", unhealthy)):
            self._npus.labels(state).set(npus)
        since = [seconds_of(job.status.queue_time) or snapshot.now for job in snapshot.jobs if job.status.phase == "Pending"]
        self._oldest.set(max((snapshot.now - joined for joined in since), default=0.0))
        known = {job.key: job for job in snapshot.jobs}
        for start in decided.decision.starts:
            self._waits.observe(max(0.0, snapshot.now - (seconds_of(known[start.key].status.queue_time) or snapshot.now)))
        self._preemptions.inc(sum(preemption.victim != preemption.beneficiary for preemption in decided.decision.preemptions))
        for actions in decided.actions.values():
            for action in actions:
                self._actions.labels(type(action).__name__).inc()
                if isinstance(action, PatchStatus) and action.kind == "NPUJob":
                    before = known.get(f"{action.namespace}/{action.name}")
                    self._restarts.inc(max(0, action.status.get("restarts", 0) - (before.status.restarts if before else 0)))

    def did(self, decided: Round, failures: int, seconds: float) -> None:
        """How carrying it out went."""
        self._rounds.observe(seconds)
        self._failures.inc(failures)

    def page(self) -> bytes:
        """All figures as text."""
        return generate_latest(self.registry)
