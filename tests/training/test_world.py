import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from semantide.services.training.world import World

from .forked_ranks import Ranks


def test_one_process_is_a_world_whose_collectives_return_what_they_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    world = World.join("cpu")
    tensor = torch.arange(3)
    assert (world.size, world.rank, world.leads, world.device.type) == (1, 0, True, "cpu")
    assert world.all_reduce_sum(tensor) is world.broadcast(tensor) is world.all_to_all([tensor])[0] is world.all_gather(tensor)[0] is tensor
    assert world.gather_json({"a": 1}) == [{"a": 1}]
    assert (world.channel().size, world.grid(1).shards.size, world.grid(1).replicas.size, world.traffic.calls) == (1, 1, 1, 0)
    world.barrier()
    world.close()
    with pytest.raises(ValueError, match="2 parts for 1 ranks"):
        world.all_to_all([tensor, tensor])
    with pytest.raises(ValueError, match="1 ranks cannot be cut into groups of 2"):
        world.grid(2)


@pytest.mark.parametrize(
    ("case", "size", "argument"),
    [("collectives", 3, ""), ("grid", 4, ""), ("gradients", 3, "overlap"), ("gradients", 3, "after"), ("exchange", 3, ""), ("few", 3, "")],
)
def test_ranks_work_together(ranks: Ranks, tmp_path: Path, case: str, size: int, argument: str) -> None:
    assert ranks(case, size, tmp_path, argument) == [0] * size


def test_a_lost_rank_is_an_error_of_the_others_not_a_hang(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("lost", 3, tmp_path) == [0, 0, 9]


@pytest.mark.parametrize("model", ["generator", "sasrec"])
def test_shared_out_training_is_that_of_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """In float64, with histories of 1 to 30 items, averages, two optimisers and label smoothing."""
    alone, together = tmp_path / "1", tmp_path / "3"
    assert ranks("train", 1, alone, model) == [0]
    assert ranks("train", 3, together, model) == [0, 0, 0]
    one = load_file(alone / "rank-0.safetensors")
    for rank in range(3):
        for name, parameter in load_file(together / f"rank-{rank}.safetensors").items():
            torch.testing.assert_close(parameter, one[name], rtol=1e-9, atol=1e-11)
    same = [load_file(together / f"rank-{rank}.safetensors") for rank in range(3)]
    assert all(torch.equal(same[0][name], other[name]) for other in same for name in other)
    losses = [json.loads((folder / "rank-0.json").read_text())["losses"] for folder in (alone, together)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


@pytest.mark.parametrize("model", ["retriever1", "retriever2", "retriever4"])
def test_training_with_a_table_over_ranks_is_that_of_one_process(ranks: Ranks, tmp_path: Path, model: str) -> None:
    """Groups of one, two and four ranks, the first with rows that miss an update; the loss itself is float32."""
    alone, together = tmp_path / "1", tmp_path / "4"
    assert ranks("train", 1, alone, model) == [0]
    assert ranks("train", 4, together, model) == [0] * 4
    one, others = load_file(alone / "rank-0.safetensors"), [load_file(together / f"rank-{rank}.safetensors") for rank in range(4)]
    assert "items" in one
    for name, tensor in one.items():
        torch.testing.assert_close(others[0][name], tensor, rtol=1e-4, atol=1e-6)
        assert all(torch.equal(others[0][name], other[name]) for other in others)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_stages_on_threads_of_two_ranks_give_what_one_thread_gives(ranks: Ranks, tmp_path: Path, staleness: int) -> None:
    assert ranks("train", 1, tmp_path / "one", f"retriever2-{staleness}-1") == [0]
    assert ranks("train", 2, tmp_path / "two", f"retriever2-{staleness}-6") == [0, 0]
    one, *others = (load_file(tmp_path / name) for name in ("one/rank-0.safetensors", "two/rank-0.safetensors", "two/rank-1.safetensors"))
    for name, tensor in one.items():
        torch.testing.assert_close(others[0][name], tensor, rtol=1e-4, atol=1e-6)
        assert torch.equal(others[0][name], others[1][name])


@pytest.mark.parametrize(("how", "ended"), [("stop", ["JobCancelled", "JobCancelled"]), ("break", ["RankLost", "OSError"])])
def test_all_ranks_end_when_one_is_stopped_or_fails_amid_its_exchanges(ranks: Ranks, tmp_path: Path, how: str, ended: list[str]) -> None:
    assert ranks("train", 2, tmp_path, f"retriever2-2-6:{how}") == [0, 0]
    assert [(tmp_path / f"ended-{rank}").read_text() for rank in range(2)] == ended


def test_a_table_over_ranks_goes_on_with_other_ranks_and_groups(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("train", 4, tmp_path / "stopped", "retriever2:stop") == [0] * 4
    assert ranks("train", 2, tmp_path / "stopped", "retriever2:stop") == [0] * 2
    assert ranks("train", 1, tmp_path / "alone", "retriever2") == [0]
    one, other = (load_file(tmp_path / name / "rank-0.safetensors") for name in ("alone", "stopped"))
    assert all(torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-6) for name in one)


def test_all_ranks_stop_at_the_step_in_which_one_is_asked_to_and_others_may_go_on(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("train", 2, tmp_path / "stopped", "sasrec:stop") == [0, 0]
    assert {json.loads((tmp_path / "stopped" / f"state-{rank}.json").read_text()) for rank in range(2)} == {5}
    # Three processes take up what two have begun.
    assert ranks("train", 3, tmp_path / "stopped", "sasrec:stop") == [0, 0, 0]
    assert ranks("train", 1, tmp_path / "alone", "sasrec") == [0]
    one, other = (load_file(tmp_path / name / "rank-0.safetensors") for name in ("alone", "stopped"))
    assert all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-11) for name in one)
