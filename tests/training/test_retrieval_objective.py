from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semantide.services.training.batches import HistoryBatch, Sampler
from semantide.services.training.objective import LossSum, TableRows
from semantide.services.training.rankers import RetrieverRanker
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import ITEMS, NextItemSampled
from semantide.services.training.trainer import Listener, RunState, Trainer
from semantide.shared.errors import JobCancelled
from semantide.shared.jagged import Jagged
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.retriever_search import ExactSearch

NUM_ITEMS = 20
SHAPE = RetrieverConfig(hidden_size=16, num_layers=1, num_heads=2, max_items=12, time_buckets=16, dropout=0.0, embedding_dropout=0.0)
COUNTS = torch.arange(1, NUM_ITEMS + 1)


def made(seed: int = 0, temperature: float = 0.05, **changes: object) -> NextItemSampled:
    torch.manual_seed(seed)
    config: TrainConfig = replace(recipe("retriever-tiny"), max_items=12, **changes)  # type: ignore[arg-type]
    return NextItemSampled(Retriever(replace(SHAPE, temperature=temperature)), LocalTable(NUM_ITEMS, 16), COUNTS, config)


def batch_of(histories: list[list[int]]) -> HistoryBatch:
    items = Jagged.from_sequences(histories)
    return HistoryBatch.of(items, torch.arange(len(items.values)) * 60)


def loss_of(objective: NextItemSampled, batch: HistoryBatch, seed: int = 0) -> LossSum:
    ids = objective.draw(batch, torch.Generator().manual_seed(seed))[ITEMS]
    route = objective.tables[ITEMS].route(ids)
    return objective.loss(batch, {ITEMS: TableRows(route.ids_U, objective.tables[ITEMS].fetch(route), route.inverse_T, ids)})


def test_with_all_items_it_is_the_cross_entropy_of_each_next_item() -> None:
    objective, histories = made(num_negatives=0), [[3, 5, 11], [7]]
    batch = batch_of(histories)
    sums = loss_of(objective, batch)
    search = ExactSearch(objective.model, lambda: objective.tables[ITEMS].weight_ND, 12)
    times = [batch.times_T[:3].numpy(), batch.times_T[3:].numpy()]
    expected = 0.0
    for history, moments in zip(histories, times, strict=True):
        for place, target in enumerate(history):
            # The begin row of an empty history has the first event's time in training; nothing stands beside it to compare with.
            scores = search.scores([np.array(history[:place], dtype=np.int64)], [moments[:place]])
            expected += float(F.cross_entropy(scores, torch.tensor([target])))
    assert float(sums.total().detach()) == pytest.approx(expected / 4, rel=1e-4)
    assert sums.counts_K.tolist() == [4]


def test_what_was_done_counts_in_ranking_as_it_does_in_training() -> None:
    torch.manual_seed(0)
    config = replace(recipe("retriever-tiny"), max_items=12, num_negatives=0)
    model = Retriever(replace(SHAPE, actions=("click", "like")))
    assert not bool(model.actions.weight[0].any()) and model.action_numbers(["like", "hate", "click"]) == [2, 0, 1]
    torch.nn.init.normal_(model.actions.weight[1:])
    done = torch.tensor([1, 2, 0, 2, 1], dtype=torch.int16)
    objective = NextItemSampled(model.eval(), LocalTable(NUM_ITEMS, 16), COUNTS, config, actions_E=done)
    items = Jagged.from_sequences([[7], [3, 5, 11]])
    batch = HistoryBatch(items, torch.arange(4) * 60, torch.arange(2), torch.tensor([4, 1, 2, 3]))
    search = ExactSearch(model, lambda: objective.tables[ITEMS].weight_ND, 12)
    expected = 0.0
    for history, actions, moments, target in (([], [], [], 7), ([], [], [], 3), ([3], [2], [60], 5), ([3, 5], [2, 0], [60, 120], 11)):
        scores = search.scores([np.array(history, dtype=np.int64)], [np.array(moments, dtype=np.int64)], [np.array(actions, dtype=np.int64)])
        expected += float(F.cross_entropy(scores, torch.tensor([target])))
    assert float(loss_of(objective, batch).total().detach()) == pytest.approx(expected / 4, rel=1e-4)
    silent = NextItemSampled(model, objective.tables[ITEMS], COUNTS, config)
    assert float(loss_of(silent, batch).total()) != pytest.approx(expected / 4, rel=1e-4)


@pytest.mark.parametrize("scope", ["batch", "target"])
@pytest.mark.parametrize("power", [0.0, 0.75])
def test_sampled_losses_are_near_that_over_all_items(scope: str, power: float) -> None:
    batch = batch_of([[3, 5, 11, 2], [7, 1], [19]])
    # At a low temperature single items decide a sum, and few samples miss them.
    whole = loss_of(made(temperature=1.0, num_negatives=0), batch).total()
    objective = made(temperature=1.0, num_negatives=12, negative_scope=scope, negative_power=power)
    sampled = torch.stack([loss_of(objective, batch, seed).total() for seed in range(60)]).mean()
    assert abs(float((sampled - whole).detach())) < 0.15


def test_what_is_drawn_depends_on_the_generator_alone_and_follows_the_counts() -> None:
    batch = batch_of([[3, 5, 11], [7]])
    for scope, number in (("batch", 8), ("target", 4 * 8)):
        objective = made(num_negatives=8, negative_scope=scope, negative_power=1.0)
        first, again, other = (objective.draw(batch, torch.Generator().manual_seed(seed))[ITEMS] for seed in (1, 1, 2))
        assert first[:4].tolist() == [3, 5, 11, 7]
        assert len(first) == 4 + number
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
    many = made(num_negatives=NUM_ITEMS - 1, negative_scope="target", negative_power=1.0)
    drawn = many.draw(batch_of([[1] * 2000]), torch.Generator().manual_seed(3))[ITEMS][2000:]
    torch.testing.assert_close(torch.bincount(drawn, minlength=NUM_ITEMS) / len(drawn), COUNTS / COUNTS.sum(), atol=0.005, rtol=0)


def test_items_of_the_history_can_be_left_out_of_its_negatives() -> None:
    batch = batch_of([[4, 9, 4, 9, 4]])
    objective = made(num_negatives=6, mask_history=True)
    ids = torch.tensor([4, 9, 4, 9, 4, *[9, 4, 4, 9, 4, 9]])
    route = objective.tables[ITEMS].route(ids)
    sums = objective.loss(batch, {ITEMS: TableRows(route.ids_U, objective.tables[ITEMS].fetch(route), route.inverse_T, ids)})
    assert float(sums.total().detach()) == pytest.approx(0.0, abs=1e-6)  # nothing is left to compare with


class Run:
    """A small run in this process."""

    def __init__(self, folder: Path, *, stop_at: int | None = None, scores: list[float] | None = None, **changes: object) -> None:
        self.objective = made(epochs=6, items_per_batch=48, warmup_steps=2, learning_rate=1e-2, **changes)
        config, self.calls, self.stop_at, self.scores = self.objective._config, 0, stop_at, scores
        histories = [(start + np.arange(7)) % NUM_ITEMS for start in range(NUM_ITEMS)]
        sampler = Sampler(histories, config, 0, [np.arange(7) * 60_000] * NUM_ITEMS)
        listener = Listener(lambda: 0.0, check_cancelled=self.check)
        self.trainer = Trainer(config, self.objective, sampler, self.validate if scores else None, listener, folder, seed=0)

    def check(self) -> None:
        self.calls += 1
        if self.calls == self.stop_at:
            raise JobCancelled("stop")

    def validate(self) -> dict[str, float]:
        assert self.scores
        return {"ndcg@10": self.scores.pop(0)}

    def __call__(self) -> RunState:
        return self.trainer.run()


def test_it_learns_the_ring_and_a_stopped_run_ends_as_one_left_alone(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", num_negatives=8)
    whole = run()
    assert whole.losses[-1] < 0.6 * whole.losses[0]
    ranker = RetrieverRanker(run.objective.model, run.objective.read, np.arange(NUM_ITEMS), 12)
    histories = [(start + np.arange(5)) % NUM_ITEMS for start in range(NUM_ITEMS)]
    lists = ranker.rank(histories, 5, True, [np.arange(5) * 60] * NUM_ITEMS)
    assert np.mean([(history[-1] + 1) % NUM_ITEMS in best for history, best in zip(histories, lists, strict=True)]) > 0.9
    assert not any(set(history) & set(best) for history, best in zip(histories, lists, strict=True))
    with pytest.raises(JobCancelled):
        Run(tmp_path / "b", num_negatives=8, stop_at=7)()
    again = Run(tmp_path / "b", num_negatives=8)
    assert again() == whole
    assert torch.equal(again.objective.tables[ITEMS].weight_ND, run.objective.tables[ITEMS].weight_ND)


def test_the_best_table_is_kept_with_the_best_weights(tmp_path: Path) -> None:
    tables: list[torch.Tensor] = []
    run = Run(tmp_path / "b", scores=[0.1, 0.5, 0.2, 0.2, 0.2, 0.2], patience=4, num_negatives=8)
    validate = run.trainer.validate
    assert validate is not None

    def remember() -> dict[str, float]:
        tables.append(run.objective.tables[ITEMS].weight_ND.clone())
        return validate()

    run.trainer.validate = remember
    state = run()
    assert (state.best_epoch, state.epoch) == (2, 6)
    assert torch.equal(run.objective.tables[ITEMS].weight_ND, tables[1])
    assert not torch.equal(tables[0], tables[1])
