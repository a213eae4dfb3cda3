"""Targets behind shared prompts: many items to be predicted from one reading of a history.

A block is one or more items that follow some first part of a prompt: the items of a page, the next item of a history, a rollout. It sees that part and itself and
no other block, so each comes out as a plain forward of the part followed by the block would have it, whatever else is asked of the same prompt.
Legend: T prompt tokens, R prompts, N prompt vectors, M of them that blocks follow, S tokens of all blocks, C blocks, I tokens of blocks that are read, D hidden size,
L levels, K codes of a level.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semantide.kernels.attention import jagged_attention
from semantide.kernels.branch_linear_attention import Branches
from semantide.kernels.target_attention import TargetSpans, target_attention
from semantide.shared.models.generator import Generator
from semantide.shared.models.seen_bias import shared_counts


@dataclass(frozen=True)
class TargetBlocks:
    """What is to be predicted, and after how much of which prompt.

    Shapes: ``tokens_S`` of whole items; ``offsets_C1`` [C + 1], int64, where each block's tokens begin; ``prompts_C`` the prompt of each block, ascending;
    ``items_C`` how many of the prompt's first items it sees.
    """

    tokens_S: Tensor
    offsets_C1: Tensor
    prompts_C: Tensor
    items_C: Tensor

    @classmethod
    def of_items(cls, tokens_CL: Tensor, prompts_C: Tensor, items_C: Tensor) -> TargetBlocks:
        """Each item a block of its own."""
        blocks, levels = tokens_CL.shape
        return cls(tokens_CL.flatten(), torch.arange(0, blocks * levels + 1, levels, device=tokens_CL.device), prompts_C, items_C)


def target_hidden(generator: Generator, tokens_T: Tensor, offsets_R1: Tensor, blocks: TargetBlocks) -> Tensor:
    """Hidden states from which each token of each block is predicted; the first of a block comes from the last place that it sees of its prompt.

    Shapes: ``tokens_T`` packs prompts with their begin tokens by ``offsets_R1`` [R + 1]; returns [S, D], normalised for ``logits``.
    Raises: ValueError where a block is no whole number of items, or sees more items than its prompt has.
    """
    vocabulary = generator.vocabulary
    levels, begin, shape = vocabulary.levels, len(vocabulary.layout.begin), generator.prompt_shape
    lengths_C = blocks.offsets_C1.diff()
    items_R = (offsets_R1.diff() - begin) // shape.tokens_per_item
    wrong_C = (lengths_C < levels) | (lengths_C % levels != 0) | (blocks.items_C < 0) | (blocks.items_C > items_R[blocks.prompts_C])
    if bool(wrong_C.any()) or bool((blocks.prompts_C.diff() < 0).any()):
        raise ValueError(
            f"{int(wrong_C.sum())} of {len(lengths_C)} blocks are no whole items of {levels} tokens or see more items than their prompt has, or prompts do not ascend: "
            "give each block at least one item, and the blocks in the order of their prompts"
        )
    x_ND, places_R1 = generator.prompt_vectors(tokens_T, offsets_R1)
    begins_C = places_R1[blocks.prompts_C]
    seen_C = begin + blocks.items_C * shape.places_per_item
    read_S = torch.ones(len(blocks.tokens_S), dtype=torch.bool, device=tokens_T.device)
    read_S[blocks.offsets_C1[1:] - 1] = False  # nothing is predicted from a block's last token
    block_S = torch.arange(len(lengths_C), device=tokens_T.device).repeat_interleave(lengths_C)
    within_S = torch.arange(len(block_S), device=tokens_T.device) - blocks.offsets_C1[:-1][block_S]
    spans = TargetSpans(blocks.offsets_C1 - torch.arange(len(lengths_C) + 1, device=tokens_T.device), begins_C, begins_C + seen_C)
    positions_N = torch.arange(len(x_ND), device=tokens_T.device) - places_R1[:-1].repeat_interleave(places_R1.diff())
    positions_I = (seen_C[block_S] + within_S)[read_S]
    cos, sin = generator.rotation(torch.cat([positions_N, positions_I]))
    many = len(x_ND)
    x = torch.cat([x_ND, generator.embed(blocks.tokens_S[read_S])])
    *earlier, last = generator.layers
    linear = any(layer.linear for layer in generator.layers)
    branches = Branches(places_R1, spans.ends_C, spans.offsets_C1) if linear else None
    for layer in earlier:
        if layer.linear:
            assert branches is not None
            x = layer.finish(x, layer.linear_attn.read_branches(layer.input_layernorm(x), branches))
            continue
        q, k, v = layer.project(x, cos, sin)
        prompts = jagged_attention(q[:many], k[:many], v[:many], places_R1)
        x = layer.finish(x, torch.cat([prompts, target_attention(q[many:], k[many:], v[many:], k[:many], v[:many], spans)]))
    # Of the prompts the last layer is asked only at the places that a block follows.
    asked_M, which_C = torch.unique(begins_C + seen_C - 1, return_inverse=True)
    rows = torch.cat([asked_M, torch.arange(many, len(x), device=x.device)])
    if last.linear:
        assert branches is not None
        outputs = [last.linear_attn.read_branches(last.input_layernorm(x), branches)[rows]]
    else:
        begin_M = places_R1[torch.searchsorted(places_R1, asked_M, right=True) - 1]
        k, v = last.keys_values(x, cos, sin)
        alone = TargetSpans(torch.arange(len(asked_M) + 1, device=x.device), begin_M, asked_M)
        q = last.queries(x[rows], cos[rows], sin[rows])
        outputs = [
            target_attention(q[: len(asked_M)], k[asked_M], v[asked_M], k[:many], v[:many], alone),
            target_attention(q[len(asked_M) :], k[many:], v[many:], k[:many], v[:many], spans),
        ]
    x = last.finish(x[rows], torch.cat(outputs))
    # A block's first token is predicted from its prompt, every other from the one before it.
    rows_S = torch.where(within_S == 0, which_C[block_S], len(asked_M) + (read_S.cumsum(0) - 1).roll(1))
    hidden_SD: Tensor = generator.model.norm(x[rows_S])
    return hidden_SD


def target_counts(generator: Generator, tokens_T: Tensor, offsets_R1: Tensor, blocks: TargetBlocks, level: int) -> Tensor | None:
    """What ``Generator.logits`` wants to know of the history at the tokens of one level, [tokens of that level, K]; None without ``seen_bias``.

    Only items that a block sees of its prompt count, not those of the block itself.
    """
    if not generator.config.seen_bias:
        return None
    vocabulary = generator.vocabulary
    levels, stride = vocabulary.levels, generator.prompt_shape.tokens_per_item
    firsts_L = torch.tensor([vocabulary.first(each) for each in range(levels)], device=tokens_T.device)
    inside_T = torch.ones(len(tokens_T), dtype=torch.bool, device=tokens_T.device)
    inside_T[offsets_R1[:-1]] = False
    codes_NL = tokens_T[inside_T].view(-1, stride)[:, :levels] - firsts_L
    offsets_items_R1 = (offsets_R1 - torch.arange(len(offsets_R1), device=tokens_T.device)) // stride
    items_C = blocks.offsets_C1.diff() // levels
    block_of = torch.arange(len(items_C), device=tokens_T.device).repeat_interleave(items_C)
    targets = blocks.tokens_S.view(-1, levels) - firsts_L
    seen = blocks.prompts_C[block_of], blocks.items_C[block_of]
    return shared_counts(codes_NL, offsets_items_R1, targets, *seen, level, vocabulary.level_sizes[level])


def target_logits(
    generator: Generator, tokens_T: Tensor, offsets_R1: Tensor, blocks: TargetBlocks, counts: Sequence[Tensor | None] | None = None
) -> Iterator[Tensor]:
    """Logits over each level's full code row, level after level, from which the items of the blocks are predicted.

    ``counts`` are those of ``target_counts``, where somebody has them already.
    Shapes: L of [items of all blocks, K].
    """
    hidden_SD = target_hidden(generator, tokens_T, offsets_R1, blocks)
    hidden_SLD = hidden_SD.unflatten(0, (-1, generator.vocabulary.levels))
    for level in range(generator.vocabulary.levels):
        seen_SK = target_counts(generator, tokens_T, offsets_R1, blocks, level) if counts is None else counts[level]
        yield generator.logits(hidden_SLD[:, level], level, seen_SK)


def target_log_probs(generator: Generator, tokens_T: Tensor, offsets_R1: Tensor, blocks: TargetBlocks) -> Tensor:
    """Logarithm of the probability of each token of each block among all codes of its level, in float32.

    With gradients, for training; whoever wants none has ``given_items.py``, which reads what prompts and items share once.
    Shapes: [S].
    """
    tokens_SL = blocks.tokens_S.view(-1, generator.vocabulary.levels)
    each = []
    for level, logits_SK in enumerate(target_logits(generator, tokens_T, offsets_R1, blocks)):
        codes_S1 = tokens_SL[:, level, None] - generator.vocabulary.first(level)
        each.append(logits_SK.float().log_softmax(-1).gather(1, codes_S1).squeeze(1))
    return torch.stack(each, 1).flatten()
