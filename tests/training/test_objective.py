from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.objective import LossSum, NextItem, NextToken, with_probes
from semantide.services.training.recipes import tiny
from semantide.shared.decoding.brute_force import score_every_item
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.prompt_spelling import PromptSpelling
from semantide.shared.models.sasrec import SASRec, SASRecConfig
from semantide.shared.models.token_merger import MergerConfig

LEVELS = (4, 3)
CODES = np.array([[a, b] for a in range(4) for b in range(3)])


def histories_of(sequences) -> HistoryBatch:  # type: ignore[no-untyped-def]
    return HistoryBatch.of(Jagged.from_sequences(sequences))


def told(sums: LossSum) -> tuple[torch.Tensor, torch.Tensor]:
    return sums.total(), sums.parts_K().detach()


def test_every_place_is_supervised_over_its_own_code_row() -> None:
    torch.manual_seed(0)
    model = Generator(GeneratorConfig(LEVELS, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16))
    tokens = torch.from_numpy(model.vocabulary.item_tokens(CODES))
    histories = [[3, 5, 11], [7]]
    loss, parts = told(NextToken(model, tokens, tiny()).loss(histories_of(histories)))
    sums = [[], []]  # type: list[list[torch.Tensor]]
    for history in histories:
        whole = torch.from_numpy(model.vocabulary.history_tokens(tokens[history].numpy()))
        hidden = model(whole, torch.tensor([0, len(whole)]))
        for place in range(len(whole) - 1):
            level = place % 2
            logits = F.log_softmax(model.logits(hidden[place], level), -1)
            sums[level].append(-logits[whole[place + 1] - model.vocabulary.first(level)])
    expected = torch.stack([torch.stack(level).mean() for level in sums])
    torch.testing.assert_close(parts, expected)
    torch.testing.assert_close(loss, expected.sum())
    weighted, _ = told(NextToken(model, tokens, replace(tiny(), level_weights=(0.0, 2.0))).loss(histories_of(histories)))
    torch.testing.assert_close(weighted, 2 * expected[1])
    with pytest.raises(ValueError, match="level_weights has 3 numbers for 2 levels"):
        NextToken(model, tokens, replace(tiny(), level_weights=(1.0, 1.0, 1.0)))


def test_sasrec_predicts_each_item_from_those_before_it() -> None:
    torch.manual_seed(0)
    model = SASRec(SASRecConfig(num_items=12, hidden_size=8, positions="start")).eval()
    histories = [[3, 5, 11], [7]]
    loss, _ = told(NextItem(model, tiny()).loss(histories_of(histories)))
    single = []
    for history in histories:
        for place, target in enumerate(history):
            rows = torch.tensor([-1, *history[:place]])
            single.append(F.cross_entropy(model.logits(model(rows, torch.tensor([0, len(rows)]))[-1]), torch.tensor(target)))
    torch.testing.assert_close(loss, torch.stack(single).mean())


def test_probes_repeat_one_item_of_each_history_behind_it() -> None:
    torch.manual_seed(0)
    histories = [[3, 5, 11], [7], [1, 2]]
    extended, probes = with_probes(Jagged.from_sequences(histories))
    for sequence, history in zip(extended, histories, strict=True):
        assert sequence.tolist()[:-1] == history
        assert sequence.tolist()[-1] in history
    assert extended.values[~probes].tolist() == [3, 5, 11, 7, 1, 2]


def test_repeats_can_be_unlearned_without_touching_what_else_is_supervised() -> None:
    torch.manual_seed(0)
    shape = GeneratorConfig(LEVELS, num_layers=2, hidden_size=32, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32)
    model = Generator(shape)
    tokens = torch.from_numpy(model.vocabulary.item_tokens(CODES))
    random = np.random.default_rng(0)
    batch = histories_of([random.permutation(12)[:6] for _ in range(40)])
    plain, parts = told(NextToken(model, tokens, tiny()).loss(batch))
    objective = NextToken(model, tokens, replace(tiny(), repeat_weight=2.0))
    loss, both = told(objective.loss(batch))
    torch.testing.assert_close(both[:2], parts)
    torch.testing.assert_close(loss, plain + 2 * both[2])
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        objective.loss(batch).total().backward()
        optimiser.step()
    assert float(told(objective.loss(batch))[1][2]) < 0.95 * float(both[2])


@pytest.mark.parametrize(
    "merger", [MergerConfig(), MergerConfig(True), MergerConfig(True, "kept"), MergerConfig(True, "merged"), MergerConfig(True, features=("gaps",))]
)
@pytest.mark.parametrize("repeat_weight", [0.0, 1.0])
def test_what_is_trained_is_what_decoding_scores(repeat_weight: float, merger: MergerConfig) -> None:
    """With a correction by what was seen, with repeats to unlearn, and however the prompt is read."""
    torch.manual_seed(0)
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 16}
    model = Generator(GeneratorConfig(LEVELS, **shape, seen_bias=True, merger=merger)).double()  # type: ignore[arg-type]
    torch.nn.init.normal_(model.seen_bias.weight)
    if merger.enabled:
        torch.nn.init.normal_(model.merger.proj.weight, std=0.2)
    histories = [[3, 5, 3, 4, 11], [7], [1, 2]]
    tokens = torch.from_numpy(model.vocabulary.item_tokens(CODES))
    _, parts = told(NextToken(model, tokens, replace(tiny(), repeat_weight=repeat_weight)).loss(histories_of(histories)))
    scores = []
    for history, place in [(each, place) for each in histories for place in range(len(each))]:
        prompt = torch.from_numpy(PromptSpelling.of(model, CODES).prompt(np.array(history[:place], dtype=np.int64)))
        scores.append(score_every_item(GeneratorDecoder(model), CODES, prompt, torch.tensor([0, len(prompt)]))[0, history[place]])
    assert float(parts[:2].sum()) == pytest.approx(-np.mean(scores), rel=1e-5)
