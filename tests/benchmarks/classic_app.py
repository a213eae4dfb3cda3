"""The serving API with the classic engine in place of ours: the baseline of ``serving.py``, a process of its own.

HTTP, validation, look-ups, scheduling and answers are the product's; only the decoder and the search are exchanged.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import torch
from classic_engine import ClassicDecoder, ClassicSearch, ClassicState
from torch import Tensor

from semantide.services import local
from semantide.services.serving import service
from semantide.services.serving.bundle import Bundle, load_bundle
from semantide.shared.models.prompt_cache import PromptCache


class ServedDecoder(ClassicDecoder):
    """The classic decoder as the scheduler wants it. Nothing is kept of earlier prompts."""

    def begin(self, tokens_T: Tensor, offsets_R1: Tensor, cached: Any = None, leases: Any = None, remembered: Any = None) -> tuple[Tensor, ClassicState]:
        """See ``ServingModel``."""
        return super().begin(tokens_T, offsets_R1)

    def step(self, state: ClassicState, level: int, parents_RW: Tensor, codes_RW: Tensor, counts: Sequence[int] | None = None) -> Tensor:
        """See ``StepModel``."""
        return super().step(state, level, parents_RW, codes_RW)

    @torch.inference_mode()
    def keep(self, state: ClassicState, requests: Sequence[int]) -> None:
        """Go on with these requests only."""
        many = len(state.lengths_R)
        kept = torch.tensor(list(requests), dtype=torch.int64)
        if state.caches:
            width = state.caches[0][0].shape[0] // many
            rows_N = (kept[:, None] * width + torch.arange(width)).flatten()
            state.caches = [(k.index_select(0, rows_N), v.index_select(0, rows_N)) for k, v in state.caches]
            if state.visible_RS is not None:
                state.visible_RS = state.visible_RS[kept]
        else:
            tokens_N = torch.cat([torch.arange(state.offsets_R1[place], state.offsets_R1[place + 1]) for place in kept.tolist()] or [kept])
            state.prompts = [(k[tokens_N], v[tokens_N]) for k, v in state.prompts]
            state.offsets_R1 = torch.cat([torch.zeros(1, dtype=torch.int64), state.lengths_R[kept].cumsum(0)])
            state.longest = int(state.lengths_R[kept].max()) if len(kept) else 0
        state.lengths_R = state.lengths_R[kept]


class ServedSearch(ClassicSearch):
    """The classic search as the scheduler wants it: some of its requests may leave."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Live beams of each request."""
        return tuple(self._live_RW.sum(1).tolist())

    def keep(self, requests: Sequence[int]) -> None:
        """Go on with these requests only."""
        kept = torch.tensor(list(requests), dtype=torch.int64)
        width = max((self.counts[request] for request in requests), default=1)
        self._owners_R, self._widths_R = self._owners_R[kept], self._widths_R[kept]
        self._nodes_RW, self._live_RW, self._scores_RW, self._paths_RWL = (
            table[kept, :width] for table in (self._nodes_RW, self._live_RW, self._scores_RW, self._paths_RWL)
        )


def load_classic(*arguments: Any, **options: Any) -> Bundle:
    """The live model with the classic decoder and search."""
    bundle = load_bundle(*arguments, **options)
    decoder = ServedDecoder(bundle.model.generator)  # type: ignore[attr-defined]
    return dataclasses.replace(bundle, model=decoder, search=ServedSearch, prompts=PromptCache(0))  # type: ignore[arg-type]


if __name__ == "__main__":
    service.load_bundle = load_classic  # type: ignore[attr-defined]
    sys.exit(local.main(["api", "serving"]))
