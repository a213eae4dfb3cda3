"""The stages of several ranks talk to each other from their threads: equal numbers, and no end in which one waits for another."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("pipeline_run.py")


class Ranks:
    """Runs the case of ``pipeline_run.py``."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen([sys.executable, str(SCRIPT)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, size: int, folder: Path, argument: str) -> list[int]:
        folder.mkdir()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"tables {size} {folder} {argument}\n")
        self._process.stdin.flush()
        return [int(status) for status in self._process.stdout.readline().split()]

    def close(self) -> None:
        self._process.communicate(timeout=120)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks()
    yield started
    started.close()


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_table_trained_by_two_ranks_is_that_of_one(ranks: Ranks, tmp_path: Path, staleness: int) -> None:
    """With threads and without; up to the rounding of the losses, which are float32."""
    assert ranks(1, tmp_path / "one", f"{staleness}:1") == [0]
    assert ranks(2, tmp_path / "two", f"{staleness}:6") == [0, 0]
    one = load_file(tmp_path / "one" / "rank-0.safetensors")
    first, second = (load_file(tmp_path / "two" / f"rank-{rank}.safetensors") for rank in range(2))
    for name, tensor in one.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-6)


def test_all_ranks_end_when_one_is_stopped_or_fails(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks(2, tmp_path / "stopped", "2:6:stop") == [0, 0]
    assert [(tmp_path / "stopped" / f"ended-{rank}").read_text() for rank in range(2)] == ["JobCancelled"] * 2
    assert ranks(2, tmp_path / "failed", "2:6:break") == [0, 0]
    assert [(tmp_path / "failed" / f"ended-{rank}").read_text() for rank in range(2)] == ["RankLost", "OSError"]
