"""The shop, its artifacts, and a reward model of it that is trained once for all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from semantide.services.reward.building import build
from semantide.services.reward.recipes import recipe
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.dataset import Dataset
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback

from .shade_shop import write_shop

WEIGHTS = {"click": 1.0, "order": 3.0, "hate": -1.0}


@pytest.fixture
def store(settings) -> ArtifactStore:  # type: ignore[no-untyped-def]
    return ArtifactStore(settings.artifacts_root)


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shop(tmp_path_factory.mktemp("shop") / "dataset")


@pytest.fixture(scope="session")
def trained(shop: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a reward model."""
    config = recipe("tiny", {"epochs": 20, "patience": 4, "batch_exposures": 128, "learning_rate": 0.01})
    model = build(Dataset.load(shop), Feedback.load(shop), EventActions.load(shop), config, WEIGHTS, 0, tmp_path_factory.mktemp("fitting"))
    folder = tmp_path_factory.mktemp("reward") / "reward"
    model.save(folder)
    return folder
