"""Work for the scheduler that only says when it runs: no model, and a clock that only rounds and tests move."""

import threading
from dataclasses import dataclass, field

from semantide.services.serving.ticket import SearchAgain
from semantide.shared.decoding.kv_pool import KVExhausted, KVPool

FAMILIES = {"a": object(), "b": object()}
PATIENCE = 60.0  # seconds until what has to happen in another thread is given up, on however slow a machine


class HandClock:
    """Seconds that pass only when a test or a round says so: what is judged by it does not depend on the machine."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


@dataclass(eq=False)
class Job:
    """A query that is its own preparation. ``fails`` names the stage that raises."""

    name: str
    beams: int = 1
    tokens: int = 1
    rounds: int = 3
    fails: str = ""
    again: int = 0
    family_name: str = "a"
    round_seconds: float = 0.0

    @property
    def family(self):
        return FAMILIES[self.family_name]

    @property
    def rows(self):
        return self.tokens + self.beams * (self.rounds - 1)


@dataclass
class Log:
    """What ran, in order: (names of the group, round)."""

    rounds: list[tuple[tuple[str, ...], int]] = field(default_factory=list)
    assembled: list[list[str]] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)

    def order(self) -> list[str]:
        return ["+".join(names) + f":{number}" for names, number in self.rounds]


class JobRun:
    def __init__(self, world, jobs, leases):
        self.world, self.jobs, self.leases, self.round, self.marks = world, list(jobs), list(leases), 0, []
        self.closed = 0

    def next_rows(self):
        return sum(job.beams for job in self.jobs)

    def advance(self):
        names = tuple(job.name for job in self.jobs)
        self.world.log.rounds.append((names, self.round))
        start = self.world.clock()
        self.world.gate(names, self.round)
        self.world.clock.advance(max(job.round_seconds for job in self.jobs))
        for job in self.jobs:
            if job.fails == f"round {self.round}":
                raise ValueError(f"{job.name} is bad")
        self.marks.append((f"round {self.round}", start, self.world.clock()))
        self.round += 1
        return self.round < max(job.rounds for job in self.jobs)

    def keep(self, places):
        for place in set(range(len(self.jobs))) - set(places):
            self.leases[place].release()
        self.jobs, self.leases = [self.jobs[place] for place in places], [self.leases[place] for place in places]

    def answers(self):
        found = []
        for job in self.jobs:
            if job.again:
                job.again -= 1
                found.append(SearchAgain())
            else:
                found.append(f"answer of {job.name}")
        return found

    def remember(self):
        assert not self.closed
        self.world.remembered.extend(job.name for job in self.jobs)
        if any(job.fails == "remember" for job in self.jobs):
            raise ValueError("cannot remember")

    def close(self):
        self.closed += 1
        assert self.closed == 1, "closed twice"
        for lease in self.leases:
            lease.release()


class Jobs:
    """Stages over jobs, with a pool of 1,000 bytes of which each beam takes one."""

    def __init__(self, gate=lambda names, number: None):
        self.log, self.pool, self.gate, self.clock = Log(), KVPool(1000), gate, HandClock()
        self.remembered = []

    def assemble(self, jobs):
        self.log.assembled.append([job.name for job in jobs])
        return [ValueError(f"{job.name} cannot be assembled") if job.fails == "assemble" else job for job in jobs]

    def admit(self, job):
        try:
            return self.pool.reserve(job.beams)
        except KVExhausted:
            return None

    def begin(self, jobs, leases, share):
        self.log.shares.append(share)
        if any(job.fails == "begin" for job in jobs):
            raise ValueError("cannot begin")
        return JobRun(self, jobs, leases)


class Gate:
    """Holds the first group's first round until ``open``."""

    def __init__(self):
        self.event, self.reached = threading.Event(), threading.Event()

    def __call__(self, names, number):
        if not self.reached.is_set():
            self.reached.set()
            assert self.event.wait(PATIENCE)

    def open(self):
        self.event.set()


def held(started, count=1, **options):
    """A scheduler whose worker is in the first round of a request named "first"."""
    gate = Gate()
    stages = Jobs(gate)
    scheduler = started(stages, **options)
    first = scheduler.submit(Job("first"))
    assert gate.reached.wait(PATIENCE)
    return gate, stages, scheduler, first
