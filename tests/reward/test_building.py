"""A reward model learns who likes what, whatever the place and however popular, and knows what it does not know."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from conftest import COLOURS, NUM_ITEMS, NUM_USERS, write_shop  # type: ignore[import-not-found]

from semantide.services.reward.building import build
from semantide.services.reward.examples import HELD_OUT, TEST, TRAIN, UNUSED, examples, so_far
from semantide.services.reward.recipes import RewardTraining, recipe
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict, Corrupt
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback, history_ends
from semantide.shared.models.preference import PreferenceModel, combined
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.rollouts import Rollouts, rollouts_of

DATASET, REWARD = "datasets/sha256-" + "d" * 64, "rewards/sha256-" + "e" * 64
