"""Batches by pages: what is asked of which part of which history."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.training.batches import HistoryBatch
from semantide.services.training.page_batches import PageSampler
from semantide.services.training.page_targets import PagesConfig
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData
from semantide.shared.pages import Pages

Log = list[list[list[float]]]  # of each user the pages, of each page the intensities of what it showed
LOGS = st.lists(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 1.0, 3.0]), min_size=1, max_size=5), min_size=1, max_size=6), min_size=1, max_size=5)


def world(log: Log) -> tuple[Dataset, Pages]:
    """Each thing shown is an item of its own, so that it tells where it stood; all of it trains."""
    users, times, offsets, items, shown, history, moments, ends = [], [], [0], [], [], [], [], [0]
    for user, pages in enumerate(log):
        for number, page in enumerate(pages):
            users.append(user)
            times.append(1000 * number)
            for value in page:
                if value >= 1:
                    history.append(len(items))
                    moments.append(1000 * number)
                items.append(len(items))
                shown.append(value)
            offsets.append(len(items))
        ends.append(len(history))
    lengths = np.diff(ends).astype(np.int32)
    table = pa.table({"item": [str(item) for item in items]})
    data = Dataset(
        tuple(map(str, range(len(log)))), tuple(map(str, items)), np.array(history, np.int32), np.array(moments, np.int64), np.array(ends, np.int64), lengths, lengths, table, {}
    )  # fmt: skip
    return data, Pages(*(np.array(column, np.int64) for column in (users, times, offsets, items)), np.array(shown, np.float32), np.zeros(len(shown), np.int8))


def config(targets: str = "parallel", **changes: Any) -> TrainConfig:
    pages = {name: changes.pop(name) for name in list(changes) if name in PagesConfig.__dataclass_fields__}
    return recipe("pagewise", {"skip_rate": 0.0, "label_smoothing": 0.0, "items_per_batch": 12, **changes, "pages": {"targets": targets, **pages}})


def asked(batch: HistoryBatch) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Of each block: the items that it sees, its own, and their weights."""
    targets = batch.targets
    assert targets is not None
    histories = [history.tolist() for history in batch.items]
    bounds = targets.offsets_C1.tolist()
    for block, (history, seen) in enumerate(zip(targets.histories_C.tolist(), targets.seen_C.tolist(), strict=True)):
        inside = slice(bounds[block], bounds[block + 1])
        yield histories[history][:seen], targets.items_S[inside].tolist(), targets.weights_S[inside].tolist()


def blocks(sampler: PageSampler, number: int = 0) -> list[tuple[list[int], list[int], list[float]]]:
    epoch = sampler.epoch(number)
    return [block for index in range(len(epoch)) for block in asked(epoch.batch(index))]


@settings(deadline=None, max_examples=60)
@given(LOGS, st.sampled_from(["parallel", "point", "sequential"]), st.integers(1, 6), st.integers(0, 3))
def test_every_page_is_asked_once_after_the_last_items_before_it(log: Log, targets: str, longest: int, number: int) -> None:
    if not any(value >= 1 for pages in log for page in pages for value in page):
        log[0][0][0] = 1.0
    data, pages = world(log)
    wanted = Counter()
    first = 0
    before: list[int] = []
    for user in log:
        before = []
        for page in user:
            items = [first + place for place, value in enumerate(page) if value >= 1]
            first += len(page)
            if items:
                wanted[tuple(items), tuple(before)] += 1
            before = before + items
    found = blocks(PageSampler(data, pages, config(targets, max_items=longest), 5), number)
    of_page = {item: key for key in wanted for item in key[0]}
    for seen, items, _ in found:
        whole = list(of_page[items[0]][1])
        assert seen == whole[len(whole) - len(seen) :] and min(len(whole), longest - max(1, longest // 2) + 1) <= len(seen) <= longest
    asked_for = [tuple(sorted(items)) for _, items, _ in found]
    if targets == "sequential":
        assert Counter(asked_for) == Counter(key[0] for key in wanted)
    elif targets == "parallel":
        assert Counter(item for items in asked_for for item in items) == Counter(list(of_page))
    else:
        assert Counter(of_page[items[0]] for items in asked_for) == wanted


@settings(deadline=None, max_examples=30)
@given(LOGS, st.integers(0, 3), st.sampled_from(["similar", "mixed"]))
def test_the_form_of_the_targets_does_not_change_which_prompts_share_a_batch(log: Log, number: int, batching: str) -> None:
    log[0][0][0] = 1.0
    data, pages = world(log)
    epochs = [PageSampler(data, pages, config(targets, batching=batching, skip_rate=0.3), 1).epoch(number) for targets in ("parallel", "point", "sequential")]
    for other in epochs[1:]:
        for mine, theirs in zip(epochs[0].batches, other.batches, strict=True):
            assert mine.tolist() == theirs.tolist()
        for index in range(len(other)):
            assert [x.tolist() for x in epochs[0].batch(index).items] == [x.tolist() for x in other.batch(index).items]
    again = PageSampler(data, pages, config("parallel", batching=batching, skip_rate=0.3), 1).epoch(number)
    assert [list(asked(again.batch(index))) for index in range(len(again))] == [list(asked(epochs[0].batch(index))) for index in range(len(again))]


def test_stronger_answers_come_first_and_weigh_more_and_what_was_shown_is_what_the_config_says() -> None:
    data, pages = world([[[0.0, 1.0, 3.0, -1.0, 1.0, 0.0, 0.0]]])
    ((seen, items, weights),) = blocks(PageSampler(data, pages, config("sequential"), 0))
    assert (seen, items[0], sorted(items[1:]), weights) == ([], 2, [1, 4], [2.0, 1.0, 1.0])
    orders = {tuple(blocks(PageSampler(data, pages, config("sequential"), 0), number)[0][1]) for number in range(20)}
    assert orders == {(2, 1, 4), (2, 4, 1)}, "equals change places"
    orders = {tuple(blocks(PageSampler(data, pages, config("sequential", shuffle=False), 0), number)[0][1]) for number in range(20)}
    assert orders == {(2, 1, 4)}
    weak = blocks(PageSampler(data, pages, config(exposed="weak", exposed_cap=2), 0))
    assert [weights for _, _, weights in weak] == [[2.0], [1.0], [1.0], [pytest.approx(0.1)], [pytest.approx(0.1)]]
    assert {items[0] for number in range(20) for _, items, _ in blocks(PageSampler(data, pages, config(exposed="weak", exposed_cap=2), 0), number)} == {
        0,
        1,
        2,
        4,
        5,
        6,
    }
    contrast = blocks(PageSampler(data, pages, config(exposed="contrast"), 0))
    assert sorted(weights[0] for _, _, weights in contrast) == [0, 0, 0, 1, 1, 2]
    assert [items for _, items, _ in blocks(PageSampler(data, pages, config(page_cap=1), 0))] == [[2]], "the strongest stays"
    drawn = {blocks(PageSampler(data, pages, config("point"), 0), number)[0][1][0] for number in range(30)}
    assert drawn == {1, 2, 4}
    assert blocks(PageSampler(data, pages, config(clicked_from=2.0, ordered_from=4.0), 0)) == [([], [2], [1.0])]


def test_pages_of_shown_items_alone_count_as_weak_positives_only_where_asked() -> None:
    data, pages = world([[[1.0], [0.0, 0.0], [1.0]]])
    assert len(blocks(PageSampler(data, pages, config(), 0))) == len(blocks(PageSampler(data, pages, config(exposed="contrast"), 0))) == 2
    assert len(blocks(PageSampler(data, pages, config(exposed="weak"), 0))) == 4


def test_only_pages_of_the_training_part_and_with_crop_last_of_the_last_stretch() -> None:
    data, pages = world([[[1.0]] * 9])
    data = replace(data, train_end=np.array([7], np.int32), valid_end=np.array([8], np.int32))
    pages = replace(pages, parts_S=np.array([0] * 7 + [1, 2], np.int8))
    assert sorted(items[0] for _, items, _ in blocks(PageSampler(data, pages, config(), 0))) == list(range(7))
    last = blocks(PageSampler(data, pages, config(crop="last", max_items=4), 0))
    assert sorted(items[0] for _, items, _ in last) == [5, 6] and {len(seen) for seen, _, _ in last} == {3, 4}


@settings(deadline=None, max_examples=60)
@given(LOGS, st.sampled_from(["parallel", "point", "sequential"]), st.sampled_from(["out", "weak"]), st.integers(1, 3))
def test_crop_last_takes_the_last_stretch_of_each_user_that_has_a_positive(log: Log, targets: str, exposed: str, longest: int) -> None:
    log = [[*pages, [0.0, -1.0]] for pages in log]
    log[0][0][0] = 1.0
    data, pages = world(log)
    owner = np.repeat(pages.users_P, np.diff(pages.offsets_P1))

    def positives(crop: str) -> dict[int, set[int]]:
        found: dict[int, set[int]] = {}
        for _, items, _ in blocks(PageSampler(data, pages, config(targets, crop=crop, exposed=exposed, max_items=longest), 1)):
            for item in items:
                if pages.intensities_S[item] >= 1:
                    found.setdefault(int(owner[item]), set()).add(item)
        return found

    whole, last = positives("cover"), positives("last")
    assert whole.keys() == last.keys()
    if targets != "point":
        assert all(last[user] <= whole[user] and max(whole[user]) in last[user] for user in whole)


def test_what_is_held_out_of_a_page_is_neither_asked_nor_a_contrast() -> None:
    data, pages = world([[[1.0, 0.0], [1.0, 1.0, 0.0, 0.0], [1.0]]])
    held_out = replace(pages, parts_S=np.array([0, 0, 0, 1, 0, 1, 2], np.int8))
    batch = PageSampler(data, held_out, config(exposed="contrast"), 0).epoch(0).batch(0)
    assert batch.targets is not None
    asked_of, exposed = batch.targets.items_S.tolist(), batch.targets.exposed_S.tolist()
    assert {item for item, only in zip(asked_of, exposed, strict=True) if not only} == {0, 2}
    assert {item for item, only in zip(asked_of, exposed, strict=True) if only} == {1, 4}
    figures = PageSampler(data, held_out, config(), 0).figures
    assert (figures["pages"], figures["positives"], figures["exposed"]) == (2, 2, 2) and "positions" not in figures


def test_skipped_items_shorten_what_pages_see() -> None:
    data, pages = world([[[1.0], [1.0, 1.0], [0.0, 1.0]] for _ in range(40)])
    whole = {tuple(items): seen for seen, items, _ in blocks(PageSampler(data, pages, config(), 0))}
    some = {tuple(items): seen for seen, items, _ in blocks(PageSampler(data, pages, config(skip_rate=0.5), 0))}
    assert whole.keys() == some.keys()
    assert all(set(some[items]) <= set(whole[items]) for items in whole)
    assert 0 < sum(map(len, some.values())) < sum(map(len, whole.values()))


@pytest.mark.parametrize("log", [[[[0.0, 0.0]]], [[[-1.0]]]])
def test_without_any_positive_there_is_nothing_to_train_on(log: Log) -> None:
    data, pages = world(log)
    with pytest.raises(BadData, match=r"no item on the 1 pages .* intensity 1\.0 or more"):
        PageSampler(data, pages, config(), 0)


def test_one_action_only_and_pages_of_one_item_train_as_items_do() -> None:
    data, pages = world([[[1.0], [1.0], [1.0]]])
    for targets in ("parallel", "point", "sequential"):
        assert sorted(blocks(PageSampler(data, pages, config(targets), 0)), key=lambda block: block[1]) == [
            ([], [0], [1.0]),
            ([0], [1], [1.0]),
            ([0, 1], [2], [1.0]),
        ]
    assert PageSampler(data, pages, config(), 0).figures["can_pay"] is False
    with pytest.raises(BadData, match="all positives have weight 0"):
        PageSampler(data, pages, config(clicked_weight=0.0), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": "all"}, r"pages\.targets is 'all'"),
        ({"exposed_cap": -1}, r"pages\.exposed_cap is -1"),
        ({"targets": "sequential", "exposed": "contrast"}, "use parallel or point"),
        ({"clicked_from": 4.0}, "the second the larger"),
    ],
)
def test_what_a_config_cannot_mean_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("pagewise", {"pages": changes})


@pytest.mark.parametrize("changes", [{"crop": "random"}, {"repeat_weight": 0.5}])
def test_what_does_not_go_with_pages_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"pages\.targets is 'parallel'"):
        recipe("pagewise", changes)
    with pytest.raises(ValueError, match=r"pages\.targets is 'point'"):
        recipe("sasrec", {"pages": {"targets": "point"}})
