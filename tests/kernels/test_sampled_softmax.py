"""The sampled softmax: what it estimates, what it leaves out, and that every implementation agrees with the reference."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semantide.kernels import native, softmax_segments
from semantide.kernels.sampled_softmax import known_keys, sampled_softmax, segmented
from semantide.kernels.segment_rows import SegmentRows, Stored


def case(seed: int, targets: int, rows: int, negatives: int, partners: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Arguments of every kind; negatives with none, hits, repeats and known positives among them."""
    draw = torch.Generator().manual_seed(seed)
    sequences_T = torch.randint(0, 3, (targets,), generator=draw)
    positives_T = torch.randint(0, rows, (targets,), generator=draw)
    return {
        "hidden_TD": torch.randn(targets, size, generator=draw, dtype=dtype).requires_grad_(),
        "vectors_UD": torch.randn(rows, size, generator=draw, dtype=dtype).requires_grad_(),
        "positives_T": positives_T,
        "negatives_TR": torch.randint(-1, rows, (targets, negatives), generator=draw),
        "shared_S": torch.randint(-1, rows, (negatives + 3,), generator=draw),
        "log_q_TR": -5 * torch.rand(targets, negatives, generator=draw, dtype=dtype),
        "log_q_S": -5 * torch.rand(negatives + 3, generator=draw, dtype=dtype),
        "temperature": 0.7,
        "sequences_T": sequences_T,
        "known_K": known_keys(sequences_T, positives_T, rows),
        "partners_MT": torch.stack([torch.randperm(targets, generator=draw) for _ in range(partners)]) if partners else None,
    }


def outcome(function: Any, arguments: dict[str, Any], **changes: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, and the gradients of hidden states and vectors under a weight for each loss."""
    losses_T = function(**{**arguments, **changes})
    weights_T = torch.linspace(0.5, 2, len(losses_T), dtype=losses_T.dtype)
    return losses_T, *torch.autograd.grad((losses_T * weights_T).sum(), [arguments["hidden_TD"], arguments["vectors_UD"]])


def agree(left: tuple[Tensor, ...], right: tuple[Tensor, ...], **tolerance: float) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, **(tolerance or {"rtol": 2e-5, "atol": 2e-5}))


def test_all_items_as_shared_negatives_give_the_full_softmax() -> None:
    draw = torch.Generator().manual_seed(1)
    hidden_TD, vectors_UD = torch.randn(5, 8, generator=draw), torch.randn(11, 8, generator=draw)
    positives_T = torch.tensor([0, 3, 3, 10, 7])
    full_T = torch.nn.functional.cross_entropy(hidden_TD @ vectors_UD.T, positives_T, reduction="none")
    for function in (sampled_softmax.reference, sampled_softmax):
        torch.testing.assert_close(function(hidden_TD, vectors_UD, positives_T, shared_S=torch.arange(11)), full_T)
        torch.testing.assert_close(function(hidden_TD, vectors_UD, positives_T, torch.arange(11).expand(5, -1)), full_T)


@pytest.mark.parametrize("function", [sampled_softmax.reference, sampled_softmax])
def test_known_positives_and_accidental_hits_count_for_nothing(function: Any) -> None:
    draw = torch.Generator().manual_seed(2)
    hidden_TD, vectors_UD = torch.randn(2, 4, generator=draw), torch.randn(6, 4, generator=draw)
    negatives_TR = torch.tensor([[0, 1, 4, -1], [2, 5, 3, 3]])
    positives_T, sequences_T = torch.tensor([0, 2]), torch.tensor([0, 1])
    known_K = known_keys(torch.tensor([0, 1, 1]), torch.tensor([1, 3, 2]), 6)
    losses_T = function(hidden_TD, vectors_UD, positives_T, negatives_TR, sequences_T=sequences_T, known_K=known_K)
    torch.testing.assert_close(losses_T, function(hidden_TD, vectors_UD, positives_T, torch.tensor([[4], [5]])))
    nothing_T = function(hidden_TD, vectors_UD, positives_T, positives_T.unsqueeze(1))
    torch.testing.assert_close(nothing_T, torch.zeros(2))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    targets=st.integers(0, 9),
    rows=st.integers(1, 12),
    negatives=st.sampled_from([0, 1, 3, 17, 40]),
    partners=st.integers(0, 3),
    size=st.sampled_from([1, 8, 33]),
    sharing=st.sampled_from(["vectors", "logits"]),
    precision=st.sampled_from(["float32", "float16", "int8"]),
    segment=st.sampled_from([0, 1, 5]),
    level=st.integers(0, 2),
    left_out=st.sets(st.sampled_from(["negatives", "shared_S", "log_q", "known"])),
)
def test_every_implementation_agrees_with_the_reference(
    seed: int, targets: int, rows: int, negatives: int, partners: int, size: int, sharing: str, precision: str, segment: int, level: int, left_out: set[str]
) -> None:
    arguments = case(seed, targets, rows, negatives, partners, size) | {"sharing": sharing, "precision": precision, "segment": segment}
    if "negatives" in left_out:
        arguments |= dict.fromkeys(("negatives_TR", "log_q_TR", "partners_MT"))
    if "shared_S" in left_out:
        arguments |= dict.fromkeys(("shared_S", "log_q_S"))
    if "log_q" in left_out:
        arguments |= dict.fromkeys(("log_q_TR", "log_q_S"))
    if "known" in left_out:
        arguments |= dict.fromkeys(("sequences_T", "known_K"))
    expected = outcome(sampled_softmax.reference, arguments)
    library = native.library()
    try:
        if library is not None:
            library.semantide_limit(level)
        agree(outcome(sampled_softmax, arguments), expected)
        narrow = arguments["negatives_TR"]
        agree(outcome(sampled_softmax, arguments, negatives_TR=None if narrow is None else narrow.int()), expected)
    finally:
        if library is not None:
            library.semantide_limit(2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(native, "library_for", lambda *_: None)
        agree(outcome(segmented, arguments), expected)


@pytest.mark.parametrize("sharing", ["vectors", "logits"])
def test_gradients_are_those_of_the_losses(sharing: str) -> None:
    arguments = case(3, 5, 7, 4, 2, 3, torch.float64) | {"sharing": sharing, "segment": 2}
    hidden_TD, vectors_UD = arguments.pop("hidden_TD"), arguments.pop("vectors_UD")
    for function in (sampled_softmax.reference, segmented):
        assert torch.autograd.gradcheck(lambda h, v, function=function: function(h, v, **arguments), (hidden_TD, vectors_UD))


def test_losses_and_gradients_do_not_depend_on_the_number_of_threads() -> None:
    arguments = case(4, 300, 50, 32, 3, 16)
    threads = torch.get_num_threads()
    alone = outcome(sampled_softmax, arguments)
    try:
        torch.set_num_threads(2)
        for a, b in zip(alone, outcome(sampled_softmax, arguments), strict=True):
            assert torch.equal(a, b)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("partners", [0, 3])
def test_with_log_q_the_sum_of_exponentials_is_unbiased(partners: int) -> None:
    draw = torch.Generator().manual_seed(5)
    hidden_TD, vectors_UD = torch.randn(1, 4, generator=draw).double(), torch.randn(20, 4, generator=draw).double()
    q_U = torch.softmax(2 * torch.randn(20, generator=draw).double(), 0)
    repeats = 20_000
    negatives_TR = torch.multinomial(q_U, repeats * 4, replacement=True, generator=draw).view(repeats, 4)
    partners_MT = torch.stack([torch.randperm(repeats, generator=draw) for _ in range(partners)]) if partners else None
    positives_T = torch.full((repeats,), 3)
    losses_T = segmented(
        hidden_TD.expand(repeats, -1), vectors_UD, positives_T, negatives_TR, log_q_TR=q_U.log()[negatives_TR], partners_MT=partners_MT
    )  # fmt: skip
    logits_U = (vectors_UD @ hidden_TD[0]).tolist()
    whole = sum(math.exp(logit) for logit in logits_U)
    estimate = (losses_T + logits_U[3]).exp().mean().item()
    assert estimate == pytest.approx(whole, rel=0.05)


def test_sharing_vectors_is_a_larger_sample_of_the_same() -> None:
    arguments = case(6, 6, 9, 5, 2, 8) | dict.fromkeys(("shared_S", "log_q_S", "log_q_TR"))
    larger_TR = torch.cat([arguments["negatives_TR"], *(arguments["negatives_TR"][partner_T] for partner_T in arguments["partners_MT"])], dim=1)
    expected = outcome(sampled_softmax.reference, arguments, negatives_TR=larger_TR, partners_MT=None)
    agree(outcome(sampled_softmax, arguments), expected)


def test_wrong_arguments_are_named() -> None:
    arguments = case(7, 4, 6, 3, 1, 8)
    for changes, text in (
        ({"positives_T": torch.zeros(3, dtype=torch.long)}, "positives"),
        ({"negatives_TR": torch.zeros(3, 2, dtype=torch.long)}, "4 targets"),
        ({"log_q_TR": torch.zeros(4, 2)}, "log_q_TR"),
        ({"sequences_T": None}, "together"),
        ({"partners_MT": torch.zeros(1, 4, dtype=torch.long)}, "twice"),
        ({"precision": "int4"}, "int4"),
    ):
        with pytest.raises(ValueError, match=text):
            sampled_softmax(**{**arguments, **changes})
    with pytest.raises(IndexError):
        sampled_softmax(**{**arguments, "negatives_TR": torch.full((4, 3), 6)})


def test_numbers_that_are_none_come_through() -> None:
    arguments = case(8, 4, 6, 3, 1, 8)
    hidden_TD = arguments["hidden_TD"].detach().clone()
    hidden_TD[1] = torch.nan
    assert torch.isnan(sampled_softmax(**{**arguments, "hidden_TD": hidden_TD})[1])


class Accelerator:
    """The streams and events of a device, all on one CPU: what is queued is done at once, and the order of it kept."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        log = self.log

        class Event:
            recorded = 0

            def record(self, stream: Any) -> None:
                self.recorded += 1
                log.append(("record", self))

            def synchronize(self) -> None:
                log.append(("synchronize", self))

        class Stream:
            def wait_event(self, event: Any) -> None:
                assert event.recorded, "waits for what was never queued"
                log.append(("wait", event))

            def wait_stream(self, stream: Any) -> None:
                log.append(("wait for all", stream))

        self.Event, self.Stream, self._main = Event, Stream, Stream()

    def current_stream(self) -> Any:
        return self._main

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_a_table_on_the_host_comes_through_two_buffers(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Accelerator()
    arguments = case(9, 40, 12, 6, 2, 8) | {"precision": precision, "segment": 2}
    expected = outcome(sampled_softmax.reference, arguments)
    monkeypatch.setattr(softmax_segments, "_NUMBERS", 64)
    monkeypatch.setattr(native, "library_for", lambda *_: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(SegmentRows, "_apart", lambda self: True)
    monkeypatch.setattr(SegmentRows, "_pinned", lambda self, count: torch.full((count, self._stored.size), 77, dtype=self._stored.table_UD.dtype))
    agree(outcome(segmented, arguments), expected)
    # A buffer is written again only after what was computed with it has been queued, and the host's only after it has left.
    assert {kind for kind, _ in fake.log} == {"record", "wait", "synchronize", "wait for all"}
    # And first of all once what was queued before, which may still read the memory that the buffers got.
    assert fake.log[0] == ("wait for all", fake.current_stream())
    stored = Stored.of(arguments["vectors_UD"].detach(), "float32")
    fake.log.clear()
    segments = [torch.tensor([number, number + 1]) for number in range(5)]
    for number, (rows, vectors) in enumerate(SegmentRows(stored, segments, torch.device("cpu"))):
        assert torch.equal(vectors, stored.table_UD[segments[number]]) and torch.equal(rows, segments[number])
        sent = sum(kind == "record" for kind, _ in fake.log) - number
        assert sent == min(number + 2, 5), "the next segment is on its way before this one is at work"
