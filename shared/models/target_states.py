"""The states of linear attention behind which blocks of targets go on.

A softmax layer finds what a block sees among the prompt's keys; a layer of linear attention needs the state after the last place that the block sees. So prompts are
read in parts that end where blocks begin, the first part of every prompt at once, then the second, and each block starts from the state after its part.
Where no gradient is asked for, short blocks share that state as beams do, and none has a copy of it.
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
from semantide.shared.models.linear_records import TokenRecords

_SHORT = 16  # tokens of a block that cost less to replay than a state of its own


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
    chains_IS: Tensor | None
    """Where blocks are short, the places of each block up to each of its own, with -1 before the first."""

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
        parts_C = torch.tensor([numbers[end] for end in ends_C.tolist()], dtype=torch.long, device=device)
        return cls(tuple(steps), order.argsort(), parts_C, offsets_C1, _chains(offsets_C1))

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
        seen = LinearState(*(torch.cat(parts) for parts in zip(*states, strict=True))) if states else None
        if seen is not None and self.chains_IS is not None and not torch.is_grad_enabled():
            parts_I = self.parts_C.repeat_interleave(self.offsets_C1.diff())
            records = TokenRecords.empty(len(blocks_ID), mixer.config, mixer.form, blocks_ID, blocks_ID.dtype)
            blocks_IHe = records.read(mixer, blocks_ID, seen.inputs_BQC, parts_I, seen.state_BHde, parts_I, self.chains_IS)
        else:
            blocks_IHe, _ = mixer.read(blocks_ID, self.offsets_C1, None if seen is None else LinearState(*(x[self.parts_C] for x in seen)))
        return torch.cat(outputs)[self.places_N] if outputs else blocks_IHe[:0], blocks_IHe


def _chains(offsets_C1: Tensor) -> Tensor | None:
    lengths_C = offsets_C1.diff()
    longest = int(lengths_C.max()) if len(lengths_C) else 0
    if not 0 < longest <= _SHORT:
        return None
    places_I = torch.arange(int(offsets_C1[-1]), device=offsets_C1.device)
    chains_IS = places_I[:, None] - torch.arange(longest - 1, -1, -1, device=offsets_C1.device)
    return chains_IS.masked_fill(chains_IS < offsets_C1[:-1].repeat_interleave(lengths_C)[:, None], -1)
