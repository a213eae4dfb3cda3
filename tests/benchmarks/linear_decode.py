"""Beams of linear attention over one shared prompt state, against a state of each beam's own and against states rebuilt from records.

The baselines are C++ as ours is (linear_states.cpp): ``materialised`` gathers the parents' states when beams are reordered and turns them in place;
``materialised_fused`` reads the parent's state and writes the child's in one pass, which is kinder to it than what serving systems do; ``replayed`` rebuilds each
beam's state in registers from the shared one and its records, and nothing is written but records. Answers of all are compared first. Parents come in order, as
beam search gives them.
The last tables are of whole models: 3 of 4 layers linear, all else equal.

With one thread processor time is measured, so that the machine may do other things beside; with more the time that passes.

    python tests/benchmarks/linear_decode.py [--quick] [--json] [--threads 1] [--parts operator bytes beams returning decode request]
"""

from __future__ import annotations

import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent))

from linear_states import OwnStates, OwnStatesDecoder, own_states_step, replayed_step  # type: ignore[import-not-found]
from stopwatch import alternate, arguments_parser, clock, finish  # type: ignore[import-not-found]

from semantide.kernels.beam_linear_attention import BeamRecords, beam_linear_attention, materialise
from semantide.shared.decoding.beam_search import Hits, beam_search
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.models import linear_records
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import DecodingState, GeneratorDecoder, PromptKV
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.quantised import BFloat16Linear, Weights, shorten
from semantide.shared.trie import Trie

HEADS = 2
MOST_BYTES = 1 << 30  # of states of beams' own, twice of which are held


def measure(value: float, unit: str, better: str, baseline: str, **bounds: float) -> dict[str, Any]:
    """One entry of the table."""
    return {"value": value, "unit": unit, "better": better, "baseline": baseline, **bounds}


def tokens_of(beams: int, size: int, random: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries and keys of length 1, values, decays, shares."""
    q, k = (F.normalize(torch.randn(beams, HEADS, size, generator=random), dim=-1) for _ in range(2))
    return q, k, torch.randn(beams, HEADS, size, generator=random), -torch.rand(beams, HEADS, 1, generator=random), torch.rand(beams, HEADS, generator=random)


def operator(requests: int, width: int, size: int, depth: int, runs: int, wrong: list[str]) -> dict[str, float]:
    """Seconds of one step behind ``depth`` tokens."""
    random = torch.Generator().manual_seed(width + size + depth)
    beams = requests * width
    states = torch.randn(requests, HEADS, size, size, generator=random)
    bases = torch.arange(requests).repeat_interleave(width)
    records = BeamRecords.empty((depth + 1) * beams, states, HEADS, False)
    rows = torch.empty(beams, 0, dtype=torch.long)
    for step in range(depth + 1):
        parents = (torch.randint(width, (requests, width), generator=random).sort(1).values + torch.arange(requests)[:, None] * width).flatten()
        own, rows = rows, torch.cat([rows[parents], torch.arange(step * beams, (step + 1) * beams)[:, None]], 1)
        tokens = tokens_of(beams, size, random)
        answer = beam_linear_attention(*tokens, states, bases, records, rows)
    before = materialise(states, bases, records, own)  # of the parents
    after, fresh, behind = torch.empty_like(before), BeamRecords.empty(beams, states, HEADS, False), rows[:, :-1].contiguous()
    everyone = torch.arange(beams)

    def materialised() -> Tensor:
        torch.index_select(before, 0, parents, out=after)
        return own_states_step(tokens, after, everyone, after)  # type: ignore[no-any-return]

    functions: dict[str, Callable[[], Tensor]] = {
        "ours": lambda: beam_linear_attention(*tokens, states, bases, records, rows),
        "materialised": materialised,
        "materialised_fused": lambda: own_states_step(tokens, before, parents, after),
        "replayed": lambda: replayed_step(tokens, states, bases, records, behind, fresh),
    }
    for name, function in functions.items():
        error = float((function() - answer).abs().max() / answer.abs().max())
        if not error <= 2e-5:
            wrong.append(f"requests {requests}, width {width}, size {size}, depth {depth}: {name} is {error:.1e} away")
    return alternate(functions, runs, clock=clock())  # type: ignore[no-any-return]


def replay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, bases: Tensor, records: BeamRecords, rows: Tensor) -> Tensor:
    """In the place of our operator, which has the same arguments; what nobody reads again (rows of -1) goes to records that are dropped."""
    if int(rows[0, -1]) < 0:
        fresh = BeamRecords.empty(len(q), states, k.shape[1], False)
    else:
        own = slice(int(rows[0, -1]), int(rows[-1, -1]) + 1)
        fresh = BeamRecords(records.k_NGd[own], records.delta_NHe[own], records.decay_NH1[own])
    tokens = tuple(x.contiguous() for x in (q, k, v, g, beta))
    return replayed_step(tokens, states, bases, records, rows[:, :-1].contiguous(), fresh)  # type: ignore[no-any-return]


def hybrid(hidden: int, layers: int, head: int, levels: tuple[int, ...], linear: str = "linear_attention") -> Generator:
    """Three linear layers, then one softmax layer, and so on."""
    torch.manual_seed(0)
    heads = hidden // head
    config = GeneratorConfig(
        levels,
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head,
        intermediate_size=3 * hidden,
        layer_types=tuple("full_attention" if place % 4 == 3 else linear for place in range(layers)),
        linear=LinearConfig(heads, heads, head, head),
        initializer_range=0.2,
    )
    return Generator(config).eval()


def prompt_of(generator: Generator, items: int, seed: int) -> tuple[Tensor, Tensor]:
    """A random history."""
    random = np.random.default_rng(seed)
    levels = generator.config.level_sizes
    codes = random.integers(0, levels, (items, len(levels)))
    tokens = torch.from_numpy(generator.vocabulary.history_tokens(generator.vocabulary.item_tokens(codes)))
    return tokens, torch.tensor([0, len(tokens)])


def play(decoder: GeneratorDecoder, state: DecodingState, width: int, steps: int, form: str) -> Tensor:
    """Decode steps with given parents and codes; the last logits."""
    random = torch.Generator().manual_seed(width)
    if form == "materialised":
        state.linear = OwnStates(state.linear)
    with patch.object(linear_records, "beam_linear_attention", replay if form == "replayed" else beam_linear_attention):
        for level in range(1, steps + 1):
            parents = torch.randint(1 if level == 1 else width, (1, width), generator=random).sort(1).values
            codes = torch.randint(decoder.level_sizes[level - 1], (1, width), generator=random)
            logits = decoder.step(state, level, parents, codes)
    return logits


def products_of(generator: Generator, rows: int) -> Callable[[], object]:
    """The products with the layers' weights that a step of so many beams takes."""
    layers = [module for module in generator.model.layers.modules() if isinstance(module, torch.nn.Linear | BFloat16Linear)]
    sizes = [layer.in_features if isinstance(layer, torch.nn.Linear) else layer.weight_NK.shape[1] for layer in layers]
    inputs = {size: torch.randn(rows, size) for size in set(sizes)}
    return lambda: [layer(inputs[size]) for layer, size in zip(layers, sizes, strict=True)]


WEIGHTS: dict[Weights, float] = {"float32": 1e-3, "bfloat16": 5e-2}
"""Forms of the layers' weights, and how far answers may lie apart: rounded products turn the last bits of what is summed in another order into whole steps."""


def whole_model(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Decode steps of a hybrid, prompts read before the clock starts; and how much of them are products with weights, which all forms share."""
    for weights, apart in WEIGHTS.items():
        decoder = GeneratorDecoder(shorten(hybrid(512, 8, 128, (256,) * 7), weights, time.perf_counter))
        ratios: dict[str, list[float]] = {"materialised": [], "replayed": []}
        for tokens in [1000] if options.quick else [1000, 5000]:
            _, begun = decoder.begin(*prompt_of(decoder.generator, tokens // 7, 0))
            for width in [256] if options.quick else [128, 256, 512]:
                for calls in [3] if options.quick else [2, 4, 6]:
                    seconds: dict[str, list[float]] = {"ours": [], "materialised": [], "replayed": []}
                    answers = {}
                    for _ in range(3):
                        for form, taken in seconds.items():
                            state = copy.deepcopy(begun)
                            start = clock()()
                            answers[form] = play(decoder, state, width, calls, form)
                            taken.append(clock()() - start)
                    median = {form: statistics.median(taken) for form, taken in seconds.items()}
                    name = f"decode_{weights}_prompt{tokens}_width{width}_calls{calls}"
                    for form in ratios:
                        difference = float((answers[form] - answers["ours"]).abs().max())
                        if not difference <= apart * float(answers["ours"].abs().max()):
                            wrong.append(f"{name}: {form} is {difference:.1e} away")
                        ratios[form].append(median[form] / median["ours"])
                        measures[f"{name}_{form}"] = measure(ratios[form][-1], "ratio", "higher", f"{form}; ours {1e3 * median['ours']:.0f} ms")
                    products = alternate({"products": products_of(decoder.generator, width)}, 3, clock=clock())["products"]
                    measures[f"{name}_products_share"] = measure(products * calls / median["ours"], "share", "higher", "all of ours")
        for form, bounds in (("materialised", {"at_least": 1.54, "aim": 2.5}), ("replayed", {})):
            measures[f"decode_{weights}_{form}_median"] = measure(statistics.median(ratios[form]), "ratio", "higher", form, **bounds)


def same_but_ties(expected: Hits, ours: Hits) -> bool:
    """Whether two searches found the same items in the same order, where those may change places whose scores lie within two last places of float32."""
    theirs, found, scores = expected.rows_RW[0].tolist(), ours.rows_RW[0].tolist(), expected.scores_RW[0].tolist()
    score_of = dict(zip(theirs, scores, strict=True))
    last_place = torch.finfo(torch.float32).eps
    return score_of.keys() == set(found) and all(abs(score_of[item] - score) <= 2 * last_place * abs(score) for item, score in zip(found, scores, strict=True))


def beams(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Whether beams are those of states of their own, in order; and how many of them are with shorter records."""
    same, alike, overlap, cases = 0, 0, {torch.bfloat16: 0.0, torch.float16: 0.0}, 40 if options.quick else 1000
    generator = hybrid(64, 4, 64, (24, 24, 24, 24))
    decoders = {dtype: GeneratorDecoder(generator, dtype) for dtype in (torch.float32, *overlap)}

    reference = OwnStatesDecoder(generator)
    for case in range(cases):
        random = np.random.default_rng(case)
        trie = Trie.build(np.unique(random.integers(0, 24, (600, 4)), axis=0))
        prompt = prompt_of(generator, int(random.integers(0, 40)), case)
        width = int(random.integers(1, 65))
        expected = beam_search(reference, trie, *prompt, width)
        ours = beam_search(decoders[torch.float32], trie, *prompt, width)
        same += torch.equal(expected.rows_RW, ours.rows_RW)
        alike += same_but_ties(expected, ours)
        for dtype in overlap:
            short = beam_search(decoders[dtype], trie, *prompt, width)
            overlap[dtype] += len(np.intersect1d(short.rows_RW.numpy(), expected.rows_RW.numpy())) / expected.rows_RW.numel() / cases
    if alike < cases:
        wrong.append(f"beams: {cases - alike} of {cases} cases differ from those of states of their own")
    measures["beams_same"] = measure(same / cases, "share", "higher", "materialised, float32", at_least=1.0)
    measures["beams_same_but_for_ties"] = measure(
        alike / cases, "share", "higher", "materialised, float32; order of scores nearer than float32 tells apart left open", at_least=1.0
    )
    for dtype, share in overlap.items():
        measures[f"beams_overlap_{str(dtype).split('.')[1]}"] = measure(share, "share", "higher", "materialised, float32", at_least=0.99)


def bytes_of(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """What beams hold and write, counted from tensors: the shared state is there in any form, and one token less is recorded than is generated."""
    width, size = 512, 128
    states = torch.empty(1, 1, size, size, device="meta")
    for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
        for outputs, bound in ((3, 56.5), (7, 20.3)):
            kept = BeamRecords.empty((outputs - 1) * width, states, 1, False, dtype).num_bytes
            least = {"at_least": bound} if name == "bfloat16" else {}
            measures[f"persistent_{name}_outputs{outputs}"] = measure(
                width * states.nbytes / (states.nbytes + kept), "ratio", "higher", "materialised", **least
            )
        least = {"at_least": 127} if name == "bfloat16" else {}
        written = BeamRecords.empty(1, states, 1, False, dtype).num_bytes
        measures[f"written_{name}"] = measure(states.nbytes / written, "ratio", "higher", "materialised", **least)
    room, prompt = 1 << 30, 1001
    for outputs, bound in ((3, 56.5), (7, 20.3)):
        generator = hybrid(512, 4, 128, (256,) * outputs)
        for dtype, name in ((torch.float32, "float32"), (torch.bfloat16, "bfloat16")):
            decoder = GeneratorDecoder(generator, dtype)
            footprint, linear = decoder.footprint, decoder.footprint.linear
            own = linear.own_state + 3 * 3 * generator.config.linear.channels * 4  # three layers' last three inputs
            # All that linear layers of a whole model keep, the inputs of the short convolution among it; a level has no more beams than prefixes.
            ours = linear.mark + footprint.recorded(width) * linear.row
            measures[f"persistent_model_{name}_outputs{outputs}"] = measure(
                width * own / ours, "ratio", "higher", "materialised, with its last inputs", **({"at_least": bound} if name == "bfloat16" else {})
            )
            widest = footprint.width_within(room - footprint.prompt(prompt, remembered=False))
            free = room - footprint.prompt(prompt, remembered=False)
            materialised = max(beams for beams in range(1, 1 << 16) if beams * own + footprint.rows(beams) * footprint.place <= free)
            measures[f"widest_within_1GB_{name}_outputs{outputs}"] = measure(
                widest / materialised, "ratio", "higher", f"materialised ({materialised} beams)", at_least=20, aim=50
            )


def returning(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """A user who comes back with one more item, behind prompts of several lengths; all layers linear, so that what is kept is of one size."""
    generator = hybrid(256, 3, 64, (64,) * 4)
    decoder = GeneratorDecoder(generator)
    for items in (100, 400) if options.quick else (100, 400, 1600):
        tokens, offsets = prompt_of(generator, items, 1)
        before = tokens[:-4]
        _, state = decoder.begin(before, torch.tensor([0, len(before)]))
        kept = state.prompt_kv(0)

        def cold(tokens: Tensor = tokens, offsets: Tensor = offsets) -> object:
            return decoder.begin(tokens, offsets)

        def warm(tokens: Tensor = tokens, offsets: Tensor = offsets, kept: PromptKV = kept) -> object:
            return decoder.begin(tokens, offsets, [kept])

        seconds = alternate({"cold": cold, "warm": warm}, 5, clock=clock())
        measures[f"returning_items{items}_bytes"] = measure(sum(mark.num_bytes for mark in kept.marks), "bytes", "lower", "")
        measures[f"returning_items{items}_warm_ms"] = measure(1e3 * seconds["warm"], "ms", "lower", f"cold: {1e3 * seconds['cold']:.1f} ms")


def hugging_face(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """Processor time of a whole request in transformers' Qwen3-Next with beam search of its own (over all tokens, without a catalog), and in ours on its weights."""
    try:
        from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
    except ImportError:
        print("transformers has no Qwen3-Next here: not compared", file=sys.stderr)
        return
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 4}
    linear = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
    theirs = Qwen3NextForCausalLM(Qwen3NextConfig(vocab_size=769, num_experts=0, eos_token_id=None, pad_token_id=0, **sizes, **linear)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        decoder = GeneratorDecoder(Generator.from_pretrained(Path(folder), (256, 256, 256)))
    tokens, offsets = prompt_of(decoder.generator, 50, 0)
    expected, answer = theirs(tokens[None]).logits[0, -1], decoder.begin(tokens, offsets)[0][0]
    if not torch.allclose(expected[decoder.generator.vocabulary.row(0)], answer, rtol=1e-3, atol=1e-3):
        wrong.append("hugging_face: logits behind the prompt differ")
    trie = SearchTrie.build(Trie.build(np.unique(np.random.default_rng(0).integers(0, 256, (12101, 3)), axis=0)))
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(1 if options.quick else 3):
        start = time.process_time()
        theirs.generate(tokens[None], num_beams=128, num_return_sequences=10, max_new_tokens=3, do_sample=False)
        middle = time.process_time()
        for _ in range(10):
            beam_search(decoder, trie, tokens, offsets, 128)
        seconds["theirs"].append(middle - start)
        seconds["ours"].append((time.process_time() - middle) / 10)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    told = f"{1e3 * median['theirs']:.0f} / {1e3 * median['ours']:.1f} CPU-ms a request"
    measures["request_width128_prompt150"] = measure(median["theirs"] / median["ours"], "ratio", "higher", f"transformers: {told}", at_least=40, aim=100)


def operators(options: Any, measures: dict[str, dict[str, Any]], wrong: list[str]) -> None:
    """One step of the operator alone, over the shapes."""
    ratios: dict[str, list[float]] = {"materialised": [], "materialised_fused": [], "replayed": []}
    for requests in (1, 4) if options.quick else (1, 4, 16):
        for width in (256,) if options.quick else (128, 256, 512):
            for size in (64, 128):
                if requests * width * HEADS * size * size * 4 > MOST_BYTES:
                    continue
                for depth in (1, 3, 6) if options.quick else range(1, 7):
                    seconds = operator(requests, width, size, depth, 3 if options.quick else 5, wrong)
                    for form, entries in ratios.items():
                        entries.append(seconds[form] / seconds["ours"])
                        measures[f"operator_{requests}x{width}_size{size}_depth{depth}_{form}"] = measure(entries[-1], "ratio", "higher", form)
    bounds: dict[str, dict[str, float]] = {"materialised": {"at_least": 20, "aim": 45}, "replayed": {"at_least": 17.5, "aim": 30}}
    for form, entries in ratios.items():
        measures[f"operator_{form}_median"] = measure(statistics.median(entries), "ratio", "higher", form, **bounds.get(form, {}))


PARTS: dict[str, Callable[[Any, dict[str, dict[str, Any]], list[str]], None]] = {
    "operator": operators,
    "bytes": bytes_of,
    "beams": beams,
    "returning": returning,
    "decode": whole_model,
    "request": hugging_face,
}


@torch.inference_mode()
def main() -> int:
    """Measure and print."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    measures: dict[str, dict[str, Any]] = {}
    wrong: list[str] = []
    for part in options.parts:
        start = time.perf_counter()
        PARTS[part](options, measures, wrong)
        print(f"{part}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return finish("linear_decode", options, measures, wrong)  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
