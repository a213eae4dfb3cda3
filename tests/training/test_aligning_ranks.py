"""Several ranks align one generator: what comes out is what one would have made, whatever is killed on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from semantide.services.training.prompt_share import PromptShare

from .forked_ranks import Ranks
from .rank_threads import on_threads


def outcome(folder: Path, rank: int = 0) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / f"state-{rank}.json").read_text()), load_file(folder / f"weights-{rank}.safetensors")


@pytest.fixture(scope="module")
def alone(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("aligned") / "1"
    assert ranks("aligned", 1, folder) == [0]
    return folder


def test_ranks_together_make_the_updates_of_one(ranks: Ranks, alone: Path, tmp_path: Path) -> None:
    """Seven prompts on three ranks: shares are uneven, and so are those of the test's users."""
    expected, weights = outcome(alone)
    assert ranks("aligned", 3, tmp_path / "3") == [0, 0, 0]
    first, own = outcome(tmp_path / "3")
    for rank in (1, 2):
        state, others = outcome(tmp_path / "3", rank)
        assert state["tests"] == first["tests"] and all(torch.equal(value, others[name]) for name, value in own.items()), "all ranks hold the same"
    assert all(torch.allclose(value, own[name], atol=2e-5) for name, value in weights.items())
    assert (first["skipped"], first["best"]) == (expected["skipped"], expected["best"])
    for one, other in zip(first["tests"], expected["tests"], strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    told = [values for values in first["heard"] if "reward" in values]
    assert len(told) == 6 and [values["reward"] for values in told] == pytest.approx(
        [values["reward"] for values in expected["heard"] if "reward" in values], abs=1e-4
    )
    assert [values["loss"] for values in told] == pytest.approx([values["loss"] for values in expected["heard"] if "loss" in values], abs=1e-4)


@pytest.mark.parametrize("staleness", ["", "stale"])
def test_a_killed_rank_costs_nothing_but_time(ranks: Ranks, tmp_path: Path, staleness: str) -> None:
    """With staleness each rank's rollouts that were drawn ahead come back to it."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert ranks("aligned", 2, whole, staleness) == [0, 0]
    statuses = ranks("aligned", 2, cut, f"1:4:{staleness}")
    assert statuses[1] == -9 and statuses[0] not in (0, -9)
    assert ranks("aligned", 2, cut, staleness) == [0, 0]
    assert all(torch.equal(value, outcome(cut)[1][name]) for name, value in outcome(whole)[1].items())
    assert outcome(cut)[0]["tests"] == outcome(whole)[0]["tests"]


def test_rewards_that_are_no_numbers_on_one_rank_end_all(ranks: Ranks, tmp_path: Path) -> None:
    statuses = ranks("aligned", 2, tmp_path, "nan")
    assert statuses[1] == 3 and statuses[0] not in (0, 3), "the one says why, the other does not wait for ever"


@settings(max_examples=15, deadline=None)
@given(count=st.integers(0, 11), size=st.integers(1, 4))
def test_what_is_dealt_out_comes_together_in_its_order(count: int, size: int) -> None:
    whole = np.arange(3 * count, dtype=np.float64).reshape(count, 3)

    def work(world: Any) -> tuple[Any, ...]:
        share = PromptShare(world)
        own = share.own(list(range(count)))
        figures = share.mean({"all": float(len(own)), **({"first": 5.0} if world.rank == 0 else {})}, 1.0)
        return share.joined(whole[own]), share.sums(len(own), 1.0), share.agreed(world.rank == size - 1), figures

    for joined, sums, agreed, figures in on_threads(size, work):
        assert np.array_equal(joined, whole) and sums == [count, size] and agreed
        assert figures == {"all": pytest.approx(count / size), "first": 5.0}
    alone = PromptShare()
    assert alone.place == () and alone.sums(1, 2) == [1, 2] and not alone.agreed(False)
