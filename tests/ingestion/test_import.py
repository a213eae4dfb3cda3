"""Imports: every format, every kind of bad file, kills and restarts."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion import fileimport, job
from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.itemlog import ItemLog
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.readers import textlines
from semantide.services.ingestion.schema import shown
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.availability import Availability
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import BadData
from semantide.shared.history import Histories
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.users import SimulatorConfig

T = int(time.time() * 1000) - 10_000_000


@pytest.fixture
def start(broker: Any, settings: Any) -> Any:
    """Run an import to its end; the same job id goes on with the same folder."""
    contexts: dict[str, Any] = {}

    def run(path: Path, *, again: str = "", **config: Any) -> JobOutcome:
        queues = Queues(settings.redis_url)
        record = Jobs(broker).get(again) if again else Jobs(broker).submit(JobSpec(kind="import", config={"path": str(path), **config}))
        contexts["last"] = record.id
        return job.run(JobContext(record, settings, ArtifactStore(settings.artifacts_root), broker, queues))

    run.contexts = contexts  # type: ignore[attr-defined]
    return run


def rows_of(settings: Any) -> list[dict[str, Any]]:
    with closing(Manifest(settings.data_dir / "events")) as manifest:
        tables = [read_segment(segment.path) for segment in EventLog(manifest).segments()]
    return sorted((row for table in tables for row in table.to_pylist()), key=lambda row: (row["user"], row["time"], row["item"]))


def items_of(settings: Any) -> dict[str, dict[str, Any]]:
    with closing(Manifest(settings.data_dir / "events")) as manifest:
        return {row["item"]: row for table in ItemLog(manifest).tables() for row in table.to_pylist()}


def brief(settings: Any) -> list[tuple[Any, ...]]:
    return [(row["user"], row["item"], row["time"], row["action"]) for row in rows_of(settings)]


GOOD_CSV = f"user_id,item_id,timestamp,event_type\na,x,{T},click\nb,y,{T + 1},order\n"


def test_csv_with_bad_rows_keeps_the_good_and_lists_the_bad(tmp_path: Path, start: Any, settings: Any) -> None:
    path = tmp_path / "log.csv"
    bad = [
        ("c,z", "row"),
        (f"c,z,{T // 1000},click", "time"),
        (f"c,z,{T + 10**9},click", "time"),
        ("c,z,soon,click", "time"),
        ("c,z,,click", "time"),
        (f"c,z,{T},buy", "action"),
        (f",z,{T},click", "user"),
    ]
    text = GOOD_CSV.encode() + "".join(line + "\n" for line, _ in bad).encode() + b"\xffc,z," + str(T).encode() + b",click\n" + f'"q,1",z,{T},click\n'.encode()
    path.write_bytes(text)
    result = start(path).result
    assert brief(settings) == [("a", "x", T, "click"), ("b", "y", T + 1, "order"), ("q,1", "z", T, "click")]
    assert (result["rows"], result["accepted"], result["rejected"], result["exit_code"]) == (11, 3, 8, 1)
    rejects = [json.loads(line) for line in Path(result["reject_file"]).read_text().splitlines()]
    assert [(entry["row"], entry["field"]) for entry in rejects] == [(2 + index, field) for index, (_, field) in enumerate(bad)] + [(9, "user")]
    assert all(entry["remedy"] and entry["reason"] and entry["file"] == "log.csv" for entry in rejects)


def test_a_second_import_of_the_same_rows_stores_nothing(tmp_path: Path, start: Any, settings: Any) -> None:
    (tmp_path / "log.csv").write_text(GOOD_CSV)
    assert start(tmp_path / "log.csv").result["accepted"] == 2
    (tmp_path / "log.csv.gz").write_bytes(gzip.compress(GOOD_CSV.encode()))
    result = start(tmp_path / "log.csv.gz").result
    assert (result["accepted"], result["duplicates"], result["exit_code"]) == (0, 2, 0)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"", "empty"),
        ("a.csv", b"\n\n", "empty"),
        ("a.csv", b"user,item,time\n", "header but no rows"),
        ("a.csv", b"colour,size\nred,1\n", "neither a user"),
        ("a.csv", b"user,item\na,b\n", "no column for time"),
        ("a.csv", b"user,user,item,time\na,a,b,1\n", "more than once"),
        ("a.csv", b"\xff\xfe\x00user\n", "UTF-8"),
        ("a.parquet", b"", "empty"),
        ("a.parquet", b"PAR1 this is no parquet", "cut off or damaged"),
        ("a.jsonl", b"\n", "no rows"),
        ("a.jsonl", b'[{"user": 1}]', "JSON array"),
        ("a.jsonl", b"nonsense\n", "JSON object"),
        ("a.seq", b"\n", "no rows"),
        ("a.csv", b"user,item,time\na,b,1\n", "none of the 1 rows"),
        # A fixed time in the header: test names must be the same in every process that collects them.
        ("a.csv.gz", gzip.compress(b"user,item,time\n" * 9999, mtime=0)[:60], "damaged or cut off"),
    ],
)
def test_a_file_that_cannot_be_used_fails_whole(tmp_path: Path, start: Any, settings: Any, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=says):
        start(tmp_path / name)
    assert rows_of(settings) == []


def test_what_came_before_the_damage_counts_in_full(tmp_path: Path, start: Any, settings: Any, broker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(textlines, "BLOCK_BYTES", 20_000)
    monkeypatch.setattr(textlines.blocks, "__kwdefaults__", {**textlines.blocks.__kwdefaults__, "block_bytes": 20_000})
    monkeypatch.setattr(fileimport, "ROWS_PER_CHUNK", 500)
    rows = "".join(json.dumps({"user": f"u{n % 7}", "item": f"i{n * 7919 % 10_007}", "time": T + n}) + "\n" for n in range(20_000))
    packed = gzip.compress(rows.encode())
    (tmp_path / "log.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(BadData, match="damaged or cut off"):
        start(tmp_path / "log.jsonl.gz")
    stored = rows_of(settings)
    assert 0 < len(stored) < 20_000
    told = Histories(broker, settings.history_length, 60).get("u0")
    assert [event.item for event in told] == [row["item"] for row in stored if row["user"] == "u0"][-settings.history_length :]


def test_a_damaged_file_stops_a_folder_before_anything_is_read(tmp_path: Path, start: Any, settings: Any) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "a.csv").write_text(GOOD_CSV)
    pq.write_table(pa.table({"user": ["a"], "item": ["x"], "time": [T]}), folder / "b.parquet")
    whole = (folder / "b.parquet").read_bytes()
    (folder / "b.parquet").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadData, match=r"b\.parquet"):
        start(folder)
    assert rows_of(settings) == []
    pq.write_table(pa.table({"user": pa.array([], pa.string()), "item": pa.array([], pa.string()), "time": pa.array([], pa.int64())}), folder / "b.parquet")
    with pytest.raises(BadData, match="no rows"):
        start(folder)


def test_paths_outside_the_roots_are_refused_in_the_job_too(start: Any) -> None:
    with pytest.raises(BadData, match="SEMANTIDE_IMPORT_ROOTS"):
        start(Path("/etc"))


def test_parquet_types_and_time_units(tmp_path: Path, start: Any, settings: Any) -> None:
    import datetime

    moment = datetime.datetime.fromtimestamp(T / 1000, datetime.UTC)
    pq.write_table(pa.table({"uid": [1, 2], "movieId": [3.0, 4.5], "ts": [moment, moment], "rating": [4.5, float("nan")]}), tmp_path / "a.parquet")
    result = start(tmp_path / "a.parquet").result
    assert (result["accepted"], result["rejects"][0]["field"]) == (1, "item")
    row = {name: value for name, value in rows_of(settings)[0].items() if name != "event" and value is not None}
    assert row == {"user": "1", "item": "3", "time": T, "action": "click", "value": 4.5}
    pq.write_table(pa.table({"user": ["s"], "item": ["x"], "time": [T // 1000]}), tmp_path / "b.parquet")
    start(tmp_path / "b.parquet", time_unit="s", default_action="view")
    assert brief(settings)[-1] == ("s", "x", T // 1000 * 1000, "view")
    (tmp_path / "c.csv").write_text("who;what;when\nd;x;2024-03-01T10:00:00Z\ne;x;2024-03-01 10:00:00\nf;x;1709287200.5\n")
    result = start(tmp_path / "c.csv", mapping={"user": "who", "item": "what", "time": "when"}).result
    assert (result["accepted"], result["rejected"]) == (2, 1)
    assert brief(settings)[-1] == ("s", "x", T // 1000 * 1000, "view")
    assert ("d", "x", 1709287200000, "click") in brief(settings)


def test_json_lines_keep_ids_as_they_are_written(tmp_path: Path, start: Any, settings: Any) -> None:
    rows = [
        {"user": "2024-01-01", "item": 5, "time": T},
        {"user": 12, "item": "x", "time": str(T), "extra": {"deep": [1]}},
        {"user": {"id": 3}, "item": "x", "time": T},
        {"item": "x", "time": T},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "broken\n")
    result = start(tmp_path / "a.jsonl").result
    assert brief(settings) == [("12", "x", T, "click"), ("2024-01-01", "5", T, "click")]
    assert [(entry["row"], entry["field"]) for entry in result["rejects"]] == [(2, "user"), (3, "user"), (4, "row")]


@pytest.mark.parametrize(("kind", "depth"), [("interactions", 300), ("interactions", 100_000), ("items", 100_000)])
def test_lists_nested_without_end_cost_one_row(tmp_path: Path, start: Any, kind: str, depth: int) -> None:
    row = {"user": "a", "item": "b", "time": T} if kind == "interactions" else {"id": "b", "title": "t", "categories": ["x"]}
    name = "extra" if kind == "interactions" else "categories"
    lines = [json.dumps(row), json.dumps({**row, "id" if kind == "items" else "item": "c", name: 0}).replace(": 0}", f": {'[' * depth}{']' * depth}}}")]
    (tmp_path / "deep.jsonl").write_text("\n".join(lines) + "\n")
    result = start(tmp_path / "deep.jsonl").result
    assert result["rejected"] == (depth == 100_000) and result["rows"] == 2


def test_items_from_files(tmp_path: Path, start: Any, settings: Any, broker: Any) -> None:
    rows: list[dict[str, Any]] = [
        {"id": 1, "title": "Lamp", "categories": [["Home", "Light"], ["Home"]], "attributes": {"brand": "B", "watt": 5}, "embedding": [0.5, 1]},
        {"id": 2, "title": "t" * 10_000_000},
        {"id": 3, "embedding": [float("nan"), 1]},
        {"id": 4, "embedding": [1, 2, 3]},
        {"id": 1, "title": "again"},
        {"id": 5, "available": False},
        {"title": "nameless"},
    ]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = start(tmp_path / "items.jsonl").result
    assert (result["items"], result["rejected"], result["exit_code"]) == (2, 5, 1)
    assert [(entry["row"], entry["field"].split(".")[0]) for entry in result["rejects"]] == [
        (1, "title"),
        (2, "embedding"),
        (3, "embedding"),
        (4, "id"),
        (6, "id"),
    ]
    items = items_of(settings)
    assert (items["1"]["categories"], json.loads(items["1"]["attributes"]), items["1"]["embedding"]) == (
        ["Home", "Light"],
        {"brand": "B", "watt": "5"},
        [0.5, 1.0],
    )
    assert (items["5"]["title"], items["5"]["available"]) == ("", False)
    assert Availability(broker).unavailable() == {"5"}
    (tmp_path / "more.csv").write_text("item_id,name,genres,price\n1,New lamp,a|b,3\n9,Chair,,\n")
    assert start(tmp_path / "more.csv").result["items"] == 2
    items = items_of(settings)
    assert (items["1"]["title"], items["1"]["categories"], items["1"]["embedding"]) == ("New lamp", ["a", "b"], [0.5, 1.0])
    assert items["9"]["attributes"] == "{}"


def test_history_is_merged_in_time_and_never_doubled(tmp_path: Path, start: Any, settings: Any, broker: Any) -> None:
    histories = Histories(broker, settings.history_length, 1000)
    (tmp_path / "log.csv").write_text(GOOD_CSV + f"a,w,{T - 5},click\na,shown,{T},exposure\n")
    start(tmp_path / "log.csv")
    start(tmp_path / "log.csv")
    assert [entry.item for entry in histories.get("a")] == ["w", "x"]


def test_kill_between_any_two_chunks_resumes_and_doubles_nothing(tmp_path: Path, start: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    folder = tmp_path / "logs"
    folder.mkdir()
    pq.write_table(
        pa.table({"user": [f"u{n % 5}" for n in range(40)], "item": [f"i{n}" for n in range(40)], "time": [T + n for n in range(40)]}),
        folder / "a.parquet",
        row_group_size=7,
    )
    lines = [json.dumps({"user": "j", "item": f"i{n}", "time": T + n if n % 10 else 5}) + "\n" for n in range(60)]
    (folder / "b.jsonl").write_text("".join(lines))
    (folder / "c.csv").write_text("user,item,time\n" + "".join(f"c,i{n},{T + n}\n" if n % 10 else "c,broken\n" for n in range(50)))
    (folder / "d.jsonl.gz").write_bytes(gzip.compress("".join(line.replace('"j"', '"z"') for line in lines).encode()))
    monkeypatch.setattr(fileimport, "ROWS_PER_CHUNK", 8)
    monkeypatch.setattr(textlines, "BLOCK_BYTES", 200)
    monkeypatch.setattr(textlines.blocks, "__kwdefaults__", {**textlines.blocks.__kwdefaults__, "block_bytes": 200})
    real = fileimport.FileImport.take
    survived = 0

    def take(self: Any, *arguments: Any) -> None:
        nonlocal survived
        survived += 1
        if survived % 3 == 1:
            raise Killed
        real(self, *arguments)
        if survived % 3 == 0:
            # The rejects of an uncommitted chunk may already be on disk.
            with self.rejects.open("ab") as stream:
                stream.write(b"half a li")
            raise Killed

    monkeypatch.setattr(fileimport.FileImport, "take", take)
    again = ""
    for _ in range(200):
        try:
            result = start(folder, again=again).result
            break
        except Killed:
            again = start.contexts["last"]
    expected = Counter({(f"u{n % 5}", f"i{n}"): 1 for n in range(40)})
    expected += Counter({(user, f"i{n}"): 1 for user in "jz" for n in range(60) if n % 10})
    expected += Counter({("c", f"i{n}"): 1 for n in range(50) if n % 10})
    assert Counter((row["user"], row["item"]) for row in rows_of(settings)) == expected
    assert (result["rows"], result["rejected"]) == (210, 17)
    rejects = [json.loads(line) for line in Path(result["reject_file"]).read_text().splitlines()]
    assert Counter((entry["file"], entry["row"]) for entry in rejects) == Counter(
        {("b.jsonl", n): 1 for n in range(0, 60, 10)} | {("c.csv", n): 1 for n in range(0, 50, 10)} | {("d.jsonl.gz", n): 1 for n in range(0, 60, 10)}
    )


def test_a_full_disk_makes_an_import_wait(tmp_path: Path, start: Any, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    from semantide.services.ingestion import eventlog

    (tmp_path / "log.csv").write_text(GOOD_CSV)
    real, failures = eventlog.write_durably, iter([True, True])

    def sometimes(table: pa.Table, path: Path) -> None:
        if next(failures, False):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(table, path)

    monkeypatch.setattr(eventlog, "write_durably", sometimes)
    monkeypatch.setattr(job, "_RETRY_SECONDS", 0.01)
    assert start(tmp_path / "log.csv").result["accepted"] == 2


def test_a_file_changed_under_way_is_noticed(tmp_path: Path, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log.csv").write_text(GOOD_CSV)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(fileimport.FileImport, "take", lambda *_: 1 // 0)
        start(tmp_path / "log.csv")
    (tmp_path / "log.csv").write_text(GOOD_CSV + "x")
    with pytest.raises(BadData, match="changed or removed"):
        start(tmp_path, again=start.contexts["last"])


@pytest.mark.parametrize("value", ["text", b"1700000000", b"caf\xc3\xa9", b"\xff\xfe"])
def test_rejected_values_are_shown_as_they_stand_in_the_file(value: str | bytes) -> None:
    text = shown(value)
    assert not text.startswith(("b'", 'b"')) and text.isprintable()


@pytest.mark.parametrize("form", ["parquet", "jsonl"])
def test_a_simulated_log_comes_in_whole(tmp_path: Path, start: Any, settings: Any, form: str) -> None:
    simulation = Simulation(SimulatorConfig(users=6, items=30, topics=3, sessions=2))
    counts = simulation.write(tmp_path / "sim", form)
    result = start(tmp_path / "sim").result
    assert result["rejected"] == 0 and result["interactions"] == counts["exposures"] and result["items"] == 30
    stored = {(row["page"], row["position"]): row for row in rows_of(settings)}
    for row in simulation.log().to_pylist():
        kept = stored.pop((row["page"], row["position"]))
        assert {name: kept[name] or None for name in row} == {name: value or None for name, value in row.items()}
    assert not stored
