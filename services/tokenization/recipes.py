"""Full tokenizer configurations by name."""

from __future__ import annotations

from collections.abc import Callable

from semantide.shared.errors import BadData
from semantide.shared.models.tokenizer import TokenizerConfig


def default() -> TokenizerConfig:
    """Collaborative vectors with content at 0.7 of their weight, levels by the number of items."""
    return TokenizerConfig()


def compact() -> TokenizerConfig:
    """A small first level for dense catalogs of a few thousand items with long histories."""
    return TokenizerConfig(level_sizes=(64, 64), content_weight=0.3)


def content_only() -> TokenizerConfig:
    """Ids from what items say alone, for catalogs whose histories do not matter yet."""
    return TokenizerConfig(collaborative_weight=0.0)


def long_ids() -> TokenizerConfig:
    """Three levels of 256 codes and one more that counts up, the layout most papers use."""
    return TokenizerConfig(level_sizes=(256, 256, 256), resolver="append", fill=1.0)


RECIPES: dict[str, Callable[[], TokenizerConfig]] = {"default": default, "compact": compact, "content_only": content_only, "long_ids": long_ids}


def recipe(name: str) -> TokenizerConfig:
    """The configuration of a name; empty for the default.

    Raises: BadData.
    """
    if (name or "default") not in RECIPES:
        raise BadData(f"tokenizer recipe {name!r} is unknown: known are {', '.join(RECIPES)}")
    return RECIPES[name or "default"]()
