"""Real Helm, and manifests rendered by it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

Manifests = list[dict[str, Any]]


def _load(name: str) -> ModuleType:
    """A script beside this file, which runs without the package being installed."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def lint() -> ModuleType:
    """The script ``lint.py``, with a Helm that runs. Without one: a failure in CI, a skip elsewhere."""
    module = _load("lint")
    try:
        module.helm_binary()
    except module.HelmMissing as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(f"THE CHART IS NOT TESTED: {error}")
    return module


@pytest.fixture(scope="session")
def environment_table() -> ModuleType:
    """The script ``environment_table.py``."""
    return _load("environment_table")


@pytest.fixture(scope="session")
def values_table() -> ModuleType:
    """The script ``values_table.py``."""
    return _load("values_table")


@pytest.fixture(scope="session")
def render(lint: ModuleType) -> Callable[..., Manifests]:
    """A function that renders the chart: profile, further options, name of the release -> manifests."""

    @functools.cache
    def run(profile: str = "", *options: str, release: str = "shop") -> Manifests:
        outcome = lint.helm("template", release, str(lint.CHART), "--namespace", "shop", *lint.profile_options(profile), *options)
        assert outcome.returncode == 0, outcome.stderr
        return [manifest for manifest in yaml.safe_load_all(outcome.stdout) if manifest]

    return run


@pytest.fixture(scope="session")
def refuse(lint: ModuleType) -> Callable[..., str]:
    """A function that renders with wrong values and gives Helm's error."""

    def run(*options: str) -> str:
        outcome = lint.helm("template", "shop", str(lint.CHART), *options)
        assert outcome.returncode != 0, "the values were accepted"
        return str(outcome.stderr)

    return run
