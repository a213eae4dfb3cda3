"""Jobs as NPUJobs: what is asked for, what follows from what both sides say, and whole jobs by real pods' processes through a real client."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import client as kubernetes_client

from semantide.operators import resources
from semantide.shared import npujob
from semantide.shared.cluster_jobs import ClusterRunner, NPUJobs
from semantide.shared.contracts import ENDED, JOB_ROOMS, ClusterWish, JobRecord, JobSpec
from semantide.shared.errors import BadData, Conflict
from semantide.shared.jobs import Jobs
from semantide.shared.npujob import Create, Delete, Deployment, End, Found, Note, body, found_of, name_of, next_step, step_after_end
from semantide.shared.pod import Place

from .npujob_server import PREFIX, Cluster, wait_until

DEPLOYMENT = Deployment(default={"image": "i", "profile": "ascend", "npusPerPod": 8}, kinds={"tokenize": {"npusPerPod": 0, "template": {"env": []}}})


def record(**fields: Any) -> JobRecord:
    return JobRecord(**{"id": "train-1", "spec": JobSpec(kind="train"), **fields})


def spec(config: dict[str, Any] | None = None, kind: str = "train", **wish: Any) -> dict[str, Any]:
    asked = JobSpec(kind=kind, config=config or {}, cluster=ClusterWish(**wish))  # type: ignore[arg-type]
    made = body(record(spec=asked), DEPLOYMENT, 5)
    resources.NPUJob.parse(made)
    return made["spec"]  # type: ignore[no-any-return]


def test_names_are_the_operators() -> None:
    assert (f"{npujob.GROUP}/{npujob.VERSION}", npujob.PLURAL, npujob.KIND) == (resources.API_VERSION, resources.JOB_PLURAL, resources.JOB_KIND)
    for name in ("PROGRESS_ANNOTATION", "CHECKPOINT_ANNOTATION", "IMBALANCE_ANNOTATION", "STEP_SECONDS_ANNOTATION"):
        assert getattr(npujob, name) == getattr(resources, name)


def test_a_job_asks_for_the_pods_that_its_processes_need() -> None:
    assert (spec()["worldSize"], spec()["npusPerPod"]) == (1, 8)
    assert (spec({"processes": 16})["worldSize"], spec({"processes": 16})["npusPerPod"]) == (2, 8)
    assert (spec({"processes": 4})["worldSize"], spec({"processes": 4})["npusPerPod"]) == (1, 4)
    assert (spec({"processes": 3}, npus_per_pod=0)["worldSize"], spec({"processes": 3}, npus_per_pod=0)["npusPerPod"]) == (3, 0)
    assert spec({"processes": 16}, pods=4)["worldSize"] == 4
    assert (spec(pods=4, kind="align")["worldSize"], spec({"processes": 16}, kind="align")["worldSize"]) == (4, 2)
    assert (spec(kind="tokenize")["npusPerPod"], spec(kind="tokenize")["template"]) == (0, {"env": []})
    assert spec(pods=4, least_pods=2, most_pods=8)["elastic"] == {"min": 2, "max": 8}
    assert spec(priority=5, deadline_seconds=60)["priority"] == 5 and "priority" not in spec()
    assert spec()["command"] == ["semantide", "pod", "train-1"] and spec()["restartPolicy"] == {"limit": 4}
    with pytest.raises(BadData, match="12 processes cannot be shared by pods of 8"):
        spec({"processes": 12})


@pytest.mark.parametrize("kind", [kind for kind in JOB_ROOMS if kind not in ("train", "align")])
@pytest.mark.parametrize("wish", [{"pods": 4}, {"least_pods": 2}, {"most_pods": 3}])
def test_work_that_one_pod_does_alone_is_refused_in_several(kind: str, wish: dict[str, int]) -> None:
    ((name, value),) = wish.items()
    with pytest.raises(BadData, match=rf"cluster\.{name} is {value}, and a job of kind {kind} .* only train and align are shared"):
        spec(kind=kind, **wish)
    assert spec(kind=kind, pods=1, npus_per_pod=0)["worldSize"] == 1
    for own, said in (({"worldSize": 2}, "worldSize is 2"), ({"elastic": {"min": 1, "max": 4}}, r"elastic\.max is 4")):
        with pytest.raises(BadData, match=rf"jobKinds\.{kind}\.{said}"):
            body(record(spec=JobSpec(kind=kind)), Deployment(kinds={kind: own}), 5)
    everywhere = Deployment(default={"worldSize": 4, "elastic": {"min": 2, "max": 8}})
    made = body(record(spec=JobSpec(kind=kind)), everywhere, 5)["spec"]
    assert made["worldSize"] == 1 and "elastic" not in made, "what is said of all kinds is meant where it can be"
    assert body(record(), everywhere, 5)["spec"]["worldSize"] == 4


states = st.builds(
    record,
    state=st.sampled_from(["queued", "running"]),
    cancel_requested=st.booleans(),
    npujob=st.sampled_from(["", "train-1"]),
    attempt=st.integers(0, 3),
)
npujobs = st.none() | st.builds(
    Found, st.just("train-1"), st.just("train-1"), st.just("training"), phase=st.sampled_from(["", *resources.JobPhase.__args__]),  # type: ignore[attr-defined]
    message=st.sampled_from(["", "asks for 16 NPUs, 3 are free"]), restarts=st.integers(0, 3), deleting=st.booleans(),
)  # fmt: skip


@given(states, npujobs)
def test_every_state_has_one_next_step_and_comes_to_rest(job: JobRecord, found: Found | None) -> None:
    step = next_step(job, found)
    if isinstance(step, Create):
        waits = next_step(job, None, Found("train-0", job_id="train-1"))
        assert isinstance(waits, Note) and "train-0" in waits.fields["stage"]
    if isinstance(step, Create):
        assert found is None and not job.npujob and not job.cancel_requested
    elif isinstance(step, Delete):
        assert job.cancel_requested and found is not None and not found.deleting
    elif isinstance(step, End):
        assert found is None or found.phase in ("Failed", "Succeeded")
        assert step.state == ("cancelled" if job.cancel_requested else "failed")
    elif isinstance(step, Note):
        after = job.model_copy(update=dict(step.fields))
        assert next_step(after, found) is None, "the same look twice writes once"
        assert found is not None and (job.cancel_requested or (after.state == "running") == (found.phase in ("Running", "Restarting")))


def test_a_pending_job_says_why_and_a_deleted_one_failed() -> None:
    step = next_step(record(npujob="train-1"), Found("train-1", phase="Pending", message="asks for 16 NPUs, 3 are free"))
    assert isinstance(step, Note) and step.fields["stage"] == "pending: asks for 16 NPUs, 3 are free"
    step = next_step(record(npujob="train-1", state="running"), None)
    assert isinstance(step, End) and step.state == "failed" and "deleted by somebody else" in step.error


def test_what_is_left_over_goes_in_its_time() -> None:
    ended = record(state="failed", finished=1_000_000)
    assert step_after_end(ended, Found("train-1", phase="Running"), 1_030_000, 3600) is None
    assert step_after_end(ended, Found("train-1", phase="Running"), 1_061_000, 3600) == Delete("train-1")
    assert step_after_end(ended, Found("train-1", phase="Failed"), 1_061_000, 3600) is None
    assert step_after_end(ended, Found("train-1", phase="Failed"), 5_000_000, 3600) == Delete("train-1")
    assert step_after_end(ended, Found("train-1", phase="Failed", ours=False), 5_000_000, 3600) is None
    assert step_after_end(record(state="cancelled", finished=1_000_000), Found("train-1", phase="Pending"), 1_000_000, 3600) == Delete("train-1")
    assert step_after_end(record(resumes=1), Found("train-1", phase="Failed"), 0, 3600) == Delete("train-1")
    assert (name_of(record()), name_of(record(resumes=2))) == ("train-1", "train-1-r2")


def test_an_npujob_made_by_hand_is_found_by_its_job() -> None:
    by_hand = Found("mine", job_id="train-1", ours=False)
    assert found_of(record(), {"mine": by_hand}) == by_hand
    assert found_of(record(), {"train-1-r1": Found("train-1-r1", job_id="train-1")}) is None


def test_annotations_tell_of_pods_not_ranks() -> None:
    said = npujob.annotations_of(record(done=1, total=4), {0: 0.1, 1: 0.3, 2: 0.1, 3: 0.1}, 2, "step-000000120")
    assert json.loads(said[npujob.STEP_SECONDS_ANNOTATION]) == {"0": 0.3, "1": 0.1}
    assert said[npujob.IMBALANCE_ANNOTATION] == "0.5000" and said[npujob.CHECKPOINT_ANNOTATION] == "step-000000120"
    said = npujob.annotations_of(record(), {0: 0.1, 1: 0.3}, 2, "", attempt=3)
    assert json.loads(said[npujob.STEP_SECONDS_ANNOTATION]) == {"attempt": 3, "0": 0.1, "1": 0.3}, "of this gang and of no other"
    assert json.loads(npujob.annotations_of(record(), {}, 2, "", attempt=4)[npujob.STEP_SECONDS_ANNOTATION]) == {"attempt": 4}, "nothing is known yet"


def test_a_pods_place_must_make_sense(tmp_path: Path) -> None:
    place = Place.of({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "RANK": "8", "MASTER_ADDR": "10.0.0.1"})
    assert (place.pod, place.leads) == (1, False)
    assert place.environment(3) == {
        "MASTER_ADDR": "10.0.0.1", "RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "GROUP_RANK": "1"
    }  # fmt: skip
    assert Place.of({}).leads
    for wrong in ({"WORLD_SIZE": "2", "RANK": "2"}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}, {"LOCAL_WORLD_SIZE": "2"}):
        with pytest.raises(ValueError, match="no place among"):
            Place.of(wrong)
    told = tmp_path / "master"
    place = Place.of({"WORLD_SIZE": "2", "SEMANTIDE_MASTER_ADDRESS_FILE": str(told)})
    assert place.found(lambda: True).master_file is not None
    told.write_text("10.0.0.7\n")
    assert place.found(lambda: False).master == "10.0.0.7"


@pytest.fixture
def cluster(settings: Any) -> Iterator[Any]:
    environment = {
        "SEMANTIDE_DATA_DIR": str(settings.data_dir),
        "SEMANTIDE_REDIS_URL": settings.redis_url,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    with Cluster(environment) as running:
        yield running


@pytest.fixture
def start(make_room: Callable[[str], Any], cluster: Any) -> Iterator[Callable[[], tuple[Jobs, ClusterRunner]]]:
    runners: list[ClusterRunner] = []
    script = Path(__file__).with_name("pod_run.py")

    def begin(idle_seconds: float = 0.2, **deployment: Any) -> tuple[Jobs, ClusterRunner]:
        room = make_room("training")
        common = {"default": {"profile": "cpu", "command": [sys.executable, str(script), "pod"]}, **deployment}
        room = replace(room, settings=room.settings.model_copy(update={"cluster_jobs": common, "job_attempts": 3}))
        configuration = kubernetes_client.Configuration()
        configuration.host, configuration.retries = cluster.url, False
        api = kubernetes_client.CustomObjectsApi(kubernetes_client.ApiClient(configuration))
        runners.append(ClusterRunner(room, NPUJobs("jobs", api), look_seconds=0.1, idle_seconds=idle_seconds))
        runners[-1].start()
        return Jobs(room.broker, room.queues), runners[-1]

    yield begin
    for runner in runners:
        runner.stop()


def finished(jobs: Jobs, job_id: str) -> JobRecord:
    wait_until(lambda: jobs.get(job_id).state in ENDED)
    return jobs.get(job_id)


def submit(jobs: Jobs, pods: int = 1, **config: Any) -> JobRecord:
    return jobs.submit(JobSpec(kind="train", config=config, cluster=ClusterWish(pods=pods)))


def progress(cluster: Any, name: str) -> dict[str, Any]:
    """What the NPUJob says of how far its job is."""
    said: dict[str, Any] = json.loads(cluster.jobs[name]["metadata"]["annotations"][npujob.PROGRESS_ANNOTATION])
    return said


def test_how_far_a_job_came_is_told_after_its_end_too(cluster: Any, start: Any) -> None:
    jobs, runner = start()
    job = submit(jobs, steps=60, pause=0.05)
    wait_until(lambda: npujob.PROGRESS_ANNOTATION in (cluster.jobs.get(job.id, {}).get("metadata", {}).get("annotations") or {}))
    runner.stop()
    finished(jobs, job.id)
    wait_until(lambda: cluster.phase(job.id) == "Succeeded")
    assert progress(cluster, job.id)["done"] < 60
    start()
    wait_until(lambda: progress(cluster, job.id)["done"] == 60)
    asked = len(cluster.requests)
    wait_until(lambda: len(cluster.requests) > asked + 5)
    assert not [request for request in cluster.requests[asked:] if request.startswith("PATCH")], "it is said once"


@pytest.mark.parametrize("pods", [1, 2])
def test_a_job_runs_in_pods_and_says_what_it_did(cluster: Any, start: Any, pods: int) -> None:
    jobs, _ = start()
    job = submit(jobs, pods, steps=30, pause=0.05)
    wait_until(lambda: npujob.STEP_SECONDS_ANNOTATION in (cluster.jobs.get(job.id, {}).get("metadata", {}).get("annotations") or {}))
    assert jobs.get(job.id).state == "running"
    ended = finished(jobs, job.id)
    assert (ended.state, ended.result, ended.npujob) == ("succeeded", {"count": 30, "world": pods}, job.id), ended.error
    assert [row["step"] for row in jobs.metrics(job.id)] == list(range(1, 31))
    wait_until(lambda: cluster.phase(job.id) == "Succeeded")
    assert progress(cluster, job.id)["total"] == 30
    with pytest.raises(Conflict):
        jobs.cancel(job.id)


def test_a_list_that_is_a_moment_old_ends_no_job_and_long_ones_come_in_pages(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    made = [submit(jobs, steps=10_000, pause=0.05) for _ in range(3)]
    wait_until(lambda: all(jobs.get(job.id).done > 2 for job in made))
    cluster.unheard = {made[0].id}
    asked = len(cluster.requests)
    wait_until(lambda: cluster.requests[asked:].count(f"GET {made[0].id}") > 1)
    assert [jobs.get(job.id).state for job in made] == ["running"] * 3
    cluster.unheard = set()
    for job in made:
        jobs.cancel(job.id)
    assert all(finished(jobs, job.id).state == "cancelled" for job in made)


def test_a_room_without_open_jobs_leaves_the_api_server_alone(cluster: Any, start: Any) -> None:
    jobs, runner = start(idle_seconds=1e9)
    wait_until(lambda: cluster.requests == ["GET"])  # once at the start: what is left over
    job = submit(jobs, steps=3)
    assert finished(jobs, job.id).state == "succeeded"
    looks: list[int] = []
    any_open = runner._jobs.any_open

    def counted(room: str) -> bool:
        looks.append(len(cluster.requests))
        return bool(any_open(room))

    wait_until(lambda: not runner._busy)
    runner._jobs.any_open = counted
    wait_until(lambda: len(looks) > 4)
    assert looks[-1] == looks[1], "Redis says that there is nothing to look for"


def test_a_lost_rank_and_a_killed_pod_start_the_gang_again(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    job = submit(jobs, 2, steps=60, pause=0.05, lose_rank=1)
    wait_until(lambda: cluster.restarts(job.id) == 1)
    before = jobs.get(job.id).done
    wait_until(lambda: jobs.get(job.id).done > before)
    done = jobs.get(job.id).done
    os.killpg(cluster.pods(job.id)[1].pid, signal.SIGKILL)
    wait_until(lambda: cluster.restarts(job.id) == 2)
    ended = finished(jobs, job.id)
    assert (ended.state, ended.result["count"]) == ("succeeded", 60) and done > before, ended.error


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_what_a_rank_says_of_its_end_is_the_jobs_error(cluster: Any, start: Any, rank: int) -> None:
    jobs, _ = start()
    job = submit(jobs, 2, steps=60, fail_rank=rank)
    ended = finished(jobs, job.id)
    assert ended.state == "failed" and "give milliseconds" in str(ended.error)
    wait_until(lambda: cluster.phase(job.id) == "Failed")
    assert cluster.restarts(job.id) <= 1


def test_cancel_stops_pods_and_resume_goes_on(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    job = submit(jobs, 2, steps=80, pause=0.05)
    wait_until(lambda: jobs.get(job.id).done > 2)
    left = cluster.jobs[job.id]
    left = {**left, "metadata": {name: value for name, value in left["metadata"].items() if name != "deletionTimestamp"}}
    jobs.cancel(job.id)
    assert finished(jobs, job.id).state == "cancelled"
    wait_until(lambda: not cluster.jobs)
    done = jobs.get(job.id).done
    assert 2 < done < 80
    cluster.answer("POST", PREFIX, {**left, "status": {"phase": "Failed"}})
    jobs.resume(job.id)
    assert finished(jobs, job.id).result["count"] == 80
    steps = [row["step"] for row in jobs.metrics(job.id)]
    assert steps == list(range(1, 81)), "it went on from where it was"
    wait_until(lambda: list(cluster.jobs) == [f"{job.id}-r1"])  # what was left of the last run was in nobody's way, and is gone


def test_an_api_server_that_is_away_costs_time_only(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    cluster.away = True
    job = submit(jobs, steps=40, pause=0.05)
    wait_until(lambda: "cannot be reached" in jobs.get(job.id).stage)
    cluster.away = False
    wait_until(lambda: jobs.get(job.id).done > 2)
    cluster.away = True
    assert finished(jobs, job.id).state == "succeeded"


def test_a_job_that_waits_says_why_and_can_be_cancelled(cluster: Any, start: Any) -> None:
    cluster.hold = "asks for 16 NPUs, 3 are free"
    jobs, _ = start()
    job = submit(jobs, steps=1)
    wait_until(lambda: jobs.get(job.id).stage == "pending: asks for 16 NPUs, 3 are free")
    assert jobs.get(job.id).state == "queued"
    jobs.cancel(job.id)
    wait_until(lambda: not cluster.jobs)
    assert jobs.get(job.id).state == "cancelled"


def test_what_the_cluster_refuses_fails_and_what_it_forbids_waits(cluster: Any, start: Any) -> None:
    cluster.refuse = (422, "spec.npusPerPod: should be less than or equal to 64")
    jobs, _ = start()
    assert "less than or equal to 64" in str(finished(jobs, submit(jobs, steps=1).id).error)
    cluster.refuse = (403, 'npujobs.semantide.io is forbidden: User "worker" cannot create resource "npujobs"')
    job = submit(jobs, steps=1)
    wait_until(lambda: "service account" in jobs.get(job.id).stage)
    cluster.refuse = None
    wait_until(lambda: job.id in cluster.jobs)


def test_a_job_that_a_quota_forbids_keeps_no_other_waiting(cluster: Any, start: Any) -> None:
    jobs, _ = start(keepSeconds=0)
    running, ends = submit(jobs, steps=10_000, pause=0.05), submit(jobs, steps=40, pause=0.05)
    wait_until(lambda: {running.id, ends.id} <= set(cluster.jobs))
    cluster.refuse = (403, 'npujobs.semantide.io "x" is forbidden: exceeded quota: small, used: 2, limited: 2')
    waiting = [submit(jobs, steps=1) for _ in range(3)]
    wait_until(lambda: all("exceeded quota" in jobs.get(job.id).stage for job in waiting))
    assert "service account" not in jobs.get(waiting[0].id).stage
    jobs.cancel(running.id)
    wait_until(lambda: not cluster.jobs)  # one that is cancelled, one that has ended
    assert jobs.get(running.id).state == "cancelled" and jobs.get(ends.id).state == "succeeded"
    cluster.refuse = None
    assert all(finished(jobs, job.id).state == "succeeded" for job in waiting)


def test_what_one_npujob_is_refused_keeps_no_other_waiting(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    cluster.refuse_annotations = (422, "metadata.annotations: Too long: may not be more than 262144 bytes")
    first, second = submit(jobs, steps=10_000, pause=0.05), submit(jobs, steps=5)
    assert finished(jobs, second.id).state == "succeeded", "the first one's annotations are refused at every look"
    jobs.cancel(first.id)
    assert finished(jobs, first.id).state == "cancelled"


def test_a_resumed_job_waits_for_the_pods_of_its_earlier_run(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    job = submit(jobs, steps=80, pause=0.05)
    wait_until(lambda: jobs.get(job.id).done > 2)
    cluster.pods_stay = True
    jobs.cancel(job.id)
    wait_until(lambda: "deletionTimestamp" in cluster.jobs[job.id]["metadata"])
    wait_until(lambda: jobs.get(job.id).state == "cancelled" or jobs.get(job.id).stage == "its pods end")
    if jobs.get(job.id).state != "cancelled":  # its own pod records that it was cancelled
        wait_until(lambda: jobs.get(job.id).state == "cancelled")
    jobs.resume(job.id)
    wait_until(lambda: f"NPUJob {job.id} to end" in jobs.get(job.id).stage)
    assert list(cluster.jobs) == [job.id], "nothing is made beside it"
    cluster.pods_stay = False
    assert finished(jobs, job.id).result["count"] == 80


@pytest.mark.slow
def test_two_runners_and_a_restarted_one_make_one_npujob(cluster: Any, start: Any) -> None:
    jobs, first = start()
    start()
    made = [submit(jobs, steps=20, pause=0.05) for _ in range(3)]
    wait_until(lambda: all(jobs.get(job.id).state == "running" for job in made))
    first.stop()
    start()
    assert all(finished(jobs, job.id).state == "succeeded" and jobs.get(job.id).attempt == 1 for job in made)
    assert sorted(cluster.jobs) == sorted(job.id for job in made)


def test_an_npujob_that_others_delete_fails_its_job_and_one_made_by_hand_becomes_a_job(cluster: Any, start: Any) -> None:
    jobs, _ = start()
    job = submit(jobs, steps=200, pause=0.05)
    wait_until(lambda: jobs.get(job.id).done > 2)
    cluster.answer("DELETE", f"{PREFIX}/{job.id}", None)
    assert "deleted by somebody else" in str(finished(jobs, job.id).error)
    script = Path(__file__).with_name("pod_run.py")
    made = {"kind": "train", "worldSize": 1, "parameters": {"config": {"steps": 5}}, "restartPolicy": {"limit": 1}}
    made["command"] = [sys.executable, str(script), "pod", "by-hand"]
    resource = {"apiVersion": "semantide.io/v1alpha1", "kind": "NPUJob", "metadata": {"name": "by-hand"}, "spec": made}
    cluster.answer("POST", PREFIX, resource)
    wait_until(lambda: cluster.phase("by-hand") == "Succeeded")
    assert (jobs.get("by-hand").state, jobs.get("by-hand").result["count"]) == ("succeeded", 5)
    assert "by-hand" in cluster.jobs


def test_a_wrong_deployment_is_named(make_room: Callable[[str], Any]) -> None:
    room = make_room("training")
    wrong = replace(room, settings=room.settings.model_copy(update={"cluster_jobs": {"namespaces": "x"}}))
    with pytest.raises(ValueError, match="SEMANTIDE_CLUSTER_JOBS: namespaces"):
        ClusterRunner(wrong, NPUJobs("jobs", None))
