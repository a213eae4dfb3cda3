import threading
import time

import pytest

from semantide.services.serving.batcher import Batcher, Overloaded
from semantide.shared.errors import TransientError


def test_what_waits_goes_together_in_order_and_within_bounds():
    gate, batches = threading.Event(), []

    def run(queries):
        batches.append(list(queries))
        if len(batches) == 1:
            gate.wait(5)
        return [query * 2 for query in queries]

    batcher = Batcher(run, max_batch=4)
    batcher.start()
    futures = [batcher.submit(0)]
    while not batches:
        time.sleep(0.001)
    futures += [batcher.submit(number) for number in range(1, 10)]
    gate.set()
    assert [future.result(5)[0] for future in futures] == [number * 2 for number in range(10)]
    assert [len(batch) for batch in batches] == [1, 4, 4, 1]
    batcher.stop()


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    gate = threading.Event()
    batcher = Batcher(lambda queries: [gate.wait(5) for _ in queries], max_batch=1, max_queue=2)
    batcher.start()
    first = batcher.submit(0)
    while batcher.depth():
        time.sleep(0.001)
    rest = [batcher.submit(1), batcher.submit(2)]
    with pytest.raises(Overloaded, match="2 requests wait already") as caught:
        batcher.submit(3)
    assert 1 <= caught.value.retry_after_seconds <= 30
    gate.set()
    for future in (first, *rest):
        future.result(5)
    batcher.submit(4).result(5)
    batcher.stop()


def test_late_and_abandoned_requests_cost_nothing():
    gate, seen = threading.Event(), []

    def run(queries):
        seen.extend(queries)
        if 0 in queries:
            gate.wait(5)
        return queries

    batcher = Batcher(run, deadline_seconds=0.05)
    batcher.start()
    first = batcher.submit(0)
    while not seen:
        time.sleep(0.001)
    late, left = batcher.submit(1), batcher.submit(2)
    left.cancel()
    time.sleep(0.1)
    gate.set()
    first.result(5)
    with pytest.raises(TransientError, match=r"past its deadline of 0\.1 s"):
        late.result(5)
    batcher.stop()
    assert seen == [0]


def test_a_bad_request_does_not_take_its_neighbours_along():
    gate, started = threading.Event(), threading.Event()

    def run(queries):
        started.set()
        gate.wait(5)
        return [1 // query for query in queries]

    batcher = Batcher(run)
    batcher.start()
    first = batcher.submit(1)
    started.wait(5)
    futures = [batcher.submit(query) for query in (1, 0, 1)]
    gate.set()
    assert first.result(5)[0] == futures[0].result(5)[0] == futures[2].result(5)[0] == 1
    with pytest.raises(ZeroDivisionError):
        futures[1].result(5)
    batcher.stop()


def test_stopping_finishes_what_waits_and_takes_no_more():
    batcher = Batcher(lambda queries: [time.sleep(0.01) or query for query in queries], max_batch=1)
    batcher.start()
    futures = [batcher.submit(number) for number in range(5)]
    batcher.stop()
    assert [future.result(0)[0] for future in futures] == list(range(5))
    with pytest.raises(TransientError, match="stopping"):
        batcher.submit(6)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="max_queue is 0"):
        Batcher(lambda queries: queries, max_queue=0)
