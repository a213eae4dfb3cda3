"""Synthetic interactions through cleaning, pages, splits and an epoch of negatives, on the local executor and on Ray: equal bytes, time, and memory.

    python tests/benchmarks/data_pipeline.py [--rows 100000000] [--quick] [--json] [--executors local ray] [--folder DIR] [--negatives 16]

Users and items come by power laws; the log lies in segments of a million events as imports write them. Each executor runs in a process of its own, with
one thread for each table. Memory is the proportional set size of that process and its children, sampled ten times a second. Rates are events of the log
over the time of all steps together, on the clock and of the processor: the latter hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
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
import pyarrow.compute as pc
import pyarrow.parquet as pq
from machine import machine

from semantide.services.ingestion.datasetfiles import DatasetConfig, write_dataset
from semantide.services.ingestion.eventlog import SEGMENT_SCHEMA, write_durably
from semantide.services.ingestion.itemlog import ARTIFACT_SCHEMA
from semantide.shared.artifacts import digest_file
from semantide.shared.executors import Steps, executor
from semantide.shared.negative_sampling import NegativeMix
from semantide.shared.negative_source import NegativeSource
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
        words = pa.DictionaryArray.from_arrays(pa.array(rng.choice(3, count, p=[0.55, 0.35, 0.1]).astype(np.int8)), sorted(ACTIONS))
        table = pa.table(
            {
                "user": pc.binary_join_element_wise("u", pa.array(user).cast(pa.string()), ""),
                "item": pc.binary_join_element_wise("i", pa.array(item).cast(pa.string()), ""),
                "time": moment,
                "action": words.cast(pa.string()),
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


def work(kind: str, folder: Path, rows: int, part_rows: int, negatives: int) -> None:
    """One executor makes the data set and draws an epoch of negatives; digests go to standard output."""
    sources = [[path] for path in sorted((folder / "log").glob("*.parquet"))]
    target, steps = folder / f"dataset-{kind}", folder / f"steps-{kind}"
    config = DatasetConfig.parse({"min_item_events": 5, "min_user_events": 5, "split": "temporal"}, session_gap_seconds=1800)
    begin, runs = time.perf_counter(), executor(kind)
    header = write_dataset(sources, rows, ARTIFACT_SCHEMA.empty_table(), ACTIONS, config, target, workdir=steps / "dataset", executor=runs, part_rows=part_rows)
    shutil.rmtree(steps)
    made = time.perf_counter()
    counts = pq.read_table(target / "items.parquet", columns=["count"])["count"].to_numpy()
    source = NegativeSource(target / "users.parquet", counts, NegativeMix(popularity=negatives))
    drawn = hashlib.sha256()
    for shard in source.epoch(Steps(runs, steps / "negatives"), 0, 0, part_events=part_rows):
        drawn.update(shard.tobytes())
    seconds = {"dataset": made - begin, "negatives": time.perf_counter() - made}
    digests = {path.name: digest_file(path) for path in sorted(target.iterdir())} | {"negatives": drawn.hexdigest()}
    shutil.rmtree(steps)
    shutil.rmtree(target)
    if kind == "ray":
        import ray

        ray.shutdown()
    used = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    processor = sum(each.ru_utime + each.ru_stime for each in used)
    counted = {**header["counts"], "negatives": source.num_events * negatives}
    sys.stdout.write(json.dumps({"seconds": seconds, "processor": processor, "digests": digests, "counts": counted}) + "\n")


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
    parser.add_argument("--negatives", type=int, default=16, help="of each training event")
    parser.add_argument("--work", choices=("local", "ray"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    rows = options.rows or (300_000 if options.quick else 100_000_000)
    if options.work:
        work(options.work, options.folder, rows, options.part_rows, options.negatives)
        return 0
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="semantide-data-") as name:
        folder = Path(name)
        (folder / "log").mkdir()
        write_log(folder / "log", rows)
        runs = [("local", options.part_rows), ("local", rows // 7)] if options.quick else [(kind, options.part_rows) for kind in options.executors]
        results = []
        for kind, part_rows in runs:
            command = [sys.executable, os.path.abspath(__file__), "--work", kind, "--folder", str(folder), "--rows", str(rows), "--part-rows", str(part_rows)]
            results.append((kind, *measured([*command, "--negatives", str(options.negatives)])))
    same = all(found["digests"] == results[0][1]["digests"] for _, found, _ in results)
    measures: dict[str, Any] = {}
    for number, (kind, found, memory) in enumerate(results):
        label = kind if kind not in {earlier for earlier, *_ in results[:number]} else f"{kind}_{number + 1}"
        measures[f"{label}_peak_memory"] = {"value": round(memory, 2), "unit": "GiB", "better": "lower", "at_least": MEMORY_BOUND_GB, "runs": 1}
        rates = {"events_per_second": sum(found["seconds"].values())}
        if kind == "local":  # of Ray's, much is its own start, and its workers are no children
            rates["events_per_processor_second"] = found["processor"]
        for name, seconds in rates.items():
            measures[f"{label}_{name}"] = {"value": round(rows / seconds), "unit": "events/s", "better": "higher", "runs": 1}
        for stage, seconds in found["seconds"].items():
            measures[f"{label}_{stage}_time"] = {"value": round(seconds, 1), "unit": "s", "better": "lower", "runs": 1}
    result = {
        "benchmark": "data_pipeline", "commit": code_version(), "machine": machine(),
        "setting": {"rows": rows, "part_rows": options.part_rows, "negatives": options.negatives},
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
