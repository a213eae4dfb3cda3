"""Serving over HTTP under Poisson load: requests a second within the latency limit, ours against the classic engine behind the same HTTP.

For a hybrid (--model hybrid-256x4) the other engine is ours with states of beams' own in the layers of linear attention.
Real processes, a real broker, prompts of real histories (Amazon Beauty with --data; a long mix whose lengths are MovieLens users'; synthetic ones without).
Both engines serve the same weights with the same threads and are first compared: exit 1 where their answers differ. Rates are bisected for both in turn.

    python tests/benchmarks/serving.py [--quick] [--json] [--data DIR] [--model 256x4] [--width 128] [--parts cost rate returning share swap overload]

Mixes: short and long histories of users who come for the first time, or (returning) users with long ones who were there before and have bought one item since.

* cost: processor time of a request, four clients at a time;
* rate: the highest Poisson rate at which 99 % of requests are answered within --limit-ms, in full (a narrowed answer counts as missing);
* returning: latency of a user with one new item, cold over warm; * share: what of a lone request's time is not the model's;
* swap: half the rate found, with swaps of the live model; * overload: twice the rate, answers and refusals.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from arrivals import Bisection, Client, Reply, percentile_ms, storm
from machine import machine
from serving_process import KEY, ServingProcess
from shop import SHAPES, Shop, open_shop

from semantide.shared.version import code_version

APPS = Path(__file__).resolve().parent
RIVALS = {"classic": ({"at_least": 3.5, "aim": 6}, "classic engine"), "materialised": ({"at_least": 1.5, "aim": 2}, "states of beams' own")}
MIXES = ("short", "long", "returning")
RETURNING_USERS = 40
CLIENTS = 4
KV_BYTES = 8 * 2**30
PARTS = ("cost", "rate", "returning", "share", "swap", "overload")
MODEL_STAGES = ("prefill", "step", "select")
TOLERANCE = 1e-3  # of scores, which are sums of float32 log-probabilities


class Bench:
    """Two engines on one shop, and what is asked of them."""

    def __init__(self, options: argparse.Namespace, shop: Shop, ours: ServingProcess, rival: ServingProcess) -> None:
        self.options, self.shop, self.rival = options, shop, options.rival
        self.engines = {"ours": ours, self.rival: rival}
        self.bounds, self.told = RIVALS[self.rival]
        self.measures: dict[str, dict[str, Any]] = {}
        self.rates: dict[tuple[str, str], float] = {}
        self.numbers = itertools.count()

    def bodies(self, mix: str, count: int, seed: int) -> list[bytes]:
        """Requests with their histories, in an order that depends on the seed only."""
        return [json.dumps({"history": history, "n": 10, "beam_width": self.options.width}).encode() for history in self.histories(mix, count, seed)]

    def histories(self, mix: str, count: int, seed: int) -> list[tuple[str, ...]]:
        """Histories of a mix, drawn by the seed."""
        pool = self.shop.short if mix == "short" else self.shop.long
        return [pool[number] for number in np.random.default_rng(seed).integers(0, len(pool), count).tolist()]

    def visits(self, mix: str, count: int, seed: int) -> list[bytes]:
        """Requests by users whose histories are stored; none of them was there before, but for those of the returning mix."""
        if mix == "returning":
            users = [f"returning-{number}" for number in np.random.default_rng(seed).integers(0, RETURNING_USERS, count).tolist()]
        else:
            number = next(self.numbers)
            histories = {f"{mix}-{number}-{place}": history for place, history in enumerate(self.histories(mix, count, seed))}
            self.shop.remember(histories)
            users = list(histories)
        return [self.visit(user) for user in users]

    def visit(self, user: str) -> bytes:
        """A request by a user whose history is stored."""
        return json.dumps({"user": user, "n": 10, "beam_width": self.options.width}).encode()

    async def buy(self, body: bytes) -> None:
        """One new item in the history of the user who is about to ask."""
        user = json.loads(body)["user"]
        number = next(self.numbers)
        await asyncio.to_thread(self.shop.remember, {user: (self.shop.items[number % len(self.shop.items)],)}, 10_000_000 + number)

    async def lone(self, engine: str, bodies: Sequence[bytes]) -> list[Reply]:
        """One request after another."""
        clock, replies = asyncio.get_running_loop().time, []
        async with Client(self.engines[engine].url, KEY) as client:
            for number, body in enumerate(bodies):
                begin = clock()
                status, data = await client.send("POST", "/v1/recommendations", body)
                replies.append(Reply(number, status, data, clock() - begin))
                if status != 200:
                    raise SystemExit(f"the {engine} engine answered {status} to a lone request: {data.decode()[:500]}")
        return replies

    async def compare(self, mix: str, count: int) -> int:
        """Requests whose answers differ between the engines; equal scores may come in either order."""
        bodies = self.bodies(mix, count, 77)
        pairs = zip(await self.lone("ours", bodies), await self.lone(self.rival, bodies), strict=True)
        return sum(not same_answer(mine, theirs) for mine, theirs in pairs)

    async def cost(self, mix: str) -> None:
        """Processor time a request in a closed loop, both engines in turn; the medians."""
        found: dict[str, list[float]] = {engine: [] for engine in self.engines}
        for run in range(2 * self.options.runs):
            for engine, server in self.engines.items():
                visits = self.visits(mix, CLIENTS * max(2, self.options.rounds // 4), 200 + run)
                async with Client(server.url, KEY) as client:
                    left = iter(visits)

                    async def take(client: Client, left: Iterator[bytes]) -> None:
                        for body in left:
                            await client.post("/v1/recommendations", json.loads(body))

                    before = server.cpu_seconds()
                    await asyncio.gather(*(take(client, left) for _ in range(CLIENTS)))
                    found[engine].append((server.cpu_seconds() - before) / len(visits) * 1e3)
        mine, theirs = (statistics.median(found[engine]) for engine in ("ours", self.rival))
        detail = f"{self.told}, {theirs:.1f} ms"
        self.measures[f"{mix}_cpu_ms_per_request"] = entry(mine, "ms", "lower", 2 * self.options.runs, baseline=detail)
        self.measures[f"{mix}_cpu_{self.rival}_over_ours"] = entry(theirs / mine, "ratio", "higher", 2 * self.options.runs, baseline=detail, **self.bounds)

    async def probe(self, engine: str, mix: str, rate: float, seed: int) -> bool:
        """Whether 99 % of a stretch of Poisson arrivals are answered within the limit."""
        count = max(self.options.least, int(rate * self.options.seconds))
        allowed = count - int(np.ceil(count * 0.99))  # how many may be late

        def late(replies: list[Reply]) -> int:
            return sum(not reply.full or reply.seconds > self.options.limit_ms / 1e3 for reply in replies)

        async with Client(self.engines[engine].url, KEY) as client:
            visits = self.visits(mix, count, seed)
            before = (lambda number: self.buy(visits[number])) if mix == "returning" else None
            replies = await storm(client, visits, rate, seed=seed, before=before, lost=lambda so_far: late(so_far) > allowed)
        held = late(replies) <= allowed
        say(
            f"  {engine:8} {mix:5} {rate:7.2f} requests/s: {'held' if held else 'missed'}  p50 {percentile_ms(replies, 50):.0f} p99 {percentile_ms(replies, 99):.0f} ms"
        )
        return held

    async def rate(self, mix: str) -> None:
        """Bisect both engines in turn, several times; the medians."""
        found: dict[str, list[float]] = {engine: [] for engine in self.engines}
        if mix == "returning":
            self.shop.remember({f"returning-{number}": history for number, history in enumerate(self.histories(mix, RETURNING_USERS, 6))})
            await self.lone("ours", [self.visit(f"returning-{number}") for number in range(RETURNING_USERS)])
        alone = {engine: await self.lone(engine, self.visits(mix, 20, 5)) for engine in self.engines}
        for engine, replies in alone.items():
            name = f"{mix}_lone_p50_ms_{engine}"
            self.measures[name] = entry(percentile_ms(replies, 50), "ms", "lower", 20)
        ratio = percentile_ms(alone[self.rival], 50) / percentile_ms(alone["ours"], 50)
        self.measures[f"{mix}_lone_p50_{self.rival}_over_ours"] = entry(ratio, "ratio", "higher", 20, baseline=self.told, **self.bounds)
        for run in range(self.options.runs):
            searches = {
                engine: Bisection(0.5e3 / percentile_ms(replies, 50), floor=self.options.floor, precision=self.options.precision)
                for engine, replies in alone.items()
            }
            while any(search.next() is not None for search in searches.values()):
                for engine, search in searches.items():
                    if (rate := search.next()) is not None:
                        search.tell(await self.probe(engine, mix, rate, 100 * run + 1))
            for engine, search in searches.items():
                found[engine].append(search.passed)
        for engine, values in found.items():
            self.rates[mix, engine] = statistics.median(values)
        mine, theirs = self.rates[mix, "ours"], self.rates[mix, self.rival]
        limit = f"p99 <= {self.options.limit_ms:.0f} ms"
        self.measures[f"{mix}_requests_per_second"] = entry(mine, "requests/s", "higher", self.options.runs, baseline=f"{self.told}, {theirs:.2f}; {limit}")
        if theirs:
            self.measures[f"{mix}_rate_over_{self.rival}"] = entry(mine / theirs, "ratio", "higher", self.options.runs, baseline=self.told, **self.bounds)
        else:
            say(f"  the {self.rival} engine does not hold {self.options.floor} requests/s with the {mix} mix: no ratio")

    async def bearable(self, mix: str) -> float:
        """The rate found for ours, or a guess from lone requests where it was not measured."""
        if (mix, "ours") not in self.rates:
            self.rates[mix, "ours"] = 1e3 / percentile_ms(await self.lone("ours", self.visits(mix, 20, 5)), 50)
        return max(self.rates[mix, "ours"], self.options.floor)

    async def returning(self, prompt_tokens: int) -> None:
        """A user comes back with one new item; another one with the same history comes for the first time."""
        rounds, wrong, server = self.options.rounds, 0, self.engines["ours"]
        cold: list[tuple[float, float]] = []
        warm: list[tuple[float, float]] = []
        clock = asyncio.get_running_loop().time
        async with Client(server.url, KEY) as client:

            async def ask(user: str) -> tuple[tuple[float, float], Any]:
                worked, begin = server.cpu_seconds(), clock()
                answer = await client.post("/v1/recommendations", json.loads(self.visit(user)))
                return ((clock() - begin) * 1e3, (server.cpu_seconds() - worked) * 1e3), answer

            for number in range(rounds):
                history = self.shop.prompt_items(prompt_tokens, number)
                old, new = f"back-{prompt_tokens}-{number}", f"first-{prompt_tokens}-{number}"
                self.shop.remember({old: history[:-1]})
                await ask(old)
                self.shop.remember({old: history[-1:]}, start_ms=10_000_000)
                self.shop.remember({new: history})
                warm_seconds, warm_answer = await ask(old)
                cold_seconds, cold_answer = await ask(new)
                warm.append(warm_seconds)
                cold.append(cold_seconds)
                wrong += not same_items(warm_answer["items"], cold_answer["items"])
        if wrong:
            raise SystemExit(f"{wrong} of {rounds} returning users got another answer than a first visitor with the same history")
        for place, name in enumerate(("latency", "cpu")):
            first, again = (statistics.median(times[place] for times in visits) for visits in (cold, warm))
            detail = f"first visit {first:.1f} ms, return {again:.1f} ms"
            measure = f"returning_cold_over_warm_{name}_prompt{prompt_tokens}"
            self.measures[measure] = entry(first / again, "ratio", "higher", rounds, baseline=detail, at_least=3, aim=5)

    async def share(self, mix: str) -> None:
        """Of lone requests, the part of the time that neither the network nor the beam selection took; the median."""
        engine, shares, stages = self.engines["ours"], [], {}
        async with Client(engine.url, KEY) as client:
            clock = asyncio.get_running_loop().time
            for body in self.visits(mix, self.options.rounds * 4, 9):
                before = engine.stage_seconds()
                begin = clock()
                status, _ = await client.send("POST", "/v1/recommendations", body)
                total = clock() - begin
                assert status == 200, status
                for _ in range(100):  # the stages are noted once the answer is on its way
                    spent = {stage: value - before.get(stage, 0.0) for stage, value in engine.stage_seconds().items()}
                    if spent.get("format"):
                        break
                    await asyncio.sleep(0.005)
                for stage, value in spent.items():
                    stages.setdefault(stage, []).append(value * 1e3)
                shares.append(1 - sum(value for stage, value in spent.items() if stage.startswith(MODEL_STAGES)) / total)
        detail = ", ".join(f"{stage} {statistics.median(values):.2f}" for stage, values in stages.items())
        self.measures[f"{mix}_non_model_share_of_p50"] = entry(
            statistics.median(shares), "share", "lower", len(shares), baseline=f"ms: {detail}", at_least=0.2, aim=0.1
        )

    async def swap(self, mix: str) -> None:
        """Half of the rate found, without and with promotions; every answer must be what its model gives."""
        rate = await self.bearable(mix) / 2
        count = max(100, int(rate * self.options.seconds * 2))
        bodies = self.bodies(mix, 50, 33)
        right: dict[str, list[Any]] = {}
        async with Client(self.engines["ours"].url, KEY) as client:
            for model in (*self.shop.models[::-1], self.shop.models[0]):
                await client.post("/v1/serving/promote", {"model": model})
                right[model] = [(await client.post("/v1/recommendations", json.loads(body)))["items"] for body in bodies]
            stream = [bodies[number % len(bodies)] for number in range(count)]
            still = await storm(client, stream, rate, seed=3)

            async def promotions() -> int:
                for number in range(4):
                    await asyncio.sleep(count / rate / 5)
                    await client.post("/v1/serving/promote", {"model": self.shop.models[(number + 1) % 2]})
                return 4

            moving, swaps = await asyncio.gather(storm(client, stream, rate, seed=3), promotions())
        errors = [reply for reply in moving if reply.status != 200]
        answers = [(reply.number, reply.body) for reply in moving if reply.status == 200]
        wrong = sum(not same_items(answer["items"], right[answer["model"]][number % len(bodies)]) for number, answer in answers)
        if wrong:
            raise SystemExit(f"{wrong} answers of {count} during swaps are not what the model that they name gives")
        self.measures["swap_errors"] = entry(len(errors), "requests", "lower", swaps, baseline=f"of {count} during {swaps} swaps", at_least=0, aim=0)
        calm = f"{percentile_ms(still, 99):.1f} ms without swaps, {rate:.2f} requests/s"
        self.measures["swap_p99_ms"] = entry(percentile_ms(moving, 99), "ms", "lower", swaps, baseline=calm)

    async def overload(self, mix: str) -> None:
        """Twice the rate found: what is answered, narrowed, refused; then half of it, to see that it recovers."""
        rate = 2 * await self.bearable(mix)
        count = max(100, int(rate * self.options.seconds))
        folder, redis_url = self.shop.folder, self.shop.redis_url
        with ServingProcess(folder, redis_url, threads=self.options.threads) as server:
            await self._crowd(server, mix, count, rate)

    async def _crowd(self, server: ServingProcess, mix: str, count: int, rate: float) -> None:
        async with Client(server.url, KEY) as client:
            crowd = await storm(client, self.visits(mix, count, 4), rate, seed=4)
            await asyncio.sleep(1.0)
            after = await storm(client, self.visits(mix, 50, 5), rate / 4, seed=5)
        answered = [reply for reply in crowd if reply.status == 200]
        refused = [reply for reply in crowd if reply.status == 429]
        other = [reply for reply in crowd if reply.status not in (200, 429)]
        told = f"of {count} at {rate:.2f} requests/s: {len(answered)} answered ({sum(not reply.full for reply in answered)} narrowed), {len(refused)} refused with 429"
        self.measures["overload_other_answers"] = entry(len(other), "requests", "lower", 1, baseline=told, at_least=0, aim=0)
        waited = float(np.percentile([reply.seconds * 1e3 for reply in answered], 99)) if answered else float("nan")
        self.measures["overload_answered_p99_ms"] = entry(waited, "ms", "lower", 1, baseline=f"{percentile_ms(after, 99):.1f} ms a second after it")


def same_items(mine: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether two lists are one: the same scores, and the same items but for those that scores do not tell apart."""
    if len(mine) != len(theirs) or any(abs(a["score"] - b["score"]) > TOLERANCE for a, b in zip(mine, theirs, strict=True)):
        return False
    last = theirs[-1]["score"] + TOLERANCE if theirs else 0.0
    return {hit["item"] for hit in mine if hit["score"] > last} == {hit["item"] for hit in theirs if hit["score"] > last}


def same_answer(mine: Reply, theirs: Reply) -> bool:
    """Whether both were answered, alike."""
    return mine.status == theirs.status == 200 and same_items(mine.body["items"], theirs.body["items"])


def entry(value: float, unit: str, better: str, runs: int, **more: Any) -> dict[str, Any]:
    """One measure."""
    return {"value": round(value, 4), "unit": unit, "better": better, **more, "runs": runs}


def say(text: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(text + "\n")


async def run(bench: Bench, options: argparse.Namespace) -> int:
    """Compare, then measure; the number of requests that were answered differently."""
    wrong = 0
    for mix in ("short", "long"):
        wrong += await bench.compare(mix, 5 if options.quick else 20)
    if wrong:
        return wrong
    for mix in options.mixes:
        if "cost" in options.parts and mix != "returning":
            await bench.cost(mix)
        if "rate" in options.parts:
            await bench.rate(mix)
    if "share" in options.parts:
        await bench.share(options.mixes[-1])
    if "swap" in options.parts:
        await bench.swap(options.mixes[0])
    if "overload" in options.parts:
        await bench.overload(options.mixes[0])
    if "returning" in options.parts:
        for tokens in options.prompts:
            await bench.returning(tokens)
    return 0


def arguments() -> argparse.Namespace:
    """The command line; ``--quick`` sets what is not given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small model, short stretches, one run")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", type=Path, help="folder of Amazon Beauty (beauty.seq ...); without it the shop is synthetic")
    parser.add_argument("--model", choices=SHAPES, help="hidden size x layers; default 256x4 (quick: 128x2)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--limit-ms", type=float, default=200.0)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each serving process")
    parser.add_argument("--runs", type=int, help="bisections of each engine; default 3 (quick: 1)")
    parser.add_argument("--seconds", type=float, help="length of one stretch of arrivals; default 20 (quick: 4)")
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=["short", "long"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--prompts", nargs="+", type=int, help="prompt tokens of returning users; default 600 1800 (quick: 600)")
    options = parser.parse_args()
    quick = options.quick
    options.model = options.model or ("128x2" if quick else "256x4")
    options.rival = "materialised" if options.model.startswith("hybrid") else "classic"
    options.runs = options.runs or (1 if quick else 3)
    options.seconds = options.seconds or (4.0 if quick else 20.0)
    options.prompts = options.prompts or ([600] if quick else [600, 1800])
    options.least = 60 if quick else 200
    options.precision, options.floor = (1.3, 2.0) if quick else (1.06, 0.25)
    options.rounds = 8 if quick else 25
    return options


def main() -> int:
    """Command line."""
    options = arguments()
    with tempfile.TemporaryDirectory(prefix="semantide-serving-") as name, ExitStack() as stack:
        folder = Path(name)
        shop = stack.enter_context(open_shop(folder, options.model, data=options.data))
        # Nobody is narrowed while rates are compared; copies of prompts need far more memory than our default.
        fixed = {"serving_narrowing_seconds": 0, "serving_kv_bytes": KV_BYTES, "serving_deadline_seconds": 60, "serving_weights": "float32"}
        ours = stack.enter_context(ServingProcess(folder, shop.redis_url, threads=options.threads, settings=fixed))
        command = [str(APPS / f"{options.rival}_app.py")]
        rival = stack.enter_context(ServingProcess(folder, shop.redis_url, command=command, threads=options.threads, settings=fixed))
        bench = Bench(options, shop, ours, rival)
        wrong = asyncio.run(run(bench, options))
    setting = {"model": options.model, "width": options.width, "threads": options.threads, "histories": "Amazon Beauty" if shop.real else "synthetic"}
    result = {"benchmark": "serving", "commit": code_version(), "machine": machine(), "setting": setting, "wrong_answers": wrong, "measures": bench.measures}
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'measure':40} {'value':>10}  {'unit':10} {'at least':>8}  baseline")
        for measure, found in bench.measures.items():
            print(f"{measure:40} {found['value']:>10}  {found['unit']:10} {found.get('at_least', ''):>8}  {found.get('baseline', '')}")
        print(f"answers that differ between the engines: {wrong}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
