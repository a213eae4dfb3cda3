"""Ingestion: rows/s of Parquet import and of REST in batches of 500, and what is stored after kill -9 of each process in turn.

    python tests/benchmarks/ingestion.py [--quick] [--json] [--rows N]

Baselines, measured in the same run on the same rows: pyarrow's Parquet writer with fsync, and XADD of the same batches to the same broker.
Exit status 1 where the stored events are not exactly the acknowledged ones.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import polars as pl
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from semantide.services.ingestion.eventlog import EventLog, write_durably
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.stream import STREAM, encode
from semantide.shared.broker import OwnBroker, connect, free_port
from semantide.shared.version import code_version

BATCH = 500
KEY = "benchmark"
START = 1_700_000_000_000
TOLD = "--json" not in sys.argv


def say(text: str) -> None:
    if TOLD:
        print(text, flush=True)


def rows(count: int, seed: int, name: str) -> pa.Table:
    """Interactions of a long-tailed catalogue; ``name`` keeps the users of two sets apart."""
    generator = np.random.default_rng(seed)
    users = pa.array([f"{name}{user}" for user in generator.integers(0, max(10, count // 50), count)])
    items = pa.array([f"item{item}" for item in np.minimum(generator.zipf(1.3, count), 100_000)])
    actions = pa.DictionaryArray.from_arrays(pa.array(generator.choice(3, count, p=[0.7, 0.27, 0.03]).astype(np.int8)), ["exposure", "click", "order"]).cast(
        pa.string()
    )
    pages = pa.array([f"p{page}" for page in np.arange(count) // 8])
    return pa.table(
        {
            "user": users,
            "item": items,
            "time": pa.array(START + np.arange(count) * 7),
            "action": actions,
            "page": pages,
            "value": pa.array(generator.random(count)),
        }
    )


class Processes:
    """Broker, ingestion API and ingestion worker; each can be killed and comes back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.broker = OwnBroker(folder / "broker")
        self.port = free_port()
        self.children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self.broker.start()
        for name in ("api", "worker"):
            self.spawn(name)
        self.wait_ready()

    def spawn(self, name: str) -> None:
        environment = {
            **os.environ,
            "SEMANTIDE_DATA_DIR": str(self.folder / "data"),
            "SEMANTIDE_REDIS_URL": self.broker.url,
            "SEMANTIDE_PORT": str(self.port),
            "SEMANTIDE_API_KEYS": KEY,
            "SEMANTIDE_IMPORT_ROOTS": str(self.folder),
            "SEMANTIDE_MAX_BATCH_ROWS": "5000",
        }
        command = [sys.executable, "-m", "semantide.services.local", "--with-parent", name, "ingestion"]
        with (self.folder / f"{name}.log").open("ab") as log:
            self.children[name] = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        wait_for(lambda: self.get("/readyz").status_code == 200, 60, "the API to answer")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers={"X-API-Key": KEY}, timeout=30)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.port}{path}", headers={"X-API-Key": KEY}, timeout=30)

    def kill(self, name: str) -> None:
        """kill -9, and start again."""
        if name == "broker":
            assert self.broker.process is not None
            self.broker.process.kill()
            self.broker.process.wait()
            self.broker.start()
            return
        child = self.children[name]
        child.kill()
        child.wait()
        assert child.stdin is not None
        child.stdin.close()
        self.spawn(name)

    def stop(self) -> None:
        for child in self.children.values():
            child.terminate()
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self.broker.stop()


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    made = Processes(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            if condition():
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > end:
            raise SystemExit(f"waited {seconds:.0f} s for {what} in vain")
        time.sleep(0.05)


def keys(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table.select(["user", "item", "time", "action", "page", "value"]))
    assert isinstance(frame, pl.DataFrame)
    return frame.sort("user", "item", "time", "action")


def stored(folder: Path) -> pl.DataFrame:
    with closing(Manifest(folder / "data" / "events")) as manifest:
        paths = [segment.path for segment in EventLog(manifest).segments()]
    return pl.read_parquet(paths, columns=["user", "item", "time", "action", "page", "value"]).sort("user", "item", "time", "action")


def drained(stack: Processes) -> None:
    wait_for(lambda: stack.get("/v1/interactions/stats").json()["waiting_batches"] == 0, 120, "the log to take everything")


def imported(stack: Processes, path: Path, *, kill: bool = False) -> dict[str, Any]:
    """Import a file and wait; with ``kill`` the job's process dies once on the way."""
    with stack.client() as client:
        answer = client.post("/v1/imports", json={"path": str(path)})
        answer.raise_for_status()
        job = answer.json()["id"]
    killed = not kill
    while True:
        try:
            record = stack.get(f"/v1/jobs/{job}").json()
        except httpx.HTTPError:
            time.sleep(0.1)
            continue
        if record.get("state") == "succeeded":
            assert killed, "the import was over before its process could be killed: give it more rows"
            return dict(record)
        if record.get("state") in ("failed", "cancelled"):
            raise SystemExit(f"the import ended {record['state']}: {record['error']}")
        if not killed and record.get("done", 0) > 0:
            for process in psutil.process_iter(["cmdline"]):
                if (process.info["cmdline"] or [])[-2:] == ["job", job]:
                    process.kill()
                    killed = True
        time.sleep(0.02)


def batches(table: pa.Table) -> list[bytes]:
    """Bodies of REST requests of 500 rows."""
    return [json.dumps({"interactions": table.slice(begin, BATCH).to_pylist()}).encode() for begin in range(0, table.num_rows, BATCH)]


def post_all(stack: Processes, bodies: list[bytes], threads: int, *, stubborn: bool = False) -> float:
    """Post every body until it is acknowledged; seconds. ``stubborn``: whatever the answer, the same body again."""
    queue = iter(bodies)
    lock = threading.Lock()
    errors: list[str] = []

    def work() -> None:
        with stack.client() as client:
            while True:
                with lock:
                    body = next(queue, None)
                if body is None:
                    return
                while True:
                    try:
                        answer = client.post("/v1/interactions", content=body)
                        if answer.status_code == 202:
                            break
                        problem = f"{answer.status_code} {answer.text[:200]}"
                    except httpx.HTTPError as error:
                        problem = repr(error)
                    if not stubborn:
                        errors.append(problem)
                        return
                    time.sleep(0.05)

    begin = time.perf_counter()
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise SystemExit(f"a request failed: {errors[0]}")
    return time.perf_counter() - begin


def best(times: list[float]) -> float:
    return min(times)


def speed(folder: Path, count: int, rest_count: int, runs: int) -> dict[str, dict[str, Any]]:
    """Both throughputs against their baselines, alternately."""
    measures: dict[str, dict[str, Any]] = {}
    with processes(folder) as stack:
        import_rates, whole_rates, writer_rates, rest_rates, rest_one, xadd_rates, expected = [], [], [], [], [], [], []
        client = connect(stack.broker.url)
        for run in range(runs):
            table = rows(count, run, f"import{run}-")
            path = folder / f"rows{run}.parquet"
            pq.write_table(table, path)
            begin = time.perf_counter()
            write_durably(table, folder / f"baseline{run}.parquet")
            writer_rates.append(count / (time.perf_counter() - begin))
            record = imported(stack, path)
            import_rates.append(record["result"]["rows_per_second"])
            whole_rates.append(count / ((record["finished"] - record["created"]) / 1000))
            say(f"import {run + 1}/{runs}: {import_rates[-1]:,.0f} rows/s (submission to end {whole_rates[-1]:,.0f}), the writer alone {writer_rates[-1]:,.0f}")
            sent = rows(rest_count, 100 + run, f"rest{run}-")
            bodies = batches(sent)
            fields = [encode("interactions", sent.slice(begin, BATCH)) for begin in range(0, rest_count, BATCH)]
            begin = time.perf_counter()
            for entry in fields:
                client.xadd("benchmark", entry)
            xadd_rates.append(rest_count / (time.perf_counter() - begin))
            client.delete("benchmark")
            half = len(bodies) // 2
            rest_rates.append(half * BATCH / post_all(stack, bodies[:half], 4))
            rest_one.append((len(bodies) - half) * BATCH / post_all(stack, bodies[half:], 1))
            say(f"REST {run + 1}/{runs}: {rest_rates[-1]:,.0f} rows/s by 4 clients, {rest_one[-1]:,.0f} by one; XADD alone {xadd_rates[-1]:,.0f}")
            expected += [keys(table), keys(sent)]
        drained(stack)
        client.close()
        if not pl.concat(expected).sort("user", "item", "time", "action").equals(stored(folder)):
            raise SystemExit("the stored events differ from those that were sent")

    def rate(values: list[float], baseline: str, **bounds: Any) -> dict[str, Any]:
        return {"value": round(float(np.median(values))), "unit": "rows/s", "better": "higher", "baseline": baseline, **bounds, "runs": runs}

    writer, xadd = round(float(np.median(writer_rates))), round(float(np.median(xadd_rates)))
    measures["import_rows_per_second"] = rate(import_rates, f"pyarrow Parquet writer with fsync, {writer} rows/s", at_least=50_000, aim=writer)
    measures["import_rows_per_second_whole_job"] = rate(whole_rates, "the same, with start of the process and online histories")
    measures["rest_rows_per_second"] = rate(rest_rates, f"XADD of the same batches, {xadd} rows/s", at_least=5_000, aim=xadd)
    measures["rest_rows_per_second_one_client"] = rate(rest_one, f"XADD of the same batches, {xadd} rows/s")
    return measures


def kills(folder: Path, count: int, rest_count: int) -> dict[str, Any]:
    """Import and post while every process dies in turn; whether exactly the acknowledged events are stored."""
    with processes(folder) as stack:
        table, sent = rows(count, 7, "import-"), rows(rest_count, 8, "rest-")
        path = folder / "rows.parquet"
        pq.write_table(table, path, row_group_size=20_000)
        bodies = batches(sent)
        part = len(bodies) // 4
        client = connect(stack.broker.url)
        for number, victim in enumerate(("api", "worker", "broker")):
            mine = bodies[number * part : (number + 1) * part]
            sender = threading.Thread(target=post_all, args=(stack, mine, 2), kwargs={"stubborn": True})
            sender.start()
            time.sleep(0.4)
            stack.kill(victim)
            sender.join()
            wait_for(lambda: stack.get("/healthz").status_code == 200, 60, "the API to come back")
            say(f"killed {victim}: {part * BATCH:,} rows acknowledged")
        sender = threading.Thread(target=post_all, args=(stack, bodies[3 * part :], 2), kwargs={"stubborn": True})
        sender.start()
        imported(stack, path, kill=True)
        sender.join()
        say(f"killed the import's process: {count:,} rows imported")
        # A client that never saw its answer sends again.
        post_all(stack, bodies[: max(1, part // 4)], 2)
        drained(stack)
        pending = client.xlen(STREAM)
        client.close()
        expected = pl.concat([keys(table), keys(sent)]).sort("user", "item", "time", "action")
        found = stored(folder)
    equal = bool(expected.equals(found)) and pending == 0
    say(f"after the kills: {expected.height:,} acknowledged, {found.height:,} stored, {'equal' if equal else 'DIFFERENT'}")
    return {
        "value": int(equal),
        "unit": "boolean",
        "better": "higher",
        "baseline": f"{expected.height} acknowledged events, {found.height} stored",
        "at_least": 1,
        "runs": 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and once: within a minute")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--rows", type=int, default=0, help="rows of the Parquet import")
    options = parser.parse_args()
    count = options.rows or (300_000 if options.quick else 2_000_000)
    with tempfile.TemporaryDirectory(prefix="semantide-benchmark-") as name:
        for part in ("speed", "kills"):
            (Path(name) / part).mkdir()
        measures = speed(Path(name) / "speed", count, 20_000 if options.quick else 100_000, 1 if options.quick else 3)
        measures["stored_equals_acknowledged"] = kills(Path(name) / "kills", 300_000 if options.quick else 1_000_000, 40_000 if options.quick else 200_000)
    machine = {"cpu": _cpu(), "cores": os.cpu_count(), "pyarrow": pa.__version__}
    if options.json:
        print(json.dumps({"benchmark": "ingestion", "commit": code_version(), "machine": machine, "measures": measures}))
    else:
        print(f"\n{'measure':40} {'value':>12} {'at least':>10}  baseline")
        for measure, entry in measures.items():
            print(f"{measure:40} {entry['value']:>12,} {entry.get('at_least', ''):>10}  {entry['baseline']}")
    return 0 if measures["stored_equals_acknowledged"]["value"] else 1


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


if __name__ == "__main__":
    sys.exit(main())
