"""The properties of ``test_generator_decoder.py`` for models with linear attention, and what only those have."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.models import linear_memory
from semantide.shared.models.footprint import Footprint
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import DecodingState, GeneratorDecoder, PromptKV
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.token_merger import MergerConfig

from .test_generator_decoder import LEVELS, Player, pack

MIXES = [
    ("linear_attention", "full_attention"),
    ("full_attention", "linear_attention"),
    ("kda", "linear_attention"),
    ("gla",),
    ("mamba2", "full_attention", "mamba2"),
]


def make(types: tuple[str, ...], dtype: torch.dtype = torch.float64, merger: MergerConfig | None = None, tied: bool = True) -> Generator:
    torch.manual_seed(0)
    linear = LinearConfig(num_key_heads=1, num_value_heads=2, key_head_dim=8, value_head_dim=6)
    shape = {
        "num_layers": len(types),
        "hidden_size": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "tie_word_embeddings": tied,
    }
    generator = Generator(GeneratorConfig(LEVELS, **shape, layer_types=types, linear=linear, merger=merger or MergerConfig()))  # type: ignore[arg-type]
    return generator.to(dtype)


def recompute(generator: Generator, tokens: torch.Tensor, level: int) -> torch.Tensor:
    with torch.no_grad():
        return generator.logits(generator(tokens, torch.tensor([0, len(tokens)]))[-1], level)


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=3, max_size=3),
    st.sampled_from(MIXES),
    st.sampled_from([1, 2, None]),
    st.integers(0, 10**6),
)
def test_steps_equal_full_recomputation_for_any_parents(histories, widths, types, flush_depth, seed) -> None:
    generator = make(types)
    decoder, player = GeneratorDecoder(generator, flush_depth=flush_depth), Player(generator, seed)
    prompts = [player.prompt(items) for items in histories]
    logits, state = decoder.begin(*pack(prompts))
    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, recompute(generator, prompt, 0))
    paths = [[prompt] for prompt in prompts]
    for level, width in enumerate(widths, start=1):
        parents, codes = player.beams([len(paths[0])] * len(prompts), [width] * len(prompts), level)
        logits = decoder.step(state, level, parents, codes)
        tokens = codes + generator.vocabulary.first(level - 1)
        paths = [[torch.cat([paths[r][parents[r, w]], tokens[r, w : w + 1]]) for w in range(width)] for r in range(len(prompts))]
        for request, beam in itertools.product(range(len(prompts)), range(width)):
            torch.testing.assert_close(logits[request, beam], recompute(generator, paths[request][beam], level))


@settings(deadline=None, max_examples=15)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), min_size=3, max_size=3)), min_size=1, max_size=4),
    st.sampled_from(MIXES),
    st.sampled_from([1, None]),
    st.data(),
)
def test_a_request_of_any_batch_gets_what_it_gets_alone(requests, types, flush_depth, data) -> None:
    """Requests have widths of their own, some have one prompt, share nothing else, and some leave while the others go on."""
    generator = make(types)
    decoder, player = GeneratorDecoder(generator, flush_depth=flush_depth), Player(generator, data.draw(st.integers(0, 99)))
    prompts = [player.prompt(items) for items, _ in requests]
    if len(prompts) > 2:
        prompts[2] = prompts[0]
    logits, together = decoder.begin(*pack(prompts))
    alone: list[DecodingState] = []
    for row, prompt in zip(logits, prompts, strict=True):
        one, state = decoder.begin(*pack([prompt]))
        torch.testing.assert_close(one[0], row)
        alone.append(state)
    left, before = list(range(len(requests))), [1] * len(requests)
    for level in (1, 2, 3):
        if data.draw(st.booleans()):
            staying = sorted(data.draw(st.sets(st.sampled_from(range(len(left))), min_size=1)))
            decoder.keep(together, staying)
            left, before = [left[place] for place in staying], [before[place] for place in staying]
        counts = [max(requests[r][1][level - 1], 0 if level > 1 else 1) * (beams > 0) for r, beams in zip(left, before, strict=True)]
        if not any(counts):
            return
        parents, codes = player.beams(before, counts, level)
        logits = decoder.step(together, level, parents, codes, counts)
        for place, (rows, request) in enumerate(zip(logits.split(counts), left, strict=True)):
            if counts[place]:
                one = decoder.step(alone[request], level, parents[place : place + 1, : counts[place]], codes[place : place + 1, : counts[place]])
                torch.testing.assert_close(one[0], rows)
        before = counts


@settings(deadline=None, max_examples=20)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 6), st.booleans()), min_size=1, max_size=4), st.sampled_from(MIXES), st.integers(0, 99))
def test_a_returning_user_gets_what_a_new_one_gets(requests, types, seed) -> None:
    """Of each prompt some items (-1: the prompt of somebody else's; more than it has: one that was longer) are known from another batch."""
    generator = make(types)
    decoder, player = GeneratorDecoder(generator), Player(generator, seed)
    prompts = [player.prompt(items) for items, _, _ in requests]
    each = len(LEVELS)
    earlier = [
        torch.cat([prompt, player.prompt(2)[1:]])[: 1 + each * known] if known > 0 else player.prompt(3)
        for prompt, (_, known, _) in zip(prompts, requests, strict=True)
    ]
    _, state = decoder.begin(*pack(earlier))
    cached: list[PromptKV | None] = [state.prompt_kv(request) if use else None for request, (_, _, use) in enumerate(requests)]
    cold, cold_state = decoder.begin(*pack(prompts))
    warm, warm_state = decoder.begin(*pack(prompts), cached)
    torch.testing.assert_close(warm, cold, rtol=1e-9, atol=1e-9)
    for read, prompt, (items, known, use) in zip(warm_state.read_R, prompts, requests, strict=True):
        # Read on from the earlier prompt's end, or from before the last item where the end is not a part of the new one, or would leave nothing to read.
        if use and 0 < known < items:
            assert read == len(prompt) - (1 + each * known)
        elif use and known == items > 1:
            assert read == each
    parents, codes = player.beams([1] * len(prompts), [3] * len(prompts), 1)
    torch.testing.assert_close(decoder.step(warm_state, 1, parents, codes), decoder.step(cold_state, 1, parents, codes), rtol=1e-9, atol=1e-9)
    for request in range(len(prompts)):
        for again, fresh in zip(warm_state.prompt_kv(request).marks, cold_state.prompt_kv(request).marks, strict=True):
            assert again.places == fresh.places
            for ours, theirs in zip(again.states_L, fresh.states_L, strict=True):
                torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=1e-9, atol=1e-9)


def test_records_of_a_shorter_type_change_little_and_are_reserved_as_such() -> None:
    generator = make(("linear_attention", "full_attention", "kda"), torch.float32)
    decoders = [GeneratorDecoder(generator, records, 99) for records in (None, torch.bfloat16, torch.float16)]
    player = Player(generator, 0)
    prompt, pool = player.prompt(3), KVPool(10**6)
    steps = [player.beams([1 if level == 1 else 6], [6], level) for level in (1, 2, 3)]
    answers = []
    for decoder in decoders:
        with pool.reserve(decoder.kv_bytes(len(prompt), 6)) as lease:
            _, state = decoder.begin(*pack([prompt]), leases=[lease])
            answers.append([decoder.step(state, level, *beams) for level, beams in enumerate(steps, start=1)][-1])
            assert lease.drawn_bytes == lease.num_bytes
    assert decoders[0].kv_bytes(9, 6) > decoders[1].kv_bytes(9, 6) == decoders[2].kv_bytes(9, 6)
    for short, tolerance in ((answers[1], 2**-6), (answers[2], 2**-8)):
        assert 0 < (short - answers[0]).abs().max() < tolerance * answers[0].abs().max()


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=3), st.sampled_from(["none", "kept", "merged"]), st.sampled_from(MIXES), st.integers(0, 99))
def test_merged_prompts_are_decoded_as_they_are_read_at_once_and_read_on(items, separator, types, seed) -> None:
    generator = make(types, merger=MergerConfig(True, separator))
    decoder, player = GeneratorDecoder(generator), Player(generator, seed)
    prompts = [player.prompt(each) for each in items]
    logits, state = decoder.begin(*pack(prompts))
    hidden, offsets = generator(*pack(prompts)), [0, *itertools.accumulate(decoder.places(len(prompt)) for prompt in prompts)]
    torch.testing.assert_close(logits, generator.logits(hidden[torch.tensor(offsets[1:]) - 1], 0))
    longer = [torch.cat([prompt, player.prompt(1)[1:]]) for prompt in prompts]
    warm, warm_state = decoder.begin(*pack(longer), [state.prompt_kv(request) for request in range(len(prompts))])
    cold, cold_state = decoder.begin(*pack(longer))
    torch.testing.assert_close(warm, cold, rtol=1e-9, atol=1e-9)
    assert warm_state.read_R == tuple(
        generator.prompt_shape.places_per_item if each else decoder.places(len(longer[request])) for request, each in enumerate(items)
    )
    beams = player.beams([1] * len(prompts), [3] * len(prompts), 1)
    torch.testing.assert_close(decoder.step(warm_state, 1, *beams), decoder.step(cold_state, 1, *beams), rtol=1e-9, atol=1e-9)


def test_what_a_prompt_leaves_is_of_one_size_however_long_it_is() -> None:
    decoder = GeneratorDecoder(make(("linear_attention", "gla")))
    player = Player(decoder.generator, 0)
    sizes = {decoder.begin(*pack([player.prompt(items)]))[1].prompt_kv(0).marks[0].num_bytes for items in (1, 7, 40)}
    assert sizes == {decoder.footprint.linear.mark}


@pytest.mark.parametrize("more", [1, 3, 4, 9])
def test_prompts_need_not_end_with_an_item_to_be_read_on(more: int) -> None:
    decoder = GeneratorDecoder(make(("linear_attention", "full_attention", "kda")))
    prompt = Player(decoder.generator, 0).prompt(5)
    before, now = prompt[:8], prompt[: 8 + more]
    kept = decoder.begin(*pack([before]))[1].prompt_kv(0)
    warm, state = decoder.begin(*pack([now, now]), [kept, None])
    assert state.read_R == (more, 1)
    cold, fresh = decoder.begin(*pack([now]))
    torch.testing.assert_close(warm, cold.expand(2, -1), rtol=1e-9, atol=1e-9)
    for request in (0, 1):
        again = state.prompt_kv(request)
        # Before the last item, or nearest before that where it was not read now.
        assert [mark.places for mark in again.marks] == [4 + more if more >= 4 else 4, 8 + more]
        torch.testing.assert_close(tuple(again.marks[-1].states_L[1]), tuple(fresh.prompt_kv(0).marks[-1].states_L[1]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(decoder.begin(*pack([prompt]), [again])[0], decoder.begin(*pack([prompt]))[0], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 4),
    st.sampled_from(MIXES),
    st.booleans(),
    st.integers(0, 99),
)
def test_from_more_snapshots_a_prompt_that_parts_earlier_is_read_on(requests, snapshots, types, alike, seed) -> None:
    """Of prompts of some items an earlier visit's first few agree; only who is remembered leaves snapshots, and nobody's answer changes."""
    generator = make(types)
    decoder, player = GeneratorDecoder(generator, snapshots=snapshots), Player(generator, seed)
    prompts = [player.prompt(items) for items, _, _ in requests]
    if alike:
        prompts[-1] = prompts[0]
    remembered = [each for _, _, each in requests]
    _, state = decoder.begin(*pack(prompts), remembered=remembered)
    kept = [state.prompt_kv(request) for request in range(len(prompts))]
    for prompt, one, known in zip(prompts, kept, remembered, strict=True):
        items, most = (len(prompt) - 1) // len(LEVELS), snapshots if known else 1
        wanted = [items - back for back in (0, 1, 2, 4)[:most]]
        assert [mark.places for mark in one.marks] == [1 + len(LEVELS) * each for each in reversed(wanted) if each >= 0]
        assert sum(mark.num_bytes for mark in one.marks) <= most * decoder.footprint.linear.mark
    later = [torch.cat([prompt[: 1 + len(LEVELS) * agree], player.prompt(3)[1:]]) for prompt, (_, agree, _) in zip(prompts, requests, strict=True)]
    warm, warm_state = decoder.begin(*pack(later), list(kept))
    cold, cold_state = decoder.begin(*pack(later))
    torch.testing.assert_close(warm, cold, rtol=1e-9, atol=1e-9)
    for request, (prompt, one, read) in enumerate(zip(later, kept, warm_state.read_R, strict=True)):
        common = one.common_tokens(prompt)
        known = max((mark.places for mark in one.marks if mark.places <= min(common, len(prompt) - 1)), default=0)
        assert read == len(prompt) - (known if known > 1 else 0) or any(torch.equal(prompt, other) for other in later[:request])
        # What a later visit leaves is good for a third one too.
        third = prompt[: 1 + len(LEVELS) * max(0, (len(prompt) - 1) // len(LEVELS) - 2)]
        torch.testing.assert_close(decoder.begin(*pack([third]), [warm_state.prompt_kv(request)])[0], decoder.begin(*pack([third]))[0], rtol=1e-9, atol=1e-9)
        assert len(warm_state.prompt_kv(request).marks) <= snapshots
    staying = [request for request, (_, _, each) in enumerate(requests) if each] or [0]
    decoder.keep(cold_state, staying)
    for place, request in enumerate(staying):
        assert [mark.places for mark in cold_state.prompt_kv(place).marks] == [
            mark.places for mark in decoder.begin(*pack([later[request]]))[1].prompt_kv(0).marks
        ]


def test_who_is_not_remembered_reserves_and_holds_one_state_only() -> None:
    decoder = GeneratorDecoder(make(("linear_attention", "gla"), torch.float32), snapshots=3)
    prompt, mark = Player(decoder.generator, 0).prompt(9), decoder.footprint.linear.mark
    assert decoder.kv_bytes(len(prompt), 4) - decoder.kv_bytes(len(prompt), 4, False) == 2 * mark
    pool = KVPool(10**6)
    for remembered, held in ((True, 3), (False, 1)):
        with pool.reserve(decoder.kv_bytes(len(prompt), 0, remembered)) as lease:
            _, state = decoder.begin(*pack([prompt]), leases=[lease], remembered=[remembered])
            assert state.linear.num_bytes == lease.drawn_bytes == held * mark


@pytest.mark.parametrize("beams", [0, 2, 3])
def test_states_of_beams_own_never_take_more_than_they_may(beams: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they would, tokens are replayed all the same: the answers are equal, and what is reserved is bounded."""
    generator = make(("linear_attention", "kda"))
    own = GeneratorDecoder(generator).footprint.linear.own_state
    monkeypatch.setattr(linear_memory, "MOST_OWN_BYTES", beams * own)
    decoder, free = GeneratorDecoder(generator, flush_depth=1), GeneratorDecoder(generator, flush_depth=99)
    assert decoder.kv_bytes(9, 4) - free.kv_bytes(9, 4) == min(4, beams) * own
    player, widths = Player(generator, 0), [3, 3, 4]
    prompts = [player.prompt(3), player.prompt(1)]
    pool = KVPool(10**9)
    leases = [pool.reserve(decoder.kv_bytes(len(prompt), 4)) for prompt in prompts]
    (_, state), (_, expected) = decoder.begin(*pack(prompts), leases=leases), free.begin(*pack(prompts))
    before = [1, 1]
    for level, width in enumerate(widths, 1):
        moves = player.beams(before, [width, 1], level)
        rows = decoder.step(state, level, *moves, [width, 1])
        torch.testing.assert_close(rows, free.step(expected, level, *moves, [width, 1]), rtol=1e-9, atol=1e-9)
        before = [width, 1]
        assert state.linear.num_bytes <= pool.in_use_bytes
    assert bool(state.linear.since) == (beams == 3)


@given(st.integers(0, 300), st.sampled_from([(9,), (3, 5), (4, 4, 4, 4), (2,) * 50]), st.sampled_from([1, None]))
def test_the_width_that_was_reserved_for_follows_from_the_bytes(width, levels, flush_depth) -> None:
    config = GeneratorConfig(levels, num_layers=2, layer_types=("linear_attention", "full_attention"), linear=LinearConfig(1, 1, 8, 8))
    footprint = Footprint(64, linear_memory.LinearSize.of(config, torch.float32, None, flush_depth), levels)
    found = footprint.width_within(footprint.beams(width))
    assert found >= width and footprint.rows(found) == footprint.rows(width) and footprint.recorded(found) == footprint.recorded(width)
    assert all(many <= np.prod(levels[:step], dtype=float) for step, many in enumerate(footprint.widths(width), 1))


def test_a_prompt_of_another_model_is_refused() -> None:
    one, other = (GeneratorDecoder(make(types)) for types in (("linear_attention",), ("kda", "linear_attention")))
    prompt = Player(one.generator, 0).prompt(3)
    _, state = one.begin(*pack([prompt]))
    with pytest.raises(ValueError, match="give back those that the same model made"):
        other.begin(*pack([prompt]), [state.prompt_kv(0)])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=3), st.sampled_from(MIXES), st.sampled_from([1, 2, 99]), st.data())
@settings(deadline=None, max_examples=15)
def test_a_request_never_holds_more_than_it_reserved(requests, types, flush_depth, data) -> None:
    decoder = GeneratorDecoder(make(types, torch.float32), flush_depth=flush_depth)
    player = Player(decoder.generator, 0)
    prompts = [player.prompt(items) for items, _ in requests]
    needed = [decoder.kv_bytes(len(prompt), width) for prompt, (_, width) in zip(prompts, requests, strict=True)]
    pool = KVPool(sum(needed))
    leases = [pool.reserve(size) for size in needed]
    _, state = decoder.begin(*pack(prompts), leases=leases)
    widths, before = [width for _, width in requests], [1] * len(requests)
    for level in (1, 2, 3):
        counts = [data.draw(st.integers(1, width)) for width in widths] if level < 3 else widths
        if level == 2 and data.draw(st.booleans()):
            decoder.keep(state, [0])
            for lease in leases[1:]:
                lease.release()
            widths, before, counts = widths[:1], before[:1], counts[:1]
        decoder.step(state, level, *player.beams(before, counts, level), counts)
        assert state.prompt_L2PGd.nbytes + state.own_L2CGd.nbytes + state.linear.num_bytes <= pool.in_use_bytes
        before = counts
    full = flush_depth == 99 and all(count == width for count, width in zip(counts, widths, strict=True))
    if full:
        assert state.prompt_L2PGd.nbytes + state.own_L2CGd.nbytes + state.linear.num_bytes == pool.in_use_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("types", [*MIXES, ("full_attention", "full_attention")])
def test_what_is_not_a_number_in_one_prompt_changes_no_bit_of_the_other_requests(types, dtype) -> None:
    generator = make(types, dtype, tied=False)
    decoder, player = GeneratorDecoder(generator, flush_depth=2), Player(generator, 4)
    healthy = [player.prompt(items) for items in (3, 2, 4)]
    code, other = (generator.vocabulary.first(3) + number for number in (3, 1))  # of the last level: no beam is fed with it
    healthy = [torch.where(prompt == code, other, prompt) for prompt in healthy]
    damaged = [healthy[0], healthy[1].clone(), healthy[2]]
    healthy[1][-5], damaged[1][-5] = other, code
    with torch.no_grad():
        generator.model.embed_tokens.weight[code] = torch.nan
    widths, found = [4, 3, 2], []
    for prompts in (healthy, damaged):
        moves = Player(generator, 5)
        logits, state = decoder.begin(*pack(prompts))
        each = [logits]
        for level in (1, 2, 3):
            parents, codes = moves.beams([1] * 3 if level == 1 else widths, widths, level)
            each.append(decoder.step(state, level, parents, codes, widths))
        found.append(each)
    for level, (right, seen) in enumerate(zip(*found, strict=True)):
        bad = slice(1, 2) if level == 0 else slice(4, 7)
        assert bool(right.isfinite().all()) and bool(seen[bad].isnan().all())
        assert torch.equal(right[: bad.start], seen[: bad.start]) and torch.equal(right[bad.stop :], seen[bad.stop :])
