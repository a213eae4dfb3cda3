"""From the log of the carried sample to a reward model: import, data set, training."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion import job as ingestion
from semantide.services.ingestion.manifest import Manifest
from semantide.services.reward import job
from semantide.shared.contracts import JobSpec
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.room import Room

SAMPLE = Path(__file__).resolve().parents[2] / "samples" / "kuairand"


@pytest.mark.slow
def test_the_sample_gives_a_reward_model(make_room: Callable[[str], Room], tmp_path: Path) -> None:
    room = make_room("reward")
    with closing(Manifest(room.settings.data_dir / "events")):
        pass

    def run(run_job: Callable[[JobContext], JobOutcome], spec: JobSpec) -> JobOutcome:
        return run_job(JobContext(Jobs(room.broker, room.queues).submit(spec), room.settings, room.store, room.broker, room.queues))

    for name in ("interactions", "items"):
        shutil.copy(SAMPLE / f"{name}.parquet", tmp_path / f"{name}.parquet")
        run(ingestion.run, JobSpec(kind="import", config={"path": str(tmp_path / f"{name}.parquet")}))
    made = run(ingestion.run, JobSpec(kind="dataset"))
    dataset = made.artifacts["dataset"]
    feedback = pq.read_table(room.store.get(dataset) / "feedback.parquet")
    assert feedback.num_rows == made.result["counts"]["exposures"] > 90_000
    outcome = run(job.run, JobSpec(kind="reward", recipe="tiny", config={"epochs": 1, "min_signals": 200}, inputs={"dataset": dataset}))
    signals = outcome.result["signals"]
    assert signals["click"]["auc"] > 0.65 and signals["long_view"]["auc"] > 0.65 and signals["click"]["calibration_error"] < 0.06
    assert outcome.result["gate"]["positives_pass"] > 0.9
