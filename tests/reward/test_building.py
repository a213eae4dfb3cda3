"""A reward model learns who likes what, whatever the place and however popular, and knows what it does not know."""

from __future__ import annotations

DATASET, REWARD = "datasets/sha256-" + "d" * 64, "rewards/sha256-" + "e" * 64
