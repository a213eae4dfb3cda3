"""The A/B test of simulated people: who knows more is worth more, who does the same is worth the same."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from semantide.shared.simulator.ab_test import ABTest, ab_test
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.recommenders import Chance, Oracle, Popular, Request
from semantide.shared.simulator.users import SimulatorConfig


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return Simulation(SimulatorConfig(users=150, items=200, topics=8, sessions=3))


@pytest.fixture(scope="module")
def found(simulation: Simulation) -> ABTest:
    log = simulation.log()
    clicks = Counter(item for item, signals in zip(log["item"].to_pylist(), log["signals"].to_pylist(), strict=True) if "click" in signals)
    popular = Popular(simulation, clicks)
    return ab_test(simulation, {"popular": popular, "again": popular, "chance": Chance(simulation), "oracle": Oracle(simulation)}, visits=2)


def test_better_recommenders_please_more(found: ABTest) -> None:
    assert found.lift("oracle", "clicks").low > 0 and found.lift("oracle", "expected_clicks").low > 0 and found.lift("chance", "clicks").high < 0
    assert found.lift("chance", "orders").high < 0
    pages = {name: arm.per_visit("pages").value for name, arm in found.arms.items()}
    assert pages["oracle"] > pages["chance"]  # who is pleased stays


def test_the_same_lists_get_the_same_answers(found: ABTest) -> None:
    again = found.lift("again", "clicks")
    assert again.value == again.low == again.high == 0


def test_expected_and_drawn_satisfaction_agree(found: ABTest) -> None:
    for arm in found.arms.values():
        for figure in ("clicks", "orders"):
            luck = arm.figures[figure] - arm.figures[f"expected_{figure}"]
            assert abs(luck.mean()) < 4 * luck.std() / np.sqrt(len(luck)) + 1e-9


def test_pairing_makes_a_small_difference_visible(simulation: Simulation) -> None:
    """The same people with the same luck: the paired interval is far shorter than that of two crowds."""
    knows, blurred = Oracle(simulation), Oracle(simulation, 0.8)
    result = ab_test(simulation, {"knows": knows, "blurred": blurred}, visits=2)
    paired = result.lift("blurred", "expected_clicks")
    first, second = (result.arms[name].figures["expected_clicks"] for name in ("knows", "blurred"))
    apart = 1.96 * np.sqrt((first.var(ddof=1) + second.var(ddof=1)) / len(first)) / first.mean()
    assert (paired.high - paired.low) / 2 < 0.7 * apart


def test_what_people_have_lived_through_is_in_the_order_of_time() -> None:
    times: list[list[int]] = []

    def notes(requests: Sequence[Request]) -> list[list[str]]:
        times.extend([event.time for event in request.history] for request in requests)
        return [[] for _ in requests]

    ab_test(Simulation(SimulatorConfig(users=300, items=60, topics=4, sessions=5, days=1)), {"notes": notes}, visits=1)
    assert len(times) >= 300 and max(map(len, times)) > 20
    assert all(own == sorted(own) for own in times)


def test_requests_carry_the_past_and_what_must_not_come_again(simulation: Simulation) -> None:
    seen: list[Request] = []
    chance = Chance(simulation)

    def spy(requests: Sequence[Request]) -> list[list[str]]:
        seen.extend(requests)
        return chance(requests)

    ab_test(simulation, {"spy": spy}, users=5, visits=2, history=30)
    for request in seen:
        times = [event.time for event in request.history]
        assert len(times) <= 30 and times == sorted(times) and all(moment < request.time for moment in times) and 5 <= request.n <= 10
        assert {event.item for event in request.history if event.action != "hate"} <= request.exclude
    assert max(len(request.history) for request in seen) > 10 and not any(event.action == "exposure" for request in seen for event in request.history)
    assert any(request.page > 0 for request in seen) and {request.visit for request in seen} == {0, 1}


def test_empty_short_and_foreign_lists_are_counted(simulation: Simulation) -> None:
    result = ab_test(
        simulation, {"none": lambda requests: [[] for _ in requests], "odd": lambda requests: [["v1", "v1", "x", "v99999"] for _ in requests]}, users=4
    )
    assert result.arms["none"].figures["clicks"].sum() == 0 and result.arms["none"].figures["exposures"].sum() == 0
    odd = result.arms["odd"].figures
    assert odd["foreign"].sum() == 2 * odd["pages"].sum() and odd["exposures"].sum() == odd["pages"].sum()
    with pytest.raises(ValueError, match="one list for each"):
        ab_test(simulation, {"broken": lambda requests: []}, users=4)
    with pytest.raises(ValueError, match="base"):
        ab_test(simulation, {}, users=4)
    with pytest.raises(ValueError, match="users is 0: let at least one"):
        ab_test(simulation, {"none": lambda requests: [[] for _ in requests]}, users=0)
