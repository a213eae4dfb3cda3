from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from semantide.services.training.evaluate import Case, EvaluateConfig, cases_of, evaluate
from semantide.services.training.rankers import GeneratorRanker, PopularityRanker, Ranker, RetrieverRanker, SASRecRanker
from semantide.services.training.row_matching import inverse, rows_of
from semantide.shared.dataset import Dataset
from semantide.shared.decoding.brute_force import score_every_item
from semantide.shared.errors import Conflict
from semantide.shared.jagged import Jagged
from semantide.shared.models.generator import Generator, GeneratorConfig
from semantide.shared.models.generator_decoder import GeneratorDecoder
from semantide.shared.models.popularity import Popularity
from semantide.shared.models.retriever import Retriever, RetrieverConfig
from semantide.shared.models.sasrec import SASRec, SASRecConfig
from semantide.shared.trie import Trie

HISTORIES = [np.array([3, 1, 4]), np.array([1]), np.array([5, 9, 2, 6, 5, 3, 5])]


def generator(levels: tuple[int, ...]) -> Generator:
    torch.manual_seed(1)
    return Generator(
        GeneratorConfig(levels, num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16, initializer_range=0.5)
    )


@pytest.mark.parametrize("seen", [False, True])
def test_the_generator_ranks_like_exact_scores_in_the_data_sets_rows(seen: bool) -> None:
    model = generator((4, 5))
    codes = np.stack([np.arange(20) // 5, np.arange(20) % 5], 1).astype(np.int64)
    catalog_rows = np.random.default_rng(0).permutation(20)[:15].astype(np.int64)  # five catalog items are not in the data set
    ranker = GeneratorRanker(model, Trie.build(codes), codes, catalog_rows, max_items=5, beam_width=20)
    lists = ranker.rank(HISTORIES, 8, seen)
    tokens = model.vocabulary.item_tokens(codes)[catalog_rows]
    prompts = Jagged.from_sequences(model.vocabulary.history_tokens(tokens[history[-5:]]) for history in HISTORIES)
    scores = score_every_item(GeneratorDecoder(model), codes, prompts.values, prompts.offsets_B1)[:, catalog_rows]
    for row, history, score in zip(lists, HISTORIES, scores, strict=True):
        if seen:
            score[history] = -np.inf
        assert row.tolist() == np.argsort(-score)[:8].tolist()


@pytest.mark.parametrize("seen", [False, True])
def test_sasrec_ranks_like_its_logits_and_lists_end_when_items_do(seen: bool) -> None:
    torch.manual_seed(0)
    model = SASRec(SASRecConfig(num_items=10, hidden_size=8, max_items=4, initializer_range=1.0)).eval()
    model_rows = np.arange(10)[::-1].copy()
    lists = SASRecRanker(model, model_rows, 4).rank(HISTORIES, 12, seen)
    for row, history in zip(lists, HISTORIES, strict=True):
        with torch.no_grad():
            rows = torch.tensor([-1, *model_rows[history[-4:]]])
            score = model.logits(model(rows, torch.tensor([0, len(rows)]))[-1]).numpy()[model_rows]
        expected = [item for item in np.argsort(-score).tolist() if not (seen and item in history)]
        assert row.tolist() == [*expected, *[-1] * (12 - len(expected))]


def test_popularity_is_the_same_for_all_but_what_they_saw() -> None:
    ranker = PopularityRanker(Popularity(np.array([5, 9, 1, 7, 0, 0, 0, 0, 0, 0])))
    assert ranker.rank(HISTORIES[:2], 3, False).tolist() == [[1, 3, 0], [1, 3, 0]]
    assert ranker.rank(HISTORIES[:2], 3, True).tolist() == [[0, 2, 5], [3, 0, 2]]


def lacking(rows: np.ndarray, missing: int) -> np.ndarray:
    return np.where(np.arange(len(rows)) == missing, -1, rows)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("missing", [1, 7])
def test_what_a_model_lacks_is_in_no_list_and_left_out_of_histories(seen: bool, missing: int) -> None:
    """As if the item had never been: neither history nor list has it, and everything else stays."""
    rows = np.random.default_rng(0).permutation(20)[:15].astype(np.int64)
    codes = np.stack([np.arange(20) // 5, np.arange(20) % 5], 1).astype(np.int64)
    torch.manual_seed(0)
    sasrec = SASRec(SASRecConfig(num_items=20, hidden_size=8, max_items=4, initializer_range=1.0)).eval()
    retriever = Retriever(RetrieverConfig(hidden_size=16, num_layers=1, num_heads=2, max_items=5, time_buckets=16)).eval()
    vectors = torch.randn(20, 16)
    model, trie = generator((4, 5)), Trie.build(codes)

    def rankers(own: np.ndarray) -> list[Ranker]:
        return [
            GeneratorRanker(model, trie, codes, own, max_items=5, beam_width=20),
            RetrieverRanker(retriever, lambda items: vectors[items], own, 5),
            SASRecRanker(sasrec, own, 4),
        ]

    times = [np.arange(len(history)) for history in HISTORIES]
    without = (
        [history[history != missing] for history in HISTORIES],
        14,
        seen,
        [moments[history != missing] for moments, history in zip(times, HISTORIES, strict=True)],
    )
    for whole, partial in zip(rankers(rows), rankers(lacking(rows, missing)), strict=True):
        assert (whole.num_unknown, partial.num_unknown) == (0, 1)
        lists = partial.rank(HISTORIES, 14, seen, times)
        expected = [[item for item in row if item != missing] for row in whole.rank(without[0], 15, *without[2:]).tolist()]
        assert [[item for item in row if item >= 0] for row in lists.tolist()] == [[item for item in row if item >= 0] for row in expected]
    assert inverse(lacking(np.array([1, 0]), 0), 2).tolist() == [1, -1]


def test_the_order_of_cases_and_the_batch_size_change_nothing() -> None:
    ranker = PopularityRanker(Popularity(np.arange(10)))
    cases = [Case(user, history, np.array([user])) for user, history in enumerate(HISTORIES)]
    ticks: list[tuple[int, int]] = []
    one = evaluate(ranker, cases, ks=(2, 9), num_items=10, exclude_seen=True, cases_per_batch=1, tick=lambda done, total: ticks.append((done, total)))
    assert one == evaluate(ranker, cases[::-1], ks=(2, 9), num_items=10, exclude_seen=True)
    assert ticks == [(1, 3), (2, 3), (3, 3)]


def test_cases_are_the_held_out_events_and_a_drawn_part_of_them_stays_the_same(ring: Dataset) -> None:
    everyone = cases_of(ring, "test")
    assert len(everyone) == len(ring.user_ids)
    assert all(case.history.tolist() == ring.history(case.user)[:-1].tolist() and case.targets.tolist() == [ring.history(case.user)[-1]] for case in everyone)
    some = [case.user for case in cases_of(ring, "valid", 10, seed=3)]
    assert some == [case.user for case in cases_of(ring, "valid", 10, seed=3)] == sorted(set(some))
    assert len(some) == 10


def test_cases_may_be_left_to_users_whose_held_out_page_has_several_items(ring: Dataset) -> None:
    longer = replace(ring, valid_end=np.where(np.arange(len(ring.user_ids)) % 4 == 0, ring.train_end, ring.valid_end).astype(np.int32))
    assert [case.user for case in cases_of(longer, "test", min_targets=2)] == list(range(0, len(ring.user_ids), 4))
    assert cases_of(longer, "test", min_targets=3) == []


def test_rows_align_by_item_and_missing_items_are_named() -> None:
    assert rows_of(("b", "a"), {"a": 0, "b": 1, "c": 2}, "the catalog", "").tolist() == [1, 0]
    assert inverse(np.array([1, 0]), 3).tolist() == [1, 0, -1]
    with pytest.raises(Conflict, match=r"the catalog lacks 2 of the data set's 3 items \('x', 'y'\): tokenize"):
        rows_of(("x", "a", "y"), {"a": 0}, "the catalog", "tokenize it")
    assert rows_of(("x", "a"), {"a": 0}, "the catalog", "", 0.5).tolist() == [-1, 0]
    with pytest.raises(Conflict, match="lacks 2"):
        rows_of(("x", "a", "y"), {"a": 0}, "the catalog", "", 0.5)


@pytest.mark.parametrize(
    "changes",
    [{"ks": []}, {"ks": [0]}, {"ks": 5}, {"part": "train"}, {"beam_width": 0}, {"max_users": 0}, {"min_targets": 0}, {"min_targets": None}, {"beam": 3}],
)
def test_a_wrong_evaluation_is_refused(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        EvaluateConfig.of(changes)
