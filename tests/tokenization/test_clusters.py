from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.tokenization.clusters import fit, kmeans, level_sizes_for, most_below
from semantide.shared.models.tokenizer import TokenizerConfig


def vectors(count: int, width: int = 16, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    centres = random.normal(size=(10, width))
    return (centres[random.integers(10, size=count)] + 0.3 * random.normal(size=(count, width))).astype(np.float32)


def test_kmeans_uses_every_code_and_repeats_itself() -> None:
    rows = vectors(400)
    centres = kmeans(rows, 32, np.random.default_rng(1), 20)
    assert np.array_equal(centres, kmeans(rows, 32, np.random.default_rng(1), 20))
    nearest = ((rows[:, None] - centres[None]) ** 2).sum(-1).argmin(1)
    assert len(np.unique(nearest)) == 32


def test_kmeans_finds_separate_groups() -> None:
    random = np.random.default_rng(0)
    centres = random.normal(size=(8, 6)) * 20
    rows = np.repeat(centres, 20, axis=0).astype(np.float32) + random.normal(size=(160, 6)).astype(np.float32) * 0.01
    found = kmeans(rows, 8, random, 30)
    assert np.abs(found[((found[:, None] - centres[None]) ** 2).sum(-1).argmin(0)] - centres).max() < 0.1


def test_fewer_distinct_rows_than_codes() -> None:
    rows = np.repeat(np.eye(3, dtype=np.float32), 5, axis=0)
    assert np.isfinite(kmeans(rows, 8, np.random.default_rng(0), 5)).all()


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 150), st.sampled_from([(16, 16), (8, 8, 8), (4, 16, 4), ()]), st.sampled_from(["reassign", "append"]),
    st.sampled_from(["optimal", "greedy"]), st.sampled_from([0.0, 1.0, 1.3]), st.floats(0.5, 1.0), st.integers(0, 3),
)  # fmt: skip
def test_no_two_items_share_an_id(count: int, sizes: tuple[int, ...], resolver: str, assignment: str, balance: float, fill: float, kinds: int) -> None:
    rows = vectors(count)
    if kinds:  # many equal items
        rows = rows[np.arange(count) % kinds]
    config = TokenizerConfig(level_sizes=sizes, resolver=resolver, assignment=assignment, balance=balance, fill=fill, append_size=64)  # type: ignore[arg-type]
    spelling = fit(rows, config, 0)
    assert len(np.unique(spelling.placed, axis=0)) == count
    assert (spelling.placed >= 0).all() and (spelling.placed < np.array(spelling.codes.level_sizes)).all()
    assert len(spelling.codes.level_sizes) == len(sizes or level_sizes_for(count)) + (resolver == "append")


def test_equal_shares_are_kept() -> None:
    spelling = fit(vectors(256), TokenizerConfig(level_sizes=(16, 32), balance=1.0), 0)
    assert np.bincount(spelling.placed[:, 0], minlength=16).max() == 16


def test_room_is_left_for_later_items() -> None:
    spelling = fit(vectors(200), TokenizerConfig(level_sizes=(16, 16), fill=0.9), 0)
    assert np.bincount(spelling.placed[:, 0]).max() <= 14


def test_items_that_collide_with_nobody_keep_their_plain_id() -> None:
    spelling = fit(vectors(120), TokenizerConfig(level_sizes=(32, 32), fill=1.0), 0)
    plain, counts = np.unique(spelling.plain, axis=0, return_counts=True)
    alone = {tuple(code) for code in plain[counts == 1].tolist()}
    prefixes = {code[0] for code in plain[counts > 1].tolist()}
    for plain_code, placed in zip(spelling.plain.tolist(), spelling.placed.tolist(), strict=True):
        if tuple(plain_code) in alone and plain_code[0] not in prefixes:
            assert plain_code == placed


def test_appended_codes_count_up_within_each_plain_id() -> None:
    rows = np.repeat(vectors(20), 3, axis=0)
    spelling = fit(rows, TokenizerConfig(level_sizes=(32, 32), resolver="append", append_size=8), 0)
    for code in np.unique(spelling.placed[:, :2], axis=0):
        last = spelling.placed[(spelling.placed[:, :2] == code).all(axis=1), 2]
        assert sorted(last.tolist()) == list(range(len(last)))


def test_too_many_items_name_the_remedy() -> None:
    with pytest.raises(ValueError, match="larger or more level_sizes"):
        fit(vectors(20), TokenizerConfig(level_sizes=(4, 4)), 0)


@given(st.integers(1, 4096), st.floats(0.1, 1), st.sampled_from([0.0, 1.0, 1.5]))
def test_who_fits_below_a_prefix_fits_below_its_children(count: int, fill: float, balance: float) -> None:
    sizes = (16, 16, 16)
    most = most_below(sizes, count, fill, balance)
    assert most[-1] == 1 and sizes[0] * most[0] >= count
    assert all(most[level] <= sizes[level + 1] * most[level + 1] for level in range(2))


@pytest.mark.parametrize("count", [1, 2, 100, 3416, 12_101, 300_000, 5_000_000])
def test_levels_hold_the_items_and_half_as_many_again(count: int) -> None:
    sizes = level_sizes_for(count)
    assert np.prod([float(size) for size in sizes]) >= 1.5 * count and max(sizes) <= 4096
