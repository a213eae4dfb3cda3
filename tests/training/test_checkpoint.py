from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training import checkpoint
from semantide.services.training.checkpoint import Checkpoints, Deal
from semantide.shared.errors import Conflict, Corrupt, TransientError


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path)


def saved_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.latest()
    assert found is not None
    return int(found.state["step"])


def test_the_newest_whole_one_comes_back_and_two_are_kept(checkpoints: Checkpoints) -> None:
    assert checkpoints.latest() is None
    for step in range(1, 5):
        checkpoints.save(step, {"x": torch.full((3,), float(step))}, {"step": step, "best": float("-inf")})
    checkpoints.wait()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000000003", "step-000000004"]
    found = checkpoints.latest()
    assert found is not None
    assert (found.tensors["x"].tolist(), found.state) == ([4.0] * 3, {"step": 4, "best": float("-inf")})


def test_every_kind_of_tensor_comes_back_bit_for_bit(checkpoints: Checkpoints) -> None:
    shared = torch.arange(6.0).view(2, 3)
    tensors = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(5).bfloat16(),
        "random": torch.get_rng_state(),
        "numbers": torch.arange(3),
        "flags": torch.tensor([True, False]),
        "turned": shared.T,
        "again": shared,
        "nothing": torch.tensor(float("nan")),
    }
    checkpoints.save(1, tensors, {}, own={"mine": torch.ones(2)})
    found = checkpoints.latest()
    assert found is not None and found.own["mine"].tolist() == [1, 1]
    assert set(found.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor) or name == "nothing"


def test_what_training_changes_after_saving_is_not_in_it(checkpoints: Checkpoints) -> None:
    weights = torch.zeros(100_000)
    checkpoints.save(1, {"x": weights}, {})
    weights += 1  # the background has hardly begun
    found = checkpoints.latest()
    assert found is not None and not found.tensors["x"].any()


def test_large_states_lie_in_several_files(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1000)
    tensors = {f"layer{number}": torch.randn(100) for number in range(5)}
    checkpoints.save(1, tensors, {})
    found = checkpoints.latest()
    assert found is not None and all(torch.equal(found.tensors[name], tensor) for name, tensor in tensors.items())
    assert len(list((checkpoints.folder / "step-000000001").glob("*.safetensors"))) == 3


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(1, 7), st.integers(1, 7))
def test_rows_dealt_out_to_some_ranks_come_back_to_any_other_number(tmp_path_factory: pytest.TempPathFactory, num_rows: int, before: int, after: int) -> None:
    rows = torch.randn(num_rows, 2)
    opened = Checkpoints(tmp_path_factory.mktemp("c"), background=False)
    # As ranks would write them: each its own rows under its own name.
    shares = {checkpoint._share_name("table.w", Deal(rank, before)): rows[rank::before] for rank in range(before)}
    opened.save(1, shares, {})
    for rank in range(after):
        found = opened.latest({"table.": Deal(rank, after)})
        assert found is not None and torch.equal(found.tensors["table.w"], rows[rank::after])
    with pytest.raises(Conflict, match=r"table\.w that are dealt out"):
        opened.latest()


def test_a_rank_outside_its_deal_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 of 2"):
        Deal(2, 2)


@pytest.mark.parametrize("name", ["shard-00001-model-00001-of-00001.safetensors", "state.json"])
def test_a_torn_checkpoint_is_passed_over_and_two_torn_ones_are_an_error(checkpoints: Checkpoints, name: str) -> None:
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.arange(4)}, {"step": step})
    checkpoints.wait()
    for step in (2, 1):
        path = checkpoints.folder / f"step-{step:09d}" / name
        path.write_bytes(path.read_bytes()[:-3])
        if step == 2:
            assert saved_step(checkpoints) == 1
    with pytest.raises(Corrupt, match="no checkpoint"):
        checkpoints.latest()


def test_what_a_kill_left_half_written_does_not_count_and_goes(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, {"x": torch.arange(4)}, {"step": 1})
    checkpoints.wait()
    (checkpoints.folder / ".incoming-000000002").mkdir()
    (checkpoints.folder / ".incoming-000000002" / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    assert saved_step(checkpoints) == 1
    checkpoints.save(3, {"x": torch.arange(4)}, {"step": 3})
    assert saved_step(checkpoints) == 3
    assert not list(checkpoints.folder.glob(".incoming-*"))


@pytest.mark.parametrize("where", ["_sync", "digest_file", "_write_alone"])
def test_a_disk_that_takes_nothing_is_transient_and_keeps_the_last_one(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    checkpoints.save(1, {"x": torch.arange(4)}, {"step": 1})
    checkpoints.wait()

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(checkpoint, where, full)
        checkpoints.save(2, {"x": torch.arange(4)}, {"step": 2})
        with pytest.raises(TransientError, match=r"step 2 could not be written .*rank 0.*No space left.*make room"):
            checkpoints.wait()
    assert saved_step(checkpoints) == 1
    # Once there is room, it goes on.
    checkpoints.save(2, {"x": torch.arange(4)}, {"step": 2})
    assert saved_step(checkpoints) == 2
