"""The serving API with states of beams' own in the layers of linear attention: the baseline of ``serving.py`` for hybrids, a process of its own.

All else is the product's: HTTP, scheduling, the search, softmax layers, kept prompts.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from linear_states import OwnStatesDecoder

from semantide.services import local
from semantide.services.serving import service
from semantide.services.serving.bundle import Bundle, load_bundle


def load_materialised(*arguments: Any, **options: Any) -> Bundle:
    """The live model with a decoder whose beams have states of their own."""
    bundle = load_bundle(*arguments, **options)
    return dataclasses.replace(bundle, model=OwnStatesDecoder(bundle.model.generator))  # type: ignore[attr-defined]


if __name__ == "__main__":
    service.load_bundle = load_materialised  # type: ignore[attr-defined]
    sys.exit(local.main(["api", "serving"]))
