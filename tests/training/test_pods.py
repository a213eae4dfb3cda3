"""A real training by the pods of a cluster: two processes as the operator starts them make one model; a killed one lets both go on from the checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.broker import free_port
from semantide.shared.contracts import JobSpec
from semantide.shared.jobs import AGAIN, Jobs


def start(job_id: str, settings: Any, folder: Path, attempt: int) -> list[subprocess.Popen[bytes]]:
    told = folder / f"master-{attempt}"
    told.write_text("127.0.0.1")
    port = str(free_port())
    common = {
        "SEMANTIDE_DATA_DIR": str(settings.data_dir),
        "SEMANTIDE_REDIS_URL": settings.redis_url,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_PORT": port,
        "SEMANTIDE_MASTER_ADDRESS_FILE": str(told),
    }
    command = [sys.executable, "-m", "semantide.services.local", "pod", job_id]
    return [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "GROUP_RANK": str(rank)}, start_new_session=True, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]


@pytest.mark.slow
def test_two_pods_train_one_model_and_go_on_after_a_kill(make_room: Any, inputs: dict[str, str], store: ArtifactStore, settings: Any, tmp_path: Path) -> None:
    jobs = Jobs(make_room("training").broker)
    config = {"epochs": 60, "items_per_batch": 64, "log_every": 1}
    job = jobs.submit(JobSpec(kind="train", recipe="tiny", config=config, inputs=inputs))
    pods = start(job.id, settings, tmp_path, 1)
    try:
        checkpoints = settings.data_dir / "jobs" / job.id / "checkpoints"
        while not list(checkpoints.glob("step-*[0-9]")):
            assert pods[0].poll() is None, (settings.data_dir / "jobs" / job.id / "log.txt").read_text()[-3000:]
            time.sleep(0.1)
        os.killpg(pods[1].pid, signal.SIGKILL)
        # The operator ends what is left of the gang.
        pods[0].send_signal(signal.SIGTERM)
        assert pods[0].wait(120) in (1, AGAIN)
        last = max(jobs.metrics(job.id), key=lambda row: row["step"])["step"]
        pods = start(job.id, settings, tmp_path, 2)
        assert [pod.wait(240) for pod in pods] == [0, 0]
        record = jobs.get(job.id)
        assert record.state == "succeeded" and record.result["steps"] > last, record.error
        assert (store.get(record.artifacts["model"]) / "model.safetensors").exists()
        assert {row["step"] for row in jobs.metrics(job.id) if "loss" in row} == set(range(1, record.result["steps"] + 1))
        assert set(jobs.step_seconds(job.id)) == {0, 1} and not checkpoints.exists()
    finally:
        for pod in pods:
            if pod.poll() is None:
                os.killpg(pod.pid, signal.SIGKILL)
                pod.wait()
