"""The loss by pages: parallel targets are point-wise ones together, sequential ones a sequence, and ranks add theirs up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.load_balancing import CostModel, Share, Shares
from semantide.services.training.objective import NextToken
from semantide.services.training.page_batches import PageSampler
from semantide.services.training.page_objective import PageWise, page_contrast
from semantide.services.training.page_targets import PageTargets
from semantide.services.training.world import World
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.targets import TargetBlocks, target_log_probs
from semantide.shared.models.token_merger import MergerConfig

from .rank_threads import on_threads
from .test_page_batches import Log, asked, config, world

LEVELS = (5, 4)
LOG = [[[1.0, 0.0], [3.0, 1.0, 0.0, 0.0], [1.0, 1.0]], [[1.0]], [[0.0, 1.0], [1.0, 3.0]]]


def made(seed: int = 3, **changes: Any) -> tuple[Generator, torch.Tensor]:
    torch.manual_seed(seed)
    shape = GeneratorConfig(LEVELS, num_layers=2, hidden_size=24, num_heads=2, num_kv_heads=1, head_dim=12, intermediate_size=40, **changes)
    generator = Generator(shape)
    items = sum(len(page) for user in LOG for page in user)
    codes = np.stack([np.arange(items) % LEVELS[0], np.arange(items) // LEVELS[0]], 1)
    return generator, torch.from_numpy(generator.vocabulary.item_tokens(codes))


def batch_of(targets: str, **changes: Any) -> HistoryBatch:
    return PageSampler(*world(LOG), config(targets, items_per_batch=1000, **changes), 0).epoch(0).batch(0)


def prompts(generator: Generator, tokens_NL: torch.Tensor, seen: list[int]) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), tokens_NL[torch.tensor(seen, dtype=torch.int64)].flatten()])


@pytest.mark.parametrize("targets", ["parallel", "point", "sequential"])
@pytest.mark.parametrize(
    "changes", [{}, {"seen_bias": True}, {"tie_word_embeddings": False, "level_scales": True}, {"merger": MergerConfig(True, "kept"), "seen_bias": True}]
)
def test_the_loss_is_that_of_one_plain_sequence_for_each_block(targets: str, changes: dict[str, Any]) -> None:
    generator, tokens_NL = made(**changes)
    batch = batch_of(targets)
    found = PageWise(generator, tokens_NL, config(targets)).loss(batch)
    expected = torch.zeros(2)
    for seen, items, weights in asked(batch):
        prompt = prompts(generator, tokens_NL, seen)
        block = TargetBlocks(tokens_NL[torch.tensor(items)].flatten(), torch.tensor([0, 2 * len(items)]), torch.tensor([0]), torch.tensor([len(seen)]))
        likelihoods = target_log_probs(generator, prompt, torch.tensor([0, len(prompt)]), block).view(-1, 2)
        expected -= (likelihoods * torch.tensor(weights).unsqueeze(1)).sum(0)
    torch.testing.assert_close(found.sums_K, expected, rtol=1e-4, atol=1e-4)
    assert found.counts_K.tolist() == [sum(len(items) for _, items, _ in asked(batch))] * 2


def test_point_wise_gradients_over_all_positives_add_up_to_the_parallel_one() -> None:
    """Training by parallel targets is point-wise training, at one reading of the history."""
    generator, tokens_NL = made()
    batch = batch_of("parallel")
    PageWise(generator, tokens_NL, config()).loss(batch).sums_K.sum().backward()
    together = {name: parameter.grad.clone() for name, parameter in generator.named_parameters() if parameter.grad is not None}
    generator.zero_grad()
    point = PageWise(generator, tokens_NL, config("point"))
    for seen, items, weights in asked(batch):
        one = PageTargets(
            torch.tensor(items),
            torch.tensor(weights),
            torch.tensor([False]),
            torch.tensor([0, 1]),
            torch.tensor([0]),
            torch.tensor([len(seen)]),
            torch.tensor([0]),
        )
        history = Jagged.from_sequences([seen])
        point.loss(HistoryBatch(history, torch.zeros(len(seen), dtype=torch.int64), torch.tensor([0]), None, 0, one)).sums_K.sum().backward()
    for name, parameter in generator.named_parameters():
        torch.testing.assert_close(parameter.grad, together[name], rtol=1e-3, atol=1e-4)


def test_pages_of_one_item_ask_what_every_place_of_a_history_does() -> None:
    generator, tokens_NL = made(seen_bias=True)
    sampler = PageSampler(*world([[[1.0]] * 5, [[1.0]] * 3]), config(items_per_batch=1000), 0)
    histories = HistoryBatch.of(Jagged.from_sequences([np.arange(5, 8), np.arange(5)]))
    found, expected = PageWise(generator, tokens_NL, config()).loss(sampler.epoch(0).batch(0)), NextToken(generator, tokens_NL, config()).loss(histories)
    torch.testing.assert_close(found.sums_K, expected.sums_K, rtol=1e-4, atol=1e-4)
    assert found.counts_K.tolist() == expected.counts_K.tolist()


@pytest.mark.parametrize("targets", ["parallel", "point", "sequential"])
@pytest.mark.parametrize("log", [LOG, [[[1.0], [0.0, 0.0, 0.0]], [[0.0, 0.0]]]])
@pytest.mark.parametrize("per_batch", [1, 1000])
def test_no_batch_weighs_more_than_its_targets_do(targets: str, log: Log, per_batch: int) -> None:
    """The mean over targets of what each costs, by its weight: a batch of pages that were only shown is as light as they are."""
    generator, tokens_NL = made()
    asked_for = config(targets, exposed="weak", exposed_weight=0.1, items_per_batch=per_batch)
    epoch, objective = PageSampler(*world(log), asked_for, 0).epoch(0), PageWise(generator, tokens_NL, asked_for)
    shown = 0
    for index in range(len(epoch)):
        batch = epoch.batch(index)
        found, targets_of = objective.loss(batch), batch.targets
        assert targets_of is not None
        shown += bool(targets_of.exposed_S.all())
        # At the start all of five codes are about as likely: each costs some ln 5.
        heaviest = float(targets_of.weights_S.max())
        assert 0 < float(found.parts_K().detach().max()) <= 2.5 * heaviest
    assert shown > 0 or per_batch > 1 or log is LOG


def test_the_contrast_raises_what_was_taken_over_what_was_only_shown() -> None:
    generator, tokens_NL = made()
    objective = PageWise(generator, tokens_NL, config(exposed="contrast", exposed_weight=0.5))
    batch = batch_of("parallel", exposed="contrast")
    found = objective.loss(batch)
    assert found.weights_K.tolist() == [1.0, 1.0, 0.5]
    targets = batch.targets
    assert targets is not None
    likelihoods = torch.randn(len(targets.items_S), generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = page_contrast(likelihoods, targets)
    expected = torch.zeros(())
    for page in set(targets.pages_C.tolist()):
        on_page = targets.pages_C == page
        others = likelihoods[on_page & targets.exposed_S]
        for positive in likelihoods[on_page & ~targets.exposed_S]:
            if len(others):
                expected = expected - torch.log_softmax(torch.cat([positive.unsqueeze(0), others]), 0)[0]
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert likelihoods.grad is not None and bool((likelihoods.grad[targets.exposed_S] >= 0).all()) and bool((likelihoods.grad[~targets.exposed_S] <= 0).all())
    found.total().backward()
    assert all(bool(parameter.grad.isfinite().all()) for parameter in generator.parameters() if parameter.grad is not None)


def test_ranks_have_all_pages_between_them_and_their_sums_are_the_whole_ones() -> None:
    generator, tokens_NL = made()
    epoch = PageSampler(*world(LOG * 3), config(items_per_batch=30), 0).epoch(1)
    objective = PageWise(generator, tokens_NL.repeat(3, 1), config())
    alone = Shares(World.single(torch.device("cpu")), epoch, CostModel(0.0), objective.counts)

    def shared(rank: Any) -> list[Share]:
        rank.all_reduce_sum = lambda counts: torch.stack(rank.all_gather(counts)).sum(0)
        shares = Shares(rank, epoch, CostModel(0.1), objective.counts, ahead=0)
        return [shares[index] for index in range(len(epoch))]

    of_ranks = on_threads(3, shared)
    assert len(epoch) > 1
    for index in range(len(epoch)):
        whole, parts = alone[index], [shares[index] for shares in of_ranks]
        expected = objective.loss(whole.batch)
        found = [objective.loss(part.batch) for part in parts if len(part.batch)]
        torch.testing.assert_close(sum((part.sums_K for part in found), torch.zeros(2)), expected.sums_K, rtol=1e-4, atol=1e-4)
        for part in parts:
            assert part.counts_K is not None and part.counts_K.tolist() == expected.counts_K.tolist()
            assert part.num_items == whole.num_items == int(whole.batch.lengths_B.sum())


def test_level_weights_must_be_one_for_each_level() -> None:
    generator, tokens_NL = made()
    with pytest.raises(ValueError, match="3 numbers for 2 levels"):
        PageWise(generator, tokens_NL, config(level_weights=[1, 2, 3]))
