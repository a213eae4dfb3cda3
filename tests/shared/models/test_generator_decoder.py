import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import DecodingState, GeneratorDecoder, PromptKV

LEVELS = (6, 5, 7, 4)


def make(layers: int = 2, seen_bias: bool = False) -> Generator:
    torch.manual_seed(0)
    shape = {"num_layers": layers, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24}
    generator = Generator(GeneratorConfig(LEVELS, **shape, dropout=0.3, level_scales=True, seen_bias=seen_bias)).double()  # type: ignore[arg-type]
    if seen_bias:
        torch.nn.init.normal_(generator.seen_bias.weight)
    return generator


def pack(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(list(prompts)), torch.tensor([0, *itertools.accumulate(len(prompt) for prompt in prompts)])


class Player:
    """Random prompts, and random beams that follow them."""

    def __init__(self, generator: Generator, seed: int) -> None:
        self.generator = generator
        self.random = torch.Generator().manual_seed(seed)

    def prompt(self, items: int) -> torch.Tensor:
        codes = (torch.rand(items, len(LEVELS), generator=self.random) * torch.tensor(LEVELS)).long()
        vocabulary = self.generator.vocabulary
        return torch.from_numpy(vocabulary.history_tokens(vocabulary.item_tokens(codes.numpy())))

    def beams(self, before: Sequence[int], counts: Sequence[int], level: int) -> tuple[torch.Tensor, torch.Tensor]:
        parents, codes = (torch.zeros(len(counts), max(counts), dtype=torch.long) for _ in range(2))
        for request, count in enumerate(counts):
            parents[request, :count] = torch.randint(max(before[request], 1), (count,), generator=self.random)
            codes[request, :count] = torch.randint(LEVELS[level - 1], (count,), generator=self.random)
        return parents, codes


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=1, max_size=5),
    st.integers(1, 2),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_a_prompt_that_several_requests_have_is_read_once(items: list[int], chosen: list[int], layers: int, warm: bool, seed: int) -> None:
    generator = make(layers, seen_bias=True)
    decoder, player = GeneratorDecoder(generator), Player(generator, seed)
    different = [player.prompt(each) for each in items]
    prompts = [different[number % len(different)] for number in chosen]
    _, earlier = decoder.begin(*pack([prompts[0]]))
    cached = [earlier.prompt_kv(0) if warm and prompt is prompts[0] else None for prompt in prompts]
    logits, together = decoder.begin(*pack(prompts), cached)
    beams = player.beams([1] * len(prompts), [2] * len(prompts), 1)
    stepped = decoder.step(together, 1, *beams)
    for request, prompt in enumerate(prompts):
        alone, state = decoder.begin(*pack([prompt]))
        torch.testing.assert_close(logits[request], alone[0])
        torch.testing.assert_close(stepped[request], decoder.step(state, 1, beams[0][request : request + 1], beams[1][request : request + 1])[0])
        torch.testing.assert_close(together.prompt_kv(request).kv_L2pGd, state.prompt_kv(0).kv_L2pGd)
        if any(torch.equal(prompt, other) for other in prompts[:request]):
            assert together.read_R[request] == 1


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.integers(1, 2), st.integers(0, 10**6))
def test_steps_equal_full_recomputation_for_any_parents(histories: list[int], widths: list[int], layers: int, seed: int) -> None:
    generator = make(layers)
    decoder, player = GeneratorDecoder(generator), Player(generator, seed)
    prompts = [player.prompt(items) for items in histories]
    logits, state = decoder.begin(*pack(prompts))
    assert logits.shape == (len(prompts), LEVELS[0])

    def recompute(tokens: torch.Tensor, level: int) -> torch.Tensor:
        with torch.no_grad():
            return generator.logits(generator(tokens, torch.tensor([0, len(tokens)]))[-1], level)

    for row, prompt in zip(logits, prompts, strict=True):
        torch.testing.assert_close(row, recompute(prompt, 0))
    paths = [[prompt] for prompt in prompts]
    for level, width in enumerate(widths, start=1):
        parents, codes = player.beams([len(paths[0])] * len(prompts), [width] * len(prompts), level)
        logits = decoder.step(state, level, parents, codes)
        assert logits.shape == (len(prompts), width, LEVELS[level])
        tokens = codes + generator.vocabulary.first(level - 1)
        paths = [[torch.cat([paths[r][parents[r, w]], tokens[r, w : w + 1]]) for w in range(width)] for r in range(len(prompts))]
        for request, beam in itertools.product(range(len(prompts)), range(width)):
            torch.testing.assert_close(logits[request, beam], recompute(paths[request][beam], level))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 5), min_size=3, max_size=3)), min_size=1, max_size=4), st.booleans(), st.data())
def test_a_request_of_any_batch_gets_what_it_gets_alone(requests: list[tuple[int, list[int]]], seen_bias: bool, data: st.DataObject) -> None:
    """Requests have widths of their own, share nothing, and some leave while the others go on."""
    generator = make(seen_bias=seen_bias)
    decoder, player = GeneratorDecoder(generator), Player(generator, data.draw(st.integers(0, 99)))
    prompts = [player.prompt(items) for items, _ in requests]
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
        assert len(logits) == sum(counts)
        for place, (rows, request) in enumerate(zip(logits.split(counts), left, strict=True)):
            if counts[place]:
                one = decoder.step(alone[request], level, parents[place : place + 1, : counts[place]], codes[place : place + 1, : counts[place]])
                torch.testing.assert_close(one[0], rows)
        before = counts


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 26), st.booleans()), min_size=1, max_size=4), st.integers(1, 3), st.booleans(), st.integers(0, 99))
def test_a_returning_user_gets_what_a_new_one_gets(requests: list[tuple[int, int, bool]], layers: int, seen_bias: bool, seed: int) -> None:
    """Of each prompt some tokens (-1: the prompt of somebody else's; more than it has: one that was longer) are known from another batch."""
    generator = make(layers, seen_bias)
    decoder, player = GeneratorDecoder(generator), Player(generator, seed)
    prompts = [player.prompt(items) for items, _, _ in requests]
    earlier = [
        torch.cat([prompt, player.prompt(2)[1:]])[:known] if known > 0 else player.prompt(3) for prompt, (_, known, _) in zip(prompts, requests, strict=True)
    ]
    _, state = decoder.begin(*pack(earlier))
    cached: list[PromptKV | None] = [state.prompt_kv(request) if use else None for request, (_, _, use) in enumerate(requests)]
    del state
    cold, cold_state = decoder.begin(*pack(prompts))
    warm, warm_state = decoder.begin(*pack(prompts), cached)
    torch.testing.assert_close(warm, cold, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(warm_state.prompt_L2PGd, cold_state.prompt_L2PGd, rtol=1e-9, atol=1e-9)
    for read, prompt, (_, known, use) in zip(warm_state.read_R, prompts, requests, strict=True):
        if use and known > 1 and len(prompt) > 2:
            assert read == max(1, len(prompt) - known)
    parents, codes = player.beams([1] * len(prompts), [3] * len(prompts), 1)
    torch.testing.assert_close(decoder.step(warm_state, 1, parents, codes), decoder.step(cold_state, 1, parents, codes), rtol=1e-9, atol=1e-9)
    for request, prompt in enumerate(prompts):
        again = warm_state.prompt_kv(request)
        assert torch.equal(again.tokens_t, prompt)
        torch.testing.assert_close(again.kv_L2pGd, cold_state.prompt_kv(request).kv_L2pGd, rtol=1e-9, atol=1e-9)


def test_a_prompt_of_another_model_is_refused() -> None:
    one, other = GeneratorDecoder(make(1)), GeneratorDecoder(make(2))
    prompt = Player(one.generator, 0).prompt(3)
    _, state = one.begin(*pack([prompt]))
    with pytest.raises(ValueError, match="give back those that the same model made"):
        other.begin(*pack([prompt]), [state.prompt_kv(0)])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=3), st.data())
@settings(deadline=None, max_examples=25)
def test_a_request_never_holds_more_than_it_reserved_and_nothing_after_its_end(requests: list[tuple[int, int]], data: st.DataObject) -> None:
    generator = make()
    decoder, player = GeneratorDecoder(generator), Player(generator, 0)
    prompts = [player.prompt(items) for items, _ in requests]
    needed = [decoder.kv_bytes(len(prompt), width) for prompt, (_, width) in zip(prompts, requests, strict=True)]
    pool = KVPool(sum(needed))
    leases = [pool.reserve(size) for size in needed]
    assert pool.in_use_bytes == pool.budget_bytes
    ends = data.draw(st.sampled_from(["finish", "cancel", "error"]))
    try:
        _, state = decoder.begin(*pack(prompts), leases=leases)
        widths, before = [width for _, width in requests], [1] * len(requests)
        for level in (1, 2, 3):
            counts = [data.draw(st.integers(1, width)) for width in widths] if level < 3 else widths
            if ends == "cancel" and level == 2:
                decoder.keep(state, [0])
                for lease in leases[1:]:
                    lease.release()
                widths, before, counts = widths[:1], before[:1], counts[:1]
                assert pool.in_use_bytes == needed[0]
            if ends == "error" and level == 3:
                raise RuntimeError("the step failed")
            decoder.step(state, level, *player.beams(before, counts, level), counts)
            assert (state.prompt_L2PGd.nbytes + state.own_L2CGd.nbytes) <= pool.in_use_bytes
            before = counts
    except RuntimeError:
        assert ends == "error"
    finally:
        for lease in leases:
            lease.release()
    assert (pool.in_use_bytes, pool.leases, pool.high_water_bytes) == (0, 0, sum(needed))


@pytest.mark.parametrize("narrowed", [False, True])
def test_stores_of_leased_memory_are_made_once_however_the_beams_grow(narrowed: bool) -> None:
    decoder, pool = GeneratorDecoder(make()), KVPool(10**6)
    player = Player(decoder.generator, 0)
    prompts, widths = [player.prompt(2), player.prompt(1)], [5, 6]
    leases = [pool.reserve(decoder.kv_bytes(len(prompt), width)) for prompt, width in zip(prompts, widths, strict=True)]
    _, state = decoder.begin(*pack(prompts), leases=leases)
    decoder.step(state, 1, *player.beams([1, 1], [1, 2], 1), [1, 2])
    before = [1, 2]
    if narrowed:
        decoder.keep(state, [1])
        prompts, widths, before, leases = prompts[1:], widths[1:], [2], leases[1:]
    store = state.own_L2CGd
    assert state.prompt_L2PGd.nbytes + store.nbytes == sum(lease.num_bytes for lease in leases)
    for level in (2, 3):
        decoder.step(state, level, *player.beams(before, widths, level), widths)
        before = widths
    assert state.own_L2CGd is store


def test_more_than_the_lease_is_refused() -> None:
    decoder = GeneratorDecoder(make())
    pool = KVPool(10**6)
    tokens, offsets = pack([Player(decoder.generator, 0).prompt(2)])
    with pool.reserve(decoder.kv_bytes(len(tokens), 2)) as lease:
        _, state = decoder.begin(tokens, offsets, leases=[lease])
        for level in (1, 2, 3):
            decoder.step(state, level, torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long))
        with pytest.raises(ValueError, match="reserve what `kv_bytes` says"):
            lease.draw(1)
    with pool.reserve(decoder.kv_bytes(len(tokens) - 1, 0)) as lease, pytest.raises(ValueError, match="reserve what"):
        decoder.begin(tokens, offsets, leases=[lease])


def test_wrong_order_empty_prompts_and_wrong_requests_are_refused() -> None:
    decoder = GeneratorDecoder(make())
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        decoder.begin(torch.tensor([0]), torch.tensor([0, 1, 1]))
    _, state = decoder.begin(torch.tensor([0, 0]), torch.tensor([0, 1, 2]))
    with pytest.raises(ValueError, match="level 2 after 0 steps"):
        decoder.step(state, 2, torch.tensor([[0], [0]]), torch.tensor([[0], [0]]))
    for wrong in ([1, 0], [0, 0], [2], [-1]):
        with pytest.raises(ValueError, match="in ascending order"):
            decoder.keep(state, wrong)
