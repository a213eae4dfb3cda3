"""The scheduler with work that only says when it runs: real threads, no model."""

import threading
import time

import pytest

from semantide.services.serving.admission import GroupBounds
from semantide.services.serving.narrowing import Narrowing
from semantide.services.serving.scheduler import Overloaded, Scheduler
from semantide.services.serving.ticket import Watcher
from semantide.shared.errors import TransientError

from .jobs import PATIENCE, Job, Jobs, held
from .world import wait_until


@pytest.fixture
def started():
    """A function that starts a scheduler; all are stopped at the end, and nothing may be held then."""
    made = []

    def start(stages, **options):
        scheduler = Scheduler(stages, clock=stages.clock, **options)
        scheduler.start()
        made.append((scheduler, stages))
        return scheduler

    yield start
    for scheduler, stages in made:
        scheduler.stop()
        assert stages.pool.in_use_bytes == 0 and stages.pool.leases == 0 and scheduler.running() == 0
        assert scheduler._rows_under_way == scheduler._requests_under_way == scheduler._ready.rows == 0


def test_what_waits_begins_together_within_the_bounds(started):
    gate, stages, scheduler, first = held(started, bounds=GroupBounds(requests=4))
    futures = [scheduler.submit(Job(str(number))) for number in range(9)]
    wait_until(lambda: len(scheduler._ready) >= 8)
    gate.open()
    assert [future.result(PATIENCE)[0] for future in (first, *futures)] == ["answer of first", *(f"answer of {number}" for number in range(9))]
    assert [names for names, number in stages.log.rounds if number == 0] == [("first",), ("0", "1", "2", "3"), ("4", "5", "6", "7"), ("8",)]


def test_groups_are_bounded_by_beams_and_tokens_and_never_mix_families(started):
    gate, stages, scheduler, _ = held(started, bounds=GroupBounds(requests=8, beams=100, tokens=50))
    jobs = [Job("a1", 10), Job("a2", 10), Job("b1", 10, family_name="b"), Job("long", 10, 45), Job("wide", 95), Job("a3", 10)]
    futures = [scheduler.submit(job) for job in jobs]
    wait_until(lambda: len(scheduler._ready) == 6)
    gate.open()
    for future in futures:
        future.result(PATIENCE)
    groups = [set(names) for names, number in stages.log.rounds if number == 0][1:]
    for group in groups:
        members = [job for job in jobs if job.name in group]
        assert len({job.family_name for job in members}) == 1
        assert len(members) == 1 or (sum(job.beams for job in members) <= 100 and sum(job.tokens for job in members) <= 50)
    assert {"a1", "a2", "a3"} <= set.union(*(group for group in groups if "a1" in group)) and len(groups) < 6


def test_a_wide_request_lets_narrow_ones_pass_between_its_rounds(started):
    stages = Jobs()
    scheduler = started(stages, bounds=GroupBounds(beams=100))
    for _ in range(30):  # the pace is learned: a row takes a millisecond, more or less
        scheduler.submit(Job("slow", 2, 1, round_seconds=0.002)).result(PATIENCE)
    stages.log.rounds.clear()
    reached, proceed = threading.Event(), threading.Event()
    stages.gate = lambda names, number: (names, number) != (("wide",), 0) or reached.set() or proceed.wait(PATIENCE)
    wide = scheduler.submit(Job("wide", 90, 1, rounds=8, round_seconds=0.05))
    assert reached.wait(PATIENCE)
    narrow = [scheduler.submit(Job(f"n{number}", 20, 1, round_seconds=0.002)) for number in range(3)]
    wait_until(lambda: len(scheduler._ready) == 3)
    proceed.set()
    for future in (*narrow, wide):
        future.result(PATIENCE)
    order = stages.log.order()
    assert order.index("wide:7") > max(place for place, entry in enumerate(order) if entry.startswith("n"))


def test_nobody_waits_for_ever(started):
    """Under a steady stream of narrow requests a wide one still gets its turn, and is not the last to be answered."""
    narrow = []

    def more(names, number):
        if number == 0 and not wide.done() and len(narrow) < 5_000:  # whenever one begins, the next is there
            narrow.append(scheduler.submit(Job("n", round_seconds=0.001)))

    gate, stages, scheduler, first = held(started, bounds=GroupBounds(requests=1))
    wide = scheduler.submit(Job("wide", 50, round_seconds=0.005))
    narrow.append(scheduler.submit(Job("n", round_seconds=0.001)))
    stages.gate = more
    gate.open()
    assert first.result(PATIENCE) and wide.result(PATIENCE)
    for future in narrow:
        future.result(PATIENCE)
    assert 1 < len(narrow) < 5_000


def test_cancelled_requests_cost_nothing_more(started):
    gate, stages, scheduler, first = held(started, bounds=GroupBounds(requests=2))
    waiting = [scheduler.submit(Job(name)) for name in ("left", "right", "last")]
    assert waiting[0].cancel()
    wait_until(lambda: scheduler.depth() == 3)
    gate.open()
    assert waiting[1].result(PATIENCE)[0] == "answer of right" and waiting[2].result(PATIENCE)[0] == "answer of last"
    assert not any("left" in names for names, _ in stages.log.rounds) and first.result(PATIENCE)


def test_a_request_cancelled_mid_step_frees_its_memory_at_the_next_round(started):
    reached, proceed = threading.Event(), threading.Event()

    def gate(names, number):
        if "stay" in names and number == 1:
            reached.set()
            assert proceed.wait(PATIENCE)

    stages = Jobs(gate)
    hold = threading.Event()
    blocker, scheduler = Job("blocker"), started(stages)
    original = stages.gate
    stages.gate = lambda names, number: hold.wait(PATIENCE) if names == ("blocker",) else original(names, number)
    scheduler.submit(blocker)
    wait_until(lambda: stages.log.rounds)
    stay, leave = scheduler.submit(Job("stay", 10)), scheduler.submit(Job("leave", 500))
    wait_until(lambda: len(scheduler._ready) == 2)
    hold.set()
    assert reached.wait(PATIENCE) and stages.pool.in_use_bytes >= 510
    assert leave.cancel()
    proceed.set()
    assert stay.result(PATIENCE)[0] == "answer of stay"
    assert [names for names, number in stages.log.rounds if "stay" in names] == [("stay", "leave")] * 2 + [("stay",)]


def test_a_group_that_everybody_left_is_dropped(started):
    gate, stages, scheduler, first = held(started)
    first.cancel()
    gate.open()
    wait_until(lambda: scheduler.running() == 0)
    assert stages.log.order() == ["first:0"]


@pytest.mark.parametrize("stage", ["assemble", "begin", "round 0", "round 2"])
def test_one_bad_request_fails_alone(started, stage):
    gate, _, scheduler, first = held(started)
    futures = [scheduler.submit(Job(name, fails=stage if name == "bad" else "")) for name in ("x", "bad", "y")]
    wait_until(lambda: len(scheduler._ready) == (2 if stage == "assemble" else 3))
    gate.open()
    assert first.result(PATIENCE) and futures[0].result(PATIENCE)[0] == "answer of x" and futures[2].result(PATIENCE)[0] == "answer of y"
    with pytest.raises(ValueError, match=r"bad|begin"):
        futures[1].result(PATIENCE)


def test_who_waited_past_the_deadline_is_told_so(started):
    gate, stages, scheduler, first = held(started, deadline_seconds=0.1)
    late = scheduler.submit(Job("late"))
    stages.clock.advance(0.15)
    gate.open()
    for future in (first, late):
        with pytest.raises(TransientError, match=r"past its deadline of 0\.1 s"):
            future.result(PATIENCE)
    assert stages.log.order() == ["first:0"]
    assert scheduler.submit(Job("next")).result(PATIENCE)[0] == "answer of next"


def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(started):
    gate, _, scheduler, first = held(started, max_queue=2)
    rest = [scheduler.submit(Job("1")), scheduler.submit(Job("2"))]
    with pytest.raises(Overloaded, match="2 requests wait already") as caught:
        scheduler.submit(Job("3"))
    assert 1 <= caught.value.retry_after_seconds <= 30
    rest[0].cancel()
    rest.append(scheduler.submit(Job("in place of the one that left")))
    gate.open()
    for future in (first, *rest[1:]):
        future.result(PATIENCE)


def test_a_refusal_looks_through_the_queue_only_when_somebody_left(started, monkeypatch):
    gate, _, scheduler, first = held(started, max_queue=500)
    waiting = [scheduler.submit(Job(str(number))) for number in range(500)]
    looked, forget = [], scheduler._forget_cancelled
    monkeypatch.setattr(scheduler, "_forget_cancelled", lambda: looked.append(1) or forget())
    for _ in range(100):
        with pytest.raises(Overloaded):
            scheduler.submit(Job("more"))
    assert looked == []
    waiting[3].cancel()
    waiting.append(scheduler.submit(Job("in its place")))
    for future in waiting:
        future.cancel()
    gate.open()
    assert looked == [1] and first.result(PATIENCE)


def test_memory_is_reserved_before_a_request_begins_and_the_most_urgent_is_not_passed(started):
    gate, stages, scheduler, first = held(started, bounds=GroupBounds(beams=2000))
    futures = [scheduler.submit(Job(name, beams)) for name, beams in (("x", 600), ("y", 600), ("z", 600))]
    wait_until(lambda: len(scheduler._ready) == 3)
    gate.open()
    for future in (first, *futures):
        future.result(PATIENCE)
    assert [names for names, number in stages.log.rounds if number == 0][1:] == [("x",), ("y",), ("z",)]
    assert stages.pool.high_water_bytes <= 1000


def test_a_request_that_memory_never_suffices_for_is_refused_and_others_go_on(started):
    scheduler = started(Jobs())
    with pytest.raises(Exception, match="the budget is 1000"):
        scheduler.submit(Job("huge", 5000)).result(PATIENCE)
    assert scheduler.submit(Job("small")).result(PATIENCE)[0] == "answer of small"


def test_what_is_kept_for_the_next_time_delays_and_fails_nobody(started):
    gate, stages, scheduler, first = held(started)
    remembering, goes_on = threading.Event(), threading.Event()

    class Slow(list):
        def extend(self, names):
            remembering.set()
            assert goes_on.wait(PATIENCE)
            super().extend(names)

    stages.remembered = Slow()
    both = [scheduler.submit(Job("x")), scheduler.submit(Job("y", fails="remember"))]
    wait_until(lambda: len(scheduler._ready) == 2)
    first.cancel()
    gate.open()
    assert [future.result(PATIENCE)[0] for future in both] == ["answer of x", "answer of y"]
    assert remembering.wait(PATIENCE) and stages.remembered == []
    goes_on.set()
    assert scheduler.submit(Job("next")).result(PATIENCE)[0] == "answer of next"
    wait_until(lambda: stages.remembered == ["x", "y", "next"])


def test_a_fault_of_the_scheduler_itself_is_told_to_whoever_waits(started, monkeypatch):
    scheduler = started(Jobs())
    monkeypatch.setattr(scheduler._pace, "learn", lambda rows, seconds: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.submit(Job("x")).result(PATIENCE)
    monkeypatch.undo()
    assert scheduler.submit(Job("y")).result(PATIENCE)[0] == "answer of y"
    scheduler._running = scheduler._requests_under_way = scheduler._rows_under_way = 0
    scheduler._stages.pool.__init__(1000)


@pytest.mark.parametrize("stage", ["assemble", "begin"])
@pytest.mark.parametrize(
    ("said", "gone"), [("CUDA error: an illegal memory access was encountered", True), ("mat1 and mat2 shapes cannot be multiplied", False)]
)
def test_a_device_that_failed_is_remembered_and_work_that_is_wrong_is_not(started, monkeypatch, stage, said, gone):
    stages = Jobs()
    scheduler = started(stages)
    monkeypatch.setattr(stages, stage, lambda *_: (_ for _ in ()).throw(RuntimeError(said)))
    with pytest.raises(RuntimeError):
        scheduler.submit(Job("x")).result(PATIENCE)
    monkeypatch.undo()
    assert scheduler.device_error == (f"RuntimeError: {said}" if gone else "")


def test_who_would_be_too_late_is_refused_at_once_unless_it_is_a_mere_burst(started):
    gate, stages, scheduler, first = held(started, deadline_seconds=1.0, bounds=GroupBounds(requests=1))
    burst = [scheduler.submit(Job("b", 50)) for _ in range(10)]
    wait_until(lambda: len(scheduler._ready) == 2)  # some are assembled, so that what they cost is known
    burst += [scheduler.submit(Job("b", 50)) for _ in range(2_000)]
    stages.clock.advance(0.3)
    with pytest.raises(Overloaded, match="requests wait already") as caught:
        scheduler.submit(Job("late", 50))
    assert 1 <= caught.value.retry_after_seconds <= 30
    for future in burst:
        future.cancel()
    gate.open()
    wait_until(lambda: first.done() and scheduler.depth() == 0)
    assert scheduler.submit(Job("next")).result(PATIENCE)[0] == "answer of next"


def test_what_has_to_be_searched_again_is(started):
    stages = Jobs()
    scheduler = started(stages)
    answer, passage = scheduler.submit(Job("x", again=2)).result(PATIENCE)
    assert answer == "answer of x" and stages.log.order() == ["x:0", "x:1", "x:2"] * 3
    assert passage.seconds("queue") >= 0 and [mark[0] for mark in passage.marks].count("format") == 3


def test_the_passage_names_every_stage_in_order(started):
    _, passage = started(Jobs()).submit(Job("x")).result(PATIENCE)
    assert [stage for stage, _, _ in passage.marks] == ["queue", "assemble", "wait", "round 0", "round 1", "round 2", "format"]
    times = [passage.arrived, *(moment for _, begin, end in passage.marks for moment in (begin, end))]
    assert times == sorted(times)


def test_overload_narrows_stepwise_and_recovers(started):
    stages = Jobs()
    scheduler = started(stages, narrowing=Narrowing(0.02), bounds=GroupBounds(requests=1, beams=10))
    for _ in range(20):
        scheduler.submit(Job("pace", 10, round_seconds=0.002)).result(PATIENCE)
    assert set(stages.log.shares) == {1.0}
    stages.log.shares.clear()
    proceed = threading.Event()
    stages.gate = lambda names, number: proceed.wait(PATIENCE)
    many = [scheduler.submit(Job("many", 10, round_seconds=0.002)) for _ in range(40)]
    wait_until(lambda: len(scheduler._ready) == 2)
    proceed.set()
    for future in many:
        future.result(PATIENCE)
    assert min(stages.log.shares) == 0.25 and stages.log.shares[-1] > 0.25
    for _ in range(5):
        scheduler.submit(Job("few", 10)).result(PATIENCE)
    assert stages.log.shares[-1] == 1.0


def test_several_workers_run_at_once(started):
    together = threading.Barrier(3)
    stages = Jobs(lambda names, number: together.wait(PATIENCE) if number == 0 else None)
    scheduler = started(stages, workers=3, bounds=GroupBounds(requests=1))
    for future in [scheduler.submit(Job(str(number))) for number in range(3)]:
        future.result(PATIENCE)


def test_stopping_answers_everything_and_takes_no_more(started):
    stages = Jobs()
    scheduler = started(stages, workers=2, bounds=GroupBounds(requests=3))
    futures = [scheduler.submit(Job(str(number), round_seconds=0.002)) for number in range(60)]
    scheduler.stop()
    assert [future.result(0)[0] for future in futures] == [f"answer of {number}" for number in range(60)]
    with pytest.raises(TransientError, match="stopping"):
        scheduler.submit(Job("more"))


def test_a_storm_of_everything_leaves_nothing_behind(started):
    """Threads that submit, cancel and fail at random: every future ends, and nothing is held at the end."""
    import random

    dropped = []

    class Counting(Watcher):
        def dropped(self, cause):
            dropped.append(cause)

    stages = Jobs()
    scheduler = started(stages, workers=3, bounds=GroupBounds(requests=5, beams=300), watcher=Counting())
    futures, lock = [], threading.Lock()

    def client(seed):
        rng = random.Random(seed)
        for number in range(60):
            fails = rng.choice(["", "", "", "", "assemble", "begin", "round 1"])
            again = rng.choice([0, 0, 0, 1])
            future = scheduler.submit(Job(f"{seed}.{number}", rng.choice([1, 10, 128]), fails=fails, again=again, family_name=rng.choice("ab")))
            with lock:
                futures.append((future, fails))
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.003)
                future.cancel()

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    scheduler.stop()
    assert len(futures) == 240 and all(future.done() for future, _ in futures)
    for future, fails in futures:
        if not future.cancelled():
            assert bool(future.exception(0)) == bool(fails), fails
    assert len(dropped) <= sum(future.cancelled() for future, _ in futures)


def test_bounds_are_checked():
    with pytest.raises(ValueError, match="max_queue is 0"):
        Scheduler(Jobs(), max_queue=0)
    with pytest.raises(ValueError, match="0 beams"):
        GroupBounds(beams=0)
