"""What the log keeps no longer goes, all of that and nothing else, whenever the process is killed; and what is merged stays near to what it happened with."""

import shutil
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.ingestion import eventlog
from semantide.services.ingestion.eventlog import EventLog, read_segment
from semantide.services.ingestion.expiry import Expiry
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.rows import interaction_table
from semantide.shared.contracts import Interaction

DAY = 86_400_000
NOW = 1_800_000_000_000


def store(manifest: Manifest, ages: list[float], origin: str = "", begin: int = 0) -> None:
    """A segment of events of so many days ago."""
    rows = [Interaction(user=f"u{number}", item="i", time=NOW - round(age * DAY), event_id=f"e{begin + number}") for number, age in enumerate(ages)]
    with manifest.writing():
        EventLog(manifest).append(interaction_table(rows), origin=origin)


def ages_in(manifest: Manifest) -> Counter[float]:
    return Counter(round((NOW - moment) / DAY, 6) for segment in EventLog(manifest).segments() for moment in read_segment(segment.path)["time"].to_pylist())


def num_seen(manifest: Manifest) -> int:
    return int(manifest.connection.execute("SELECT count(*) FROM seen").fetchone()[0])


segments = st.lists(st.lists(st.integers(0, 400).map(lambda tenths: tenths / 10), min_size=1, max_size=6), min_size=1, max_size=6)


@settings(max_examples=25)
@given(segments, st.integers(1, 30), st.booleans())
def test_what_is_too_old_goes_and_nothing_else(kept: list[list[float]], days: int, importing: bool) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Manifest(Path(folder))) as manifest:
        for number, ages in enumerate(kept):
            store(manifest, ages, "import-1" if importing and number == 0 else "", begin=100 * number)
        untouched = Counter(kept[0]) if importing else Counter()
        ours = Counter(age for ages in kept[importing:] for age in ages)
        gone = Expiry(EventLog(manifest), days, 0).step(NOW)
        left = ages_in(manifest) - untouched
        assert not left - ours and gone == (ours - left).total()
        assert all(age > days for age in (ours - left)), "an event went that is young enough"
        assert all(age <= 1.1 * days for age in left), "an event stayed that is too old"
        assert num_seen(manifest) == (left + untouched).total(), "the ids of what went are forgotten, others are not"
        assert Expiry(EventLog(manifest), days, 0).step(NOW) == 0
        store(manifest, kept[0], begin=0)
        assert ages_in(manifest)[kept[0][0]] >= 1, "what comes again is stored once more, or is there"


@settings(max_examples=15)
@given(segments, st.integers(0, 40_000))
def test_a_log_that_is_too_large_loses_its_oldest_segments(kept: list[list[float]], num_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, closing(Manifest(Path(folder))) as manifest:
        for number, ages in enumerate(kept):
            store(manifest, ages, begin=100 * number)
        before = EventLog(manifest).segments()
        Expiry(EventLog(manifest), 0, num_bytes).step(NOW)
        after = EventLog(manifest).segments()
        total = sum(segment.num_bytes for segment in after)
        assert after == [segment for segment in before if segment in after] and (total <= num_bytes or num_bytes == 0 or len(after) == 1)
        gone = [segment for segment in before if segment not in after]
        assert not gone or min(segment.last_time for segment in after) >= max(segment.last_time for segment in gone)
        assert not gone or total + min(segment.num_bytes for segment in gone) > 0 < num_bytes


def test_a_kill_at_any_point_loses_and_doubles_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """A copy of the folder before each statement and after each file is what a killed process leaves there."""
    kept = [[1.0, 30.0, 12.0], [40.0, 41.0], [2.0, 3.0], [15.0, 0.5], [11.0]]
    young = Counter(age for ages in kept for age in ages if age <= 10)
    points: list[Path] = []

    def keep(*_: Any) -> None:
        points.append(tmp_path / f"kill-{len(points)}")
        shutil.copytree(tmp_path / "log", points[-1])

    write = eventlog.write_durably

    def writing(*arguments: Any) -> None:
        write(*arguments)
        keep()

    with closing(Manifest(tmp_path / "log")) as manifest:
        for number, ages in enumerate(kept):
            store(manifest, ages, begin=100 * number)
        before = ages_in(manifest)
        monkeypatch.setattr(eventlog, "write_durably", writing)
        manifest.connection.set_trace_callback(keep)
        log = EventLog(manifest)
        log.merge_small(at_least=2, small_rows=3, now=NOW / 1000)
        Expiry(log, 10, 0).step(NOW)
        log.sweep(now=NOW / 1000 + 7200)
        manifest.connection.set_trace_callback(None)
        assert ages_in(manifest) == young
    monkeypatch.undo()
    assert len(points) > 20
    for point in points:
        with closing(Manifest(point)) as manifest:
            found = ages_in(manifest)
            assert not found - before and not young - found, point
            assert found.total() == num_seen(manifest)
            log = EventLog(manifest)
            Expiry(log, 10, 0).step(NOW)
            log.sweep(now=NOW / 1000 + 7200)
            assert ages_in(manifest) == young
            assert {path.name for path in manifest.segments.iterdir()} == {segment.path.name for segment in log.segments()}


def test_neighbours_in_time_are_merged_and_no_more_than_fit_into_memory(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        for number, age in enumerate([5.0, 1.0, 4.0, 2.0, 3.0, 0.0]):
            store(manifest, [age, age], begin=100 * number)
        log = EventLog(manifest)
        assert log.merge_small(at_least=3, most_rows=7) == 3
        ages = sorted(((NOW - segment.last_time) / DAY, (NOW - segment.first_time) / DAY) for segment in log.segments())
        assert ages == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0), (3.0, 5.0)]


def test_a_damaged_segment_stays_as_it_is_and_the_others_go(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        for begin, ages in enumerate(([30.0, 1.0], [40.0], [30.0, 2.0])):
            store(manifest, ages, begin=100 * begin)
        damaged = EventLog(manifest).segments()[0].path
        content = damaged.read_bytes()
        damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        before = damaged.read_bytes()
        gone = Expiry(EventLog(manifest), 10, 0).step(NOW)
        left = [segment.path for segment in EventLog(manifest).segments()]
        assert gone in (1, 2), "what is sound and too old, wherever the damaged one stands among them"
        assert damaged in left and damaged.read_bytes() == before
        damaged.write_bytes(content)
        assert gone + Expiry(EventLog(manifest), 10, 0).step(NOW) == 3
        assert ages_in(manifest) == Counter([1.0, 2.0])
