"""Queues of serving replicas under skewed traffic: the router's choice, round robin, and where a user's hash or the fewest requests say.

A faithful simulation of queues with measured times: a real serving process answers requests of several widths and history lengths, first visits and second ones
(the prompt of a known user is kept), and the processor time it took is what the simulated replicas take. Each replica works on one request after the other. The choice is
the product's own code (``services/serving/replicas.py``), which sees what the router sees: bodies, when it was given what and when that was answered, and the answers' ``history_items``; not the time that
a request will take. Traffic: a few users ask for much (Zipf), histories as long as KuaiRand's / 50, some wide searches; the same arrivals for every policy. Queue: requests that wait or run, over time.
"all times known" is no router but what one could reach that knew every time beforehand and every prompt that is kept: fewest requests first, then the earliest end.

``--utilisation`` is the share of time that replicas would be busy if all prompts were new. Since most are kept, they are busy for less: at 0.95 for 0.55, and then the longest queue over the mean one cannot be less than
1 / 0.55, for somebody has a request nearly always. The second table is at a load at which round robin keeps its replicas 85 % busy.

    python tests/benchmarks/service_balance.py [--quick] [--json] [--replicas 16] [--utilisation 0.95] [--data FOLDER]

Before anything is measured, the router in front of two real processes must give the answers that each of them gives: exit 1 where one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from kuairand_lengths import kuairand_lengths
from machine import machine
from serving_process import KEY, ServingProcess
from shop import open_shop

from semantide.services.serving.replicas import Asked, Given, Replicas
from semantide.shared.broker import free_port
from semantide.shared.version import code_version

WIDTHS = (10, 50, 500)
WIDTH_SHARES = (0.25, 0.7, 0.05)
USERS_KEPT = 500  # prompts that one replica keeps


@dataclass(frozen=True)
class Request:
    """One request of the simulation."""

    arrival: float
    user: str
    items: int
    width: int
    asked: Asked


@dataclass
class Times:
    """Measured seconds by width and items of the history, of a first visit and of one whose prompt is kept."""

    items: list[int]
    first: dict[int, list[float]]
    again: dict[int, list[float]]

    def of(self, request: Request, kept: bool) -> float:
        return float(np.interp(request.items, self.items, (self.again if kept else self.first)[request.width]))


@dataclass
class Outcome:
    """What one policy made of the traffic."""

    mean_queue: float
    most_queue: float
    p99: float
    mean: float
    kept_share: float
    busy: float

    @property
    def imbalance(self) -> float:
        """Longest queue over the mean one, both averaged over time."""
        return self.most_queue / self.mean_queue


@dataclass
class Cluster:
    """Simulated replicas: when each has ended what it has, the requests that each has, and the users whose prompts each keeps."""

    free_at: list[float]
    held: list[int]
    prompts: list[OrderedDict[str, None]]
    times: Times
    now: float = 0.0


class Policy(Protocol):
    """Who decides."""

    def choose(self, number: int, request: Request, cluster: Cluster) -> int:
        """The replica for a request; only "all times known" looks at more of the cluster than ``held`` and ``now``."""

    def ended(self, number: int, request: Request, now: float) -> None:
        """A request was answered."""


def simulate(requests: list[Request], replicas: int, times: Times, policy: Policy) -> Outcome:
    """Send every request where ``policy`` says."""
    free_at, held = [0.0] * replicas, [0] * replicas
    prompts: list[OrderedDict[str, None]] = [OrderedDict() for _ in range(replicas)]
    cluster = Cluster(free_at, held, prompts, times)
    ends: list[tuple[float, int, int]] = []
    now, queue_time, most_time, busy = 0.0, 0.0, 0.0, 0.0
    took: list[float] = []
    kept_count = answered = 0

    def until(moment: float) -> None:
        nonlocal now, queue_time, most_time
        queue_time += (moment - now) * sum(held)
        most_time += (moment - now) * max(held)
        now = moment

    def finish(moment: float) -> None:
        nonlocal answered
        while ends and ends[0][0] <= moment:
            end, number, place = heapq.heappop(ends)
            until(end)
            held[place] -= 1
            policy.ended(number, requests[number], end)
            answered += 1

    for number, request in enumerate(requests):
        finish(request.arrival)
        until(request.arrival)
        cluster.now = now
        place = policy.choose(number, request, cluster)
        kept = request.user in prompts[place]
        prompts[place][request.user] = None
        prompts[place].move_to_end(request.user)
        if len(prompts[place]) > USERS_KEPT:
            prompts[place].popitem(last=False)
        seconds = times.of(request, kept)
        end = max(now, free_at[place]) + seconds
        free_at[place] = end
        held[place] += 1
        busy += seconds
        heapq.heappush(ends, (end, number, place))
        took.append(end - request.arrival)
        kept_count += kept
    finish(float("inf"))
    assert answered == len(requests) and not any(held), "a request was lost or answered twice"
    return Outcome(
        queue_time / now / replicas, most_time / now, float(np.quantile(took, 0.99)), statistics.fmean(took), kept_count / len(requests), busy / now / replicas
    )


class Router:
    """The product's own choice."""

    def __init__(self, replicas: int) -> None:
        self._known = Replicas()
        self._places = {replica.address: place for place, replica in enumerate(self._known.set(f"10.0.0.{number}:8000" for number in range(replicas)))}
        for replica in self._known:
            replica.ready = True
        self._given: dict[int, Given] = {}

    def choose(self, number: int, request: Request, cluster: Cluster) -> int:
        replica = self._known.choose(request.asked, cluster.now)
        assert replica is not None
        self._given[number] = self._known.begin(replica, request.asked, cluster.now)
        return self._places[replica.address]

    def ended(self, number: int, request: Request, now: float) -> None:
        self._known.end(self._given.pop(number), now, request.items)


class Simple:
    """A rule without a memory."""

    def __init__(self, rule: Callable[[int, Request, Cluster], int]) -> None:
        self.choose = rule

    def ended(self, number: int, request: Request, now: float) -> None:
        pass


def by_hash(_: int, request: Request, cluster: Cluster) -> int:
    """Always the user's own replica."""
    return int(hashlib.blake2b(request.user.encode(), digest_size=8).hexdigest(), 16) % len(cluster.held)


def all_known(_: int, request: Request, cluster: Cluster) -> int:
    """The earliest end among those with the fewest requests."""
    fewest = min(cluster.held)

    def end(place: int) -> float:
        return max(cluster.now, cluster.free_at[place]) + cluster.times.of(request, request.user in cluster.prompts[place])

    return min((place for place, held in enumerate(cluster.held) if held == fewest), key=end)


def policies(replicas: int) -> dict[str, Policy]:
    """Ours and those that it is compared with."""
    return {
        "router": Router(replicas),
        "round robin": Simple(lambda number, *_: number % replicas),
        "user's hash": Simple(by_hash),
        "fewest requests": Simple(lambda _, __, cluster: cluster.held.index(min(cluster.held))),
        "all times known": Simple(all_known),
    }


def traffic(count: int, replicas: int, utilisation: float, times: Times, data: Path | None, seed: int) -> list[Request]:
    """Arrivals at a rate that keeps replicas busy for the given share of the time, if all prompts were new."""
    rng = np.random.default_rng(seed)
    users = 4000
    lengths = kuairand_lengths(data, users, 50.0, times.items[-1], rng)
    chances = 1 / np.arange(1, users + 1) ** 1.1
    who = rng.choice(users, count, p=chances / chances.sum())
    widths = rng.choice(WIDTHS, count, p=WIDTH_SHARES)
    made = [
        Request(0.0, f"u{user}", int(lengths[user]), int(width), Asked.of(json.dumps({"user": f"u{user}", "n": 10, "beam_width": int(width)}).encode()))
        for user, width in zip(who, widths, strict=True)
    ]
    mean = statistics.fmean(times.of(request, False) for request in made)
    arrivals = np.cumsum(rng.exponential(mean / (replicas * utilisation), count))
    return [Request(float(arrival), each.user, each.items, each.width, each.asked) for arrival, each in zip(arrivals, made, strict=True)]


def post(url: str, body: dict[str, Any]) -> tuple[float, Any]:
    """Seconds and answer of one recommendation."""
    request = urllib.request.Request(f"{url}/v1/recommendations", json.dumps(body).encode(), {"X-API-Key": KEY, "Content-Type": "application/json"})
    begin = time.perf_counter()
    with urllib.request.urlopen(request, timeout=60) as response:
        return time.perf_counter() - begin, json.load(response)


@contextmanager
def routing(addresses: list[str], folder: Path) -> Iterator[str]:
    """The router in a process of its own."""
    port = free_port()
    own = {"SEMANTIDE_ROUTE_TO": ",".join(addresses), "SEMANTIDE_PORT": str(port), "SEMANTIDE_API_KEYS": KEY, "SEMANTIDE_DATA_DIR": str(folder)}
    process = subprocess.Popen([sys.executable, "-m", "semantide.services.local", "route"], env=os.environ | own | {"SEMANTIDE_LOG_LEVEL": "WARNING"})
    try:
        for _ in range(600):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=2) as answer:
                    if json.load(answer)["replicas"] == len(addresses):
                        break
            except OSError:
                pass
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(40)


def busy(replica: ServingProcess, user: str, width: int) -> float:
    """Processor time of one recommendation: what a replica with a core of its own would take, whatever else this machine does."""
    before = replica.cpu_seconds()
    post(replica.url, {"user": user, "beam_width": width})
    return replica.cpu_seconds() - before


def measure_times(options: argparse.Namespace) -> tuple[Times, float, int]:
    """Times of a real process; what the router adds to a lone request, seconds; answers that differ between the router and its replicas."""
    items = [5, 100, 600] if options.quick else [5, 50, 150, 300, 600]
    runs = 3 if options.quick else 7
    with (
        tempfile.TemporaryDirectory() as name,
        open_shop(Path(name), "128x2" if options.quick else "256x4", data=None, num_models=1) as shop,
        ExitStack() as stack,
    ):
        replicas = [stack.enter_context(ServingProcess(shop.folder, shop.redis_url)) for _ in range(2)]
        url = replicas[0].url
        first: dict[int, list[float]] = {width: [] for width in WIDTHS}
        again: dict[int, list[float]] = {width: [] for width in WIDTHS}
        history = shop.prompt_items(3 * (max(items) + runs), 1)
        for width in WIDTHS:
            for count in items:
                pairs = []
                for run in range(runs):
                    user = f"m{width}-{count}-{run}"
                    shop.remember({user: history[run : run + count]})
                    pairs.append((busy(replicas[0], user, width), busy(replicas[0], user, width)))
                first[width].append(statistics.median(pair[0] for pair in pairs))
                again[width].append(statistics.median(pair[1] for pair in pairs))
        bodies = [{"history": list(history[start : start + 20]), "n": 10} for start in range(8)]
        with routing([replica.url for replica in replicas], Path(name) / "router") as router:
            answers = [[post(each, body)[1]["items"] for each in (router, *(replica.url for replica in replicas))] for body in bodies]
            wrong = sum(any(other != found[0] for other in found[1:]) for found in answers)
            straight, routed = [], []
            for body in bodies * 3:
                straight.append(post(url, body)[0])
                routed.append(post(router, body)[0])
        return Times(items, first, again), statistics.median(routed) - statistics.median(straight), wrong


def main() -> int:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--replicas", type=int, default=16)
    parser.add_argument("--utilisation", type=float, default=0.95)
    parser.add_argument("--data", type=Path, default=None)
    options = parser.parse_args()
    times, added, wrong = measure_times(options)
    count, seeds = (4_000, 3) if options.quick else (40_000, 5)
    loads = {"": options.utilisation, "_loaded": busy_share(times, count, options)}
    tables = {name: compare(times, count, seeds, utilisation, options) for name, utilisation in loads.items()}

    def middle(load: str, name: str, figure: str) -> float:
        return statistics.median(getattr(outcome, figure) for outcome in tables[load][name])

    def lower(load: str, figure: str, of: str = "router") -> float:
        ours, others = tables[load][of], tables[load]["round robin"]
        return statistics.median(getattr(other, figure) / getattr(own, figure) for own, other in zip(ours, others, strict=True))

    measures: dict[str, dict[str, Any]] = {}
    for load in tables:
        for name, figure, least, aim in (("queue_imbalance", "imbalance", 2.0, 5.0), ("longest_queue", "most_queue", 2.0, 5.0), ("p99", "p99", 1.0, 2.0)):
            measures[f"{name}_lower{load}"] = {
                "value": lower(load, figure), "unit": "ratio", "better": "higher", "baseline": "round robin, same arrivals", "at_least": least, "aim": aim,
                "all_times_known": lower(load, figure, "all times known"), "runs": seeds,
            }  # fmt: skip
    measures |= {
        "kept_prompts": {
            "value": middle("", "router", "kept_share"), "unit": "share", "better": "higher", "baseline": "user's hash",
            "at_least": middle("", "round robin", "kept_share"), "aim": middle("", "user's hash", "kept_share"), "runs": seeds,
        },
        "router_adds_ms": {"value": 1000 * added, "unit": "ms", "better": "lower", "baseline": "the replica asked straight", "at_least": 5.0, "aim": 1.0, "runs": 24},
    }  # fmt: skip
    if options.json:
        print(json.dumps({"benchmark": "service_balance", "commit": code_version(), "machine": machine(), "measures": measures}))
        return 1 if wrong else 0
    for width in WIDTHS:
        print(
            f"width {width}: ms of a first visit by items {dict(zip(times.items, (round(1e3 * each, 1) for each in times.first[width]), strict=True))}, again {[round(1e3 * each, 1) for each in times.again[width]]}"
        )
    for load, utilisation in loads.items():
        print(f"{options.replicas} replicas, {100 * utilisation:.0f} % busy if all prompts were new, {count} requests, median of {seeds} seeds")
        print(f"{'policy':<16}{'busy':>7}{'mean queue':>11}{'longest':>9}{'imbalance':>11}{'mean ms':>9}{'p99 ms':>9}{'kept':>7}")
        for name in tables[load]:
            figures = [middle(load, name, figure) for figure in ("busy", "mean_queue", "most_queue", "imbalance", "mean", "p99", "kept_share")]
            print(
                f"{name:<16}{figures[0]:>7.2f}{figures[1]:>11.2f}{figures[2]:>9.2f}{figures[3]:>11.2f}{1e3 * figures[4]:>9.1f}{1e3 * figures[5]:>9.1f}{figures[6]:>7.2f}"
            )
    for name, each in measures.items():
        known = f"; with all times known {each['all_times_known']:.2f}" if "all_times_known" in each else ""
        print(f"{name}: {each['value']:.2f} (at least {each['at_least']:.2f}, aim {each['aim']:.2f}{known})")
    print(f"answers that differ between the router and its replicas: {wrong}")
    return 1 if wrong else 0


def compare(times: Times, count: int, seeds: int, utilisation: float, options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """What every policy makes of the same arrivals, seed by seed."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in policies(options.replicas)}
    for seed in range(seeds):
        requests = traffic(count, options.replicas, utilisation, times, options.data, seed)
        for name, policy in policies(options.replicas).items():
            outcomes[name].append(simulate(requests, options.replicas, times, policy))
    return outcomes


def busy_share(times: Times, count: int, options: argparse.Namespace) -> float:
    """The utilisation, in terms of new prompts, at which round robin's replicas are busy 85 % of the time: its kept prompts do not depend on the load."""
    requests = traffic(count, options.replicas, options.utilisation, times, options.data, 0)
    outcome = simulate(requests, options.replicas, times, policies(options.replicas)["round robin"])
    return 0.85 * options.utilisation / outcome.busy


if __name__ == "__main__":
    sys.exit(main())
