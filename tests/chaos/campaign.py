"""Chaos: faults drawn from a seed strike a real stack under load, one after the other; nothing may be lost, doubled or wrong, and everything comes back.

    python tests/chaos/campaign.py [--runs 200] [--seed 1] [--only NUMBER ...] [--kind NAME ...] [--minutes M] [--keep FOLDER] [--json]

Each run is one fault: processes killed, a broker that fails over, a disk that is full or slow, a clock that is set, a network that is cut, a job without memory, damaged
files, a second stack, the version before. What a run does follows from the seed and its number: ``--only 17`` repeats that one. Meanwhile events are sent and sent
again, users are recommended items and say what they clicked, and recommendations are compared with those of the live model. Recovery is the time from the fault, or from
its end where it lasts, until the log takes events again, right answers come, every process runs and the interrupted job has got on. Some faults take root; where they cannot
be had they are passed over and named. Exit 1 where anything was lost, doubled, wrong, or answered without a clear error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults import KINDS, Fault, deck
from ground import Ground, specs
from ledger import Balance, balance, histories_that_differ, stored_events
from visitors import Crowd

from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.version import code_version

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from machine import machine

RECOVERED_SECONDS = 180.0  # after which a run counts as one that did not recover
DYING_SECONDS = 1.0
REWARD_WORDS = "a reward job got inputs"


@dataclass
class Run:
    """One fault and what came of it. ``recovery``: seconds until each part was right again."""

    number: int
    kind: str
    recovery: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    passed_over: str = ""
    seconds: float = 0.0

    @property
    def slowest(self) -> float:
        """Seconds until all was right."""
        return max(self.recovery.values(), default=0.0)


@dataclass
class Campaign:
    """Runs on one stack, and their accounts."""

    ground: Ground
    crowd: Crowd
    seed: int
    say: Any
    runs: list[Run] = field(default_factory=list)
    base: int = 0  # events in the log before anybody came
    balance: Balance = field(default=Balance(0, 0, 0, 0))

    def run(self, number: int, kind: str) -> Run:
        """One fault, from its draw to the end of the job that it met."""
        run, chance, begun = Run(number, kind), random.Random(f"{self.seed}/{number}"), time.monotonic()
        fault = KINDS[kind][1]()
        run.passed_over = fault.missing(self.ground)
        if not run.passed_over:
            try:
                self._go_through(run, fault, chance)
            except Exception as error:
                run.problems.append(f"{type(error).__name__}: {error}")
                self.ground.revive()
        run.seconds = time.monotonic() - begun
        self.runs.append(run)
        self.say(_line(run))
        return run

    def _go_through(self, run: Run, fault: Fault, chance: random.Random) -> None:
        wrong_before = len(self.crowd.wrong())
        spec = specs(self.ground.inputs).get(fault.room) if chance.random() < fault.meets else None
        fault.prepare(self.ground, chance)
        job: JobRecord | None = None
        if spec is not None:
            job = self.ground.submit(spec)
            if spec.kind != "reward":  # whose answer comes too soon to be met in the middle
                self._await_start(job)
                time.sleep(chance.uniform(0.0, 1.5))
        struck = time.monotonic()
        fault.strike(self.ground, chance)
        if fault.lasts[1]:
            time.sleep(chance.uniform(*fault.lasts))
        begin = time.monotonic() if fault.planned else struck
        fault.lift(self.ground)
        if fault.lasts[1] and not fault.planned:
            begin = time.monotonic()
        self._recover(run, begin, job, max(begin, fault.gone))
        if job is not None and spec is not None:
            self._settle(run, fault, spec, job)
        run.problems += fault.problems(self.ground)
        run.problems += self.crowd.wrong()[wrong_before:]

    def _await_start(self, job: JobRecord) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = self.ground.job(job.id)
            if found is not None and (found.state != "queued" or found.finished):
                return
            time.sleep(0.05)

    def _recover(self, run: Run, begin: float, job: JobRecord | None, since: float) -> None:
        """Look until everything works again; when each part did. Answers count that were given after ``since``."""
        crowd, found = self.crowd, run.recovery
        before = self.ground.job(job.id) if job else None
        mark = 0
        while time.monotonic() < begin + RECOVERED_SECONDS:
            now = time.monotonic() - begin
            if "answers" not in found and all(load.was_served(since) for load in (crowd.asker, *crowd.visitors)):
                found["answers"] = max(_first(load.served, since) for load in (crowd.asker, *crowd.visitors)) - begin
            if not mark and crowd.sender.was_served(since):
                mark = crowd.accepted()
            if mark and "events" not in found:
                stored = self.ground.stored()
                if stored is not None and stored[0] >= self.base + mark:
                    found["events"] = now
            # What was killed takes a moment to be gone.
            if "processes" not in found and now > DYING_SECONDS and self.ground.ready():
                found["processes"] = now
            if job is not None and "job" not in found:
                record = self.ground.job(job.id)
                if record is not None and (record.finished or (before and (record.attempt, record.done) != (before.attempt, before.done) and record.done)):
                    found["job"] = now
                before = before or record
            if {"answers", "events", "processes"} <= set(found) and (job is None or "job" in found):
                return
            time.sleep(0.1)
        run.problems.append(f"not recovered within {RECOVERED_SECONDS:.0f} s: only {found or 'nothing'}")

    def _settle(self, run: Run, fault: Fault, spec: JobSpec, job: JobRecord) -> None:
        """The job's end must be the one that it always has, whatever it met; where it had to fail, the same job afterwards."""
        record = self.ground.ended(job.id)
        if spec.kind == "reward":
            if record.state != "failed" or REWARD_WORDS not in (record.error or ""):
                run.problems.append(f"a job without inputs {record.state}: {record.error}")
            return
        if fault.fails == "must" and record.state != "failed":
            run.problems.append(f"{record.id} {record.state}, and had to fail")
        if fault.fails != "never" and record.state == "failed":
            if fault.words not in (record.error or "").lower():
                run.problems.append(f"{record.id} failed without a word of {fault.words!r}: {record.error}")
            fault.relieve(self.ground)
            record = self.ground.ended(self.ground.submit(spec).id)
        if record.state != "succeeded":
            run.problems.append(f"{record.id} {record.state}: {record.error}")
            return
        if (expected := self.ground.expected[spec.kind]) != record.artifacts:
            run.problems.append(f"{record.id} made {record.artifacts} and not {expected}")

    def close(self) -> list[str]:
        """Once nobody comes any more: the accounts of all events and histories; what is wrong with them."""
        sent = list(self.crowd.events())
        problems: list[str] = []
        deadline = time.monotonic() + 60
        while (found := self.ground.stored()) is None or found[1]:
            if time.monotonic() > deadline:
                problems.append(f"accepted batches still wait for the log: {found}")
                break
            time.sleep(0.2)
        users = sorted({event[0] for event in sent})
        with self.ground.client() as client:
            online = {user: [(row["item"], row["time"], row["action"]) for row in client.get(f"/v1/users/{user}/history")["events"]] for user in users}
            parked = client.get("/v1/queues")["dead_letters"]
        problems += histories_that_differ(sent, online, Settings().history_length)
        problems += [f"parked in {queue}: {letter['error']}" for queue, letters in parked.items() for letter in letters]
        self.ground.down()
        self.balance = balance(sent, (event for event in stored_events(self.ground.data_dir) if not event[0].startswith("user-")))
        if self.balance.strange:
            problems.append(f"{self.balance.strange} events are stored that nobody sent")
        return problems


def _first(served: list[float], begin: float) -> float:
    return min(moment for moment in served[-10_000:] if moment > begin)


def _line(run: Run) -> str:
    if run.passed_over:
        return f"{run.number:>4}  {run.kind:<28} passed over: {run.passed_over}"
    parts = "  ".join(f"{name} {seconds:5.1f}" for name, seconds in run.recovery.items())
    return f"{run.number:>4}  {run.kind:<28} {run.seconds:6.1f} s  {parts}" + "".join(f"\n      PROBLEM: {problem[:1500]}" for problem in run.problems)


@contextmanager
def _campaign(folder: Path, seed: int, failover: bool, say: Any) -> Iterator[Campaign]:
    with Ground(folder, failover) as ground:
        crowd = Crowd.of(ground)
        stored = ground.stored()
        assert stored is not None
        yield Campaign(ground, crowd, seed, say, base=stored[0])


def shake(folder: Path, wanted: list[tuple[int, str]], seed: int, until: float, say: Any) -> tuple[list[Run], Balance, list[str], dict[str, int]]:
    """All wanted runs, first those on a broker of the stack's own, then those on one that fails over."""
    runs: list[Run] = []
    total, problems, told = Balance(0, 0, 0, 0), list[str](), dict[str, int]()
    for failover in (False, True):
        these = [(number, kind) for number, kind in wanted if KINDS[kind][1]().failover == failover]
        if not these or time.monotonic() > until:
            continue
        say(f"a stack on {'a broker with replicas and sentinels' if failover else 'a broker of its own'} for {len(these)} runs")
        with _campaign(folder / ("failover" if failover else "own"), seed, failover, say) as campaign:
            with campaign.crowd.at_work():
                try:
                    for number, kind in these:
                        if time.monotonic() < until:
                            campaign.run(number, kind)
                except KeyboardInterrupt:
                    say("interrupted: the accounts of what was run follow")
                    until = 0.0
            problems += campaign.close()
        runs += campaign.runs
        one = campaign.balance
        total = Balance(total.accepted + one.accepted, total.lost + one.lost, total.doubled + one.doubled, total.strange + one.strange)
        for words, count in campaign.crowd.told().items():
            told[words] = told.get(words, 0) + count
    return runs, total, problems, told


def table(runs: list[Run]) -> list[str]:
    """A row for each kind of fault."""
    lines = [f"{'fault':<28} {'runs':>5} {'wrong':>6} {'recovery: median':>17} {'longest':>8}   slowest part"]
    for kind in KINDS:
        these = [run for run in runs if run.kind == kind and not run.passed_over]
        if not these:
            over = next((run.passed_over for run in runs if run.kind == kind), "")
            lines += [f"{kind:<28} {0:>5}   passed over: {over}"] if over else []
            continue
        worst = max(these, key=lambda run: run.slowest)
        part = max(worst.recovery, key=lambda name: worst.recovery[name], default="")
        wrong = sum(bool(run.problems) for run in these)
        lines.append(
            f"{kind:<28} {len(these):>5} {wrong:>6} {statistics.median(run.slowest for run in these):>15.1f} s {worst.slowest:>6.1f} s   {part} (run {worst.number})"
        )
    return lines


def measures(runs: list[Run], total: Balance, problems: list[str]) -> dict[str, dict[str, Any]]:
    """The figures of the benchmarks' form."""
    done = [run for run in runs if not run.passed_over]
    wrong = sum(len(run.problems) for run in done) + len(problems)
    longest = max((run.slowest for run in done), default=0.0)
    base: dict[str, Any] = {"better": "lower", "at_least": 0, "aim": 0, "runs": len(done)}
    return {
        "runs": {"value": len(done), "unit": "faults", "better": "higher", "at_least": 200, "aim": 200, "runs": 1},
        "events": {"value": total.accepted, "unit": "events", "better": "higher", "runs": 1},
        "lost": {**base, "value": total.lost, "unit": "events"},
        "doubled": {**base, "value": total.doubled + total.strange, "unit": "events"},
        "wrong": {**base, "value": wrong, "unit": "answers, outcomes and unclear errors"},
        "longest_recovery": {**base, "value": round(longest, 1), "unit": "s", "at_least": 30, "aim": 10},
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="runs of these numbers, and no others")
    parser.add_argument("--kind", nargs="+", choices=list(KINDS), metavar="NAME", help="only runs of these kinds: " + ", ".join(KINDS))
    parser.add_argument("--minutes", type=float, default=0.0, help="begin no run after so many minutes (0: all)")
    parser.add_argument("--keep", type=Path, help="folder for the stack's data and logs, which stays; it must not exist")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    cards = deck(options.seed)
    numbers = options.only if options.only is not None else range(options.runs)
    wanted = [(number, cards[number % len(cards)]) for number in numbers]
    if options.kind:
        wanted = [(number, kind) for number, kind in wanted if kind in options.kind]
    until = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")

    def say(text: str) -> None:
        print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    with tempfile.TemporaryDirectory(prefix="semantide-chaos-") as name:
        folder = options.keep.absolute() if options.keep else Path(name) / "chaos"
        folder.mkdir(parents=True)
        runs, total, problems, told = shake(folder, wanted, options.seed, until, say)
    found = measures(runs, total, problems)
    by_kind = table(runs)
    if options.json:
        passed_over = sorted({run.kind for run in runs if run.passed_over})
        setting = {"seed": options.seed, "told": told, "problems": problems, "passed_over": passed_over}
        print(
            json.dumps(
                {
                    "benchmark": "chaos",
                    "commit": code_version(),
                    "machine": machine(),
                    "setting": setting,
                    "measures": found,
                    "faults": [vars(run) for run in runs],
                }
            )
        )
    else:
        print("", *by_kind, "", sep="\n")
        for measure, entry in found.items():
            print(
                f"{measure:<18} {entry['value']:>10,} {entry['unit']:<38} {'at most' if entry['better'] == 'lower' else 'at least'} {entry.get('at_least', '-')}"
            )
        print("instead of answers:", ", ".join(f"{words} {count:,}" for words, count in sorted(told.items())) or "nothing")
        print(*(f"PROBLEM: {problem}" for problem in problems), sep="\n")
    return 1 if total.lost or found["doubled"]["value"] or found["wrong"]["value"] else 0


if __name__ == "__main__":
    sys.exit(main())
