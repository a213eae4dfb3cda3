"""Soak: the whole stack under mixed load for an hour; memory, open files, the broker's keys and files on disk must not grow, but for what is stored.

    python tests/chaos/soak.py [--minutes 60] [--users 100000] [--visitors 4] [--quick] [--json]

Every user has a history before it begins. Then visitors come in turn, are recommended items and say what they saw and clicked; events of others come in batches, some of them
twice; the same questions are asked again and again and their answers compared; every few minutes a job of each room runs. Each process of the stack, the broker and the data
folder are looked at every few seconds. A slope is that of the straight line through the samples after the first quarter of the run, in percent of their mean an hour, with its
standard error. Flat: no more than 5 % an hour beyond twice that error. What is stored grows with what comes in, so of that the bytes an event are told. Exit 1 where an answer was
wrong or an event is lost or stored twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from ground import KEY, NUM_ITEMS, START_MS, Ground, specs
from ledger import balance, stored_events
from visitors import Crowd, Visitor

from semantide.client import Client, Retries
from semantide.shared.broker import connect
from semantide.shared.version import code_version

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
from machine import machine

SAMPLE_SECONDS = 5.0
JOBS_EVERY_SECONDS = 180.0
FLAT_PERCENT = 5.0  # an hour
_MIB = 1 << 20
_ROWS = 4000


@dataclass(eq=False)
class Watch(threading.Thread):
    """Samples of everything that could grow, with the second of each."""

    ground: Ground
    pause_seconds: float = SAMPLE_SECONDS
    times: list[float] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__init__(name="watch", daemon=True)

    def run(self) -> None:
        """Until told to end."""
        begin = time.monotonic()
        with connect(self.ground.state()["redis_url"]) as broker:
            while not self.ended.wait(self.pause_seconds):
                self.samples.append(self._look(broker))
                self.times.append(time.monotonic() - begin)

    def _look(self, broker: Any) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, number in self.ground.processes().items():
            try:
                process = psutil.Process(number)
                found[f"memory: {name}"] = process.memory_info().rss / _MIB
                found[f"open files: {name}"] = process.num_fds()
            except psutil.NoSuchProcess:
                continue
        found["broker: keys"] = int(broker.dbsize()) - sum(1 for _ in broker.scan_iter("semantide:job:*", count=10_000))
        found["broker: memory in use"] = int(broker.info("memory")["used_memory"]) / _MIB
        for folder in ("events", "artifacts", "jobs", "logs", "broker", "uploads"):
            paths = [path for path in (self.ground.data_dir / folder).rglob("*") if path.is_file()]
            found[f"files: {folder}"] = len(paths)
            found[f"MB: {folder}"] = sum(_size(path) for path in paths) / 1e6
        return found


@dataclass(frozen=True)
class Slope:
    """The straight line through some samples: their mean, how much it grows an hour in percent of that, and the standard error of this."""

    mean: float
    percent_an_hour: float
    error: float

    @property
    def flat(self) -> bool:
        """Whether no more growth than the bound is shown."""
        return self.percent_an_hour - 2 * self.error <= FLAT_PERCENT


def slope(times: list[float], values: list[float]) -> Slope:
    """Least squares over what lies after the first quarter of the time. Units: seconds."""
    x, y = np.array(times) / 3600, np.array(values)
    late = x >= x[0] + (x[-1] - x[0]) / 4
    x, y = x[late], y[late]
    mean = float(y.mean())
    if len(x) < 3 or mean == 0:
        return Slope(mean, 0.0, 0.0)
    spread = float(((x - x.mean()) ** 2).sum())
    grows = float(((x - x.mean()) * (y - mean)).sum()) / spread
    rest = y - mean - grows * (x - x.mean())
    error = float(np.sqrt((rest**2).sum() / (len(x) - 2) / spread))
    return Slope(mean, 100 * grows / mean, 100 * error / mean)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def remember(client: Client, users: int) -> int:
    """Two events of every user's past; how many."""
    rows = (
        {"user": f"visitor-{user}", "item": f"item-{(user + step) % NUM_ITEMS}", "time": START_MS + user * 10 + step, "action": "click"}
        for user in range(users)
        for step in (0, 1)
    )
    return client.send_interactions(rows, batch_rows=_ROWS).accepted


def work(ground: Ground, ended: threading.Event, every_seconds: float, problems: list[str]) -> None:
    """A job of each room now and then; each must make what it always makes."""
    while not ended.wait(every_seconds):
        for room in ("tokenization", "training", "negatives"):
            spec = specs(ground.inputs)[room]
            record = ground.ended(ground.submit(spec).id)
            if record.artifacts != ground.expected[spec.kind]:
                problems.append(f"{record.id} {record.state} {record.artifacts}: {record.error}")


def measures(watch: Watch, events: int, lost: int, doubled: int, wrong: list[str], users: int) -> dict[str, dict[str, Any]]:
    """The figures of the benchmarks' form."""
    count = len(watch.samples)
    out: dict[str, dict[str, Any]] = {
        name: {"value": value, "unit": unit, "better": "lower", "at_least": 0, "aim": 0, "runs": 1}
        for name, value, unit in (("lost", lost, "events"), ("doubled", doubled, "events"), ("wrong", len(wrong), "answers and outcomes"))
    }
    out["events"] = {"value": events, "unit": "events", "better": "higher", "baseline": f"of {users:,} users", "runs": 1}
    names = sorted({name for sample in watch.samples for name in sample})
    for name in names:
        pairs = [(moment, sample[name]) for moment, sample in zip(watch.times, watch.samples, strict=True) if name in sample]
        found = slope([moment for moment, _ in pairs], [value for _, value in pairs])
        out[name] = {
            "value": round(found.percent_an_hour, 2), "unit": "% an hour", "better": "lower", "at_least": FLAT_PERCENT, "aim": 0, "runs": count,
            "baseline": f"mean {found.mean:,.1f}, standard error {found.error:.2f}", "flat": found.flat,
        }  # fmt: skip
    first, last = watch.samples[0], watch.samples[-1]
    out["log_bytes_an_event"] = {
        "value": round(1e6 * (last["MB: events"] - first["MB: events"]) / max(1, events), 1), "unit": "bytes", "better": "lower",
        "baseline": "segments, those that wait for their removal, and the manifest", "runs": 1,
    }  # fmt: skip
    return out


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--users", type=int)
    parser.add_argument("--visitors", type=int, default=4, help="who come at the same time")
    parser.add_argument("--quick", action="store_true", help="one minute, 2,000 users")
    parser.add_argument("--keep", type=Path, help="folder for the stack's data and logs, which stays; it must not exist")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    minutes, users = options.minutes or (1.0 if options.quick else 60.0), options.users or (2_000 if options.quick else 100_000)
    with tempfile.TemporaryDirectory(prefix="semantide-soak-") as name:
        folder = options.keep.absolute() if options.keep else Path(name) / "soak"
        with Ground(folder) as ground:
            with Client(ground.url, key=KEY, retries=Retries()) as client:
                before = remember(client, users)
            crowd = Crowd.of(ground)
            crowd.visitors = [
                Visitor(ground.client(), users=users, number=place, step=options.visitors, pause_seconds=0.05) for place in range(options.visitors)
            ]
            watch, ended, wrong = Watch(ground, min(SAMPLE_SECONDS, minutes * 60 / 60)), threading.Event(), list[str]()
            worker = threading.Thread(target=work, args=(ground, ended, min(JOBS_EVERY_SECONDS, minutes * 60 / 4), wrong), daemon=True)
            with crowd.at_work():
                watch.start()
                worker.start()
                time.sleep(minutes * 60)
                ended.set()
            worker.join(300)
            watch.ended.set()
            watch.join(60)
            while (found := ground.stored()) is None or found[1]:
                time.sleep(0.2)
            wrong += crowd.wrong()
            sent = list(crowd.events())
            ground.down()
            past = START_MS + 10 * users + 10
            account = balance(sent, (event for event in stored_events(ground.data_dir) if not event[0].startswith("user-") and event[2] > past))
    result = measures(watch, len(sent), account.lost, account.doubled + account.strange, wrong, users)
    if options.json:
        setting = {"minutes": minutes, "users": users, "visitors": options.visitors, "events_before": before, "wrong": wrong[:20]}
        print(json.dumps({"benchmark": "stack_soak", "commit": code_version(), "machine": machine(), "setting": setting, "measures": result}))
    else:
        print(f"{minutes:g} minutes, {users:,} users ({before:,} events before), {options.visitors} visitors at a time")
        for measure, entry in result.items():
            verdict = "" if "flat" not in entry else "flat" if entry["flat"] else "GROWS"
            print(f"{measure:36} {entry['value']:>12,} {entry['unit']:<20} {verdict:<6} {entry.get('baseline', '')}")
        print(*(f"WRONG: {problem}" for problem in wrong[:20]), sep="\n")
    return 1 if account.lost or account.doubled or account.strange or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
