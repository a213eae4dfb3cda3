"""Swap of the live model under 1,000 requests: errors, and latency with and without swaps.

The real stack: a broker of its own, the serving API in a process of its own, requests over HTTP at a steady rate, each on a new connection.
The rate is half of what the stack answered in a short closed loop just before, so that what shows is the swap and not a queue. Runs without and
with swaps alternate on the same work. Every answer is compared with what its model gave before: exit 1 where one differs.

    python tests/benchmarks/swap.py [--quick] [--json] [--requests 1000] [--rate REQUESTS_PER_SECOND]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "serving"))

from world import Reply, make_catalog, make_model, post, storm  # type: ignore[import-not-found]

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import OwnBroker, connect, free_port
from semantide.shared.config import Settings
from semantide.shared.version import code_version

LEVEL_SIZES = (64, 64, 64)
KEY = "benchmark-key"
SHAPES: dict[bool, dict[str, int]] = {
    False: {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "head_dim": 32, "intermediate_size": 256},
    True: {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "head_dim": 32, "intermediate_size": 128},
}


class Bench:
    """One stack, two models, a list of requests and their right answers."""

    def __init__(self, url: str, requests: int, rate: float | None) -> None:
        self.url, self.rate = url, rate or 0.0
        rng = np.random.default_rng(0)
        self.histories = [[f"i{row}" for row in rng.integers(0, 12_000, rng.integers(1, 40))] for _ in range(50)]
        self.bodies = [{"history": self.histories[number % 50], "n": 10, "exclude_ids": self.histories[number % 50]} for number in range(requests)]
        self.right: dict[str, list[list[str]]] = {}

    async def post(self, path: str, body: Any) -> Any:
        """A request that must succeed."""
        status, answer = await post(self.url, path, body, KEY)
        if status != 200:
            raise SystemExit(f"{path} answered {status}: {answer}")
        return answer

    async def learn(self, models: list[str]) -> None:
        """What each model answers, undisturbed."""
        for model in models:
            await self.post("/v1/serving/promote", {"model": model})
            self.right[model] = [
                [hit["item"] for hit in (await self.post("/v1/recommendations", body))["items"]] for body in self.bodies[: len(self.histories)]
            ]

    async def settle(self) -> None:
        """Without a given rate: half of what 16 clients get in a closed loop."""
        if self.rate:
            return
        left = iter(self.bodies[:160])

        async def client() -> None:
            for body in left:
                await self.post("/v1/recommendations", body)

        begin = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(16)))
        self.rate = 0.5 * 160 / (time.perf_counter() - begin)

    async def run(self, swaps: list[str], requests: int | None = None) -> tuple[list[Reply], list[float]]:
        """All (or some) requests at the rate, with these promotions spread over the time; replies and seconds of each promotion."""
        bodies = self.bodies[:requests]
        seconds = len(bodies) / self.rate
        took = []

        async def promote() -> None:
            for model in swaps:
                await asyncio.sleep(seconds / (len(swaps) + 1))
                begin = time.perf_counter()
                await self.post("/v1/serving/promote", {"model": model})
                took.append(time.perf_counter() - begin)

        replies, _ = await asyncio.gather(storm(self.url, bodies, seconds, KEY), promote())
        return replies, took

    def wrong(self, replies: list[Reply]) -> int:
        """Answers that are not what their model gives."""
        return sum(
            reply.status == 200 and [hit["item"] for hit in reply.body["items"]] != self.right[reply.body["model"]][reply.number % len(self.histories)]
            for reply in replies
        )


def start_stack(folder: Path, redis_url: str) -> tuple[subprocess.Popen[bytes], str]:
    """The serving API in a process of its own."""
    port = free_port()
    environment = os.environ | {
        "SEMANTIDE_REDIS_URL": redis_url,
        "SEMANTIDE_DATA_DIR": str(folder / "data"),
        "SEMANTIDE_PORT": str(port),
        "SEMANTIDE_API_KEYS": KEY,
        "SEMANTIDE_LOG_LEVEL": "WARNING",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen([sys.executable, "-m", "semantide.services.local", "api", "serving"], env=environment), f"http://127.0.0.1:{port}"


async def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Until recommendations are answered."""
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"the serving process ended with status {process.returncode}")
        try:
            if (await post(url, "/v1/recommendations", {"user": "nobody"}, KEY))[0] == 200:
                return
        except OSError:
            pass
        await asyncio.sleep(0.1)
    raise SystemExit("the serving process did not become ready within 60 s")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Build a stack, run, and sum up."""
    with tempfile.TemporaryDirectory() as name, OwnBroker(Path(name) / "broker") as broker:
        folder = Path(name)
        settings = Settings(data_dir=folder / "data", redis_url=broker.url)
        store = ArtifactStore(settings.artifacts_root)
        make_catalog(folder / "catalog", items=12_000, level_sizes=LEVEL_SIZES)
        catalog = store.put("catalogs", folder / "catalog")
        registry = Registry(connect(broker.url))
        models = []
        for seed in range(2):
            make_model(folder / f"model-{seed}", seed, catalog, level_sizes=LEVEL_SIZES, **SHAPES[options.quick])
            models.append(store.put("models", folder / f"model-{seed}"))
            registry.register(Candidate(model=models[-1], catalog=catalog))
        registry.promote(registry.resolve(models[0], None))
        process, url = start_stack(folder, broker.url)
        try:
            bench = Bench(url, options.requests, options.rate)
            still: list[Reply] = []
            moving: list[Reply] = []
            took: list[float] = []

            async def everything() -> None:
                await wait_ready(url, process)
                await bench.learn(models)
                await bench.settle()
                for _ in range(1 if options.quick else 3):
                    still.extend((await bench.run([], 250 if options.quick else None))[0])
                    replies, seconds = await bench.run([models[0], models[1], models[0], models[1]])
                    moving.extend(replies)
                    took.extend(seconds)

            asyncio.run(everything())
        finally:
            process.terminate()
            process.wait(30)
    wrong = bench.wrong(still) + bench.wrong(moving)
    errors = sum(reply.status != 200 for reply in moving)

    def percentile(replies: list[Reply], share: float) -> float:
        return float(np.percentile([reply.seconds * 1e3 for reply in replies], share))

    runs = 1 if options.quick else 3
    measures = {
        "errors": {"value": errors, "unit": "requests", "better": "lower", "baseline": f"of {len(moving)} requests", "at_least": 0, "aim": 0, "runs": runs},
        "errors_without_swap": {"value": sum(reply.status != 200 for reply in still), "unit": "requests", "better": "lower", "runs": runs},
        "rate": {"value": round(bench.rate, 1), "unit": "requests/s", "better": "higher", "baseline": "half of a closed loop", "runs": runs},
        "swaps": {"value": len(took), "unit": "swaps", "better": "higher", "runs": runs},
        "swap_seconds": {
            "value": round(statistics.median(took), 4),
            "unit": "s",
            "better": "lower",
            "baseline": "load, verify, warm and swap",
            "runs": len(took),
        },
    }
    for share in (50, 95, 99):
        base, value = percentile(still, share), percentile(moving, share)
        measures[f"p{share}_ms"] = {"value": round(value, 2), "unit": "ms", "better": "lower", "baseline": f"{base:.2f} ms without swaps", "runs": runs}
    return {"benchmark": "swap", "commit": code_version(), "machine": machine(), "wrong_answers": wrong, "measures": measures}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of runs instead of three")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rate", type=float, help="requests per second; default: half of what a closed loop gets")
    options = parser.parse_args()
    result = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'measure':22} {'value':>10}  unit      baseline")
        for name, entry in result["measures"].items():
            print(f"{name:22} {entry['value']:>10}  {entry['unit']:8}  {entry.get('baseline', '')}")
        print(f"answers that differ from what their model gives undisturbed: {result['wrong_answers']}")
    return 1 if result["wrong_answers"] else 0


if __name__ == "__main__":
    sys.exit(main())
