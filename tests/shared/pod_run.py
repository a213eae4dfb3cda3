"""A job's processes on a cluster with a body of the tests' own: ranks count together to ``steps``, the first one keeps the count.

``pod ID`` as the operator starts it, ``job ID`` and ``rank ID`` as the pod does.
"""

import json
import os
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

from semantide.shared import broker
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.errors import BadData, RankLost
from semantide.shared.followed_jobs import FollowedJobs
from semantide.shared.job_process import run_job
from semantide.shared.job_ranks import run_rank
from semantide.shared.jobs import JobContext, JobOutcome
from semantide.shared.pod import Place, adopted, run_pod
from semantide.shared.queues import Queues


def run(job: JobContext) -> JobOutcome:
    rank, world, config = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), job.spec.config
    path = job.workdir / "count.json"
    count = json.loads(path.read_text()) if path.exists() else 0
    if world > 1:
        port = os.environ["MASTER_PORT"]
        (job.workdir / f"here-{port}-{rank}").touch()
        while len(list(job.workdir.glob(f"here-{port}-*"))) < world:
            job.check_cancelled()
            time.sleep(0.02)
    while count < config["steps"]:
        job.check_cancelled()
        if config.get("fail_rank") == rank and count == 2:
            raise BadData("row 7: give milliseconds")
        if config.get("lose_rank") == rank and count == 2 and not (job.workdir / "lost").exists():
            (job.workdir / "lost").touch()
            os._exit(3)
        if rank and not (job.workdir / "count.json").exists() and count > 2:
            raise RankLost("the first rank keeps no count")
        count += 1
        if rank == 0:
            job.metric(count, loss=1.0 / count)
            job.progress(count, config["steps"], "steps", "counting")
            aside = path.with_suffix(".incoming")
            aside.write_text(json.dumps(count))
            aside.replace(path)
        job.step_seconds(rank, 0.1 * (1 + rank))
        time.sleep(config.get("pause", 0.02))
    (job.workdir / "out").mkdir(exist_ok=True)
    (job.workdir / "out" / "count").write_text(str(count))
    return JobOutcome({"thing": job.store.put("things", job.workdir / "out")}, {"count": count, "world": world})


def end_with_parent() -> None:
    def watch() -> None:
        while os.read(0, 1024):
            pass
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()


def main(verb: str, job_id: str) -> int:
    settings = Settings()
    client = broker.connect(settings.redis_url)
    queues, store = Queues(settings.redis_url), ArtifactStore(settings.artifacts_root)
    if verb == "pod":
        jobs = FollowedJobs(client)
        if not job_id.startswith("wrong"):
            adopted(job_id, os.environ, jobs)
        return run_pod(job_id, Place.of(os.environ), [sys.executable, str(Path(__file__).resolve())], lambda _: nullcontext(), settings, store, client, queues)
    end_with_parent()
    if verb == "rank":
        return run_rank(job_id, int(os.environ["RANK"]), run, settings, store, client, queues)
    return run_job(job_id, run, settings, store, client, queues)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
