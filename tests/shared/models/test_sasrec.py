import json
from pathlib import Path

import numpy as np
import pytest
import torch

from semantide.shared.errors import Conflict, Corrupt
from semantide.shared.models.popularity import Popularity
from semantide.shared.models.sasrec import SASRec, SASRecConfig


def small(**changes: object) -> SASRec:
    torch.manual_seed(0)
    return SASRec(SASRecConfig(num_items=11, hidden_size=8, num_heads=2, feedforward_size=12, max_items=6, **changes)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", ["start", "end"])
def test_histories_of_a_pack_do_not_see_each_other(positions: str) -> None:
    model = small(positions=positions)
    rows, offsets = torch.tensor([-1, 3, 4, -1, -1, 5, 6, 7]), torch.tensor([0, 3, 4, 8])
    together = model(rows, offsets)
    for begin, end in ((0, 3), (3, 4), (4, 8)):
        torch.testing.assert_close(together[begin:end], model(rows[begin:end], torch.tensor([0, end - begin])))


def test_sampled_loss_approaches_the_full_one() -> None:
    model = small()
    hidden, targets = torch.randn(400, 8, generator=torch.Generator().manual_seed(1)), torch.arange(400) % 11
    torch.manual_seed(0)
    sampled = torch.stack([model.loss(hidden, targets, num_negatives=10) for _ in range(300)]).mean()
    assert abs(sampled.item() - model.loss(hidden, targets).item()) < 0.1
    assert torch.equal(model.loss(hidden, targets, num_negatives=11), model.loss(hidden, targets))


def test_it_saves_and_loads_and_refuses_what_is_not_its_own(tmp_path: Path) -> None:
    model = small(positions="start")
    model.save_pretrained(tmp_path)
    again = SASRec.from_pretrained(tmp_path)
    rows, offsets = torch.tensor([-1, 3, 4]), torch.tensor([0, 3])
    assert again.config == model.config
    assert torch.equal(again(rows, offsets), model(rows, offsets))
    header = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**header, "num_items": 12}))
    with pytest.raises(Corrupt, match=r"items\.weight is"):
        SASRec.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({**header, "model_type": "qwen3"}))
    with pytest.raises(Conflict, match="qwen3"):
        SASRec.from_pretrained(tmp_path)


def test_too_long_a_history_is_refused_and_so_is_a_shape_that_does_not_divide() -> None:
    with pytest.raises(ValueError, match="cut it to the last 6"):
        small()(torch.tensor([-1, *[1] * 7]), torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="multiple"):
        SASRecConfig(num_items=3, hidden_size=9)
    with pytest.raises(ValueError, match="num_items is 0"):
        SASRec(SASRecConfig())


def test_popularity_ranks_every_item_by_count_then_row() -> None:
    ranking = Popularity.fit([np.array([2, 2, 0]), np.array([3, 0, 2])], 5).ranking()
    assert ranking.tolist() == [2, 0, 3, 1, 4]
