"""Softmax loss over one positive and sampled negatives, with sharing between targets, logQ correction and masks.

All rows are indices into the table of distinct vectors that a batch has fetched; a negative row of -1 is none.

Legend: T targets, U fetched rows, R negatives of a target, S negatives shared by all targets, D features,
        M partners a target shares with (an expansion of k is M = k - 1), K keys of known positives.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from semantide.kernels.dispatch import kernel
from semantide.kernels.known_rows import Masks, known_keys
from semantide.kernels.segment_rows import Precision, Stored
from semantide.kernels.softmax_segments import SharedSums, Token, TokenSums

__all__ = ["Precision", "Sharing", "known_keys", "sampled_softmax", "segmented"]

Sharing = Literal["vectors", "logits"]


@kernel
def sampled_softmax(
    hidden_TD: Tensor,
    vectors_UD: Tensor,
    positives_T: Tensor,
    negatives_TR: Tensor | None = None,
    shared_S: Tensor | None = None,
    *,
    log_q_TR: Tensor | None = None,
    log_q_S: Tensor | None = None,
    temperature: float = 1.0,
    sequences_T: Tensor | None = None,
    known_K: Tensor | None = None,
    partners_MT: Tensor | None = None,
    sharing: Sharing = "vectors",
    precision: Precision = "float32",
    segment: int = 0,
) -> Tensor:
    """The loss of each target: log of the summed exponentials of its positive's and its negatives' logits, less the positive's logit.

    ``log_q_TR`` and ``log_q_S`` are the logarithms of the probability that one draw gives this negative; the logits of negatives then lose
    the logarithm of the expected number of such draws, which makes the sum of exponentials an unbiased estimate of the one over all items.
    The positive, which is always there, is not corrected. A negative that is the target's positive, or known of its sequence
    (``known_K`` of ``known_keys``, ``sequences_T`` the sequence of each target), is left out.

    ``partners_MT`` holds M permutations of the targets: target i also takes the negatives of its partners, either their vectors, scored
    afresh, or with ``sharing="logits"`` the logits that the partners have computed with their own hidden states.
    ``precision`` is that of the negatives' vectors; products are summed in float32, and the gradient passes as if nothing were rounded.
    ``segment`` bounds how many negatives of a target are at work at once (0: what suits the device); results do not depend on it.

    The registered implementations never hold an array of targets x negatives x features, nor one of targets x negatives, so that their memory does
    not grow with R or S. ``vectors_UD`` may lie in the memory of the host and ``hidden_TD`` on a device: then segments are copied while the one
    before is at work, and the gradient of the vectors is summed on the host.

    Shapes: [T, D], [U, D], [T], [T, R], [S] -> [T].
    Source: arXiv 2605.13433, 3.4.
    """
    _check(hidden_TD, vectors_UD, positives_T, negatives_TR, shared_S, log_q_TR, log_q_S, sequences_T, known_K, partners_MT)
    plain_UD = vectors_UD.detach()
    rounded_UD = vectors_UD + (Stored.of(plain_UD, precision).whole() - plain_UD)
    masks = Masks(positives_T, sequences_T, known_K, len(vectors_UD))
    positive_T = (hidden_TD * vectors_UD[positives_T]).sum(-1) / temperature
    logits = [positive_T.unsqueeze(1)]

    def masked(logits_TN: Tensor, rows_TN: Tensor) -> Tensor:
        return logits_TN.masked_fill(masks.out(slice(None), rows_TN), -torch.inf)

    if negatives_TR is not None:
        expansion = 1 if partners_MT is None else 1 + len(partners_MT)
        shift_TR = _correction(log_q_TR, negatives_TR.shape[1] * expansion)

        def scored(rows_TR: Tensor, shift_TR: Tensor | None) -> Tensor:
            logits_TR = torch.einsum("td,trd->tr", hidden_TD, rounded_UD[rows_TR.clamp(min=0)]) / temperature
            return logits_TR if shift_TR is None else logits_TR - shift_TR

        own_TR = scored(negatives_TR, shift_TR)
        logits.append(masked(own_TR, negatives_TR))
        for partner_T in () if partners_MT is None else partners_MT:
            rows_TR = negatives_TR[partner_T]
            if sharing == "vectors":
                logits.append(masked(scored(rows_TR, None if shift_TR is None else shift_TR[partner_T]), rows_TR))
            else:
                logits.append(masked(masked(own_TR, negatives_TR)[partner_T], rows_TR))
    if shared_S is not None:
        logits_TS = hidden_TD @ rounded_UD[shared_S.clamp(min=0)].T / temperature
        shift_S = _correction(log_q_S, len(shared_S))
        logits.append(masked(logits_TS if shift_S is None else logits_TS - shift_S, shared_S.expand(len(hidden_TD), -1)))
    return torch.cat(logits, dim=1).logsumexp(1) - positive_T


@sampled_softmax.register("cpu")
@sampled_softmax.register("cuda")
@sampled_softmax.register("npu")
def segmented(
    hidden_TD: Tensor,
    vectors_UD: Tensor,
    positives_T: Tensor,
    negatives_TR: Tensor | None = None,
    shared_S: Tensor | None = None,
    *,
    log_q_TR: Tensor | None = None,
    log_q_S: Tensor | None = None,
    temperature: float = 1.0,
    sequences_T: Tensor | None = None,
    known_K: Tensor | None = None,
    partners_MT: Tensor | None = None,
    sharing: Sharing = "vectors",
    precision: Precision = "float32",
    segment: int = 0,
) -> Tensor:
    """``sampled_softmax`` with memory that does not grow with the number of negatives; the C++ library takes float32 on a CPU."""
    _check(hidden_TD, vectors_UD, positives_T, negatives_TR, shared_S, log_q_TR, log_q_S, sequences_T, known_K, partners_MT)
    stored = Stored.of(vectors_UD.detach(), precision)
    masks = Masks(positives_T, sequences_T, known_K, len(vectors_UD))
    found_TD = F.embedding(positives_T.to(vectors_UD.device), vectors_UD).to(hidden_TD.device)
    positive_T = (hidden_TD * found_TD).sum(-1) / temperature
    sums = [positive_T]
    if negatives_TR is not None:
        own_T = torch.arange(len(hidden_TD), device=hidden_TD.device)
        takers_PT = own_T.unsqueeze(0) if partners_MT is None else torch.cat([own_T.unsqueeze(0), partners_MT.argsort(1)])
        log_draws = math.log(max(negatives_TR.shape[1] * len(takers_PT), 1))
        token = Token(negatives_TR, log_q_TR, log_draws, takers_PT, sharing == "logits", temperature, segment)
        sums.append(TokenSums.apply(hidden_TD, vectors_UD, stored, token, masks))
    if shared_S is not None:
        sums.append(SharedSums.apply(hidden_TD, vectors_UD, stored, shared_S, _correction(log_q_S, len(shared_S)), masks, temperature, segment))
    return torch.stack(sums).logsumexp(0) - positive_T


def _correction(log_q: Tensor | None, draws: int) -> Tensor | None:
    """The logarithm of how often each negative is expected among that many draws."""
    return None if log_q is None else log_q + math.log(max(draws, 1))


def _check(
    hidden_TD: Tensor,
    vectors_UD: Tensor,
    positives_T: Tensor,
    negatives_TR: Tensor | None,
    shared_S: Tensor | None,
    log_q_TR: Tensor | None,
    log_q_S: Tensor | None,
    sequences_T: Tensor | None,
    known_K: Tensor | None,
    partners_MT: Tensor | None,
) -> None:
    """Raises: ValueError where shapes do not belong together."""
    num_targets = len(hidden_TD)
    if hidden_TD.ndim != 2 or vectors_UD.ndim != 2 or hidden_TD.shape[1] != vectors_UD.shape[1] or positives_T.shape != (num_targets,):
        raise ValueError(
            f"hidden states {tuple(hidden_TD.shape)}, vectors {tuple(vectors_UD.shape)}, positives {tuple(positives_T.shape)}: give [T, D], [U, D] and [T]"
        )
    if negatives_TR is not None and (negatives_TR.ndim != 2 or len(negatives_TR) != num_targets):
        raise ValueError(f"negatives {tuple(negatives_TR.shape)} for {num_targets} targets: give [T, R]; what all targets share is shared_S")
    if shared_S is not None and shared_S.ndim != 1:
        raise ValueError(f"shared negatives {tuple(shared_S.shape)}: give [S]")
    if log_q_TR is not None and (negatives_TR is None or log_q_TR.shape != negatives_TR.shape):
        raise ValueError(f"log_q_TR {tuple(log_q_TR.shape)}: give one number for each of negatives_TR")
    if log_q_S is not None and (shared_S is None or log_q_S.shape != shared_S.shape):
        raise ValueError(f"log_q_S {tuple(log_q_S.shape)}: give one number for each of shared_S")
    if (sequences_T is None) != (known_K is None) or (sequences_T is not None and sequences_T.shape != (num_targets,)):
        raise ValueError("known positives take sequences_T [T] and known_K together")
    if partners_MT is not None and (negatives_TR is None or partners_MT.ndim != 2 or partners_MT.shape[1] != num_targets):
        raise ValueError(f"partners {tuple(partners_MT.shape)}: give [M, T] permutations of the targets, beside negatives_TR")
    if partners_MT is not None and not torch.equal(partners_MT.sort(1).values, torch.arange(num_targets, device=partners_MT.device).expand_as(partners_MT)):
        raise ValueError("a row of partners names a target twice: give permutations of the targets")
