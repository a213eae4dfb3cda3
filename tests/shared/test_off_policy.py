"""Off-policy estimates against the simulator, where the true value of any policy is known."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.off_policy import Decisions, Estimate, cascade_weights, doubly_robust, halves, ips, lift, snips
from semantide.shared.paired import Floats
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.preference import Moment
from semantide.shared.simulator.users import SimulatorConfig


@dataclass(frozen=True)
class Place:
    """The first place of everybody's first page: chances of each item to be shown, by the log's policy and another one, and to be opened.

    Shapes: all [U, N].
    """

    logging: Floats
    target: Floats
    opens: Floats

    @property
    def truth(self) -> float:
        """What the other policy earns there."""
        return float((self.target * self.opens).sum(1).mean())

    def log(self, rng: np.random.Generator, visits: int) -> tuple[Decisions, np.ndarray, np.ndarray]:
        """So many visits of everybody; with the people and the items."""
        people = np.repeat(np.arange(len(self.logging)), visits)
        items = np.array([rng.choice(self.logging.shape[1], p=self.logging[user]) for user in people])
        opened = rng.random(len(people)) < self.opens[people, items]
        return Decisions(opened.astype(float), self.logging[people, items], self.target[people, items], people), people, items


@pytest.fixture(scope="module")
def place() -> Place:
    simulation = Simulation(SimulatorConfig(users=60, items=40, topics=5, sessions=1, slots=(5, 6)))
    users, items = np.arange(60), np.broadcast_to(np.arange(40), (60, 40))
    blank = np.zeros((60, 40))
    moment = Moment(users, simulation.world.focus(users, users * 0), users * 0, items, blank.astype(np.int64), blank, blank.astype(bool))
    chances = simulation.preference.chances(moment)
    logging = simulation.policy.weights(users)
    liked = np.exp(2 * simulation.preference.affinity(users, simulation.world.focus(users, users * 0)))
    target = logging * liked**0.2
    return Place(logging, target / target.sum(1, keepdims=True), chances.seen * chances.click)


def _model(place: Place, people: np.ndarray, items: np.ndarray, rewards: Floats) -> tuple[Floats, Floats]:
    """A poor model of rewards: each item's smoothed rate, fitted on the other half of the people."""
    half = halves(people)
    predicted, expected = np.zeros(len(rewards)), np.zeros(len(rewards))
    for side in (True, False):
        fit = half != side
        rate = (np.bincount(items[fit], rewards[fit], 40) + rewards[fit].mean()) / (np.bincount(items[fit], minlength=40) + 1)
        mine = half == side
        predicted[mine], expected[mine] = rate[items[mine]], (place.target[people[mine]] * rate).sum(1)
    return predicted, expected


def _all(place: Place, rng: np.random.Generator, visits: int) -> dict[str, Estimate]:
    decisions, people, items = place.log(rng, visits)
    return {"ips": ips(decisions), "snips": snips(decisions), "dr": doubly_robust(decisions, *_model(place, people, items, decisions.rewards))}


def test_estimates_are_unbiased_and_their_intervals_hold_the_truth(place: Place) -> None:
    rng = np.random.default_rng(11)
    rounds = [_all(place, rng, 8) for _ in range(150)]
    naive = float((place.logging * place.opens).sum(1).mean())
    assert abs(naive - place.truth) > 0.03  # there is something to correct
    for name in ("ips", "snips", "dr"):
        values = np.array([found[name].interval.value for found in rounds])
        assert abs(values.mean() - place.truth) < 4 * values.std() / np.sqrt(len(values)) + 0.002, name
        held = np.mean([found[name].interval.low <= place.truth <= found[name].interval.high for found in rounds])
        assert held > 0.88, (name, held)
        weight = np.mean([found[name].mean_weight.low <= 1 <= found[name].mean_weight.high for found in rounds])
        assert weight > 0.88
    spread = {name: np.std([found[name].interval.value for found in rounds]) for name in ("ips", "snips", "dr")}
    assert spread["snips"] < spread["ips"] and spread["dr"] < spread["ips"]


def test_with_perfect_predictions_nothing_is_left_to_luck(place: Place) -> None:
    decisions, people, items = place.log(np.random.default_rng(1), 4)
    exact = Decisions(place.opens[people, items], decisions.propensities, decisions.targets, people)
    found = doubly_robust(exact, place.opens[people, items], (place.target * place.opens).sum(1)[people])
    assert found.interval.value == pytest.approx(place.truth)


def test_a_log_that_never_makes_a_choice_says_so_by_its_mean_weight(place: Place) -> None:
    decisions, _, items = place.log(np.random.default_rng(2), 20)
    hidden = items != 3
    wanted = np.zeros_like(place.target)
    wanted[:, 3], wanted[:, 4] = 0.5, 0.5
    groups = decisions.groups
    assert groups is not None
    cut = Decisions(decisions.rewards[hidden], decisions.propensities[hidden], wanted[groups[hidden], items[hidden]], groups[hidden])
    assert ips(cut).mean_weight.high < 1


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0.05, 1), st.floats(0, 1)), min_size=2, max_size=40))
@settings(max_examples=60)
def test_the_policy_that_wrote_the_log_earns_what_the_log_says(rows: list[tuple[float, float, float]]) -> None:
    rewards, propensities, _ = (np.array(column) for column in zip(*rows, strict=True))
    own = Decisions(rewards, propensities, propensities)
    zero = np.zeros(len(rewards))
    for found in (ips(own), snips(own), doubly_robust(own, zero, zero)):
        assert found.interval.value == pytest.approx(rewards.mean()) and found.effective == pytest.approx(len(rewards))


@given(st.integers(0, 2**31), st.floats(1, 3))
@settings(max_examples=30)
def test_snips_is_among_the_rewards_and_clipping_lowers_weights(seed: int, clip: float) -> None:
    rng = np.random.default_rng(seed)
    decisions = Decisions(rng.random(50), rng.uniform(0.05, 1, 50), rng.random(50), rng.integers(0, 9, 50))
    found, clipped = snips(decisions), ips(decisions, clip)
    assert decisions.rewards.min() <= found.interval.value <= decisions.rewards.max()
    assert clipped.interval.value <= ips(decisions).interval.value + 1e-12 and clipped.effective >= ips(decisions).effective - 1e-9


def test_cascades_multiply_within_a_page() -> None:
    weights = cascade_weights(np.array([2.0, 3.0, 0.5, 4.0]), np.array([0, 0, 1, 1]))
    assert weights.tolist() == [2.0, 6.0, 0.5, 2.0]


def test_what_is_no_chance_is_refused() -> None:
    one = np.ones(2)
    for wrong, match in (
        ((one, np.array([0.0, 1.0]), one), "propensity is 0.0"),
        ((one, one, np.array([0.5, 2.0])), "targets"),
        ((np.array([np.nan, 1.0]), one, one), "1 rewards are not numbers"),
        ((one, one, np.ones(3)), "one of each"),
    ):
        with pytest.raises(ValueError, match=match):
            Decisions(*wrong)
    with pytest.raises(ValueError, match="2 decisions"):
        doubly_robust(Decisions(one, one, one), np.ones(3), one)
    empty = np.zeros(0)
    assert not ips(Decisions(empty, empty, empty)).interval.beyond_noise


def of_sides(rng: np.random.Generator, people: int, share: float, reward: float) -> dict[str, list[Estimate]]:
    """Two equal variants that chance divides people between, each meeting a few requests: estimates of the new one and of the old one, by kind."""
    side = np.repeat(rng.random(people) < share, 3)
    groups, rewards = np.repeat(np.arange(people), 3), reward + 0.3 * rng.normal(size=3 * people)
    found: dict[str, list[Estimate]] = {}
    for mine in (side, ~side):
        decisions = Decisions(rewards, np.where(side, share, 1 - share), mine.astype(float), groups)
        expected = np.full(len(rewards), reward)
        for name, estimate in (("ips", ips(decisions)), ("snips", snips(decisions)), ("robust", doubly_robust(decisions, expected, expected))):
            found.setdefault(name, []).append(estimate)
    return found


def test_equal_variants_differ_beyond_noise_once_in_twenty_times() -> None:
    """However unevenly chance divided the people: what one side has too many of, the other has too few of."""
    rng = np.random.default_rng(8)
    beyond: dict[str, list[bool]] = {}
    for _ in range(400):
        for name, (new, old) in of_sides(rng, 120, 0.6, 1.0).items():
            beyond.setdefault(name, []).append(lift(new, old).beyond_noise)
    assert all(np.mean(found) < 0.09 for found in beyond.values()), {name: np.mean(found) for name, found in beyond.items()}


def test_a_lift_has_the_value_of_its_estimates_and_one_person_tells_nothing() -> None:
    rng = np.random.default_rng(2)
    for new, old in of_sides(rng, 60, 0.3, 2.0).values():
        found = lift(new, old)
        assert found.value == pytest.approx(new.interval.value / old.interval.value - 1) and found.low < found.value < found.high
        assert new.influences_G.sum() == pytest.approx(0, abs=1e-9)
    groups = np.array([0, 1, 1, 2, 3])
    mine = np.array([1.0, 0, 0, 0, 0])
    one, rest = (snips(Decisions(np.arange(5.0), np.full(5, 0.5), target, groups)) for target in (mine, 1 - mine))
    assert not np.isfinite(one.interval.high - one.interval.low) and not lift(one, rest).beyond_noise
    with pytest.raises(ValueError, match="same decisions"):
        lift(one, snips(Decisions(np.ones(2), np.ones(2), np.ones(2))))
