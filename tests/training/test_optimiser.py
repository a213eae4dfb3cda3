from dataclasses import replace

import pytest

from semantide.services.training.optimiser import build_optimiser, rate_share, set_rate
from semantide.services.training.recipes import tiny
from semantide.shared.models.generator import Generator, GeneratorConfig


def test_the_rate_warms_up_then_falls_along_a_cosine_to_its_last_share() -> None:
    config = replace(tiny(), warmup_steps=10, final_rate_share=0.1)
    assert [rate_share(config, step, 0.0) for step in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1, 1])
    assert rate_share(config, 99, 0.5) == pytest.approx(0.55)
    assert rate_share(config, 99, 1.0) == pytest.approx(0.1)
    assert rate_share(replace(config, warmup_steps=0), 0, 0.0) == 1


def test_matrices_decay_vectors_do_not_and_embeddings_have_their_own_rate() -> None:
    model = Generator(GeneratorConfig((4, 3)))
    config = replace(tiny(), weight_decay=0.1, learning_rate=1e-3, embedding_rate_scale=3.0)
    optimiser = build_optimiser(model, config)
    set_rate(optimiser, 0.5)
    of = {parameter: group for group in optimiser.param_groups for parameter in group["params"]}
    assert len(of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert of[parameter]["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0)
        assert of[parameter]["lr"] == pytest.approx(1.5e-3 if "embed" in name else 0.5e-3)
