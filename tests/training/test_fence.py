"""The order in which a table is read and changed, for any speed of the threads."""

from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.training.fence import Fence, Staleness, Stopped


@given(st.integers(0, 3), st.integers(0, 9), st.integers(0, 6), st.integers(1, 12))
def test_rows_miss_no_more_updates_than_allowed_and_none_while_warming_up(batches: int, warmup: int, start: int, length: int) -> None:
    staleness = Staleness(batches, warmup)
    seen = [staleness.seen(step, start) for step in range(start, start + length)]
    assert seen[0] == start
    assert seen == sorted(seen)
    for step, updates in enumerate(seen, start):
        assert step - batches <= updates <= step
        assert updates == step or step >= warmup
        if step >= start + batches and step >= warmup + batches:
            assert updates == step - batches
        last = staleness.last_before(step, start)
        assert staleness.seen(last, start) <= step < staleness.seen(last + 1, start)


@given(st.integers(0, 2), st.integers(0, 5), st.integers(0, 4), st.integers(0, 10), st.data())
def test_every_schedule_of_the_threads_gives_one_order(batches: int, warmup: int, start: int, length: int, data: st.DataObject) -> None:
    """Two threads, one of which may go on at any moment: what each could do is found by asking the fence."""
    end = start + length
    first = data.draw(st.integers(start, end))
    fence = Fence(Staleness(batches, warmup), start, first, end)
    fetched, updated, seen = first, first, {}
    while fetched < end or updated < end:
        choices = []
        if fetched < end and updated >= fence.seen(fetched):
            choices.append("fetch")
        # An update also needs its batch to have been fetched and computed with.
        if updated < fetched and fetched > fence.last_before(updated):
            choices.append("update")
        assert choices, "the threads wait for each other"
        if data.draw(st.sampled_from(choices)) == "fetch":
            fence.before_fetch(fetched)
            seen[fetched] = updated
            fence.fetched(fetched)
            fetched += 1
        else:
            fence.before_update(updated)
            fence.updated(updated)
            updated += 1
    fence.settle(end)
    # Right after going on, rows that were read before are read again and see all.
    assert all(updates == max(first, fence.seen(step)) for step, updates in seen.items())


def test_who_waits_is_let_go_at_the_end() -> None:
    fence, ended = Fence(Staleness(), 0, 0, 9), []

    def wait() -> None:
        try:
            fence.before_fetch(5)
        except Stopped:
            ended.append(True)

    thread = Thread(target=wait)
    thread.start()
    fence.stop()
    thread.join(60)
    assert ended == [True]
    with pytest.raises(Stopped):
        fence.before_update(3)


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="batches is -1"):
        Staleness(-1)
    with pytest.raises(ValueError, match="first is 7: give a step from 2 to 5"):
        Fence(Staleness(), 2, 7, 5)
