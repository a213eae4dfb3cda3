"""Look-ups, sums and steps of rows against torch and against dense optimisers."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.kernels import native
from semantide.kernels.jagged_embedding import SegmentOrder, adagrad_rows, adam_rows, gather_rows, segment_order, segment_sum, unique_ids

IDS = st.integers(1, 200).flatmap(lambda rows: st.tuples(st.just(rows), st.lists(st.integers(0, rows - 1), max_size=60), st.sampled_from([1, 3, 16, 33, 64])))


@pytest.mark.skipif(native.library() is None, reason="the C++ kernels are not built: make native")
@settings(deadline=None, max_examples=80)
@given(case=IDS, level=st.integers(0, 2), seed=st.integers(0, 99))
def test_the_native_forms_equal_the_references(case: tuple[int, list[int], int], level: int, seed: int) -> None:
    rows, ids, size = case
    loaded = native.library()
    assert loaded is not None
    ids_T = torch.tensor(ids, dtype=torch.int64)
    generator = torch.Generator().manual_seed(seed)
    weight_ND, values_TD = torch.randn(rows, size, generator=generator), torch.randn(len(ids), size, generator=generator)
    try:
        loaded.semantide_limit(level)
        fast = unique_ids(ids_T, rows)
        slow = unique_ids.reference(ids_T, rows)
        assert torch.equal(fast.ids_U, slow.ids_U) and torch.equal(fast.inverse_T, slow.inverse_T)
        order, expected = segment_order(fast.inverse_T, len(fast.ids_U)), segment_order.reference(fast.inverse_T, len(fast.ids_U))
        assert torch.equal(order.order_T, expected.order_T) and torch.equal(order.starts_U1, expected.starts_U1)
        assert torch.equal(gather_rows(weight_ND, ids_T), gather_rows.reference(weight_ND, ids_T))
        sums_UD = torch.zeros(len(fast.ids_U), size, dtype=torch.float64).index_add_(0, fast.inverse_T, values_TD.double())
        torch.testing.assert_close(segment_sum(values_TD, order).double(), sums_UD, rtol=1e-5, atol=1e-5)
        if ids:
            torch.testing.assert_close(segment_sum.reference(values_TD.double(), order), sums_UD)
        for optimiser, state in (
            (adagrad_rows, (torch.rand(rows),)),
            (adam_rows, (torch.randn(rows, size), torch.rand(rows, size), torch.arange(rows) % 7.0)),
            (adam_rows, (torch.randn(rows, size), torch.rand(rows), torch.arange(rows) % 7.0)),
        ):
            betas = (0.9, 0.98) if optimiser is adam_rows else ()
            results = []
            for function, gradients, given_order in (
                (optimiser, values_TD, order),
                (optimiser, segment_sum(values_TD, order), None),
                (optimiser.reference, segment_sum(values_TD, order), None),
            ):
                mine = copy.deepcopy((weight_ND, *state))
                function(*mine, fast.ids_U, gradients, 0.1, *betas, given_order)
                results.append(mine)
            for other in results[1:]:
                for left, right in zip(results[0], other, strict=True):
                    torch.testing.assert_close(left, right, rtol=2e-5, atol=1e-5)
            untouched = torch.ones(rows, dtype=torch.bool)
            untouched[fast.ids_U] = False
            for before, after in zip((weight_ND, *state), results[0], strict=True):
                assert torch.equal(before[untouched], after[untouched])
    finally:
        loaded.semantide_limit(2)


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    inverse_T = torch.randint(0, 3000, (20_000,), generator=generator)
    inverse_T[:3000] = torch.arange(3000)
    values_TD, order, before = torch.randn(20_000, 24, generator=generator), segment_order(inverse_T, 3000), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            weight_ND, sums_N = torch.zeros(3000, 24), torch.zeros(3000)
            adagrad_rows(weight_ND, sums_N, torch.arange(3000), values_TD, 0.1, order)
            results.append((segment_sum(values_TD, order), weight_ND, sums_N))
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(left, right) for left, right in zip(results[0], result, strict=True))


def test_adam_on_all_rows_is_torchs_adam() -> None:
    generator = torch.Generator().manual_seed(1)
    weight_ND = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    parameter = torch.nn.Parameter(weight_ND.clone())
    theirs = torch.optim.Adam([parameter], lr=0.05, betas=(0.9, 0.98))
    first_ND, second_ND, steps_N = torch.zeros_like(weight_ND), torch.zeros_like(weight_ND), torch.zeros(9, dtype=torch.float64)
    for _ in range(6):
        gradient_ND = torch.randn(9, 5, generator=generator, dtype=torch.float64)
        parameter.grad = gradient_ND
        theirs.step()
        adam_rows(weight_ND, first_ND, second_ND, steps_N, torch.arange(9), gradient_ND, 0.05, 0.9, 0.98)
    torch.testing.assert_close(weight_ND, parameter.detach())


@pytest.mark.parametrize("ids", [[-1], [4], [0, 9], [1 << 40]])
def test_an_id_outside_the_table_is_named(ids: list[int]) -> None:
    ids_T = torch.tensor(ids)
    for ask in (
        lambda: unique_ids(ids_T, 4),
        lambda: gather_rows(torch.zeros(4, 2), ids_T),
        lambda: gather_rows.reference(torch.zeros(4, 2), ids_T),
        lambda: adagrad_rows(torch.zeros(4, 2), torch.zeros(4), ids_T, torch.zeros(len(ids), 2), 0.1),
    ):
        with pytest.raises(ValueError, match="table of 4 rows"):
            ask()


def test_nothing_asked_gives_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    ids_U, inverse_T = unique_ids(empty, 4)
    order = segment_order(inverse_T, 0)
    assert len(ids_U) == len(inverse_T) == 0 and isinstance(order, SegmentOrder)
    assert gather_rows(torch.zeros(4, 2), empty).shape == (0, 2) and segment_sum(torch.zeros(0, 2), order).shape == (0, 2)


def test_gradients_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one for each row"):
        adagrad_rows(torch.zeros(4, 2), torch.zeros(4), torch.tensor([1, 2]), torch.zeros(3, 2), 0.1)
