import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from semantide.services.training.flops import StepMeter, StepWork, measured_peak, work_of
from semantide.services.training.page_targets import PageTargets
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.linear_layer import LinearConfig
from semantide.shared.models.retriever import Retriever
from semantide.shared.models.sasrec import SASRec, SASRecConfig
from semantide.shared.models.token_merger import MergerConfig

ITEMS = 40


def model_of(config: TrainConfig) -> torch.nn.Module:
    if config.model_type == "sasrec":
        return SASRec(replace(config.sasrec, num_items=ITEMS))
    return Retriever(config.retriever) if config.model_type == "retriever" else Generator(replace(config.generator, level_sizes=(8, 8, 4)))


def layers_forward(model: torch.nn.Module, tokens: int) -> None:
    """The model's layers on histories of one token each, where attention has one pair a token."""
    offsets_B1 = torch.arange(tokens + 1)
    if isinstance(model, Generator):
        model(torch.zeros(tokens, dtype=torch.int64), offsets_B1)
    elif isinstance(model, SASRec):
        model(torch.full((tokens,), -1), offsets_B1)
    else:
        assert isinstance(model, Retriever)
        model(torch.zeros(tokens, model.config.hidden_size), torch.ones(tokens, dtype=torch.bool), offsets_B1, torch.zeros(tokens, dtype=torch.int64))


@pytest.mark.parametrize("name", ["tiny", "sasrec", "retriever-tiny", "fuxi-tiny"])
def test_layers_count_what_torch_counts(name: str) -> None:
    config = recipe(name)
    model, tokens = model_of(config).eval(), 24
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layers_forward(model, tokens)
    counts = counter.get_flop_counts()["Global"]
    linear = counts.get(torch.ops.aten.addmm, 0) + counts.get(torch.ops.aten.mm, 0)
    assert linear == 2 * work_of(model, config, ITEMS).per_token * tokens


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 4))
def test_pairs_are_those_that_causality_allows(lengths: list[int], tokens_per_item: int) -> None:
    work = StepWork(0.0, 1.0, 0.0, tokens_per_item)
    pairs = sum(1 for length in lengths for place, other in itertools.product(range(length * tokens_per_item), repeat=2) if other <= place)
    assert work.flops(torch.tensor(lengths)) == 6 * pairs


@given(st.lists(st.tuples(st.integers(0, 6), st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), max_size=3)), min_size=1, max_size=4), st.integers(1, 3))
def test_targets_of_pages_count_what_they_see(histories: list[tuple[int, list[tuple[int, int]]]], levels: int) -> None:
    blocks = [(min(seen, length), items) for length, own in histories for seen, items in own]
    ends = torch.tensor([0, *itertools.accumulate(items for _, items in blocks)])
    numbers = torch.zeros(int(ends[-1]), dtype=torch.int64)
    seen = torch.tensor([seen for seen, _ in blocks], dtype=torch.int64)
    targets = PageTargets(numbers, numbers.float(), numbers.bool(), ends, torch.zeros_like(seen), seen, torch.zeros_like(seen))
    lengths = torch.tensor([length for length, _ in histories])
    pairs = sum(sum(range(1, 2 + length * levels)) for length, _ in histories)
    pairs += sum(1 + seen * levels + place for seen, items in blocks for place in range(1, items * levels))
    tokens = sum(1 + length * levels for length, _ in histories) + sum(items * levels - 1 for _, items in blocks)
    assert StepWork(0.0, 1.0, 0.0, levels).page_flops(lengths, targets) == 6 * pairs
    assert StepWork(1.0, 0.0, 2.0, levels).page_flops(lengths, targets) == 6 * (tokens + 2 * len(numbers))
    meter = StepMeter(StepWork(1.0, 0.0, 0.0, levels), 1.0)
    meter.add(lengths, targets)
    assert meter.report(1.0)["mfu"] == 6 * tokens


@given(st.integers(1, 12), st.integers(1, 2), st.integers(1, 3))
def test_pairs_behind_a_merged_prompt_are_those_that_blocks_see(items: int, places_per_item: int, behind: int) -> None:
    work = StepWork(0.0, 1.0, 0.0, places_per_item + behind, behind=behind)
    prompt = 1 + places_per_item * (items - 1)
    pairs = sum(range(1, prompt + 1)) + sum(1 + places_per_item * item + place for item in range(items) for place in range(1, behind + 1))
    assert work.flops(torch.tensor([items])) == 6 * pairs
    assert StepWork(1.0, 0.0, 0.0, places_per_item + behind, behind=behind).flops(torch.tensor([items])) == 6 * (prompt + items * behind)


@given(st.lists(st.integers(1, 60), min_size=2, max_size=8))
def test_work_of_a_batch_is_that_of_its_histories(lengths: list[int]) -> None:
    work = StepWork(5.0, 3.0, 2.0, 2)
    assert work.flops(torch.tensor(lengths)) == pytest.approx(sum(work.flops(torch.tensor([length])) for length in lengths))


def test_attention_of_each_model() -> None:
    for name, products in (("retriever-tiny", 2), ("fuxi-tiny", 4)):
        config = recipe(name)
        model = model_of(config)
        assert isinstance(model, Retriever)
        assert work_of(model, config, ITEMS).per_pair == products * config.retriever.hidden_size * config.retriever.num_layers
    generator = Generator(GeneratorConfig((4, 6), num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8))
    work = work_of(generator, recipe("tiny"), ITEMS)
    assert work.per_pair == 2 * 3 * 4 * 8 and work.per_item == 10 * generator.config.hidden_size and work.tokens_per_item == 2
    types = ("linear_attention", "full_attention", "gla")
    mixed = Generator(replace(generator.config, layer_types=types, linear=LinearConfig(1, 2, 8, 16, 4)))
    hybrid = work_of(mixed, recipe("tiny"), ITEMS)
    dense = sum(x.weight.numel() for x in mixed.model.layers.modules() if isinstance(x, torch.nn.Linear))
    assert hybrid.per_pair == 2 * 4 * 8 and hybrid.per_token == dense + 2 * (2 * 8 + 2 * 16) * 4 + (3 + 2) * 2 * 8 * 16
    merged = work_of(Generator(replace(generator.config, merger=MergerConfig(True, "kept"))), recipe("tiny"), ITEMS)
    assert (merged.tokens_per_item, merged.behind, merged.per_item - work.per_item) == (3, 1, 2 * generator.config.hidden_size**2)


def test_items_that_a_target_is_compared_with() -> None:
    config = recipe("retriever-tiny", {"num_negatives": 7, "negative_scope": "target", "negatives": {"expansion": 3}})
    model, size = model_of(config), config.retriever.hidden_size
    assert work_of(model, config, ITEMS).per_item == size * (1 + 3 * 7)
    logits = recipe("retriever-tiny", {"num_negatives": 7, "negative_scope": "target", "negatives": {"expansion": 3, "sharing": "logits"}})
    assert work_of(model, logits, ITEMS).per_item == size * 8
    batch = recipe("retriever-tiny", {"num_negatives": 7, "negatives": {"in_batch": True}})
    assert work_of(model, batch, ITEMS).flops(torch.tensor([3])) - work_of(model, recipe("retriever-tiny", {"num_negatives": 7}), ITEMS).flops(
        torch.tensor([3])
    ) == pytest.approx(6 * size * 9)
    sasrec = SASRec(SASRecConfig(num_items=ITEMS))
    assert work_of(sasrec, recipe("sasrec"), ITEMS).per_item == 64 * ITEMS
    assert work_of(model, recipe("retriever-tiny", {"num_negatives": ITEMS}), ITEMS).per_item == size * ITEMS
    with pytest.raises(ValueError, match="give a generator"):
        work_of(torch.nn.Linear(2, 2), config, ITEMS)


def test_meter_reports_work_over_the_peak_and_begins_anew() -> None:
    meter = StepMeter(StepWork(1.0, 0.0, 0.0), peak=120.0)
    meter.add(torch.tensor([10]))
    assert meter.report(2.0) == {"flops_per_second": 30.0, "mfu": 0.25}
    assert meter.report(1.0)["mfu"] == 0.0


def test_peak_counts_the_best_run_of_a_clock() -> None:
    ticks = iter([0.0, 0.0, 2.0, 0.1, 3.0, 3.5, 9.0])
    # Runs of 2 and of 0.5 seconds, after which the time is over.
    assert measured_peak(torch.device("cpu"), torch.float32, lambda: next(ticks)) == 2.0 * 1024**3 / 0.5
