import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semantide.services.training.job import run
from semantide.services.training.launch import Launch, launch
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import ENDED, JobSpec
from semantide.shared.errors import BadData, BrokerUnavailable, PermanentError
from semantide.shared.job_runner import JobRunner
from semantide.shared.jobs import AGAIN, JobContext, Jobs
from semantide.shared.table_snapshots import TableSnapshot


def shell(text: str) -> list[str]:
    return ["/bin/sh", "-c", text]


def test_every_rank_runs_and_knows_its_place(tmp_path: Path) -> None:
    launch(shell(f"echo $RANK $WORLD_SIZE $LOCAL_RANK > {tmp_path}/$RANK"), Launch(2, 1), failed=lambda: None, lost=lambda *_: None)
    assert [(tmp_path / name).read_text().split() for name in "01"] == [["0", "2", "0"], ["1", "2", "1"]]


def test_a_killed_rank_starts_all_again(tmp_path: Path) -> None:
    lost: list[tuple[int, str]] = []
    script = tmp_path / "rank.sh"
    script.write_text(
        f"echo x >> {tmp_path}/starts-$RANK; test $RANK = 0 -o -e {tmp_path}/died || {{ touch {tmp_path}/died; kill -9 $$; }}; "
        f"while [ $(cat {tmp_path}/starts-1 2>/dev/null | wc -l) -lt 2 ]; do sleep 0.05; done"
    )
    launch(["/bin/sh", str(script)], Launch(2, 3), failed=lambda: None, lost=lambda attempt, how: lost.append((attempt, how)))
    assert lost == [(1, "rank 1 was killed by signal 9 (out of memory?)")]
    assert [(tmp_path / f"starts-{rank}").read_text() for rank in range(2)] == ["x\nx\n"] * 2


def test_attempts_end(tmp_path: Path) -> None:
    lost: list[int] = []
    with pytest.raises(PermanentError, match="ended with status 3, in the last of 2 attempts"):
        launch(shell("exit 3"), Launch(1, 2), failed=lambda: None, lost=lambda attempt, how: lost.append(attempt))
    assert lost == [1]


def test_what_cannot_succeed_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="the loss is nan"):
        launch(shell("exit 1"), Launch(1, 5), failed=lambda: PermanentError("the loss is nan"), lost=lambda *_: pytest.fail("tried again"))


def test_a_broker_that_is_away_costs_no_attempt(tmp_path: Path) -> None:
    with pytest.raises(BrokerUnavailable, match="start again"):
        launch(shell(f"test $RANK = 1 && exit {AGAIN}; sleep 100"), Launch(2, 1), failed=lambda: None, lost=lambda *_: pytest.fail("counted"))


def test_a_wrong_number_of_processes_is_bad_data(make_job: Callable[..., JobContext], inputs: dict[str, str]) -> None:
    for wrong in (-1, 1.5, True, "2"):
        with pytest.raises(BadData, match="config processes is"):
            run(make_job("train", recipe="tiny", config={"processes": wrong}, inputs=inputs))


TABLES = {"growth": {"rows": "admission", "shared_rows": 8, "admit_events": 6}, "publish_every": 2, "warmup_steps": 2, "num_negatives": 8}


@pytest.mark.parametrize(("recipe", "more"), [("tiny", {}), ("retriever-tiny", TABLES)])
def test_two_processes_train_and_store_one_model(
    make_room: Any, inputs: dict[str, str], store: ArtifactStore, settings: Any, monkeypatch: pytest.MonkeyPatch, recipe: str, more: dict[str, Any]
) -> None:
    monkeypatch.setenv("SEMANTIDE_DATA_DIR", str(settings.data_dir))
    monkeypatch.setenv("SEMANTIDE_REDIS_URL", settings.redis_url)
    room = make_room("training")
    jobs, runner = Jobs(room.broker), JobRunner(room)
    config = {"epochs": 2, "items_per_batch": 128, "log_every": 1, "processes": 2, **more}
    job = jobs.submit(JobSpec(kind="train", recipe=recipe, config=config, inputs=inputs))
    runner.start()
    try:
        wait_for(jobs, job.id)
        record = jobs.get(job.id)
        assert record.state == "succeeded", record.error
        assert store.get(record.artifacts["model"]).joinpath("model.safetensors").exists()
        rows = jobs.metrics(job.id)
        assert any("imbalance" in row for row in rows) and any("valid_ndcg@10" in row for row in rows)
        assert {row["step"] for row in rows} == set(range(1, record.result["steps"] + 1))
        assert not (settings.data_dir / "jobs" / job.id / "ranks").exists()
        if more:
            assert (
                any(row.get("wire_vectors", 0) > 0 for row in rows)
                and any(row.get("wire_reads", 0) > 0 for row in rows)
                and record.result["table"]["own_rows"] > 0
            )
            links = {ref for ref in store.list("snapshots") for _ in [TableSnapshot.load(store.get, ref)]}
            assert len(links) == record.result["steps"] // 2 - 1, "every link leads to the table that it was written for"
    finally:
        runner.stop()


def wait_for(jobs: Jobs, job_id: str) -> None:
    while jobs.get(job_id).state not in ENDED:
        time.sleep(0.1)
