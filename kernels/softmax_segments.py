"""The sampled softmax in segments: sums of exponentials that go on from segment to segment, and a backward pass that computes logits again.

Legend as in ``sampled_softmax.py``; further b targets and r negatives of a segment, P = 1 + M places: a source's own and those of its takers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from semantide.kernels import native
from semantide.kernels.known_rows import Masks
from semantide.kernels.segment_rows import SegmentRows, Stored

_NUMBERS = 1 << 20  # of one segment's vectors, or of its logits


class Token(NamedTuple):
    """Negatives of each target's own; ``takers_PT`` says at each place which target takes a source's negatives."""

    rows_TR: Tensor
    shift_TR: Tensor | None
    log_draws: float
    takers_PT: Tensor
    as_logits: bool
    temperature: float
    segment: int


class TokenSums(torch.autograd.Function):
    """The logarithm of the sum of exponentials of every target's negatives, its own and those it takes from partners."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, vectors_UD: Tensor, stored: Stored, token: Token, masks: Masks) -> Tensor:
        """See ``torch.autograd.Function``: the sums; what is kept is of size [T, D] and [T]."""
        hidden_TD = hidden_TD.detach().contiguous()
        plain = _Plain.of(hidden_TD, stored, token, masks)
        sums_TP = hidden_TD.new_full((len(hidden_TD), len(token.takers_PT)), -torch.inf)
        if plain is not None:
            plain.sums(sums_TP)
        else:
            for source, logits_Pbr in _logits(hidden_TD, stored, token, masks):
                sums_Pb = logits_Pbr.logsumexp(2)
                for place, targets_b in enumerate(token.takers_PT[:, source.targets]):
                    sums_TP[targets_b, place] = torch.logaddexp(sums_TP[targets_b, place], sums_Pb[place])
        sums_T = sums_TP.logsumexp(1)
        ctx.save_for_backward(hidden_TD, sums_T)
        ctx.given = stored, token, masks, vectors_UD
        return sums_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Logits are computed again, segment by segment, and their shares added to both gradients."""
        hidden_TD, sums_T = ctx.saved_tensors
        stored, token, masks, vectors_UD = ctx.given
        hidden_grad_TD, vectors_grad_UD = torch.zeros_like(hidden_TD), torch.zeros_like(vectors_UD)
        plain = _Plain.of(hidden_TD, stored, token, masks)
        if plain is not None:
            plain.gradients(sums_T, grad_T.contiguous(), hidden_grad_TD, vectors_grad_UD)
            return hidden_grad_TD, vectors_grad_UD, None, None, None
        for source, logits_Pbr in _logits(hidden_TD, stored, token, masks):
            takers_Pb = token.takers_PT[:, source.targets]
            shares_Pbr = (logits_Pbr - sums_T[takers_Pb].unsqueeze(2)).exp().nan_to_num(nan=0.0) * (grad_T[takers_Pb] / token.temperature).unsqueeze(2)
            if token.as_logits:
                # All takers' shares move the source's own logits.
                shares_Pbr, takers_Pb = shares_Pbr.sum(0, keepdim=True), takers_Pb[:1]
            rows_grad_brD = torch.einsum("pbr,pbd->brd", shares_Pbr, hidden_TD[takers_Pb])
            for shares_br, targets_b in zip(shares_Pbr, takers_Pb, strict=True):
                hidden_grad_TD.index_add_(0, targets_b, torch.einsum("br,brd->bd", shares_br, source.vectors))
            stored.add(vectors_grad_UD, source.rows, rows_grad_brD)
        return hidden_grad_TD, vectors_grad_UD, None, None, None


class SharedSums(torch.autograd.Function):
    """The logarithm of the sum of exponentials of negatives that all targets share: matrix products of blocks."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        vectors_UD: Tensor,
        stored: Stored,
        shared_S: Tensor,
        shift_S: Tensor | None,
        masks: Masks,
        temperature: float,
        segment: int,
    ) -> Tensor:
        """See ``torch.autograd.Function``: the sums; what is kept is of size [T, D] and [T]."""
        hidden_TD = hidden_TD.detach()
        sums_T = hidden_TD.new_full((len(hidden_TD),), -torch.inf)
        for block, _, logits_br in _shared_logits(hidden_TD, stored, shared_S, shift_S, masks, temperature, segment):
            sums_T[block.targets] = torch.logaddexp(sums_T[block.targets], logits_br.logsumexp(1))
        ctx.save_for_backward(hidden_TD, sums_T)
        ctx.given = stored, shared_S, shift_S, masks, temperature, segment, vectors_UD
        return sums_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        """Logits are computed again, segment by segment, and their shares added to both gradients."""
        hidden_TD, sums_T = ctx.saved_tensors
        stored, shared_S, shift_S, masks, temperature, segment, vectors_UD = ctx.given
        hidden_grad_TD, vectors_grad_UD = torch.zeros_like(hidden_TD), torch.zeros_like(vectors_UD)
        for block, rows_grad_rD, logits_br in _shared_logits(hidden_TD, stored, shared_S, shift_S, masks, temperature, segment):
            shares_br = (logits_br - sums_T[block.targets].unsqueeze(1)).exp_().nan_to_num_(nan=0.0).mul_((grad_T[block.targets] / temperature).unsqueeze(1))
            hidden_grad_TD[block.targets] += shares_br @ block.vectors
            rows_grad_rD.addmm_(shares_br.T, hidden_TD[block.targets])
            if block.last:
                stored.add(vectors_grad_UD, block.rows, rows_grad_rD)
        return hidden_grad_TD, vectors_grad_UD, None, None, None, None, None, None


class _Source(NamedTuple):
    targets: slice
    rows: Tensor
    vectors: Tensor
    last: bool = True


def _logits(hidden_TD: Tensor, stored: Stored, token: Token, masks: Masks) -> Iterator[tuple[_Source, Tensor]]:
    """Segments of sources, and their masked logits at every place [P, b, r]."""
    num_targets, num_negatives = token.rows_TR.shape
    width = max(1, min(token.segment or num_negatives, num_negatives, _NUMBERS // max(stored.size * len(token.takers_PT), 1) or 1))
    height = max(1, _NUMBERS // (width * max(stored.size, 1)))
    cuts = [
        (slice(top, min(top + height, num_targets)), slice(left, min(left + width, num_negatives)))
        for top in range(0, num_targets, height)
        for left in range(0, num_negatives, width)
    ]
    for (targets, columns), (rows_br, vectors_brD) in zip(cuts, SegmentRows(stored, [token.rows_TR[cut] for cut in cuts], hidden_TD.device), strict=True):
        scorers = token.takers_PT[:1, targets] if token.as_logits else token.takers_PT[:, targets]
        logits_Pbr = torch.einsum("pbd,brd->pbr", hidden_TD[scorers], vectors_brD) / token.temperature
        if token.shift_TR is not None:
            logits_Pbr -= token.shift_TR[targets, columns] + token.log_draws
        out_Pbr = torch.stack([masks.out(takers_b, rows_br) for takers_b in token.takers_PT[:, targets]])
        if token.as_logits:
            out_Pbr |= out_Pbr[:1].clone()
        yield _Source(targets, rows_br, vectors_brD), logits_Pbr.masked_fill(out_Pbr, -torch.inf)


def _shared_logits(
    hidden_TD: Tensor, stored: Stored, shared_S: Tensor, shift_S: Tensor | None, masks: Masks, temperature: float, segment: int
) -> Iterator[tuple[_Source, Tensor, Tensor]]:
    """Segments of shared negatives by blocks of targets: the block, a place to sum the segment's gradient [r, D], and masked logits [b, r]."""
    width = max(1, min(segment or 1024, len(shared_S)))
    height = max(1, _NUMBERS // width)
    cuts = [slice(left, min(left + width, len(shared_S))) for left in range(0, len(shared_S), width)]
    for columns, (rows_r, vectors_rD) in zip(cuts, SegmentRows(stored, [shared_S[cut] for cut in cuts], hidden_TD.device), strict=True):
        rows_grad_rD = torch.zeros_like(vectors_rD)
        for top in range(0, len(hidden_TD), height):
            targets = slice(top, min(top + height, len(hidden_TD)))
            logits_br = hidden_TD[targets] @ vectors_rD.T / temperature
            if shift_S is not None:
                logits_br -= shift_S[columns]
            logits_br.masked_fill_(masks.out(targets, rows_r.expand(len(logits_br), -1)), -torch.inf)
            yield _Source(targets, rows_r, vectors_rD, targets.stop == len(hidden_TD)), rows_grad_rD, logits_br


@dataclass(frozen=True)
class _Plain:
    """The C++ way: what the library takes, with the tensors behind its addresses."""

    library: Any
    hidden_TD: Tensor
    stored: Stored
    token: Token
    masks: Masks

    @classmethod
    def of(cls, hidden_TD: Tensor, stored: Stored, token: Token, masks: Masks) -> _Plain | None:
        library = native.library_for(hidden_TD) if stored.table_UD.is_cpu and stored.wide == torch.float32 else None
        return None if library is None else cls(library, hidden_TD, stored, token, masks)

    def sums(self, sums_TP: Tensor) -> None:
        if self._call("semantide_sampled_sums", sums=sums_TP):
            raise IndexError(f"a negative's row is {int(self.token.rows_TR.max())} and there are {self.masks.num_rows} vectors: give rows below that number")

    def gradients(self, sums_T: Tensor, weights_T: Tensor, hidden_grad_TD: Tensor, vectors_grad_UD: Tensor) -> None:
        self._call("semantide_sampled_gradients", totals=sums_T, weights=weights_T, hidden_grad=hidden_grad_TD, table_grad=vectors_grad_UD)

    def _call(self, name: str, **written: Tensor) -> int:
        token, masks, stored = self.token, self.masks, self.stored
        rows_TR = token.rows_TR.contiguous() if token.rows_TR.dtype in (torch.int32, torch.int64) else token.rows_TR.long().contiguous()
        shift_TR = None if token.shift_TR is None else token.shift_TR.float().contiguous()
        takers_MT, positives_T = token.takers_PT[1:].contiguous(), masks.positives_T.long().contiguous()
        known = masks.known_K is not None and masks.sequences_T is not None and len(masks.known_K) > 0
        sequences_T, known_K = (masks.sequences_T.long().contiguous(), masks.known_K.contiguous()) if known else (None, None)  # type: ignore[union-attr]
        bounds_2T = None
        if sequences_T is not None and known_K is not None:
            bounds_2T = torch.searchsorted(known_K, torch.stack([sequences_T, sequences_T + 1]) * masks.num_rows)
        kind = {torch.float32: 0, torch.float16: 1, torch.int8: 2}[stored.table_UD.dtype]

        def at(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        arguments = native.SAMPLED_SOFTMAX.pack(
            *(*rows_TR.shape[:1], masks.num_rows, rows_TR.shape[1], len(takers_MT), stored.size, kind),
            *(rows_TR.dtype == torch.int64, token.as_logits, known),
            *(at(self.hidden_TD), at(stored.table_UD), at(stored.scales_U), at(positives_T), at(rows_TR), at(shift_TR)),
            *(at(takers_MT), at(sequences_T), at(known_K), at(bounds_2T)),
            *(at(written.get(key)) for key in ("sums", "totals", "weights", "hidden_grad", "table_grad")),
            *(1 / token.temperature, token.log_draws),
        )
        return native.call(self.library, name, arguments)
