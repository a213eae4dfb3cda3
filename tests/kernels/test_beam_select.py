import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.kernels.beam_select import AllowedLeaves, beam_select

QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def case(seed: int, requests: int, width: int, num_codes: int, *, ties: bool = False, filtered: bool = False, holes: bool = False, most: int = 40):
    """Beams at random nodes of a random trie level, in node order, with everything that may be odd about them."""
    rng = np.random.default_rng(seed)
    nodes = max(width, 1) * 2
    degrees = rng.integers(1, num_codes + 1, nodes)
    degrees[rng.random(nodes) < 0.2] = num_codes  # a full node: codes without a gap
    codes = np.concatenate([np.sort(rng.permutation(num_codes)[:degree]) for degree in degrees])
    offsets = np.concatenate([[0], np.cumsum(degrees)])
    logits = rng.normal(size=(requests, width, num_codes)).astype(np.float32) * 3
    if ties:
        logits = np.round(logits)
    if holes:
        logits[rng.random(logits.shape) < 0.3] = -np.inf
        logits[..., 0] = 0.0
    live = rng.integers(0, width + 1, requests)
    live[0] = width
    table = np.zeros((requests, width), dtype=np.int64)
    for row in range(requests):
        table[row, : live[row]] = np.sort(rng.permutation(nodes)[: live[row]])
    scores = -rng.exponential(2.0, (requests, width)) if not ties else -np.round(rng.exponential(2.0, (requests, width)))
    tensors = (logits, table, live, scores, rng.integers(1, most, requests), offsets, codes)
    leaves = None
    if filtered:
        below = rng.integers(1, 4, len(codes))  # items below each child
        child_bounds = np.concatenate([[0], np.cumsum(below)])
        items = int(child_bounds[-1])
        counts = np.stack([np.concatenate([[0], np.cumsum(rng.random(items) < share)]) for share in (0.02, 0.6, 1.0)])
        excluded = np.unique(np.concatenate([owner * (items + 1) + rng.integers(0, items, rng.integers(0, items + 1)) for owner in range(requests + 2)]))
        leaf = excluded % (items + 1)
        mask_of = rng.integers(0, 3, requests + 2)
        mine = counts[mask_of[excluded // (items + 1)]]
        here = np.arange(len(leaf))
        excluded = excluded[mine[here, leaf + 1] > mine[here, leaf]]
        owners = rng.permutation(requests + 2)[:requests]
        arrays = (child_bounds[offsets], child_bounds, counts.astype(np.int32), mask_of, excluded, owners)
        leaves = AllowedLeaves(*map(torch.as_tensor, arrays))
    return (*map(torch.as_tensor, tensors), leaves)


def assert_same(ours, theirs):
    for name in ("parents_RW", "codes_RW", "nodes_RW", "kept_R", "dead_ends_R"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name in ("scores_RW", "steps_RW", "dropped_R"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-6, atol=2e-6)
    assert ours.children == theirs.children and ours.visited <= theirs.children


@QUICK
@given(st.data())
def test_every_instruction_set_chooses_what_the_reference_chooses(instructions, data):
    arguments = case(
        data.draw(st.integers(0, 10_000)),
        requests=data.draw(st.integers(1, 4)),
        width=data.draw(st.integers(1, 30)),
        num_codes=data.draw(st.sampled_from([1, 3, 15, 16, 17, 64, 100])),
        filtered=data.draw(st.booleans()),
        holes=data.draw(st.booleans()),
        most=data.draw(st.sampled_from([2, 40, 3000])),
    )
    among_children = data.draw(st.booleans())
    if arguments[0].isinf().any() and among_children:  # a node may have no code with a finite logit
        return
    assert_same(beam_select(*arguments, among_children), beam_select.reference(*arguments, among_children))


@pytest.mark.parametrize("most", [2, 10, 100])
@pytest.mark.parametrize("filtered", [False, True])
def test_equal_scores_go_to_the_smaller_nodes(instructions, most, filtered):
    for seed in range(20):
        logits, nodes, live, scores, *rest = case(seed, 3, 20, 24, filtered=filtered, most=most)
        flat = torch.zeros_like(logits)  # one norm for all, so that ties are exact
        for s in (torch.zeros_like(scores), scores.round()):
            assert_same(beam_select(flat, nodes, live, s, *rest), beam_select.reference(flat, nodes, live, s, *rest))


def test_wide_beams_visit_few_candidates(instructions):
    for seed in range(3):
        arguments = list(case(seed, 1, 256, 512))
        arguments[4] = torch.tensor([256])
        ours, theirs = beam_select(*arguments), beam_select.reference(*arguments)
        assert_same(ours, theirs)
        assert ours.visited < 0.03 * 256 * 512 and ours.visited < 0.1 * ours.children


ODD_NAN = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)  # with a payload, as damaged weights may have


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, ODD_NAN])
@pytest.mark.parametrize("among_children", [False, True])
def test_logits_that_are_not_numbers_are_refused_where_a_beam_lives(instructions, bad, among_children):
    for place in (0, 7, 36):
        arguments = list(case(1, 2, 5, 37))
        arguments[5], arguments[6] = torch.arange(0, 37 * 11, 37), torch.arange(37).repeat(10)  # every code below every node
        arguments[2] = torch.tensor([5, 3])
        logits = arguments[0].clone()
        logits[1, 4, place] = bad  # the second request has three beams
        assert_same(beam_select(logits, *arguments[1:], among_children), beam_select.reference(logits, *arguments[1:], among_children))
        logits[1, 2, place] = bad
        for function in (beam_select, beam_select.reference):
            with pytest.raises(FloatingPointError, match="not finite"):
                function(logits, *arguments[1:], among_children)


@pytest.mark.parametrize("filtered", [False, True])
def test_nodes_without_children_end(instructions, filtered):
    logits = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 0, 2, 2, 5, 5])  # the first, the middle and the last node are bare
    counts, nothing = torch.arange(6, dtype=torch.int32)[None], torch.zeros(0, dtype=torch.int64)
    leaves = AllowedLeaves(offsets, torch.arange(6), counts, torch.tensor([0]), nothing, torch.tensor([0])) if filtered else None
    beams = (torch.tensor([[0, 1, 3, 4]]), torch.tensor([4]), torch.zeros(1, 4, dtype=torch.float64), torch.tensor([9]))
    arguments = (logits, *beams, offsets, torch.tensor([1, 4, 0, 2, 5]), leaves)
    assert_same(beam_select(*arguments), beam_select.reference(*arguments))
    for function in (beam_select, beam_select.reference):
        with pytest.raises(FloatingPointError, match="not finite"):
            function(*arguments, True)


def test_shorter_types_are_widened(instructions):
    logits, *rest = case(4, 2, 9, 33)
    half = logits.bfloat16()
    assert_same(beam_select(half, *rest), beam_select.reference(half.float(), *rest))
