from pathlib import Path

import pytest
import torch

from semantide.services.training.checkpoint import Checkpoints
from semantide.shared.errors import Corrupt, TransientError


def test_the_newest_whole_one_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "c")
    assert checkpoints.latest() is None
    for step in range(1, 5):
        checkpoints.save(step, {"x": torch.full((3,), float(step))}, {"step": step, "best": float("-inf")})
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-000000003", "step-000000004"]
    tensors, state = checkpoints.latest()  # type: ignore[misc]
    assert (tensors["x"].tolist(), state["step"], state["best"]) == ([4.0] * 3, 4, float("-inf"))


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_torn_checkpoint_is_passed_over_and_two_torn_ones_are_an_error(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.arange(4)}, {"step": step})
    for step in (2, 1):
        path = tmp_path / f"step-{step:09d}" / name
        path.write_bytes(path.read_bytes()[:-3])
        if step == 2:
            assert checkpoints.latest()[1]["step"] == 1  # type: ignore[index]
    with pytest.raises(Corrupt, match="no checkpoint"):
        checkpoints.latest()


def test_what_a_kill_left_half_written_does_not_count(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.arange(4)}, {"step": 1})
    (tmp_path / ".incoming-000000002").mkdir()
    (tmp_path / ".incoming-000000002" / "state.safetensors").write_bytes(b"half")
    assert checkpoints.latest()[1]["step"] == 1  # type: ignore[index]
    checkpoints.save(2, {"x": torch.arange(4)}, {"step": 2})
    assert checkpoints.latest()[1]["step"] == 2  # type: ignore[index]


def test_a_disk_that_takes_nothing_is_transient_and_keeps_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semantide.services.training import checkpoint

    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"x": torch.arange(4)}, {"step": 1})

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(TransientError, match="No space left"):
        checkpoints.save(2, {"x": torch.arange(4)}, {"step": 2})
    assert checkpoints.latest()[1]["step"] == 1  # type: ignore[index]
