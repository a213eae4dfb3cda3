import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.decoding.kv_pool import KVPool
from semantide.shared.errors import Corrupt
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder, PromptKV
from semantide.shared.models.prompt_spelling import PromptSpelling, gap_buckets
from semantide.shared.models.token_merger import GAP_BUCKETS, MergerConfig

LEVELS = (6, 5, 7)
MERGERS = [
    MergerConfig(True),
    MergerConfig(True, "kept"),
    MergerConfig(True, "merged"),
    MergerConfig(True, "kept", ("actions", "gaps"), ("click", "buy")),
    MergerConfig(True, "none", ("gaps",)),
]
MERGER = st.sampled_from(MERGERS)


def make(merger: MergerConfig, seen_bias: bool = False, learned: bool = True, **changes: object) -> Generator:
    torch.manual_seed(0)
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 24, **changes}
    generator = Generator(GeneratorConfig(LEVELS, **shape, merger=merger, seen_bias=seen_bias)).double().eval()  # type: ignore[arg-type]
    if learned and merger.enabled:
        torch.nn.init.normal_(generator.merger.proj.weight, std=0.2)
    if seen_bias:
        torch.nn.init.normal_(generator.seen_bias.weight)
    return generator


def prompt_of(generator: Generator, items: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, items) for size in LEVELS], 1)
    actions, times = random.integers(0, 3, items), np.cumsum(random.integers(0, 10**6, items))
    return torch.from_numpy(PromptSpelling.of(generator, codes).prompt(np.arange(items), actions, times))


def pack(prompts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat(list(prompts)), torch.tensor([0, *itertools.accumulate(len(prompt) for prompt in prompts)])


def reference(generator: Generator, prompt: torch.Tensor, codes: Sequence[int]) -> torch.Tensor:
    """Logits of the level after these codes, written out: vectors one by one, a dense mask, one sequence."""
    merger, vocabulary = generator.config.merger, generator.vocabulary
    table = generator.model.embed_tokens.weight
    vectors = [table[prompt[0]]]
    stride = len(LEVELS) + len(merger.features)
    for item in prompt[1:].view(-1, stride):
        embedded = [table[token] for token in item[: len(LEVELS)]]
        inputs = list(embedded)
        if merger.separator == "merged":
            inputs.append(generator.merger.separator)
        inputs += [generator.merger.features[name].weight[value] for name, value in zip(merger.features, item[len(LEVELS) :].tolist(), strict=True)]
        vectors.append(sum(embedded) / len(LEVELS) + generator.merger.proj.weight @ torch.cat(inputs))
        if merger.separator == "kept":
            vectors.append(generator.merger.separator)
    vectors += [table[vocabulary.first(level) + code] for level, code in enumerate(codes)]
    x = torch.stack(vectors)
    cos, sin = generator.rotation(torch.arange(len(x)))
    for layer in generator.layers:
        q, k, v = layer.project(x, cos, sin)
        k, v = (each.repeat_interleave(2, 1).transpose(0, 1) for each in (k, v))
        scores = q.transpose(0, 1) @ k.mT / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf).softmax(-1)
        x = layer.finish(x, (weights @ v).transpose(0, 1))
    return generator.logits(generator.model.norm(x[-1]), len(codes))


@settings(deadline=None, max_examples=20)
@given(MERGER, st.lists(st.integers(0, 5), min_size=1, max_size=4), st.booleans(), st.integers(0, 10**6))
def test_decoding_equals_the_plain_computation(merger: MergerConfig, items: list[int], fixed: bool, seed: int) -> None:
    """Of weights that are trained, and of fixed ones, which are multiplied out."""
    generator = make(merger).requires_grad_(not fixed)
    decoder = GeneratorDecoder(generator)
    prompts = [prompt_of(generator, many, seed + place) for place, many in enumerate(items)]
    random = np.random.default_rng(seed)
    codes = np.stack([random.integers(0, size, (len(items), 3)) for size in LEVELS], 2)  # request, beam, level
    with torch.no_grad():
        logits, state = decoder.begin(*pack(prompts))
        for request, prompt in enumerate(prompts):
            torch.testing.assert_close(logits[request], reference(generator, prompt, ()))
        for level in (1, 2):
            parents = torch.zeros(len(items), 3, dtype=torch.int64) if level == 1 else torch.arange(3).expand(len(items), 3)
            logits = decoder.step(state, level, parents, torch.from_numpy(codes[:, :, level - 1]))
            for request, beam in itertools.product(range(len(items)), range(3)):
                torch.testing.assert_close(logits[request, beam], reference(generator, prompts[request], codes[request, beam, :level]))


@settings(deadline=None, max_examples=25)
@given(MERGER, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.booleans()), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_a_returning_user_gets_what_a_new_one_gets(merger: MergerConfig, requests: list[tuple[int, int, bool]], seen_bias: bool, seed: int) -> None:
    """Of each prompt the first items are known; or more than it has, of one that was longer."""
    generator = make(merger, seen_bias)
    decoder, shape = GeneratorDecoder(generator), generator.prompt_shape
    whole = [prompt_of(generator, 8, seed + place) for place in range(len(requests))]
    prompts, earlier = ([full[: 1 + shape.tokens_per_item * request[column]] for full, request in zip(whole, requests, strict=True)] for column in (0, 1))
    _, state = decoder.begin(*pack(earlier))
    cached: list[PromptKV | None] = [state.prompt_kv(place) if use else None for place, (_, _, use) in enumerate(requests)]
    cold, cold_state = decoder.begin(*pack(prompts))
    warm, warm_state = decoder.begin(*pack(prompts), cached)
    torch.testing.assert_close(warm, cold, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(warm_state.prompt_L2PGd, cold_state.prompt_L2PGd, rtol=1e-9, atol=1e-9)
    for place, (items, known, use) in enumerate(requests):
        places = 1 + items * shape.places_per_item
        assert cold_state.prompt_kv(place).num_places == places == decoder.places(len(prompts[place]))
        common = min(1 + min(items, known) * shape.places_per_item, places - 1)
        if use and common > 1:
            assert warm_state.read_R[place] == places - common


@settings(deadline=None, max_examples=10)
@given(MERGER, st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_a_request_holds_exactly_what_it_reserved(merger: MergerConfig, items: list[int]) -> None:
    generator = make(merger)
    decoder = GeneratorDecoder(generator)
    prompts = [prompt_of(generator, many, place) for place, many in enumerate(items)]
    needed = [decoder.kv_bytes(len(prompt), 4) for prompt in prompts]
    pool = KVPool(sum(needed))
    leases = [pool.reserve(size) for size in needed]
    _, state = decoder.begin(*pack(prompts), leases=leases)
    for level in (1, 2):
        decoder.step(state, level, torch.zeros(len(items), 4, dtype=torch.int64), torch.zeros(len(items), 4, dtype=torch.int64))
    assert state.prompt_L2PGd.nbytes + state.own_L2CGd.nbytes == sum(needed)
    with pytest.raises(ValueError, match="reserve what `kv_bytes` says"):
        leases[0].draw(1)


@pytest.mark.parametrize("merger", MERGERS)
def test_an_item_begins_as_the_mean_of_its_codes(merger: MergerConfig) -> None:
    generator = make(merger, learned=False)
    prompt = prompt_of(generator, 4, 0)
    vectors, offsets = generator.prompt_vectors(prompt, torch.tensor([0, len(prompt)]))
    codes = prompt[1:].view(4, -1)[:, : len(LEVELS)]
    means = generator.model.embed_tokens(codes).mean(1)
    torch.testing.assert_close(vectors[1 :: generator.prompt_shape.places_per_item], means)
    torch.testing.assert_close(generator.item_vectors(codes), means)
    assert offsets.tolist() == [0, len(vectors)] == [0, 1 + 4 * generator.prompt_shape.places_per_item]


def test_fixed_weights_that_are_replaced_count() -> None:
    generator = make(MERGERS[3]).requires_grad_(False)
    prompt = prompt_of(generator, 4, 0)
    offsets = torch.tensor([0, len(prompt)])
    before = generator.prompt_vectors(prompt, offsets)[0]
    generator.merger.proj.weight.mul_(2.0)
    after = generator.prompt_vectors(prompt, offsets)[0]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after, generator.requires_grad_(True).prompt_vectors(prompt, offsets)[0])
    generator.requires_grad_(False).model.embed_tokens.weight.neg_()
    torch.testing.assert_close(
        generator.prompt_vectors(prompt, offsets)[0], generator.requires_grad_(True).prompt_vectors(prompt, offsets)[0], rtol=1e-9, atol=1e-9
    )


def test_everything_that_is_merged_learns() -> None:
    generator = make(MERGERS[3], learned=False).train()
    prompt = prompt_of(generator, 6, 0)
    for _ in range(2):
        loss = generator(prompt, torch.tensor([0, len(prompt)])).square().mul(torch.randn(1, 16, dtype=torch.float64)).sum()
        loss.backward()
        with torch.no_grad():
            for parameter in generator.merger.parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    assert all(bool((parameter.grad != 0).any()) for parameter in generator.merger.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("merger", MERGERS)
def test_a_saved_model_decodes_as_before(merger: MergerConfig, tmp_path: Path) -> None:
    generator = make(merger, embedding_scale=3.0, level_scales=True)
    generator.save_pretrained(tmp_path)
    again = Generator.from_pretrained(tmp_path)
    assert again.config.merger == merger
    prompt = prompt_of(generator, 5, 1)
    offsets = torch.tensor([0, len(prompt)])
    torch.testing.assert_close(GeneratorDecoder(again).begin(prompt, offsets)[0], GeneratorDecoder(generator).begin(prompt, offsets)[0])


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    generator = make(MERGERS[0])
    decoder, plain = GeneratorDecoder(generator), GeneratorDecoder(make(MergerConfig()))
    prompt = prompt_of(generator, 3, 0)
    offsets = torch.tensor([0, len(prompt)])
    for call in (decoder.begin, generator.prompt_vectors):
        with pytest.raises(ValueError, match=r"a begin token and (then )?3 numbers"):
            call(prompt[:-1], torch.tensor([0, len(prompt) - 1]))  # type: ignore[operator]
    with pytest.raises(ValueError, match="give back those that the same model made"):
        decoder.begin(prompt, offsets, [plain.begin(prompt, offsets)[1].prompt_kv(0)])
    with pytest.raises(ValueError, match=r"merger\.separator is 'kpet'"):
        MergerConfig(True, "kpet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"merger\.features is \['price'\]"):
        MergerConfig(True, features=("price",))
    with pytest.raises(ValueError, match=r"set merger\.enabled to true"):
        MergerConfig(separator="kept")
    with pytest.raises(ValueError, match="merger field 'depth' is unknown"):
        MergerConfig.of({"enabled": True, "depth": 2})
    generator.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text().replace('"separator": "none"', '"separator": "merged"'))
    with pytest.raises(Corrupt, match=r"merger\.proj\.weight is"):
        Generator.from_pretrained(tmp_path)


def test_prompts_say_what_was_done_and_how_long_after_the_item_before() -> None:
    generator = make(MERGERS[3])
    spelling = PromptSpelling.of(generator, np.array([[1, 2, 3], [0, 0, 0]]))
    assert spelling.action_numbers(["buy", "like", "click"]).tolist() == [2, 0, 1]
    known = spelling.prompt(np.array([1, 0]), [2, 0], [100, 160])
    assert known.tolist() == [0, *(1, 7, 12), 2, 0, *(2, 9, 15), 0, 6]
    assert spelling.prompt(np.array([1, 0])).tolist() == [0, *(1, 7, 12), 0, 0, *(2, 9, 15), 0, 0]
    assert spelling.prompt(np.array([], dtype=np.int64), [], []).tolist() == [0]


@given(st.lists(st.lists(st.integers(0, 2**40), min_size=1, max_size=6).map(sorted), min_size=1, max_size=4))
def test_gaps_of_packed_histories_are_those_of_each(histories: list[list[int]]) -> None:
    starts = np.cumsum([0, *(len(history) for history in histories)])[:-1]
    packed = gap_buckets(np.concatenate([np.array(history) for history in histories]), starts)
    alone = np.concatenate([gap_buckets(np.array(history), np.array([0])) for history in histories])
    assert packed.tolist() == alone.tolist() and packed.min() >= 0 and packed.max() < GAP_BUCKETS
    assert (packed == 0).sum() == len(histories)
