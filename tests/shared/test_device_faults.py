"""A device that fails is told from work that is wrong."""

from typing import Any

import pytest
import torch

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import JobSpec
from semantide.shared.device_faults import device_failed
from semantide.shared.errors import BadData, RankLost
from semantide.shared.job_process import run_job
from semantide.shared.job_ranks import rank_failure, run_rank
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.queues import Queues

ILLEGAL = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported at some other API call"
NPU = "RunOpsApiV2:build/CMakeFiles/torch_npu.dir/compiler_depend.ts:243 NPU function error: c10_npu::acl::AclrtSynchronizeStream(stream), error code is {}\n[ERROR]"


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


DEVICE = [
    torch.AcceleratorError(ILLEGAL),
    torch.AcceleratorError("uncorrectable ECC error"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
    RuntimeError("HIP error: unspecified launch failure"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError(NPU.format(507014)),
    RuntimeError("InnerRun:OpParamMaker.cpp:208 NPU error, error code is 500002"),
    caused(ValueError("batch 7 could not be trained on"), RuntimeError(ILLEGAL)),
]
WORK = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: too many resources requested for launch"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("CUDA error: no kernel image is available for execution on the device"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError(NPU.format(161001)),
    RuntimeError("Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    BadData("row 7: CUDA error: an illegal memory access is no category"),
]


@pytest.mark.parametrize("error", DEVICE, ids=str)
def test_a_device_that_failed_is_recognised(error: Exception) -> None:
    assert device_failed(error)


@pytest.mark.parametrize("error", WORK, ids=str)
def test_work_that_is_wrong_or_too_large_is_no_device_that_failed(error: Exception) -> None:
    assert not device_failed(error)


@pytest.mark.parametrize(("error", "status", "state"), [(DEVICE[0], 1, "queued"), (DEVICE[6], 1, "queued"), (WORK[0], 0, "failed"), (WORK[6], 0, "failed")])
def test_a_job_whose_device_failed_is_started_again(broker: Any, settings: Any, error: Exception, status: int, state: str) -> None:
    jobs = Jobs(broker)
    record = jobs.submit(JobSpec(kind="train"))

    def work(job: JobContext) -> JobOutcome:
        raise error

    assert run_job(record.id, work, settings, ArtifactStore(settings.artifacts_root), broker, Queues(settings.redis_url)) == status
    assert jobs.get(record.id).state == state


def test_a_rank_whose_device_failed_ends_nobodys_job_whatever_the_others_say(broker: Any, settings: Any) -> None:
    job = Jobs(broker).submit(JobSpec(kind="train"))
    workdir = settings.data_dir / "jobs" / job.id
    errors = [BadData("the loss is not a number"), DEVICE[0], RankLost("rank 1 is gone")]

    def work(context: JobContext, error: Exception) -> JobOutcome:
        raise error

    for rank, error in enumerate(errors):
        assert run_rank(
            job.id,
            rank,
            lambda context, error=error: work(context, error),
            settings,
            ArtifactStore(settings.artifacts_root),
            broker,
            Queues(settings.redis_url),
        )
        assert (rank_failure(workdir) is None) == (rank > 0)
