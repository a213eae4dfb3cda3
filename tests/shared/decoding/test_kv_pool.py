import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.decoding.kv_pool import KVExhausted, KVLease, KVPool
from semantide.shared.errors import PermanentError

BUDGET = 100


@given(st.lists(st.tuples(st.sampled_from(["reserve", "release", "again", "fail"]), st.integers(0, 120)), max_size=40))
def test_bytes_in_use_are_those_of_live_leases_and_return_to_zero(moves: list[tuple[str, int]]) -> None:
    pool = KVPool(BUDGET)
    live: list[KVLease] = []
    dead: list[KVLease] = []
    most = 0
    for move, number in moves:
        used = sum(lease.num_bytes for lease in live)
        if move == "reserve":
            if number > BUDGET:
                with pytest.raises(PermanentError, match="smaller width"):
                    pool.reserve(number)
            elif used + number > BUDGET:
                assert not pool.fits(number)
                with pytest.raises(KVExhausted, match="are in use"):
                    pool.reserve(number)
            else:
                assert pool.fits(number)
                live.append(pool.reserve(number))
        elif move == "release" and live:
            dead.append(live.pop(number % len(live)))
            dead[-1].release()
        elif move == "again" and dead:
            dead[number % len(dead)].release()
        elif move == "fail" and used + number <= BUDGET:
            with pytest.raises(RuntimeError), pool.reserve(number):
                raise RuntimeError
        most = max(most, sum(lease.num_bytes for lease in live))
        assert pool.in_use_bytes == sum(lease.num_bytes for lease in live)
        assert pool.leases == len(live)
    assert most <= pool.high_water_bytes <= BUDGET
    for lease in live:
        lease.release()
    assert (pool.in_use_bytes, pool.leases) == (0, 0)


def test_no_more_is_drawn_than_was_reserved() -> None:
    pool = KVPool(BUDGET)
    with pool.reserve(10) as lease:
        lease.draw(4)
        lease.draw(6)
        with pytest.raises(ValueError, match="asked of a lease of 10"):
            lease.draw(1)
    with pytest.raises(ValueError, match="is released"):
        lease.draw(0)
    for wrong in (-1,):
        with pytest.raises(ValueError, match="num_bytes is -1"):
            pool.reserve(wrong)
    with pytest.raises(ValueError, match="budget_bytes is 0"):
        KVPool(0)


def test_threads_never_exceed_the_budget() -> None:
    pool = KVPool(BUDGET)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for size in range(200):
            try:
                with pool.reserve(size % 60):
                    assert pool.in_use_bytes <= BUDGET
            except KVExhausted:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pool.in_use_bytes == 0
    assert 0 < pool.high_water_bytes <= BUDGET
