import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pytest
import torch

from semantide.kernels import native
from semantide.kernels.attention import beam_attention, jagged_attention
from semantide.kernels.beam_select import AllowedLeaves, beam_select
from semantide.kernels.gating import silu_product
from semantide.kernels.normalisation import rms_norm
from semantide.kernels.prefix_attention import prefix_attention
from semantide.kernels.rotary import norm_rotate


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The loader as it is in another folder, with nothing loaded yet."""
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


@pytest.fixture(autouse=True)
def warnings_are_heard(caplog):
    """Also where an earlier test set another level."""
    caplog.set_level(logging.WARNING)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float32)


def attend(offsets=(0, 3), requests=1, own=None):
    own = rows(0, 1, 4) if own is None else own
    nothing = torch.zeros(requests, 2, 0, dtype=torch.long)
    return beam_attention(rows(requests, 2, 2, 4), rows(3, 1, 4), rows(3, 1, 4), torch.tensor(offsets), own, own, nothing)


def test_without_a_library_the_reference_runs_and_the_log_says_so_once(elsewhere, caplog):
    without = [attend() for _ in range(3)]
    assert len(caplog.records) == 1 and "not built" in caplog.text and "make native" in caplog.text
    assert native.instructions() is None
    native.library.cache_clear()
    torch.testing.assert_close(without[0], attend())


def test_a_damaged_library_is_passed_over(elsewhere, caplog):
    (elsewhere / f"_native{native.importlib.machinery.EXTENSION_SUFFIXES[0]}").write_bytes(b"not a library")
    assert native.library() is None and "cannot be loaded" in caplog.text
    attend()


def test_a_library_of_another_version_is_passed_over(tmp_path, monkeypatch, caplog):
    if native.library() is None:
        pytest.skip("the C++ kernels are not built: run `make native`")
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    native.library.cache_clear()
    try:
        assert native.library() is None and f"not {native.VERSION}" in caplog.text
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_the_kernels_are_built_where_there_is_a_compiler():
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("no C++ compiler on this machine")
    assert native.library() is not None


def select(**changes: object) -> object:
    """Two requests of three beams over a level of four nodes with five codes each, with one thing changed."""
    given = {
        "logits_RWK": rows(2, 3, 5),
        "nodes_RW": torch.tensor([[0, 1, 3], [2, 3, 0]]),
        "live_R": torch.tensor([3, 2]),
        "scores_RW": torch.zeros(2, 3, dtype=torch.float64),
        "widths_R": torch.tensor([4, 4]),
        "offsets_M1": torch.arange(5) * 5,
        "codes_C": torch.arange(5).repeat(4),
        "leaves": None,
    }
    return beam_select(**(given | changes))


def leaves(nodes: int = 4, children: int = 20, dtype: torch.dtype = torch.int32) -> AllowedLeaves:
    nothing, counts = torch.zeros(0, dtype=torch.int64), torch.arange(children + 1, dtype=dtype)[None]
    return AllowedLeaves(torch.arange(nodes + 1) * 5, torch.arange(children + 1), counts, torch.zeros(2, dtype=torch.int64), nothing, torch.arange(2))


MISFITS = {
    "too many factors": lambda: rms_norm(rows(3, 4), rows(5)),
    "too few factors": lambda: rms_norm(rows(3, 4), rows(1)),
    "an odd head": lambda: norm_rotate(rows(3, 2, 5), None, rows(3, 1, 2), rows(3, 1, 2)),
    "one angle for all rows": lambda: norm_rotate(rows(3, 2, 4), None, rows(1, 1, 2), rows(1, 1, 2)),
    "fewer sines than cosines": lambda: norm_rotate(rows(3, 2, 4), None, rows(3, 1, 2), rows(2, 1, 2)),
    "factors of another head size": lambda: norm_rotate(rows(3, 2, 4), rows(3), rows(3, 1, 2), rows(3, 1, 2)),
    "fewer numbers than gates": lambda: silu_product(rows(4), rows(3)),
    "fewer keys than offsets say": lambda: prefix_attention(rows(2, 2, 4), torch.tensor([0, 2]), rows(3, 1, 4), rows(3, 1, 4), torch.tensor([0, 5])),
    "offsets that go back": lambda: prefix_attention(rows(3, 2, 4), torch.tensor([0, 5, 3]), rows(9, 1, 4), rows(9, 1, 4), torch.tensor([0, 6, 9])),
    "fewer prompts than requests": lambda: attend(offsets=[0, 3], requests=2),
    "more prompts than requests": lambda: attend(offsets=[0, 1, 3]),
    "prompts that go back": lambda: attend(offsets=[0, 5, 3], requests=2),
    "own rows of other heads": lambda: attend(own=rows(0, 2, 4)),
    "heads that do not divide": lambda: prefix_attention(rows(2, 3, 4), torch.tensor([0, 2]), rows(3, 2, 4), rows(3, 2, 4), torch.tensor([0, 3])),
    "a node that does not exist": lambda: select(nodes_RW=torch.tensor([[0, 1, 4], [2, 3, 0]])),
    "a node below zero": lambda: select(nodes_RW=torch.tensor([[0, 1, -1], [2, 3, 0]])),
    "a code beyond the logits": lambda: select(logits_RWK=rows(2, 3, 4)),
    "fewer nodes than beams": lambda: select(nodes_RW=torch.zeros(2, 2, dtype=torch.int64)),
    "more live beams than there are": lambda: select(live_R=torch.tensor([3, 4])),
    "a negative width": lambda: select(widths_R=torch.tensor([4, -1])),
    "widths of fewer requests": lambda: select(widths_R=torch.tensor([4])),
    "short scores": lambda: select(scores_RW=torch.zeros(2, 3)),
    "short nodes": lambda: select(nodes_RW=torch.zeros(2, 3, dtype=torch.int32)),
    "a table with gaps": lambda: select(codes_C=torch.arange(5).repeat(8)[::2]),
    "leaves of other nodes": lambda: select(leaves=leaves(nodes=3)),
    "leaves of other children": lambda: select(leaves=leaves(children=19)),
    "wide counts": lambda: select(leaves=leaves(dtype=torch.int64)),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_before_memory_is_read_by_address(misfit):
    if native.library() is None:
        pytest.skip("the C++ kernels are not built: run `make native`")
    select()
    select(leaves=leaves())
    with torch.inference_mode(), pytest.raises(ValueError, match=r"give|at most as many|do not cover|none of"):
        MISFITS[misfit]()


def test_factors_may_lie_apart():
    x, wide = rows(3, 2, 4), rows(4, 2)
    with torch.inference_mode():
        torch.testing.assert_close(rms_norm(x, wide[:, 0]), rms_norm.reference(x, wide[:, 0]))
        angles = (rows(3, 1, 2), rows(3, 1, 2))
        torch.testing.assert_close(norm_rotate(x, wide[:, 0], *angles), norm_rotate.reference(x, wide[:, 0], *angles))


def test_results_have_the_type_of_what_was_given_whatever_the_default_is():
    calls = (
        attend,
        lambda: prefix_attention(rows(2, 2, 4), torch.tensor([0, 2]), rows(3, 1, 4), rows(3, 1, 4), torch.tensor([0, 3])),
        lambda: rms_norm(rows(3, 4), rows(4)),
        lambda: norm_rotate(rows(3, 2, 4), rows(4), rows(3, 1, 2), rows(3, 1, 2)),
        lambda: silu_product(rows(3), rows(3)),
    )
    expected = [call() for call in calls]
    torch.set_default_dtype(torch.float64)
    try:
        found = [call() for call in calls]
    finally:
        torch.set_default_dtype(torch.float32)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs)


def test_memory_of_another_device_is_never_read_here():
    here = rows(3)
    assert native.library_for(here, here.to("meta")) is None


def test_kernels_run_in_several_threads_at_once():
    def work(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        lengths, width = [40 + seed, 3, 40 + seed], 8 + seed
        q, (k, v) = torch.randn(3, width, 4, 16, generator=generator), torch.randn(2, sum(lengths), 2, 16, generator=generator)
        offsets, own = torch.tensor([0, *accumulate(lengths)]), torch.zeros(0, 2, 16)
        with torch.inference_mode():
            return [
                beam_attention(q, k, v, offsets, own, own, torch.zeros(3, width, 0, dtype=torch.long)),
                jagged_attention(k, k, v, offsets),
                prefix_attention(k[:3], torch.tensor([0, 1, 2, 3]), k, v, offsets),
                beam_select(
                    torch.randn(1, width, 50, generator=generator),
                    torch.zeros(1, width, dtype=torch.long),
                    torch.tensor([width]),
                    torch.zeros(1, width, dtype=torch.float64),
                    torch.tensor([30]),
                    torch.tensor([0, 50]),
                    torch.arange(50),
                ).scores_RW,
            ]

    seeds = list(range(8)) * 20
    alone = {seed: work(seed) for seed in range(8)}
    with ThreadPoolExecutor(4) as pool:
        for seed, found in zip(seeds, pool.map(work, seeds), strict=True):
            for ours, theirs in zip(found, alone[seed], strict=True):
                torch.testing.assert_close(ours, theirs)
