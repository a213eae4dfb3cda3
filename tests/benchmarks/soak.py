"""A long run of everything at once: memory that stays flat, no errors, nothing left in use at the end.

100,000 users with stored histories come in turn, in a closed loop of --clients; some come back with a new item, ask for one, ten or 128 beams, exclude
items, ask for a category, send nonsense, or hang up while their request is worked on. Items come and go, models are swapped. Every answer is checked: only
available, allowed items, as many as asked for. Memory of the serving process and of the broker is sampled throughout.

    python tests/benchmarks/soak.py [--quick] [--json] [--minutes 30] [--users 100000] [--data DIR] [--model 128x2]

Exit 1 where an answer is wrong or missing. Memory is flat where the last fifth of the run needs no more than 5 % above the second fifth.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from arrivals import Client, Reply, percentile_ms
from machine import machine
from serving_process import KEY, ServingProcess
from shop import SHAPES, Shop, open_shop

from semantide.shared.availability import Availability
from semantide.shared.broker import connect
from semantide.shared.contracts import Interaction
from semantide.shared.history import Histories
from semantide.shared.version import code_version

WIDTHS = (1, 10, 10, 50, 50, 50, 128)
KINDS = {"first": 0.62, "return": 0.15, "excluding": 0.08, "category": 0.05, "explicit": 0.05, "nonsense": 0.02, "hang up": 0.03}
NONSENSE: tuple[dict[str, Any], ...] = (
    {"user": "x", "beam_width": 0},
    {"user": "x", "beam_width": -5},
    {"user": "x", "n": 100_000},
    {"history": []},
    {"user": "x", "history": ["1"]},
    {"history": ["1"] * 10_001},
    {"wrong": 1},
)
HIDDEN = 50  # items that are unavailable at any time
SETTLE_SECONDS = 1.0  # after an item was hidden, before an answer with it is wrong
SAMPLE_SECONDS = 2.0
PATH = "/v1/recommendations"


class Soak:
    """The visitors, what they got, and what was sampled meanwhile."""

    def __init__(self, options: argparse.Namespace, shop: Shop, server: ServingProcess) -> None:
        self.options, self.shop, self.server = options, shop, server
        self.end = 0.0
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.replies: list[Reply] = []
        self.samples: list[tuple[float, float, float]] = []
        self.users_seen = 0
        self.swaps = 0
        self._hidden: dict[str, float] = {}
        self._broker = connect(shop.redis_url)
        self._histories = Histories(self._broker, 1000, 86_400)
        self._numbers = itertools.count()
        self._items = frozenset(shop.items)

    def histories(self) -> None:
        """Store what every user did before."""
        for begin in range(0, self.options.users, 5_000):
            users = range(begin, min(begin + 5_000, self.options.users))
            self.shop.remember({f"u{user}": self.shop.short[user % len(self.shop.short)][-100:] for user in users})

    async def run(self, minutes: float) -> None:
        """All clients until the time is over."""
        begin = time.monotonic()
        self.end = begin + minutes * 60
        async with Client(self.server.url, KEY) as client:
            visitors = [self._visitor(client, number) for number in range(self.options.clients)]
            await asyncio.gather(*visitors, self._shopkeeper(), self._promoter(client), self._watch(begin))

    async def _visitor(self, client: Client, seed: int) -> None:
        rng = np.random.default_rng(seed)
        kinds, shares = list(KINDS), np.array(list(KINDS.values()))
        while time.monotonic() < self.end:
            await self._visit(client, str(rng.choice(kinds, p=shares)), rng)

    async def _visit(self, client: Client, kind: str, rng: np.random.Generator) -> None:
        width = int(rng.choice(WIDTHS))
        wish: dict[str, Any] = {"n": min(10, width), "beam_width": width}
        excluded: frozenset[str] = frozenset()
        if kind == "nonsense":
            wish = NONSENSE[int(rng.integers(len(NONSENSE)))]
        elif kind == "explicit":
            wish["history"] = self.shop.short[int(rng.integers(len(self.shop.short)))]
        elif kind == "return":
            user = int(rng.integers(max(1, min(self.users_seen, self.options.users))))
            wish["user"] = f"u{user}"
            bought = Interaction(user=f"u{user}", item=str(rng.choice(self.shop.items)), time=int(time.time() * 1000), action="click")
            await asyncio.to_thread(self._histories.append, [bought])
        else:
            number = next(self._numbers)
            self.users_seen = max(self.users_seen, min(number + 1, self.options.users))
            wish["user"] = f"u{number % self.options.users}"
        if kind == "excluding":
            excluded = frozenset(rng.choice(self.shop.items, int(rng.choice((5, 100, 5_000)))).tolist())
            wish["exclude_ids"] = sorted(excluded)
        if kind == "category":
            wish["categories_any"] = ["no such category"] if rng.random() < 0.2 else [self.options.category]
        data = json.dumps(wish).encode()
        if kind == "hang up":
            await client.abandon(PATH, data, float(rng.uniform(0.001, 0.03)))
            self.outcomes["hung up"] += 1
            return
        begin = time.monotonic()
        try:
            status, answer = await client.send("POST", PATH, data)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            status, answer = 0, repr(error).encode()
        reply = Reply(0, status, b"" if status == 200 else answer, time.monotonic() - begin)
        if kind != "nonsense":
            self.replies.append(reply)
        self.outcomes[f"{kind}: {status}"] += 1
        if problem := self._problem(kind, wish, excluded, status, answer, begin):
            self.wrong.append(problem)
            sys.stderr.write(f"wrong: {problem}\n")

    def _problem(self, kind: str, wish: dict[str, Any], excluded: frozenset[str], status: int, answer: bytes, begin: float) -> str | None:
        """What is wrong with an answer."""
        if kind == "nonsense":
            return None if status == 422 else f"{str(wish)[:80]} was answered {status}"
        if status != 200:
            return f"{kind} was answered {status}: {answer.decode()[:200]}"
        body = json.loads(answer)
        items = [hit["item"] for hit in body["items"]]
        if len(items) < wish["n"] and not body["short_reason"]:
            return f"{kind} got {len(items)} of {wish['n']} items and no reason"
        if kind not in ("category",) and len(items) != wish["n"]:
            return f"{kind} got {len(items)} of {wish['n']} items: {body['short_reason']}"
        if len(set(items)) != len(items) or not self._items.issuperset(items):
            return f"{kind} got items twice, or none of the catalog: {items}"
        if excluded.intersection(items):
            return f"{kind} got excluded items: {sorted(excluded.intersection(items))}"
        stale = [item for item in items if self._hidden.get(item, begin) < begin - SETTLE_SECONDS]
        return f"{kind} got items that have been unavailable: {stale}" if stale else None

    async def _shopkeeper(self) -> None:
        """Hide items and show them again."""
        availability, rng = Availability(self._broker), np.random.default_rng(99)
        while time.monotonic() < self.end:
            hide = rng.choice(self.shop.items, 5, replace=False).tolist()
            show = list(self._hidden)[:5] if len(self._hidden) >= HIDDEN else []
            for item in show:
                del self._hidden[item]
            changes = {item: True for item in show} | {item: False for item in hide}
            await asyncio.to_thread(availability.update, changes)
            self._hidden.update({item: time.monotonic() for item in hide})
            await asyncio.sleep(1.0)

    async def _promoter(self, client: Client) -> None:
        """Swap the live model now and then."""
        pause = min(60.0, self.options.minutes * 60 / 5)
        await asyncio.sleep(pause)
        while time.monotonic() < self.end:
            self.swaps += 1
            await client.post("/v1/serving/promote", {"model": self.shop.models[self.swaps % 2]})
            await asyncio.sleep(pause)

    async def _watch(self, begin: float) -> None:
        while time.monotonic() < self.end:
            memory, store = await asyncio.to_thread(lambda: (self.server.memory_bytes(), int(self._broker.info("memory")["used_memory"])))
            self.samples.append((time.monotonic() - begin, memory, store))
            await asyncio.sleep(SAMPLE_SECONDS)

    def growth(self, column: int) -> float:
        """Memory of the last fifth of the run over that of the second one, less one."""
        values = np.array([sample[column] for sample in self.samples])
        fifth = max(1, len(values) // 5)
        return float(np.median(values[-fifth:]) / np.median(values[fifth : 2 * fifth]) - 1)

    def left_in_use(self) -> dict[str, float]:
        """Gauges of what requests hold, once nobody asks any more."""
        deadline = time.monotonic() + 15
        while True:
            found = {name: value for name, value in self.server.metrics().items() if name.startswith(IN_USE)}
            if not any(found.values()) or time.monotonic() > deadline:
                return found
            time.sleep(0.2)


IN_USE = ("semantide_serving_queue", "semantide_serving_groups", "semantide_kv_bytes")


def report(soak: Soak, options: argparse.Namespace, left: dict[str, float]) -> dict[str, Any]:
    """The measures."""
    served = [reply for reply in soak.replies if reply.status == 200]
    resident = [sample[1] for sample in soak.samples]
    return {
        "wrong_answers": {"value": len(soak.wrong), "unit": "answers", "better": "lower", "baseline": f"of {len(soak.replies)}", "at_least": 0, "aim": 0, "runs": 1},
        "left_in_use": {"value": sum(left.values()), "unit": "bytes and requests", "better": "lower", "baseline": json.dumps(left), "at_least": 0, "aim": 0, "runs": 1},
        "memory_growth": {
            "value": round(soak.growth(1), 4), "unit": "share", "better": "lower", "baseline": f"second fifth of the run; most {max(resident) / 2**20:.0f} MiB", "at_least": 0.05, "aim": 0.01, "runs": len(resident),
        },
        "broker_growth": {"value": round(soak.growth(2), 4), "unit": "share", "better": "lower", "baseline": "second fifth of the run", "at_least": 0.05, "aim": 0.01, "runs": len(resident)},
        "users_seen": {"value": soak.users_seen, "unit": "users", "better": "higher", "baseline": f"of {options.users} with stored histories", "runs": 1},
        "requests_per_second": {"value": round(len(served) / (options.minutes * 60), 2), "unit": "requests/s", "better": "higher", "baseline": f"{options.clients} clients in a closed loop", "runs": 1},
        "p50_ms": {"value": round(percentile_ms(soak.replies, 50), 2), "unit": "ms", "better": "lower", "runs": 1},
        "p99_ms": {"value": round(percentile_ms(soak.replies, 99), 2), "unit": "ms", "better": "lower", "runs": 1},
        "swaps": {"value": soak.swaps, "unit": "swaps", "better": "higher", "runs": 1},
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half a minute, 2,000 users")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--users", type=int)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--data", type=Path, help="folder of Amazon Beauty; without it the shop is synthetic")
    parser.add_argument("--model", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of the serving process")
    options = parser.parse_args()
    options.minutes = options.minutes or (0.5 if options.quick else 30.0)
    options.users = options.users or (2_000 if options.quick else 100_000)
    options.model = options.model or ("64x2" if options.quick else "128x2")
    options.category = "Beauty > Skin Care > Face" if options.data else "red"
    with tempfile.TemporaryDirectory(prefix="semantide-soak-") as name, ExitStack() as stack:
        shop = stack.enter_context(open_shop(Path(name), options.model, data=options.data))
        server = stack.enter_context(ServingProcess(Path(name), shop.redis_url, threads=options.threads))
        soak = Soak(options, shop, server)
        soak.histories()
        asyncio.run(soak.run(options.minutes))
        left = soak.left_in_use()
        measures = report(soak, options, left)
        alive = server.process is not None and server.process.poll() is None
    setting = {"model": options.model, "minutes": options.minutes, "threads": options.threads, "histories": "Amazon Beauty" if shop.real else "synthetic"}
    if options.json:
        result = {"benchmark": "soak", "commit": code_version(), "machine": machine(), "setting": setting, "outcomes": soak.outcomes, "measures": measures}
        print(json.dumps(result))
    else:
        print(f"{'measure':20} {'value':>12}  {'unit':20} baseline")
        for measure, found in measures.items():
            print(f"{measure:20} {found['value']:>12}  {found['unit']:20} {found.get('baseline', '')}")
        print("outcomes:", ", ".join(f"{what} {count}" for what, count in sorted(soak.outcomes.items())))
    return 0 if alive and not soak.wrong and not sum(left.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
