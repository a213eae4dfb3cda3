"""Synthetic interactions through the steps of a data set, on the local executor and on Ray: equal bytes, time, and the memory that was needed.

    python tests/benchmarks/data_pipeline.py [--rows 100000000] [--quick] [--json] [--executors local ray] [--folder DIR]

Users come as often as a log-normal says, items by a power law; the log lies in segments of a million events as imports write them. Each executor runs in a
process of its own; memory is the proportional set size of that process and its children, sampled ten times a second.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from machine import machine

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.eventlog import SEGMENT_SCHEMA, write_durably
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.shared.artifacts import digest_file
from semantide.shared.executors import executor
from semantide.shared.version import code_version

SEGMENT_ROWS = 1_000_000
MEMORY_BOUND_GB = 8.0
ACTIONS = {"exposure": 0.0, "click": 1.0, "like": 2.0}


def write_log(folder: Path, rows: int, seed: int = 0) -> list[Path]:
    """Segments of random events; each user's are spread over all of them, as time is."""
    users, items = max(rows // 200, 10), max(rows // 100, 50)
    paths = []
    for number, begin in enumerate(range(0, rows, SEGMENT_ROWS)):
        rng = np.random.default_rng([seed, number])
        count = min(SEGMENT_ROWS, rows - begin)
        user = np.minimum((rng.random(count) ** 2 * users).astype(np.int64), users - 1)
        item = np.minimum((rng.random(count) ** 3 * items).astype(np.int64), items - 1)
        moment = 1_700_000_000_000 + np.sort(rng.integers(begin * 20, (begin + count) * 20, count))
        words = np.asarray(sorted(ACTIONS), dtype=object)[rng.choice(3, count, p=[0.55, 0.35, 0.1])]
        table = pa.table(
            {
                "user": pa.array(np.char.add("u", user.astype(str))),
                "item": pa.array(np.char.add("i", item.astype(str))),
                "time": moment,
                "action": pa.array(words, pa.string()),
                "event": pa.FixedSizeBinaryArray.from_buffers(pa.binary(16), count, [None, pa.py_buffer(rng.bytes(16 * count))]),
            }
        )
        columns = [
            table[name].cast(kind) if name in table.column_names else pa.nulls(count, kind)
            for name, kind in zip(SEGMENT_SCHEMA.names, SEGMENT_SCHEMA.types, strict=True)
        ]
        paths.append(folder / f"segment-{number:05d}.parquet")
        write_durably(pa.table(columns, schema=SEGMENT_SCHEMA), paths[-1])
    return paths


def work(kind: str, folder: Path, rows: int, part_rows: int) -> None:
    """One executor makes the data set; its digests go to standard output."""
    sources = [[path] for path in sorted((folder / "log").glob("*.parquet"))]
    target, steps = folder / f"dataset-{kind}", folder / f"steps-{kind}"
    config = DatasetConfig.parse({"min_item_events": 5, "min_user_events": 5, "split": "temporal"}, session_gap_seconds=1800)
    begin = time.perf_counter()
    header = write_dataset(sources, rows, ARTIFACT_SCHEMA.empty_table(), ACTIONS, config, target, workdir=steps, executor=executor(kind), part_rows=part_rows)
    seconds = time.perf_counter() - begin
    digests = {path.name: digest_file(path) for path in sorted(target.iterdir())}
    sys.stdout.write(json.dumps({"seconds": seconds, "digests": digests, "counts": header["counts"]}) + "\n")
    shutil.rmtree(steps)


def measured(command: list[str]) -> tuple[dict[str, Any], float]:
    """What a process printed last, and the most memory that it and its children needed together, GB."""
    most, process = 0.0, subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watched = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        try:
            for each in [watched, *watched.children(recursive=True)]:
                total += each.memory_full_info().pss
        except psutil.Error:
            continue
        most = max(most, total / 2**30)
        time.sleep(0.1)
    output = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return json.loads(output.splitlines()[-1]), most


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, help="interactions; default 100,000,000 (quick: 300,000)")
    parser.add_argument("--part-rows", type=int, default=1_000_000)
    parser.add_argument("--executors", nargs="+", choices=("local", "ray"), default=["local", "ray"])
    parser.add_argument("--quick", action="store_true", help="few rows, the local executor twice with parts of different sizes")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--folder", type=Path, help="where the log and the steps are kept meanwhile; default a temporary folder")
    parser.add_argument("--work", choices=("local", "ray"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = options.rows or (300_000 if options.quick else 100_000_000)
    if options.work:
        work(options.work, options.folder, rows, options.part_rows)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="semantide-data-") as name:
        folder = Path(name)
        (folder / "log").mkdir()
        write_log(folder / "log", rows)
        runs = [("local", options.part_rows), ("local", rows // 7)] if options.quick else [(kind, options.part_rows) for kind in options.executors]
        results = []
        for kind, part_rows in runs:
            command = [sys.executable, os.path.abspath(__file__), "--work", kind, "--folder", str(folder), "--rows", str(rows), "--part-rows", str(part_rows)]
            results.append((kind, *measured(command)))
    same = all(found["digests"] == results[0][1]["digests"] for _, found, _ in results)
    measures: dict[str, Any] = {}
    for number, (kind, found, memory) in enumerate(results):
        label = kind if kind not in {earlier for earlier, *_ in results[:number]} else f"{kind}_{number + 1}"
        measures[f"{label}_peak_memory"] = {"value": round(memory, 2), "unit": "GiB", "better": "lower", "at_least": MEMORY_BOUND_GB, "runs": 1}
        measures[f"{label}_events_per_second"] = {"value": round(rows / found["seconds"]), "unit": "events/s", "better": "higher", "runs": 1}
    result = {
        "benchmark": "data_pipeline", "commit": code_version(), "machine": machine(), "setting": {"rows": rows, "part_rows": options.part_rows},
        "equal_digests": same, "counts": results[0][1]["counts"], "measures": measures,
    }  # fmt: skip
    if options.json:
        print(json.dumps(result))
    else:
        for measure, entry in measures.items():
            print(f"{measure:32} {entry['value']:>12}  {entry['unit']}")
        print(f"{len(results)} runs, {'equal' if same else 'DIFFERENT'} digests; counts: {results[0][1]['counts']}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
