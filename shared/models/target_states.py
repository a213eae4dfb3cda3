"""The states of linear attention behind which blocks of targets go on.

A softmax layer finds what a block sees among the prompt's keys; a layer of linear attention needs the state after the last place that the block sees. So prompts are
read in parts that end where blocks begin, the first part of every prompt at once, then the second, and each block starts from the state after its part.
Legend: N prompt places, I places of blocks, C blocks, H heads, e size of a value, D hidden size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from semantide.shared.models.linear_layer import LinearAttention, LinearState


@dataclass(frozen=True)
class PromptParts:
    """Parts that are read at once: their places, where each begins among these, and after which of the step before it comes."""

    rows: Tensor
    offsets: Tensor
    after: Tensor


@dataclass(frozen=True)
class TargetStates:
    """In what parts prompts are read, and after which part each block goes on.

    Shapes: ``places_N`` where each place of the prompts comes out of the parts; ``parts_C``; ``offsets_C1`` [C + 1] of the blocks' places.
    """

    steps: tuple[PromptParts, ...]
    places_N: Tensor
    parts_C: Tensor
    offsets_C1: Tensor

    @classmethod
    def of(cls, bounds: Sequence[int], ends_C: Tensor, offsets_C1: Tensor) -> TargetStates:
        """``bounds`` are where the prompts begin and the last one ends, ``ends_C`` the places behind the last one that each block sees."""
        device, asked = ends_C.device, sorted(set(ends_C.tolist()))
        parts: list[list[tuple[int, int]]] = []
        for begin, end in pairwise(bounds):
            cuts = asked[bisect_left(asked, begin + 1) : bisect_left(asked, end)]
            parts.append(list(pairwise([begin, *cuts, end])))
        steps: list[PromptParts] = []
        rows: list[Tensor] = []
        numbers: dict[int, int] = {}
        before: dict[int, int] = {}
        for step in range(max(map(len, parts), default=0)):
            going = [prompt for prompt, cut in enumerate(parts) if step < len(cut)]
            after = torch.tensor([before[prompt] for prompt in going] if step else [], dtype=torch.long, device=device)
            spans = [parts[prompt][step] for prompt in going]
            rows.append(torch.cat([torch.arange(*span) for span in spans]).to(device))
            numbers |= {end: len(numbers) + place for place, (_, end) in enumerate(spans)}
            steps.append(PromptParts(rows[-1], torch.tensor([0, *accumulate(end - begin for begin, end in spans)], device=device), after))
            before = {prompt: place for place, prompt in enumerate(going)}
        order = torch.cat(rows) if rows else ends_C[:0]
        return cls(tuple(steps), order.argsort(), torch.tensor([numbers[end] for end in ends_C.tolist()], dtype=torch.long, device=device), offsets_C1)

    def read(self, mixer: LinearAttention, prompts_ND: Tensor, blocks_ID: Tensor) -> tuple[Tensor, Tensor]:
        """What the places of prompts and of blocks read, from the layer's normalised input.

        Shapes: [N, D], [I, D] -> [N, H, e], [I, H, e].
        """
        outputs, states = [], []
        before: LinearState | None = None
        for step in self.steps:
            if before is not None:
                before = LinearState(*(x[step.after] for x in before))
            o_PHe, before = mixer.read(prompts_ND[step.rows], step.offsets, before)
            outputs.append(o_PHe)
            states.append(before)
        seen = LinearState(*(torch.cat(parts)[self.parts_C] for parts in zip(*states, strict=True))) if states else None
        blocks_IHe, _ = mixer.read(blocks_ID, self.offsets_C1, seen)
        return torch.cat(outputs)[self.places_N] if outputs else blocks_IHe[:0], blocks_IHe
