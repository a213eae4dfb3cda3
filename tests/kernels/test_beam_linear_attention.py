import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import semantide.kernels.beam_linear_attention as kernel_module
from semantide.kernels.beam_linear_attention import BeamRecords, beam_linear_attention, break_even_depth, materialise

RULES = [(delta, per_channel) for delta in (False, True) for per_channel in (False, True)]


class Case:
    """Random beams of several requests, step by step, and what a state of each beam's own gives."""

    def __init__(
        self, requests: int, groups: int, share: int, size: int, value_size: int, rule: tuple[bool, bool], seed: int, dtype: torch.dtype, strength: float = 1.0
    ) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.groups, self.heads, self.size, self.value_size, self.dtype, self.strength = groups, groups * share, size, value_size, dtype, strength
        self.delta, self.per_channel = rule
        self.states = self.draw(requests, self.heads, size, value_size)
        self.own_states = self.states.double()
        self.bases = torch.arange(requests)
        self.rows = torch.empty(requests, 0, dtype=torch.long)
        self.records = BeamRecords.empty(0, self.states, groups, self.per_channel)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64).to(self.dtype)

    def tokens(self, beams: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        q, k = (torch.nn.functional.normalize(self.draw(beams, self.groups, self.size), dim=-1) for _ in range(2))
        decay = -self.strength * torch.rand(beams, self.heads, self.size if self.per_channel else 1, generator=self.random, dtype=torch.float64).to(self.dtype)
        beta = torch.rand(beams, self.heads, generator=self.random, dtype=torch.float64).to(self.dtype) if self.delta else None
        return q, k, self.draw(beams, self.heads, self.value_size), decay, beta

    def advance(self, width: int) -> Tensor:
        """Beams follow random parents of their own request; returns which."""
        chosen = []
        for base in self.bases.unique().tolist():
            live = (self.bases == base).nonzero().squeeze(1)
            chosen.append(live[torch.randint(len(live), (width,), generator=self.random)])
        parents = torch.cat(chosen)
        begin = len(self.records)
        self.records = self.records.grown(begin + len(parents), begin)
        self.rows = torch.cat([self.rows[parents], torch.arange(begin, begin + len(parents))[:, None]], 1)
        self.bases, self.own_states = self.bases[parents], self.own_states[parents]
        return parents

    def expected(self, tokens: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]) -> Tensor:
        """Beam by beam, each turning its own state."""
        q, k, v, g, beta = (None if x is None else x.double() for x in tokens)
        share = self.heads // self.groups
        q, k = q.repeat_interleave(share, 1), k.repeat_interleave(share, 1)
        self.own_states = self.own_states * g.exp().unsqueeze(-1)
        delta = v if beta is None else beta.unsqueeze(-1) * (v - torch.einsum("bhde,bhd->bhe", self.own_states, k))
        self.own_states = self.own_states + torch.einsum("bhd,bhe->bhde", k, delta)
        return torch.einsum("bhde,bhd->bhe", self.own_states, q)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(1, 3),
    st.sampled_from([(1, 1), (2, 2), (3, 1)]),
    st.sampled_from([(1, 1), (4, 3), (16, 16), (5, 33)]),
    st.sampled_from(RULES),
    st.integers(0, 9),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_beams_equal_those_with_states_of_their_own(requests, heads, sizes, rule, seed, widths) -> None:
    case = Case(requests, *heads, *sizes, rule, seed, torch.float64)
    for width in widths:
        case.advance(width)
        tokens = case.tokens(len(case.bases))
        o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
        torch.testing.assert_close(o, case.expected(tokens), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(materialise(case.states, case.bases, case.records, case.rows), case.own_states, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (3, 1, 5, 33), (2, 2, 64, 80), (1, 1, 128, 128)])
def test_the_native_beams_equal_the_reference(instructions, shape, rule) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = Case(2, *shape, rule, 5, torch.float32)
        for width in (7, 1, 51):
            case.advance(width)
            tokens = case.tokens(len(case.bases))
            o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
            torch.testing.assert_close(o, case.expected(tokens).float(), rtol=2e-5, atol=2e-5 * case.own_states.abs().max().item())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_short_records_are_rounded_as_torch_rounds_them(instructions, dtype) -> None:
    case = Case(2, 1, 2, 24, 40, (True, False), 1, torch.float32)
    case.records = BeamRecords.empty(0, case.states, 1, False, dtype)
    for _ in range(3):
        case.advance(9)
        tokens = case.tokens(len(case.bases))
        written = []
        outputs = []
        for attention in (beam_linear_attention, beam_linear_attention.reference):
            records = case.records.grown(len(case.records), len(case.records))
            outputs.append(attention(*tokens, case.states, case.bases, records, case.rows))
            written.append(records)
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
        own = case.rows[:, -1]
        assert torch.equal(written[0].k_NGd[own], written[1].k_NGd[own])
        torch.testing.assert_close(written[0].delta_NHe[own], written[1].delta_NHe[own], rtol=2**-7, atol=1e-6)
        case.records = written[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_kind_of_number_is_rounded_as_torch_rounds_it(instructions, dtype) -> None:
    special = torch.tensor(
        [
            0.0,
            -0.0,
            math.inf,
            -math.inf,
            math.nan,
            65504.0,
            65519.9,
            65520.0,
            1e-8,
            2.0**-24,
            2.0**-25,
            6e-8,
            3e-5,
            6.1e-5,
            1e38,
            -1e-40,
            1.00048828125,
            1.00390625,
        ]
    )
    values = torch.cat([special, torch.randn(994, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 6, 994)])
    count, zero = len(values), torch.zeros
    records = BeamRecords.empty(count, zero(1, 1, 1, 1), 1, False, dtype)
    k = values[:, None, None]
    beam_linear_attention(k, k, k, zero(count, 1, 1), None, zero(1, 1, 1, 1), zero(count, dtype=torch.long), records, torch.arange(count)[:, None])
    # What is beyond the largest number is kept as that: an infinite record would make all of its beams' answers no numbers.
    most = torch.finfo(dtype).max
    wanted = values.clamp(-most, most).to(dtype) if dtype == torch.float16 else values.to(dtype)
    for kept in (records.k_NGd, records.delta_NHe):
        torch.testing.assert_close(kept.flatten(), wanted, rtol=0, atol=0, equal_nan=True)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 40), st.integers(0, 9), st.sampled_from(RULES), st.sampled_from([torch.float32, torch.float64]), st.booleans())
def test_a_tree_in_one_call_equals_its_paths_token_by_token(nodes, seed, rule, dtype, strong) -> None:
    """The triangular solve: nodes follow one another within the call."""
    case = Case(2, 2, 2, 8, 20, rule, seed, dtype, 200.0 if strong else 1.0)
    bases = torch.randint(2, (nodes,), generator=case.random)
    paths: list[list[int]] = []
    for node in range(nodes):
        before = [other for other in range(node) if bases[other] == bases[node]]
        pick = int(torch.randint(len(before) + 1, (1,), generator=case.random))
        paths.append([*(paths[before[pick - 1]] if pick else []), node])
    depth = max(map(len, paths))
    rows = torch.tensor([[-1] * (depth - len(path)) + path for path in paths])
    tokens = case.tokens(nodes)
    records = BeamRecords.empty(nodes, case.states, 2, rule[1])
    o = beam_linear_attention(*tokens, case.states, bases, records, rows)
    for node, path in enumerate(paths):
        alone = BeamRecords.empty(len(path), case.states, 2, rule[1])
        for step, other in enumerate(path):
            token = tuple(None if x is None else x[other : other + 1] for x in tokens)
            last = beam_linear_attention.reference(*token, case.states, bases[node : node + 1], alone, torch.arange(step + 1)[None])
        torch.testing.assert_close(o[node : node + 1], last, rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_decay_of_nothing_everything_and_beta_of_nothing(instructions, rule) -> None:
    """A token whose decay is 0 forgets all before it, exactly, whatever decays follow; with decay 1 and beta 0 nothing changes."""
    case = Case(1, 1, 2, 16, 16, rule, 3, torch.float32)
    for step in range(5):
        case.advance(4)
        q, k, v, g, beta = case.tokens(4)
        g = torch.full_like(g, -math.inf) if step in (1, 2) else g * 0 if step == 4 else g * 1e6 if step == 3 else g
        tokens = (q, k, v, g, None if beta is None else beta * (step != 4))
        before = case.own_states
        o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
        torch.testing.assert_close(o, case.expected(tokens).float(), rtol=1e-5, atol=1e-5)
        if step == 4 and beta is not None:
            assert torch.equal(case.own_states, before)
    torch.testing.assert_close(materialise(case.states, case.bases, case.records, case.rows).double(), case.own_states, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_in_its_request(instructions) -> None:
    case = Case(3, 1, 1, 16, 16, (True, False), 3, torch.float32)
    case.states[1, 0, 3, 3] = math.nan
    for _ in range(3):
        case.advance(50)
        tokens = case.tokens(len(case.bases))
        o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
        for base in range(3):
            assert bool(o[case.bases == base].isnan().any()) == (base == 1)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("attention", [beam_linear_attention, beam_linear_attention.reference])
def test_what_nobody_follows_is_not_recorded(instructions, rule, attention) -> None:
    """Some of a call's tokens have no row of their own: every token reads the same, and no other row is touched."""
    case = Case(2, 1, 2, 24, 40, rule, 1, torch.float32)
    bases, tokens = torch.tensor([0, 1, 0, 0, 1, 1]), case.tokens(6)
    whole = torch.tensor([[-1, 0], [-1, 1], [0, 2], [0, 3], [1, 4], [-1, 5]])
    some = torch.tensor([[-1, 0], [-1, 1], [0, -1], [0, 3], [1, -1], [-1, -1]])
    all_of_them, few = (BeamRecords.empty(6, case.states, 1, rule[1]) for _ in range(2))
    for kept in (few.k_NGd, few.delta_NHe, few.decay_NH1):
        kept.fill_(7.0)
    expected = attention(*tokens, case.states, bases, all_of_them, whole)
    assert torch.equal(attention(*tokens, case.states, bases, few, some), expected)
    for kept, every in zip((few.k_NGd, few.delta_NHe, few.decay_NH1), (all_of_them.k_NGd, all_of_them.delta_NHe, all_of_them.decay_NH1), strict=True):
        assert torch.equal(kept[[0, 1, 3]], every[[0, 1, 3]]) and bool((kept[[2, 4, 5]] == 7).all())
    nothing = BeamRecords.empty(0, case.states, 1, rule[1])
    torch.testing.assert_close(
        attention(*(None if x is None else x[:2] for x in tokens), case.states, bases[:2], nothing, torch.tensor([[-1], [-1]])), expected[:2]
    )


def test_states_are_made_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(2, 1, 2, 8, 8, (True, True), 4, torch.float64)
    for _ in range(3):
        case.advance(7)
        beam_linear_attention(*case.tokens(len(case.bases)), case.states, case.bases, case.records, case.rows)
    whole = materialise(case.states, case.bases, case.records, case.rows)
    seen: list[int] = []
    part = kernel_module._materialised
    monkeypatch.setattr(kernel_module, "_materialised", lambda states, bases, *rest: (seen.append(len(bases)), part(states, bases, *rest))[1])
    monkeypatch.setattr(kernel_module, "_CHUNK_BYTES", 4 * whole[:1].nbytes)
    torch.testing.assert_close(materialise(case.states, case.bases, case.records, case.rows), whole, rtol=1e-12, atol=1e-12)
    assert seen == [4, 4, 4, 2]


def test_many_beams_and_all_from_one_parent(instructions) -> None:
    case = Case(1, 1, 1, 16, 16, (True, False), 3, torch.float32)
    for width in (4096, 1, 4096):
        case.advance(width)
        tokens = case.tokens(width)
        o = beam_linear_attention(*tokens, case.states, case.bases, case.records, case.rows)
        torch.testing.assert_close(o, case.expected(tokens).float(), rtol=2e-5, atol=2e-5)


def test_deep_beams_go_on_from_states_of_their_own() -> None:
    """After a flush each beam has a base of its own, which its children share."""
    case = Case(2, 1, 2, 8, 8, (True, True), 4, torch.float64)
    begin, states, bases = 0, case.states, case.bases
    for step in range(9):
        parents = case.advance(6)
        bases = bases[parents]
        tokens = case.tokens(len(bases))
        o = beam_linear_attention(*tokens, states, bases, case.records, case.rows[:, begin:])
        torch.testing.assert_close(o, case.expected(tokens), rtol=1e-9, atol=1e-11)
        if step % 3 == 2:
            states, bases, begin = materialise(states, bases, case.records, case.rows[:, begin:]), torch.arange(len(bases)), step + 1


@pytest.mark.parametrize("attention", [beam_linear_attention, beam_linear_attention.reference])
def test_wrong_rows_are_refused(attention) -> None:
    case = Case(2, 1, 1, 4, 4, (True, False), 0, torch.float32)
    tokens, bases = case.tokens(2), torch.tensor([0, 1])
    records = BeamRecords.empty(4, case.states, 1, False)

    def run(rows: list[list[int]], **changed: Tensor) -> None:
        given = {"bases_B": bases, **changed}
        attention(*tokens, case.states, given["bases_B"], records, torch.tensor(rows))

    run([[0, 2], [1, 3]])
    for rows in ([[0, 4], [1, 3]], [[-2, 2], [1, 3]], [[0, -2], [1, 3]], [[3, 2], [1, 3]], [[0, 2], [1, 2]], [[0, 0], [1, 1]], [[], []]):
        with pytest.raises(ValueError, match="row"):
            run(rows)
    with pytest.raises(ValueError, match="rows"):
        attention(*case.tokens(2), case.states, bases, records, torch.tensor([[0, -1, 2], [1, 0, 3]]))
    for wrong in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="there are 2 states"):
            run([[0, 2], [1, 3]], bases_B=torch.tensor(wrong))
    for wrong in ([0], [0, 1, 1]):
        with pytest.raises(ValueError, match="one base"):
            run([[0, 2], [1, 3]], bases_B=torch.tensor(wrong))
    q, k, v, g, beta = tokens
    for changed in (
        (q[:1], k, v, g, beta),
        (q, k, v[:, :, :3], g, beta),
        (q, k, v, g[..., 0], beta),
        (q, k, v, g.expand(-1, -1, 3), beta),
        (q, k, v, g, beta[:1]),
    ):
        with pytest.raises(ValueError, match="states \\[states"):
            attention(*changed, case.states, bases, records, torch.tensor([[0, 2], [1, 3]]))
    with pytest.raises(ValueError, match="records of shapes"):
        attention(*tokens, case.states, bases, replace(records, k_NGd=records.k_NGd[..., :3]), torch.tensor([[0, 2], [1, 3]]))


def test_no_beams_and_the_break_even() -> None:
    case = Case(1, 1, 1, 4, 4, (True, False), 0, torch.float32)
    nobody = torch.empty(0, dtype=torch.long)
    assert beam_linear_attention(*case.tokens(0), case.states, nobody, case.records, nobody.view(0, 1)).shape == (0, 1, 4)
    assert break_even_depth(128, 128) == 38
    assert break_even_depth(1, 1) == 1


@pytest.mark.parametrize("native", [False, True])
def test_what_is_too_large_for_a_half_record_becomes_its_largest(native):
    states = torch.zeros(1, 1, 16, 16)
    records = BeamRecords.empty(2, states, 1, False, torch.float16)
    k, v = torch.ones(2, 1, 16), torch.tensor([1e6, -1e6]).view(2, 1, 1).expand(2, 1, 16).contiguous()
    function = beam_linear_attention if native else beam_linear_attention.reference
    function(k, k * 1e6, v, torch.zeros(2, 1, 1), None, states, torch.tensor([0, 0]), records, torch.tensor([[0], [1]]))
    assert records.k_NGd.unique().tolist() == [65504.0] and records.delta_NHe[:, 0, 0].tolist() == [65504.0, -65504.0]
