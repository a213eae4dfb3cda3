"""A run is found again by its configuration, after an upgrade too."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from semantide.services.training import run_config
from semantide.services.training.alignment_recipes import align_recipe
from semantide.services.training.recipes import recipe

CONFIGS = [recipe("tiny", {}), recipe("hybrid-tiny", {}), recipe("pagewise", {}), align_recipe("grpo-sr", {})]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.recipe)
def test_a_configuration_is_its_own_and_any_other_number_makes_another(config: Any) -> None:
    saved = run_config.plain(config)
    assert run_config.same(saved, config)
    for name, value in saved.items():
        other = {**saved, name: [value]}
        assert not run_config.same(other, config), name
    assert not run_config.same({**saved, "of a later version": 1}, config)
    assert not run_config.same(None, config)


@pytest.mark.parametrize("config", CONFIGS[:3], ids=lambda config: config.recipe)
def test_what_an_older_version_did_not_know_counts_as_its_default(config: Any) -> None:
    saved = run_config.plain(config)
    usual = recipe("tiny", {}).generator
    for field in fields(config.generator):
        older = {**saved, "generator": {name: value for name, value in saved["generator"].items() if name != field.name}}
        at_default = getattr(config.generator, field.name) == getattr(type(usual)(), field.name)
        assert run_config.same(older, config) == at_default, field.name
    newer = replace(config, generator=replace(config.generator, attention_gate=True))
    assert not run_config.same({**saved, "generator": {name: value for name, value in saved["generator"].items() if name != "attention_gate"}}, newer)
