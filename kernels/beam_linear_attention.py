"""Linear attention of many beams that share their prompt's state: what a beam did since is a short list of records, and no beam has a state of its own.

A state S [d, e] is read as S^T x. A token turns it into a S + k delta^T, with a = e^g its decay and delta = beta (v - a S^T k) under the delta rule, or
delta = v without it. So along a beam's ancestors 1..t, with G_j the sum of g from token j + 1 to the new one and G all of them,

    U(x) = e^G S^T x + sum_j e^(G_j) (k_j^T x) delta_j,    delta = beta (v - U(k)),    o = U(q) + (k^T q) delta

and a token's record (k, delta, g) never changes once written. Kept is the decay of each token, not its running sum: summed newest first over the few
ancestors, a decay of 0 (g of -inf) never meets another in a difference, a strong one does not swallow those after it, and every exponent is <= 0.

Rows of one call may follow one another, so a tree of suffix tokens (given items to be scored) is evaluated in one call too: the sum over ancestors is then
the forward substitution of (I + diag(beta) (K K^T . Gamma)) Delta = diag(beta) (V - diag(e^G) K S), taken in the order of the tree.

Legend: B beams (or nodes of trees) of all requests, G key heads, H value heads (a multiple of G), d key size, e value size, M states, N records, S tokens
behind and with the new one, n beams of one base and depth, t ancestors of each.
Source: OneLA (arXiv 2609.12399), with what is above in place of its running product.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.dispatch import kernel

RECORD_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the C++ kernels keep of beams' tokens, and how their structures call it."""

_CHUNK_BYTES = 4 << 20  # of states that are made at a time


@dataclass(frozen=True)
class BeamRecords:
    """What tokens did to the state, one row each, written once; the decay is kept in full precision.

    Shapes: ``k_NGd``, ``delta_NHe``, ``decay_NH1`` [N, H, 1], or [N, H, d] where each channel decays by itself.
    """

    k_NGd: Tensor
    delta_NHe: Tensor
    decay_NH1: Tensor

    @classmethod
    def empty(cls, rows: int, states_MHde: Tensor, key_heads: int, per_channel: bool, dtype: torch.dtype | None = None) -> BeamRecords:
        """Room for so many tokens beside such states, their keys and deltas in the states' type or another."""
        _, heads, size, value_size = states_MHde.shape
        dtype = dtype or states_MHde.dtype
        return cls(
            states_MHde.new_empty(rows, key_heads, size, dtype=dtype),
            states_MHde.new_empty(rows, heads, value_size, dtype=dtype),
            states_MHde.new_empty(rows, heads, size if per_channel else 1),
        )

    def __len__(self) -> int:
        return len(self.k_NGd)

    @property
    def num_bytes(self) -> int:
        """What all rows occupy."""
        return self.k_NGd.nbytes + self.delta_NHe.nbytes + self.decay_NH1.nbytes

    def rows(self, rows_N: Tensor) -> BeamRecords:
        """These rows alone, in this order."""
        return BeamRecords(self.k_NGd[rows_N], self.delta_NHe[rows_N], self.decay_NH1[rows_N])

    def grown(self, rows: int, used: int) -> BeamRecords:
        """Room for so many rows, the first ``used`` of which are these."""
        grown = BeamRecords(*(x.new_empty(rows, *x.shape[1:]) for x in (self.k_NGd, self.delta_NHe, self.decay_NH1)))
        grown.k_NGd[:used], grown.delta_NHe[:used], grown.decay_NH1[:used] = self.k_NGd[:used], self.delta_NHe[:used], self.decay_NH1[:used]
        return grown


@kernel
def beam_linear_attention(
    q_BGd: Tensor,
    k_BGd: Tensor,
    v_BHe: Tensor,
    g_BH1: Tensor,
    beta_BH: Tensor | None,
    states_MHde: Tensor,
    bases_B: Tensor,
    records: BeamRecords,
    rows_BS: Tensor,
) -> Tensor:
    """What each beam's new token reads [B, H, e]; its record is written to the row that ``rows_BS`` names last, or nowhere where that is -1.

    ``bases_B`` says from which state a beam goes on, the other columns of ``rows_BS`` which records stand between, oldest first; where beams differ in depth,
    -1 stands before the oldest. Ancestors of one call have to come before their descendants. Without ``beta_BH`` there is no delta rule.

    Shapes: ``g_BH1`` the logarithm of the decay, [B, H, 1] or [B, H, d], at most 0.
    Raises: ValueError when shapes do not fit, or a state, a row or the order does not exist.
    """
    _check(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)
    _check_rows(bases_B, len(states_MHde), rows_BS, len(records))
    share = v_BHe.shape[1] // k_BGd.shape[1]
    o_BHe = torch.empty_like(v_BHe)
    depth_B = (rows_BS[:, :-1] >= 0).sum(1)
    for depth, base in torch.stack([depth_B, bases_B], 1).unique(dim=0).tolist():
        chosen_n = ((depth_B == depth) & (bases_B == base)).nonzero().squeeze(1)
        behind_nt, own_n = rows_BS[chosen_n, rows_BS.shape[1] - 1 - depth : -1], rows_BS[chosen_n, -1]
        k_nGd, v_nHe = k_BGd[chosen_n], v_BHe[chosen_n]
        x_n2Hd = torch.stack([q_BGd[chosen_n], k_nGd], 1).repeat_interleave(share, 2)
        past = records.rows(behind_nt)
        k_ntHd, delta_ntHe = past.k_NGd.to(x_n2Hd.dtype).repeat_interleave(share, 2), past.delta_NHe.to(v_nHe.dtype)
        # Entry j is the sum of all decays from token j on, so that of the tokens after j is the next entry.
        sums_nTH1 = torch.cat([past.decay_NH1, g_BH1[chosen_n, None]], 1).flip(1).cumsum(1).flip(1)
        u_n2He = torch.einsum("nxhd,hde->nxhe", x_n2Hd * sums_nTH1[:, :1].exp(), states_MHde[base])
        weights_n2tH = torch.einsum("nthd,nxhd->nxth", k_ntHd * sums_nTH1[:, 1:].exp(), x_n2Hd)
        u_n2He = u_n2He + torch.einsum("nxth,nthe->nxhe", weights_n2tH, delta_ntHe)
        delta_nHe = v_nHe if beta_BH is None else beta_BH[chosen_n].unsqueeze(-1) * (v_nHe - u_n2He[:, 1])
        o_BHe[chosen_n] = u_n2He[:, 0] + (x_n2Hd[:, 0] * x_n2Hd[:, 1]).sum(-1, keepdim=True) * delta_nHe
        kept_n, own_n = own_n >= 0, own_n[own_n >= 0]
        records.k_NGd[own_n], records.delta_NHe[own_n] = as_record(k_nGd[kept_n], records.k_NGd.dtype), as_record(delta_nHe[kept_n], records.delta_NHe.dtype)
        records.decay_NH1[own_n] = g_BH1[chosen_n][kept_n]
    return o_BHe


@beam_linear_attention.register("cpu")
def beam_linear_attention_native(
    q_BGd: Tensor,
    k_BGd: Tensor,
    v_BHe: Tensor,
    g_BH1: Tensor,
    beta_BH: Tensor | None,
    states_MHde: Tensor,
    bases_B: Tensor,
    records: BeamRecords,
    rows_BS: Tensor,
) -> Tensor:
    """One product of a state with all beams that share it, in C++, and their ancestors replayed from registers; other types than float32 take the torch way.

    Raises: ValueError when shapes do not fit, or a state, a row or the order does not exist.
    """
    floats = (q_BGd, k_BGd, v_BHe, g_BH1, states_MHde, records.decay_NH1, *(() if beta_BH is None else (beta_BH,)))
    library = native.library_for(*floats)
    kept = (records.k_NGd, records.delta_NHe, records.decay_NH1)
    kind = RECORD_KINDS.get(records.k_NGd.dtype)
    if library is None or kind is None or records.delta_NHe.dtype != records.k_NGd.dtype or not all(x.is_contiguous() for x in kept):
        return beam_linear_attention.reference(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)
    _check(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)
    (beams, groups, size), (heads, value_size), steps = k_BGd.shape, v_BHe.shape[1:], rows_BS.shape[1]
    if not beams:
        return torch.empty_like(v_BHe)
    q_BGd, k_BGd, v_BHe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BGd, k_BGd, v_BHe))
    g_BH1, states_MHde, bases_B, rows_BS = g_BH1.contiguous(), states_MHde.contiguous(), bases_B.long().contiguous(), rows_BS.long().contiguous()
    beta_BH = None if beta_BH is None else beta_BH.contiguous()
    o_BHe = v_BHe.new_empty(v_BHe.shape)
    decays = g_BH1.shape[-1]
    arguments = native.BEAM_LINEAR.pack(
        *(beams, groups, heads, size, value_size, steps, decays, int(decays > 1), kind),
        *(q_BGd.data_ptr(), k_BGd.data_ptr(), v_BHe.data_ptr(), *q_BGd.stride()[:2], *k_BGd.stride()[:2], *v_BHe.stride()[:2]),
        *(g_BH1.data_ptr(), 0 if beta_BH is None else beta_BH.data_ptr(), states_MHde.data_ptr(), bases_B.data_ptr(), len(states_MHde), len(records)),
        *(x.data_ptr() for x in kept),
        *(rows_BS.data_ptr(), o_BHe.data_ptr()),
    )
    if not steps or native.call(library, "semantide_beam_linear", arguments):
        _check_rows(bases_B, len(states_MHde), rows_BS, len(records))
        raise AssertionError("the kernel refuses rows that are right")
    return o_BHe


@beam_linear_attention.register("cuda")
def beam_linear_attention_cuda(
    q_BGd: Tensor,
    k_BGd: Tensor,
    v_BHe: Tensor,
    g_BH1: Tensor,
    beta_BH: Tensor | None,
    states_MHde: Tensor,
    bases_B: Tensor,
    records: BeamRecords,
    rows_BS: Tensor,
) -> Tensor:
    """In Triton, with sums in float32; float64 and a torch without Triton take the torch way."""
    if find_spec("triton") is None or states_MHde.dtype == torch.float64:
        return beam_linear_attention.reference(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)
    _check(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)
    _check_rows(bases_B, len(states_MHde), rows_BS, len(records))
    from semantide.kernels.triton_beam_linear_attention import beam_linear_attention_triton

    return beam_linear_attention_triton(q_BGd, k_BGd, v_BHe, g_BH1, beta_BH, states_MHde, bases_B, records, rows_BS)


def as_record(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept of numbers in a type; those that are too large for it become its largest, since an infinite one would spoil all that follow."""
    return x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype) if dtype == torch.float16 else x.to(dtype)


def materialise(states_MHde: Tensor, bases_B: Tensor, records: BeamRecords, rows_BS: Tensor) -> Tensor:
    """The state of each beam [B, H, d, e] after all the tokens of its row: what replaying them each time becomes dearer than at some depth.

    Beside the result there is never more than a few megabytes.
    """
    states_BHde = states_MHde.new_empty(len(bases_B), *states_MHde.shape[1:])
    many = max(1, _CHUNK_BYTES // max(1, states_MHde[:1].nbytes))
    for begin in range(0, len(bases_B), many):
        some = slice(begin, begin + many)
        states_BHde[some] = _materialised(states_MHde, bases_B[some], records, rows_BS[some])
    return states_BHde


def _materialised(states_MHde: Tensor, bases_B: Tensor, records: BeamRecords, rows_BS: Tensor) -> Tensor:
    past = records.rows(rows_BS)
    sums_BSH1 = past.decay_NH1.flip(1).cumsum(1).flip(1)
    after_BSH1 = torch.cat([sums_BSH1[:, 1:], torch.zeros_like(sums_BSH1[:, :1])], 1)
    share = past.delta_NHe.shape[2] // past.k_NGd.shape[2]
    k_BSHd = past.k_NGd.to(states_MHde.dtype).repeat_interleave(share, 2) * after_BSH1.exp()
    states_BHde = states_MHde[bases_B]
    if rows_BS.shape[1]:
        states_BHde = states_BHde * sums_BSH1[:, 0].exp().unsqueeze(-1)
    return states_BHde + torch.einsum("bshd,bshe->bhde", k_BSHd, past.delta_NHe.to(states_MHde.dtype))


def break_even_depth(key_size: int, value_size: int) -> int:
    """From how many records on a beam's replay takes more arithmetic than a state of its own would.

    A step with such a state takes 7 d e operations (decay, both products, the update), one with the shared state 4 d e, and each record 4 d + 6 e.
    """
    return max(1, 3 * key_size * value_size // (4 * key_size + 6 * value_size))


def _check(
    q_BGd: Tensor,
    k_BGd: Tensor,
    v_BHe: Tensor,
    g_BH1: Tensor,
    beta_BH: Tensor | None,
    states_MHde: Tensor,
    bases_B: Tensor,
    records: BeamRecords,
    rows_BS: Tensor,
) -> None:
    beams, groups, size = k_BGd.shape
    heads, value_size = v_BHe.shape[1:]
    decays = g_BH1.shape[-1]
    fits = (
        q_BGd.shape == k_BGd.shape
        and len(v_BHe) == beams
        and heads % groups == 0
        and g_BH1.shape == (beams, heads, decays)
        and decays in (1, size)
        and (beta_BH is None or beta_BH.shape == (beams, heads))
        and states_MHde.shape[1:] == (heads, size, value_size)
    )
    if not fits:
        raise ValueError(
            f"queries {tuple(q_BGd.shape)}, keys {tuple(k_BGd.shape)}, values {tuple(v_BHe.shape)}, decays {tuple(g_BH1.shape)}, "
            f"beta {None if beta_BH is None else tuple(beta_BH.shape)}, states {tuple(states_MHde.shape)}: give [beams, heads, size], value heads a multiple of "
            "key heads, one decay per value head or one per channel, and states [states, value heads, key size, value size]"
        )
    shapes = (records.k_NGd.shape[1:], records.delta_NHe.shape[1:], records.decay_NH1.shape[1:])
    if shapes != ((groups, size), (heads, value_size), (heads, decays)) or bases_B.shape != (beams,) or rows_BS.ndim != 2 or len(rows_BS) != beams:
        raise ValueError(
            f"records of shapes {[tuple(shape) for shape in shapes]}, bases {tuple(bases_B.shape)}, rows {tuple(rows_BS.shape)}: give keys, deltas and decays as "
            f"the {beams} beams' own, one base and one list of rows for each beam"
        )


def _check_rows(bases_B: Tensor, states: int, rows_BS: Tensor, records: int) -> None:
    """Every base and row exists, what is missing stands first, and a row of this call is written before it is read."""
    if not len(rows_BS):
        return
    known_BS = rows_BS[:, :-1] >= 0
    if bool((bases_B < 0).any() or (bases_B >= states).any()):
        raise ValueError(f"bases from {int(bases_B.min())} to {int(bases_B.max())}, but there are {states} states")
    if not rows_BS.shape[1] or bool((rows_BS < -1).any() or (rows_BS >= records).any() or (known_BS[:, :-1] & ~known_BS[:, 1:]).any()):
        raise ValueError(
            f"rows {tuple(rows_BS.shape)} from {int(rows_BS.min()) if rows_BS.numel() else None} to {int(rows_BS.max()) if rows_BS.numel() else None}, but there "
            f"are {records} records: name the ancestors' rows, then the row to write, with -1 only before the oldest, and last where nothing is recorded"
        )
    place_N = torch.full((records + 1,), -1, dtype=torch.long, device=rows_BS.device)  # what is not recorded has no place
    order_B = torch.arange(len(rows_BS), device=rows_BS.device)
    written_B = rows_BS[:, -1] >= 0
    own_b = rows_BS[written_B, -1]
    place_N[own_b] = order_B[written_B]
    if bool((place_N[own_b] != order_B[written_B]).any() or (known_BS & (place_N[rows_BS[:, :-1]] >= order_B[:, None])).any()):
        raise ValueError("two beams write one row, or a row is read before it is written: give each beam a row of its own, ancestors before descendants")
