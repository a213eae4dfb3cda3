"""Embedding look-ups without padding: each id once, rows gathered, gradients summed per row, and an optimiser that touches only rows that were used.

Nothing here is as large as a padded batch or, but for the tables themselves, as a table. Gradients of one row are added in the order in which it was asked
for, so that sums do not depend on the number of threads. Other devices than the CPU, other types than float32, and a missing C++ build take the torch way.
Legend: T asked ids, U unique ones among them, N rows of the table, D features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from semantide.kernels import native
from semantide.kernels.dispatch import kernel

ADAGRAD_EPSILON = ADAM_EPSILON = 1e-8


class UniqueIds(NamedTuple):
    """Each asked id once, ascending, and where each asked one is among them."""

    ids_U: Tensor
    inverse_T: Tensor


class SegmentOrder(NamedTuple):
    """The asked places in the order of their segments: those of segment u are ``order_T[starts_U1[u] : starts_U1[u + 1]]``, ascending."""

    order_T: Tensor
    starts_U1: Tensor


@kernel
def unique_ids(ids_T: Tensor, num_rows: int) -> UniqueIds:
    """De-duplicate ids of a table of ``num_rows`` rows.

    Raises: ValueError for an id outside the table.
    """
    _check(ids_T, num_rows)
    return UniqueIds(*torch.unique(ids_T, return_inverse=True))


@unique_ids.register("cpu")
def unique_ids_native(ids_T: Tensor, num_rows: int) -> UniqueIds:
    """A bit for each row of the table, and no sorting."""
    loaded = native.library()
    if loaded is None or ids_T.dtype != torch.int64 or num_rows > 64 * max(len(ids_T), 1 << 20):
        return unique_ids.reference(ids_T, num_rows)
    ids_T = ids_T.contiguous()
    words = (num_rows + 63) // 64
    bits, ranks = torch.zeros(words, dtype=torch.int64), torch.empty(words, dtype=torch.int64)
    ids_U, inverse_T = torch.empty(min(len(ids_T), num_rows), dtype=torch.int64), torch.empty_like(ids_T)
    addresses = (x.data_ptr() for x in (ids_T, bits, ranks, ids_U, inverse_T))
    found = native.call(loaded, "semantide_unique_ids", native.UNIQUE_IDS.pack(len(ids_T), num_rows, *addresses))
    if found < 0:
        _check(ids_T, num_rows)
    return UniqueIds(ids_U[:found], inverse_T)


@kernel
def segment_order(inverse_T: Tensor, num_segments: int) -> SegmentOrder:
    """Sort places by segment; places of one segment stay in order."""
    starts_U1 = torch.zeros(num_segments + 1, dtype=torch.int64, device=inverse_T.device)
    torch.cumsum(torch.bincount(inverse_T, minlength=num_segments), 0, out=starts_U1[1:])
    return SegmentOrder(inverse_T.argsort(stable=True), starts_U1)


@segment_order.register("cpu")
def segment_order_native(inverse_T: Tensor, num_segments: int) -> SegmentOrder:
    """A counting sort.

    Raises: ValueError for a segment that does not exist.
    """
    loaded = native.library()
    if loaded is None:
        return segment_order.reference(inverse_T, num_segments)
    inverse_T = inverse_T.contiguous()
    order = SegmentOrder(torch.empty_like(inverse_T), torch.empty(num_segments + 1, dtype=torch.int64))
    arguments = native.SEGMENT_ORDER.pack(len(inverse_T), num_segments, inverse_T.data_ptr(), order.starts_U1.data_ptr(), order.order_T.data_ptr())
    if native.call(loaded, "semantide_segment_order", arguments):
        raise ValueError(f"segments from {int(inverse_T.min())} to {int(inverse_T.max())}, but there are {num_segments}")
    return order


@kernel
def gather_rows(weight_ND: Tensor, ids_T: Tensor) -> Tensor:
    """The rows of some ids: [T, D].

    Raises: ValueError for an id outside the table.
    """
    _check(ids_T, len(weight_ND))
    rows_TD: Tensor = weight_ND[ids_T]
    return rows_TD


@gather_rows.register("cpu")
def gather_rows_native(weight_ND: Tensor, ids_T: Tensor) -> Tensor:
    """Copies rows while the next ones are on their way from memory."""
    loaded = native.library_for(weight_ND)
    if loaded is None or not weight_ND.is_contiguous():
        return gather_rows.reference(weight_ND, ids_T)
    _check(ids_T, len(weight_ND))
    ids_T = ids_T.long().contiguous()
    out_TD = weight_ND.new_empty(len(ids_T), weight_ND.shape[1])
    arguments = native.GATHER_ROWS.pack(len(ids_T), weight_ND.shape[1], weight_ND.data_ptr(), ids_T.data_ptr(), out_TD.data_ptr())
    native.call(loaded, "semantide_gather_rows", arguments)
    return out_TD


@kernel
def segment_sum(values_TD: Tensor, order: SegmentOrder) -> Tensor:
    """Sum of the rows of each segment, none of which is empty: [U, D]."""
    if len(order.starts_U1) == 1:
        return values_TD.new_zeros(0, *values_TD.shape[1:])  # torch refuses to reduce no segments
    sums_UD: Tensor = torch.segment_reduce(values_TD[order.order_T], "sum", lengths=order.starts_U1.diff(), axis=0)
    return sums_UD


@segment_sum.register("cpu")
def segment_sum_native(values_TD: Tensor, order: SegmentOrder) -> Tensor:
    """One pass over the rows; a segment is added up by one thread."""
    loaded = native.library_for(values_TD)
    if loaded is None or not values_TD.is_contiguous():
        return segment_sum.reference(values_TD, order)
    count, size = len(order.starts_U1) - 1, values_TD.shape[1]
    out_UD = values_TD.new_empty(count, size)
    addresses = (x.data_ptr() for x in (values_TD, order.order_T, order.starts_U1, out_UD))
    native.call(loaded, "semantide_segment_sums", native.SEGMENT_SUMS.pack(count, size, *addresses))
    return out_UD


@kernel
def adagrad_rows(weight_ND: Tensor, sums_N: Tensor, ids_U: Tensor, gradients: Tensor, rate: float, order: SegmentOrder | None = None) -> None:
    """A step of row-wise Adagrad, in place: one sum of mean squares a row.

    ``gradients`` are those of the unique rows [U, D], or with an ``order`` those of the asked places [T, D], which are summed on the way.
    Source: Duchi et al., Adaptive subgradient methods, 2011; one accumulator a row as in DLRM.
    """
    gradients_UD = gradients if order is None else segment_sum(gradients, order)
    sums_U = sums_N[ids_U] + gradients_UD.square().mean(1)
    sums_N[ids_U] = sums_U
    weight_ND[ids_U] -= rate * gradients_UD / (sums_U.sqrt() + ADAGRAD_EPSILON).unsqueeze(1)


@adagrad_rows.register("cpu")
def adagrad_rows_native(weight_ND: Tensor, sums_N: Tensor, ids_U: Tensor, gradients: Tensor, rate: float, order: SegmentOrder | None = None) -> None:
    """Sum and step in one pass: the summed gradient of a row never leaves the nearest cache."""
    if not _step(0, weight_ND, (sums_N, None, None, None), ids_U, gradients, (rate, 0.0, 0.0, ADAGRAD_EPSILON), order):
        adagrad_rows.reference(weight_ND, sums_N, ids_U, gradients, rate, order)


@kernel
def adam_rows(
    weight_ND: Tensor, first_ND: Tensor, second: Tensor, steps_N: Tensor, ids_U: Tensor, gradients: Tensor, rate: float, beta1: float, beta2: float,
    order: SegmentOrder | None = None,
) -> None:  # fmt: skip
    """A step of Adam for the rows that were used, in place; each row counts its own steps.

    ``second`` is [N, D], or [N] for the row-wise form with one second moment a row, of the mean square. ``gradients`` as in ``adagrad_rows``.
    Source: Kingma and Ba, Adam, 2015; the lazy form.
    """
    gradients_UD = gradients if order is None else segment_sum(gradients, order)
    steps_U1 = steps_N[ids_U].add_(1).unsqueeze(1)
    first_UD = first_ND[ids_U].lerp_(gradients_UD, 1 - beta1)
    squares = gradients_UD.square() if second.ndim == 2 else gradients_UD.square().mean(1)
    moved = second[ids_U].lerp_(squares, 1 - beta2)
    steps_N[ids_U], first_ND[ids_U], second[ids_U] = steps_U1.squeeze(1), first_UD, moved
    second_UD = moved if moved.ndim == 2 else moved.unsqueeze(1)
    bias1_U1, bias2_U1 = 1 - beta1**steps_U1, 1 - beta2**steps_U1
    weight_ND[ids_U] -= rate * (first_UD / bias1_U1) / ((second_UD / bias2_U1).sqrt() + ADAM_EPSILON)


@adam_rows.register("cpu")
def adam_rows_native(
    weight_ND: Tensor, first_ND: Tensor, second: Tensor, steps_N: Tensor, ids_U: Tensor, gradients: Tensor, rate: float, beta1: float, beta2: float,
    order: SegmentOrder | None = None,
) -> None:  # fmt: skip
    """See ``adagrad_rows_native``."""
    by_row = second.ndim == 1
    state = (second if by_row else None, first_ND, None if by_row else second, steps_N)
    if not _step(1 if by_row else 2, weight_ND, state, ids_U, gradients, (rate, beta1, beta2, ADAM_EPSILON), order):
        adam_rows.reference(weight_ND, first_ND, second, steps_N, ids_U, gradients, rate, beta1, beta2, order)


def _step(
    kind: int,
    weight_ND: Tensor,
    state: tuple[Tensor | None, ...],
    ids_U: Tensor,
    gradients: Tensor,
    numbers: tuple[float, float, float, float],
    order: SegmentOrder | None,
) -> bool:
    """Whether the C++ took the step."""
    tensors = (weight_ND, gradients, *(x for x in state if x is not None))
    loaded = native.library_for(*tensors)
    if loaded is None or not all(x.is_contiguous() for x in tensors):
        return False
    _check(ids_U, len(weight_ND))
    ids_U = ids_U.long().contiguous()
    count = len(ids_U) if order is None else len(order.starts_U1) - 1
    if count != len(ids_U) or (order is None and len(gradients) != count) or gradients.shape[1] != weight_ND.shape[1]:
        raise ValueError(f"gradients {tuple(gradients.shape)} for {len(ids_U)} rows of {weight_ND.shape[1]} features: give one for each row")
    places = (0, 0) if order is None else (order.order_T.data_ptr(), order.starts_U1.data_ptr())
    addresses = (0 if x is None else x.data_ptr() for x in state)
    arguments = native.STEP_ROWS.pack(
        count, gradients.shape[1], gradients.data_ptr(), *places, 0, kind, ids_U.data_ptr(), weight_ND.data_ptr(), *addresses, *numbers
    )
    native.call(loaded, "semantide_step_rows", arguments)
    return True


def _check(ids: Tensor, num_rows: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise ValueError(f"ids from {int(ids.min())} to {int(ids.max())} for a table of {num_rows} rows: give rows of the table")
