from typing import Any

import pytest

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import BadData, BrokerUnavailable, JobCancelled, PermanentError, RankLost, StoreUnavailable
from semantide.shared.job_ranks import forget_ranks, rank_failure, rank_outcome, run_rank
from semantide.shared.jobs import AGAIN, JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues


@pytest.fixture
def rank(broker: Any, settings: Any) -> Any:
    job = Jobs(broker).submit(JobSpec(kind="train"))
    workdir = settings.data_dir / "jobs" / job.id

    def run(number: int, body: Any) -> int:
        return run_rank(job.id, number, body, settings, ArtifactStore(settings.artifacts_root), broker, Queues(settings.redis_url))

    run.workdir = workdir  # type: ignore[attr-defined]
    return run


def raising(error: Exception) -> Any:
    def body(job: JobContext) -> JobOutcome:
        raise error

    return body


def test_the_first_rank_leaves_what_was_made(rank: Any) -> None:
    assert [rank(number, lambda job, number=number: JobOutcome(result={"rank": number})) for number in (1, 0)] == [0, 0]
    assert rank_outcome(rank.workdir) == JobOutcome(result={"rank": 0})
    assert rank_failure(rank.workdir) is None


def test_the_first_fault_counts_and_a_lost_neighbour_is_none(rank: Any) -> None:
    assert rank(0, raising(RankLost("rank 1 is gone"))) == 1
    assert rank_failure(rank.workdir) is None
    assert rank(1, raising(BadData("row 7"))) == 1
    assert rank(2, raising(MemoryError("later"))) == 1
    failure = rank_failure(rank.workdir)
    assert isinstance(failure, PermanentError) and str(failure) == "rank 1: BadData: row 7"
    forget_ranks(rank.workdir)
    assert rank_failure(rank.workdir) is None


def test_a_broker_that_is_away_is_no_fault_and_a_store_that_is_counts(rank: Any) -> None:
    assert rank(0, raising(BrokerUnavailable("away"))) == AGAIN
    assert rank(1, raising(StoreUnavailable("away"))) == 1
    assert rank_failure(rank.workdir) is None, "both may pass"


def test_a_stopped_rank_leaves_nothing(rank: Any) -> None:
    assert rank(0, raising(JobCancelled("stop"))) == AGAIN
    assert not list((rank.workdir / "ranks").glob("*.json"))
