"""The serving API with the classic engine in place of ours: the baseline of ``serving.py``, a process of its own.

HTTP, validation, look-ups, batching and answers are the product's; only the decoder and the search are exchanged.
"""

from __future__ import annotations

import dataclasses
import sys

from classic_engine import ClassicDecoder, classic_search

from semantide.services import local
from semantide.services.serving import engine, service
from semantide.services.serving.bundle import Bundle, load_bundle
from semantide.services.serving.registry import Pair
from semantide.shared.artifacts import ArtifactStore


def load_classic(store: ArtifactStore, pair: Pair) -> Bundle:
    """The live model with the classic decoder."""
    bundle = load_bundle(store, pair)
    return dataclasses.replace(bundle, model=ClassicDecoder(bundle.model.generator))  # type: ignore[attr-defined]


if __name__ == "__main__":
    engine.beam_search = classic_search  # type: ignore[attr-defined,assignment]
    service.load_bundle = load_classic  # type: ignore[attr-defined]
    sys.exit(local.main(["api", "serving"]))
