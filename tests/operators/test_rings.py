"""Which NPUs of a node a pod gets."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.rings import choose, indices_of, largest_run, mask_of, pods_that_fit, ring_masks, worth

SHAPES = st.sampled_from([(8, 4), (8, 0), (8, 8), (16, 8), (16, 4), (16, 0), (4, 1), (1, 0), (6, 4)])


@st.composite
def nodes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Free NPUs, capacity, ring."""
    capacity, ring = draw(SHAPES)
    return draw(st.integers(0, (1 << capacity) - 1)), capacity, ring


@given(nodes(), st.integers(0, 18))
def test_what_is_chosen_is_free_and_keeps_to_rings(node: tuple[int, int, int], count: int) -> None:
    free, capacity, ring = node
    chosen, masks = choose(free, capacity, ring, count), ring_masks(capacity, ring)
    size = masks[0].bit_count()
    whole = [mask for mask in masks if free & mask == mask and mask.bit_count() == size]
    parts = sorted(((free & mask).bit_count() for mask in masks), reverse=True)
    need, rest = divmod(count, size)
    possible = count > 0 and len(whole) >= need and (rest == 0 or sum(part >= rest for part in parts) > need)
    assert bool(chosen) == possible
    if chosen:
        assert chosen & ~free == 0 and chosen.bit_count() == count
        touched = [(chosen & mask).bit_count() for mask in masks if chosen & mask]
        assert sorted(touched, reverse=True) == [size] * need + ([rest] if rest else [])


@given(nodes(), st.integers(1, 16), st.data())
def test_more_free_npus_never_carry_fewer_pods(node: tuple[int, int, int], count: int, data: st.DataObject) -> None:
    free, capacity, ring = node
    fewer = free & data.draw(st.integers(0, (1 << capacity) - 1))
    assert pods_that_fit(fewer, capacity, ring, count) <= pods_that_fit(free, capacity, ring, count)
    assert largest_run(fewer, capacity, ring) <= largest_run(free, capacity, ring)
    assert worth(fewer, capacity, ring) <= worth(free, capacity, ring)


@given(st.sampled_from([(8, 4), (8, 8), (16, 8), (16, 0)]), st.data())
def test_powers_of_two_fill_a_node_to_the_last_npu(node: tuple[int, int], data: st.DataObject) -> None:
    capacity, ring = node
    sizes, left = [], capacity
    while left:
        sizes.append(data.draw(st.sampled_from([size for size in (1, 2, 4, 8, 16) if size <= min(left, ring or capacity)])))
        left -= sizes[-1]
    free = (1 << capacity) - 1
    for size in sorted(sizes, reverse=True):
        chosen = choose(free, capacity, ring, size)
        assert chosen
        free &= ~chosen
    assert not free


def test_a_pair_is_taken_where_it_breaks_least() -> None:
    assert indices_of(choose(0b11110011, 8, 4, 2)) == (0, 1)  # the other ring stays whole
    assert indices_of(choose(0b11111110, 8, 4, 1)) == (1,)  # its neighbour is gone already
    assert indices_of(choose(0b11111101, 8, 4, 2)) == (2, 3)
    assert indices_of(choose(0b00111100, 8, 4, 4)) == ()  # four, but not in one ring
    assert indices_of(choose(0b00111100, 8, 0, 4)) == (2, 3, 4, 5)


@given(st.sets(st.integers(0, 15)))
def test_masks_hold_indices(npus: set[int]) -> None:
    assert set(indices_of(mask_of(list(npus)))) == npus
