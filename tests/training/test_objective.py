from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from semantide.services.training.objective import NextItem, NextToken
from semantide.services.training.recipes import tiny
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig

LEVELS = (4, 3)
CODES = np.array([[a, b] for a in range(4) for b in range(3)])


def test_every_place_is_supervised_over_its_own_code_row() -> None:
    torch.manual_seed(0)
    model = Generator(GeneratorConfig(LEVELS, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16))
    tokens = torch.from_numpy(model.vocabulary.item_tokens(CODES))
    histories = [[3, 5, 11], [7]]
    loss, parts = NextToken(model, tokens, tiny()).loss(Jagged.from_sequences(histories))
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
    weighted, _ = NextToken(model, tokens, replace(tiny(), level_weights=(0.0, 2.0))).loss(Jagged.from_sequences(histories))
    torch.testing.assert_close(weighted, 2 * expected[1])
    with pytest.raises(ValueError, match="level_weights has 3 numbers for 2 levels"):
        NextToken(model, tokens, replace(tiny(), level_weights=(1.0, 1.0, 1.0)))


def test_sasrec_predicts_each_item_from_those_before_it() -> None:
    torch.manual_seed(0)
    model = SASRec(SASRecConfig(num_items=12, hidden_size=8, positions="start")).eval()
    histories = [[3, 5, 11], [7]]
    loss, _ = NextItem(model, tiny()).loss(Jagged.from_sequences(histories))
    single = []
    for history in histories:
        for place, target in enumerate(history):
            rows = torch.tensor([-1, *history[:place]])
            single.append(F.cross_entropy(model.logits(model(rows, torch.tensor([0, len(rows)]))[-1]), torch.tensor(target)))
    torch.testing.assert_close(loss, torch.stack(single).mean())
