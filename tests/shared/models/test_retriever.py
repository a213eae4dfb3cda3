from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.errors import Conflict, Corrupt, NotFound, TransientError
from semantide.shared.jagged import Jagged
from semantide.shared.models.retriever import ItemVectors, Retriever, RetrieverConfig
from semantide.shared.models.retriever_search import ExactSearch

SHAPE = RetrieverConfig(hidden_size=16, num_layers=2, num_heads=2, max_items=12, time_buckets=20)
FORMS = [replace(SHAPE, layer="hstu"), replace(SHAPE, layer="fuxi"), replace(SHAPE, layer="fuxi", time_buckets=0, places="end", cosine=False)]


def made(config: RetrieverConfig, seed: int = 0) -> Retriever:
    torch.manual_seed(seed)
    model = Retriever(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def states(model: Retriever, vectors_ND: torch.Tensor, histories: list[list[int]], times: list[list[int]]) -> list[torch.Tensor]:
    packed = Jagged.from_sequences([[0, *history] for history in histories])
    begins = torch.zeros(len(packed.values), dtype=torch.bool)
    begins[packed.offsets_B1[:-1]] = True
    moments = torch.cat([torch.tensor([*known[:1], *known] or [0]) for known in times])
    return [*Jagged(model(vectors_ND[packed.values], begins, packed.offsets_B1, moments), packed.offsets_B1)]


@pytest.mark.parametrize("config", FORMS)
def test_a_place_sees_what_came_before_it_and_nothing_else(config: RetrieverConfig) -> None:
    model, vectors = made(replace(config, places="start")), torch.randn(30, 16, dtype=torch.float64)
    history, times = [3, 9, 4, 27, 1], [5, 60, 61, 4000, 10**6]
    together = states(model, vectors, [[8, 8], history, []], [[1, 2], times, []])
    for end in range(len(history) + 1):
        alone = states(model, vectors, [history[:end]], [times[:end]])[0]
        torch.testing.assert_close(alone, together[1][: end + 1])
    assert together[2].shape == (1, 16)


@pytest.mark.parametrize("layer", ["hstu", "fuxi"])
def test_times_and_order_count_and_only_differences_of_times(layer: Any) -> None:
    model, vectors = made(replace(SHAPE, layer=layer)), torch.randn(30, 16, dtype=torch.float64)
    (usual,), (later,), (slower,), (swapped,) = (
        states(model, vectors, [history], [times])
        for history, times in (([3, 9, 4], [10, 20, 90]), ([3, 9, 4], [1010, 1020, 1090]), ([3, 9, 4], [10, 20, 90000]), ([9, 3, 4], [10, 20, 90]))
    )
    torch.testing.assert_close(usual, later)
    assert not torch.allclose(usual[-1], slower[-1])
    assert not torch.allclose(usual[-1], swapped[-1])
    blind = made(replace(SHAPE, layer=layer, time_buckets=0))
    torch.testing.assert_close(*(states(blind, vectors, [[3, 9, 4]], [times])[0] for times in ([10, 20, 90], [1, 2, 3])))


@pytest.mark.parametrize("config", FORMS)
def test_every_parameter_is_learned(config: RetrieverConfig) -> None:
    model = made(config)
    vectors = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    torch.stack([state.sum() for state in states(model.train(), vectors, [[3, 9, 4], []], [[10, 20, 9000], []])]).pow(2).sum().backward()
    assert vectors.grad is not None and vectors.grad[9].abs().sum() > 0
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.abs().sum()]
    assert not missing


def test_the_large_shapes_have_the_papers_number_of_dense_parameters() -> None:
    # Of one layer of 16, counted without memory for it.
    with torch.device("meta"):
        hstu, fuxi = (
            sum(p.numel() for p in Retriever(RetrieverConfig(layer, 1024, 1, 8, 2048, places="none")).layers[0].parameters())  # type: ignore[arg-type]
            for layer in ("hstu", "fuxi")
        )
    assert 16 * hstu == pytest.approx(83.97e6, rel=0.002)
    assert 16 * fuxi == pytest.approx(201.55e6, rel=0.002)


@pytest.mark.parametrize("config", FORMS)
def test_a_saved_model_scores_the_same(tmp_path: Path, config: RetrieverConfig) -> None:
    model = made(config).float()
    vectors = torch.randn(30, 16)
    items = [f"item {row}" for row in range(30)]
    model.save_pretrained(tmp_path, vectors, items)
    again, table = Retriever.from_pretrained(tmp_path), ItemVectors.load(tmp_path)
    assert table.item_ids == tuple(items)
    assert torch.equal(table.vectors_ND, vectors)
    assert set(pq.read_schema(tmp_path / "vectors.parquet").names) == {"item", "vector"}
    histories: list[Any] = [np.array([3, 1, 4]), np.zeros(0, dtype=np.int64)]
    moments: list[Any] = [np.array([10, 20, 30]), None]
    expected = ExactSearch(model, lambda: vectors, 12).scores(histories, moments)
    assert torch.equal(expected, ExactSearch(again, lambda: table.vectors_ND, 12).scores(histories, moments))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.lists(st.integers(0, 29), max_size=9), min_size=1, max_size=4), st.integers(1, 5))
def test_a_search_reads_the_last_items_of_each_history(histories: list[list[int]], longest: int) -> None:
    model, vectors = made(SHAPE), torch.randn(30, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    search = ExactSearch(model, lambda: vectors, longest)
    arrays = [np.array(history, dtype=np.int64) for history in histories]
    times = [np.cumsum(history, dtype=np.int64) for history in arrays]
    scores = search.scores(arrays, times)
    for row, (history, moments) in enumerate(zip(histories, times, strict=True)):
        kept = [int(moment) for moment in moments[-longest:]] if history else []
        state = states(model, vectors, [history[-longest:]], [kept])[0][-1]
        torch.testing.assert_close(scores[row], (torch.nn.functional.normalize(vectors, dim=-1) @ state / 0.05).float())


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    for wrong, message in (
        ({"layer": "gru"}, "layer is 'gru'"), ({"num_heads": 3}, "not a multiple"), ({"num_layers": 0}, "num_layers is 0"), ({"temperature": 0.0}, "temperature"),
        ({"layer": "fuxi", "time_buckets": 0, "position_bias": False}, "channels"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            replace(SHAPE, **wrong)  # type: ignore[arg-type]
    model = Retriever(SHAPE)
    with pytest.raises(ValueError, match="a history of 13 items: cut it to the last 12"):
        model(torch.zeros(14, 16), torch.zeros(14, dtype=torch.bool), torch.tensor([0, 14]), torch.zeros(14, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"vectors \(3, 16\) for 2 items"):
        model.save_pretrained(tmp_path, torch.zeros(3, 16), ["a", "b"])
    (tmp_path / "full" / "model.safetensors").mkdir(parents=True)
    with pytest.raises(TransientError, match="make room there"):
        model.save_dense(tmp_path / "full")
    model.save_pretrained(tmp_path, torch.zeros(2, 16), ["a", "b"])
    (tmp_path / "vectors.parquet").write_bytes(b"PAR1")
    with pytest.raises(Corrupt, match="damaged"):
        ItemVectors.load(tmp_path)
    (tmp_path / "vectors.parquet").unlink()
    with pytest.raises(NotFound, match="retriever"):
        ItemVectors.load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "sasrec"}')
    with pytest.raises(Conflict, match="'sasrec', not 'retriever'"):
        Retriever.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "retriever", "layer": "hstu"}')
    with pytest.raises(Corrupt, match="field is missing"):
        Retriever.from_pretrained(tmp_path)
