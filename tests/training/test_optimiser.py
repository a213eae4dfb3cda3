from dataclasses import replace

import pytest
import torch

from semantide.services.training.optimiser import Muon, build_optimisers, orthogonal, rate_share, set_rate
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
    (optimiser,) = build_optimisers(model, config)
    set_rate(optimiser, 0.5)
    of = {parameter: group for group in optimiser.param_groups for parameter in group["params"]}
    assert len(of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert of[parameter]["weight_decay"] == (0.1 if parameter.ndim >= 2 else 0)
        assert of[parameter]["lr"] == pytest.approx(1.5e-3 if "embed" in name else 0.5e-3)


@pytest.mark.parametrize("shape", [(8, 8), (4, 12), (12, 4)])
def test_an_orthogonal_step_keeps_directions_and_evens_their_strength(shape: tuple[int, int]) -> None:
    matrices = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 3).view(-1, 1, 1)
    even = orthogonal(matrices)
    for matrix, result in zip(matrices, even, strict=True):
        left, _, right = torch.linalg.svd(matrix, full_matrices=False)
        strengths = torch.diagonal(left.T @ result @ right.T)
        assert float(strengths.min()) > 0.4 and float(strengths.max()) < 1.3
        torch.testing.assert_close(left @ strengths.diag() @ right, result, rtol=1e-3, atol=1e-4)


def test_muon_trains_the_layers_matrices_and_nothing_else() -> None:
    model = Generator(GeneratorConfig((4, 3), num_layers=1, hidden_size=16))
    adam, muon = build_optimisers(model, replace(tiny(), muon_rate=0.02))
    assert isinstance(muon, Muon)
    names = {parameter: name for name, parameter in model.named_parameters()}
    of_muon = {names[p] for group in muon.param_groups for p in group["params"]}
    assert of_muon == {name for name, p in model.named_parameters() if p.ndim == 2 and ".layers." in name}
    assert of_muon.isdisjoint(names[p] for group in adam.param_groups for p in group["params"])
    target = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.zeros(16, 64))
    optimiser = Muon([{"params": [weight], "base_rate": 0.1}])
    losses = []
    for step in range(60):
        set_rate(optimiser, 1 - step / 60)
        loss = (weight - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
