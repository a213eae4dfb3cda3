from dataclasses import asdict, replace

import pytest
import torch

from semantide.services.training.recipes import RECIPES, RETRIEVER_SIZES, recipe
from semantide.shared.models.generator import Generator


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_full_and_can_be_changed_in_single_numbers(name: str) -> None:
    assert recipe(name).recipe == name
    changed = recipe(name, {"epochs": 3, "generator": {"dropout": 0}, "level_weights": [1, 2]})
    assert (changed.epochs, changed.generator.dropout, changed.level_weights) == (3, 0.0, (1.0, 2.0))
    assert {**asdict(changed), "epochs": 0, "generator": 0, "level_weights": 0} == {**asdict(recipe(name)), "epochs": 0, "generator": 0, "level_weights": 0}


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_hybrids_have_as_many_parameters_as_their_softmax_siblings(size: str) -> None:
    counts = []
    for name in (size, f"hybrid-{size}"):
        with torch.device("meta"):
            model = Generator(replace(recipe(name).generator, level_sizes=(256, 256, 256)))
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert abs(counts[1] - counts[0]) < 0.015 * counts[0]
    assert recipe(f"hybrid-{size}", {"generator": {"layer_types": ["kda"] * len(model.layers)}}).generator.types == ("kda",) * len(model.layers)


def test_retrievers_come_in_five_sizes_of_either_layer_for_their_longest_histories() -> None:
    for layer, prefix in (("hstu", "retriever"), ("fuxi", "fuxi")):
        configs = [recipe(f"{prefix}-{size}") for size in RETRIEVER_SIZES]
        assert all((config.model_type, config.retriever.layer, config.retriever.max_items) == ("retriever", layer, config.max_items) for config in configs)
        widths = [config.retriever.hidden_size**2 * config.retriever.num_layers for config in configs]
        assert widths == sorted(widths)
        assert [config.max_items for config in configs[-2:]] == [2048, 4096]
    assert recipe("retriever-tiny", {"retriever": {"layer": "fuxi"}}).retriever.layer == "fuxi"
    with pytest.raises(ValueError, match="layer is 'gru'"):
        recipe("retriever-tiny", {"retriever": {"layer": "gru"}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epoch": 3}, "'epoch' is unknown"),
        ({"epochs": 0}, "epochs is 0: only a checkpoint"),
        ({"epochs": 1.5}, "epochs is 1.5: give a whole number"),
        ({"epochs": True}, "epochs is True"),
        ({"crop": "middle"}, "crop is 'middle': give one of last"),
        ({"crop": 3}, "crop is 3: give a str"),
        ({"generator": 5}, "generator is 5: give an object"),
        ({"generator": {"layers": 5}}, r"'generator\.layers' is unknown"),
        ({"generator": {"level_sizes": [3]}}, "not to be set"),
        (
            {"generator": {"layer_types": ["linear"]}},
            "layer_types is .*give one of full_attention, linear_attention, kda, gla, mamba2 for each of the 3 layers",
        ),
        ({"generator": {"layer_types": "kda"}}, "give a list with a name"),
        ({"generator": {"linear": {"num_key_heads": 0}}}, "num_key_heads is 0"),
        ({"generator": {"rotary_share": 0.3}}, "rotary_share is 0.3"),
        ({"generator": {"num_heads": 3}}, "num_heads 3 must be a multiple"),
        ({"level_weights": "all"}, "give a list of numbers"),
    ],
)
def test_a_wrong_change_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("small", changes)


def test_an_unknown_recipe_is_named() -> None:
    with pytest.raises(ValueError, match="'huge' is unknown: give one of tiny"):
        recipe("huge")
