"""The custom resources as values."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.resources import API_VERSION, Elastic, NPUJob, NPUJobSpec, NPUJobStatus, NPUService, NPUServiceSpec, PodPlacement, Progress


def test_a_job_is_read_as_the_api_server_writes_it() -> None:
    body = {
        "apiVersion": API_VERSION,
        "kind": "NPUJob",
        "metadata": {"name": "train-1", "namespace": "shop", "uid": "u", "generation": 3, "deletionTimestamp": None, "managedFields": [{"manager": "helm"}]},
        "spec": {
            "kind": "train",
            "worldSize": 4,
            "npusPerPod": 8,
            "elastic": {"min": 2, "max": 4},
            "parameters": {"someKey": {"innerKey": 1}},
            "ofTomorrow": True,
        },
        "status": {"phase": "Running", "placement": [{"pod": "train-1-0", "node": "n1", "npus": [0, 1]}]},
    }
    job = NPUJob.parse(body)
    assert job.key == "shop/train-1" and not job.deleting and not job.ended
    assert (job.spec.world_size, job.spec.least_pods, job.spec.most_pods) == (4, 2, 4)
    assert job.spec.parameters == {"someKey": {"innerKey": 1}}  # what is inside belongs to the user
    assert job.status.placement == (PodPlacement(pod="train-1-0", node="n1", npus=(0, 1)),)
    assert job.spec.restart_policy.limit == 10 and job.spec.scheduler == "own"


@given(st.integers(1, 100), st.integers(0, 16), st.text(max_size=5), st.floats(0, 1e6))
def test_what_is_written_reads_back(world: int, npus: int, message: str, done: float) -> None:
    spec = NPUJobSpec(kind="train", world_size=world, npus_per_pod=npus, elastic=Elastic(min=1, max=world))
    status = NPUJobStatus(phase="Restarting", message=message, progress=Progress(done=done, total=1e6), restart_time="2026-01-01T00:00:00Z")
    body = {"kind": "NPUJob", "metadata": {"name": "a"}, "spec": spec.to_body(), "status": status.to_body()}
    job = NPUJob.parse(body)
    assert job.spec == spec and job.status == status
    assert "worldSize" in body["spec"] and "world_size" not in body["spec"] and "deadlineSeconds" not in body["spec"]


@pytest.mark.parametrize(
    ("kind", "spec", "said"),
    [
        ("NPUJob", {"kind": "train", "worldSize": 0}, ["spec.worldSize = 0", "greater than or equal to 1"]),
        ("NPUJob", {"kind": "train", "elastic": {"min": 3, "max": 2}}, ["spec.elastic", "elastic.max is 2, below elastic.min 3"]),
        ("NPUJob", {"kind": "train", "worldSize": 8, "elastic": {"min": 1, "max": 4}}, ["worldSize 8 is not within elastic 1 to 4"]),
        ("NPUJob", {"kind": "train", "profile": "tpu"}, ["spec.profile = 'tpu'"]),
        ("NPUJob", {}, ["spec.kind", "Field required"]),
        ("NPUService", {"replicas": {"min": 3, "max": 1}}, ["replicas.max is 1, below replicas.min 3"]),
    ],
)
def test_a_spec_that_cannot_be_used_says_what_is_wrong(kind: str, spec: dict[str, object], said: list[str]) -> None:
    body = {"kind": kind, "metadata": {"name": "bad"}, "spec": spec}
    with pytest.raises(ValueError, match="'bad' cannot be used") as caught:
        (NPUJob if kind == "NPUJob" else NPUService).parse(body)
    assert all(words in str(caught.value) for words in said)


def test_a_service_has_defaults_for_everything() -> None:
    service = NPUService.parse({"kind": "NPUService", "metadata": {"name": "serving"}})
    assert service.spec == NPUServiceSpec() and service.spec.replicas.min == 1 and service.spec.rollout.strategy == "Surge"
    assert NPUService.parse({"kind": "NPUService", "metadata": {"name": "s"}, "spec": service.spec.to_body()}).spec == service.spec
