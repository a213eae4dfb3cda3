"""Segments of the log that are damaged on disk: found before anything is made of them, and left as they are."""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.identity import event_hashes
from semantide.services.ingestion.job import make_dataset
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.rows import interaction_table
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import Interaction, JobSpec
from semantide.shared.errors import Corrupt
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.queues import Queues

T = int(time.time() * 1000) - 10_000_000


def fill(manifest: Manifest, segments: int, rows: int = 6) -> None:
    for number in range(segments):
        with manifest.writing():
            table = interaction_table([Interaction(user=f"u{row % 2}", item=f"i{row}", time=T + number * 1000 + row, action="click") for row in range(rows)])
            EventLog(manifest).append(table, event_hashes(table))


def flip(path: Path, place: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))


@given(st.integers(0, 1 << 20), st.integers(0, 7))
def test_one_bit_anywhere_is_noticed(place: int, bit: int) -> None:
    with tempfile.TemporaryDirectory() as name, closing(Manifest(Path(name))) as manifest:
        fill(manifest, 1)
        (segment,) = EventLog(manifest).segments()
        segment.check()
        flip(segment.path, place, bit)
        with pytest.raises(Corrupt, match=r"bring .*parquet back from a backup"):
            segment.check()


def test_a_missing_segment_is_named(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        fill(manifest, 1)
        (segment,) = EventLog(manifest).segments()
        segment.path.unlink()
        with pytest.raises(Corrupt, match=segment.path.name):
            segment.check()


def test_a_damaged_segment_is_not_merged_and_comes_back_with_its_file(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        log = EventLog(manifest)
        fill(manifest, 8)
        bad = log.segments()[3]
        kept = bad.path.read_bytes()
        flip(bad.path, 40)
        assert log.merge_small(at_least=4) == 7
        left = {segment.path.name for segment in log.segments()}
        assert bad.path.name in left and len(left) == 2 and sum(segment.num_rows for segment in log.segments()) == 48
        assert log.merge_small(at_least=2) == 0
        bad.path.write_bytes(kept)
        assert log.merge_small(at_least=2) == 2
        for segment in log.segments():
            segment.check()
        log.sweep(grace_seconds=-1.0)
        assert manifest.connection.execute("SELECT count(*) FROM digests").fetchone() == (1,)


def test_no_data_set_is_made_of_a_damaged_segment(broker: Any, settings: Any) -> None:
    with closing(Manifest(settings.data_dir / "events")) as manifest:
        fill(manifest, 3)
        bad = EventLog(manifest).segments()[1]
        kept = bad.path.read_bytes()
        flip(bad.path, 100)
    store, queues = ArtifactStore(settings.artifacts_root), Queues(settings.redis_url)
    record = Jobs(broker).submit(JobSpec(kind="dataset", config={"split": "temporal"}))
    with pytest.raises(Corrupt, match=bad.path.name):
        make_dataset(JobContext(record, settings, store, broker, queues))
    assert store.list("datasets") == []
    bad.path.write_bytes(kept)
    assert make_dataset(JobContext(record, settings, store, broker, queues)).artifacts["dataset"] in store.list("datasets")


def test_a_segment_of_a_version_that_kept_no_digests_is_read(tmp_path: Path) -> None:
    with closing(Manifest(tmp_path)) as manifest:
        fill(manifest, 2)
        manifest.connection.execute("DELETE FROM digests")
        for segment in EventLog(manifest).segments():
            segment.check()
        manifest.connection.execute("DROP TABLE digests")
    with closing(Manifest(tmp_path)) as manifest:  # what an upgrade finds
        fill(manifest, 3)
        assert sorted(bool(segment.digest) for segment in EventLog(manifest).segments()) == [False, False, True]
