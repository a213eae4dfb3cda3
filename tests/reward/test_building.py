"""A reward model learns who likes what, whatever the place and however popular, and knows what it does not know."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion.readers.kuairand import RANDOM_POOL
from semantide.services.reward.building import build
from semantide.services.reward.examples import HELD_OUT, TEST, TRAIN, UNUSED, bound_of, examples, learned_from, so_far
from semantide.services.reward.recipes import RewardTraining, recipe
from semantide.shared.dataset import Dataset
from semantide.shared.errors import BadData, Conflict, Corrupt
from semantide.shared.event_actions import EventActions
from semantide.shared.feedback import Feedback, history_ends
from semantide.shared.models.preference import PreferenceModel, combined
from semantide.shared.models.reward_pairs import Histories

from .conftest import WEIGHTS
from .shade_shop import COLOURS, NUM_ITEMS, write_shop

TINY = recipe("tiny", {"epochs": 2, "batch_exposures": 256})


def read(folder: Path) -> tuple[Dataset, Feedback, EventActions]:
    return Dataset.load(folder), Feedback.load(folder), EventActions.load(folder)


def made(folder: Path, workdir: Path, config: RewardTraining = TINY, **options: Any) -> PreferenceModel:
    return build(*read(folder), config, WEIGHTS, 0, workdir, **options)


def every_item(model: PreferenceModel, dataset: Dataset, user: int) -> tuple[np.ndarray, np.ndarray]:
    """Preferences and gates of all items for one user."""
    items_E = dataset.history(user).astype(np.int64)
    rows = np.arange(NUM_ITEMS)
    judged = model.judge(
        model.user_rows([dataset.user_ids[user]]), Histories(items_E, np.ones(len(items_E), np.int64)), np.array([0, len(items_E)]), np.zeros(NUM_ITEMS, np.int64), rows
    )  # fmt: skip
    return judged.preference_X, judged.gate_X


def test_items_of_the_own_colour_are_preferred_and_relevant(shop: Path, trained: Path) -> None:
    model, dataset = PreferenceModel.load(trained), Dataset.load(shop)
    own, other, passed = [], [], []
    for user in range(12):
        preference, gate = every_item(model, dataset, user)
        mine = np.arange(NUM_ITEMS) % COLOURS == user % COLOURS
        own.append(preference[mine].mean())
        other.append(preference[~mine].mean())
        passed.append((gate[mine].mean(), gate[~mine].mean()))
    assert np.mean(own) > 1.5 * np.mean(other)
    assert np.mean([share for share, _ in passed]) > 0.9
    signals = model.header["metrics"]["signals"]
    assert signals["click"]["auc"] > 0.65 and signals["click"]["calibration_error"] < 0.12
    assert model.header["metrics"]["gate"]["positives_pass"] >= 0.9


def test_a_user_of_unknown_events_alone_is_unknown_to_the_gate(trained: Path) -> None:
    """As one without any; and an unknown event is not mistaken for a known item."""
    model = PreferenceModel.load(trained)
    histories = Histories(np.array([-1, -1, -1, 0, 0, -1, 0]), np.ones(7, np.int64))
    offsets, rows = np.array([0, 3, 3, 5, 7]), np.arange(NUM_ITEMS)
    judged = model.judge(np.full(4, -1), histories, offsets, np.repeat(np.arange(4), NUM_ITEMS), np.tile(rows, 4))
    unknown, empty, known, mixed = judged.gate_X.reshape(4, -1)
    assert unknown.all() and empty.all() and not known.all() and not mixed.all()
    assert (judged.relevance_X[:NUM_ITEMS] == judged.relevance_X[NUM_ITEMS : 2 * NUM_ITEMS]).all()


def test_a_place_takes_the_blame_for_what_is_seen_less(trained: Path) -> None:
    network = PreferenceModel.load(trained).network
    effects = network.place_effects.detach().numpy()[:4, network.config.signals.index("click")]
    assert effects[0] > effects[1] > effects[3]


def test_predictions_come_true_as_they_are_deployed_and_at_every_place(trained: Path) -> None:
    click = PreferenceModel.load(trained).header["metrics"]["signals"]["click"]
    assert click["calibration_error"] < 0.12 and click["calibration_error_placed"] < 0.12 and click["auc"] > click["auc_deployed"] > 0.6
    assert click["places"] == []  # too few exposures of each to tell


def test_calibration_is_reported_for_each_place_with_exposures_enough(tmp_path: Path) -> None:
    folder = write_shop(tmp_path / "shop", num_users=300)
    click = made(folder, tmp_path / "fitting", recipe("tiny", {"epochs": 2, "test": 0.4})).header["metrics"]["signals"]["click"]
    tabs = {place["tab"]: place for place in click["places"] if "tab" in place}
    positions = {place["position"]: place for place in click["places"] if "position" in place}
    assert set(tabs) == {"home", "search"} and set(positions) == {0, 1, 2, 3} and positions[0]["rate"] > positions[3]["rate"]
    assert all(place["calibration_error"] < 0.12 and place["exposures"] >= 500 for place in click["places"])


def test_one_seed_gives_one_model_and_a_killed_run_goes_on(shop: Path, tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    seen: list[float] = []

    def kill(stage: str, share: float) -> None:
        seen.append(share)
        if stage == "training" and share > 0.05 + 0.8 * 0.6:
            raise Killed

    whole = made(shop, tmp_path / "whole")
    with pytest.raises(Killed):
        made(shop, tmp_path / "killed", tick=kill)
    again = made(shop, tmp_path / "killed")
    for name, tensor in whole.network.state_dict().items():
        assert np.array_equal(tensor.numpy(), again.network.state_dict()[name].numpy()), name
    assert whole.header == again.header


def test_saved_is_loaded_and_judges_the_same(shop: Path, trained: Path, tmp_path: Path) -> None:
    model, dataset = PreferenceModel.load(trained), Dataset.load(shop)
    model.save(tmp_path / "copy")
    again = PreferenceModel.load(tmp_path / "copy")
    for one, other in zip(every_item(model, dataset, 3), every_item(again, dataset, 3), strict=True):
        assert np.array_equal(one, other)
    assert json.loads((tmp_path / "copy" / "reward.json").read_text()) == json.loads((trained / "reward.json").read_text())
    for name in ("items.parquet", "vectors.safetensors", "model.safetensors"):
        broken = tmp_path / f"broken-{name}"
        shutil.copytree(trained, broken)
        (broken / name).write_bytes(b"torn")
        with pytest.raises(Corrupt):
            PreferenceModel.load(broken)
    with pytest.raises(Conflict, match="holds no reward model"):
        PreferenceModel.load(shop)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4), st.booleans(), st.booleans()), max_size=20))
def test_what_was_known_before_is_what_came_strictly_earlier(rows: list[tuple[int, int, bool, bool]]) -> None:
    keys, times, counted, given_ = (np.array([row[column] for row in rows], dtype) for column, dtype in enumerate((np.int64, np.int64, bool, bool)))
    shown, signals = so_far(keys, times, counted, given_[:, None])
    for index, row in enumerate(rows):
        earlier = [other for other in rows if other[0] == row[0] and other[1] < row[1] and other[2]]
        assert (shown[index], signals[index, 0]) == (len(earlier), sum(other[3] for other in earlier))


def test_no_example_knows_itself_or_what_came_later(shop: Path) -> None:
    dataset, feedback, _ = read(shop)
    found = examples(dataset, feedback, TINY)
    ends = history_ends(dataset, feedback.users, feedback.times)
    for row in range(0, len(feedback), 97):
        times = dataset.times[dataset.offsets[feedback.users[row]] : dataset.offsets[feedback.users[row] + 1]]
        assert ends[row] == (times < feedback.times[row]).sum()
    order = [feedback.times[found.use_X == use] for use in (TRAIN, HELD_OUT, TEST)]
    assert order[0].max() < order[1].min() and order[1].max() < order[2].min()
    assert 0.05 < len(order[1]) / len(feedback) < 0.15 and not (found.use_X == UNUSED).any()


def test_answers_from_before_exposures_were_logged_are_no_examples(shop: Path) -> None:
    dataset, feedback, _ = read(shop)
    middle = int(np.median(feedback.times))
    told = feedback.take((feedback.times >= middle) | feedback.signals_XS.any(1))
    found = examples(dataset, told, TINY)
    assert (found.use_X[told.times < middle] == UNUSED).all() and not (found.use_X[told.times > middle + 1_000_000] == UNUSED).any()


def test_halves_of_the_users_share_no_feedback(shop: Path) -> None:
    dataset, feedback, _ = read(shop)
    halves = [set(feedback.users[examples(dataset, feedback, recipe("tiny", {"users": half})).use_X != UNUSED].tolist()) for half in ("even", "odd")]
    assert halves[0] and halves[1] and not halves[0] & halves[1]


def test_a_half_of_the_users_knows_nothing_of_what_the_other_half_did(shop: Path, tmp_path: Path) -> None:
    """Neither its labels nor its spaces of items, which the search and the gate compare in."""
    dataset, feedback, events = read(shop)
    vectors: dict[str, np.ndarray] = {}
    for half, other in (("even", "odd"), ("odd", "even")):
        config = recipe("tiny", {"epochs": 1, "batch_exposures": 256, "users": half})
        model = build(dataset, feedback, events, config, WEIGHTS, 0, tmp_path / half)
        vectors[half] = model.spaces.collaborative_NG
        # The other half's events become others at the same moments: nothing of the model may move.
        theirs = np.repeat(learned_from(dataset, recipe("tiny", {"users": other})), np.diff(dataset.offsets))
        assert theirs.any() and not theirs.all()
        changed = replace(dataset, items=np.where(theirs, NUM_ITEMS - 1 - dataset.items, dataset.items))
        again = build(changed, feedback, events, config, WEIGHTS, 0, tmp_path / f"{half}-again")
        assert np.array_equal(model.spaces.collaborative_NG, again.spaces.collaborative_NG)
        assert (model.gate, model.header) == (again.gate, again.header)
    assert vectors["even"].shape[1] and not np.allclose(np.abs(vectors["even"] @ vectors["even"].T), np.abs(vectors["odd"] @ vectors["odd"].T), atol=0.1)


def test_unlikely_exposures_stand_for_more(tmp_path: Path) -> None:
    dataset, feedback, _ = read(write_shop(tmp_path / "shop", propensities=True, pages=3))
    found = examples(dataset, feedback, TINY)
    known = ~np.isnan(feedback.propensities) & (found.use_X == TRAIN)
    order = np.argsort(feedback.propensities[known])
    weights = found.weights_X[known]
    assert (np.diff(weights[order]) <= 1e-6).all() and weights.mean() == pytest.approx(1, abs=1e-3) and weights.max() <= TINY.max_weight * 1.5
    assert (examples(dataset, feedback, recipe("tiny", {"debias": "position"})).weights_X == 1).all()


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=60), st.floats(1, 50))
def test_no_weight_is_larger_than_its_bound_times_the_mean(inverse: list[float], max_weight: float) -> None:
    found = np.array(inverse)
    bound = bound_of(found, max_weight)
    capped = np.minimum(found, bound)
    assert capped.max() <= max_weight * capped.mean() * (1 + 1e-9) and capped.sum() ** 2 / np.square(capped).sum() >= len(found) / max_weight * (1 - 1e-9)
    # And no bound that holds is larger.
    assert bound >= found.max() or (looser := np.minimum(found, bound * (1 + 1e-4))).max() > max_weight * looser.mean()


def test_propensities_that_nobody_logged_are_estimated_where_that_is_asked_for(tmp_path: Path) -> None:
    dataset, feedback, _ = read(write_shop(tmp_path / "shop", propensities=True, pages=6))
    true = feedback.propensities
    hidden = replace(feedback, propensities=np.full(len(feedback), np.nan, np.float32))
    assert (examples(dataset, hidden, TINY).weights_X == 1).all()
    config = recipe("tiny", {"propensities": "estimated"})
    found = examples(dataset, hidden, config)
    train, known = found.use_X == TRAIN, ~np.isnan(true)
    weights = found.weights_X[train]
    assert weights.mean() == pytest.approx(1, abs=1e-3) and weights.max() <= config.max_weight * 1.5
    # They follow what the shop knew of its draws, and every item counts about as much as the others.
    assert np.corrcoef(np.log(found.weights_X[known & train]), -np.log(true[known & train]))[0, 1] > 0.9
    items = feedback.items[train]
    shown, weighed = np.bincount(items, minlength=NUM_ITEMS), np.bincount(items, weights, minlength=NUM_ITEMS)
    assert weighed.std() / weighed.mean() < 0.5 * shown.std() / shown.mean()
    # What is logged is on the same scale, whether the others are estimated or not: that of a recommender that was sure.
    some = np.arange(len(feedback)) % 2 == 0
    mixed = replace(feedback, propensities=np.where(some, true, np.nan).astype(np.float32))
    both, plain = (
        examples(dataset, mixed, recipe("tiny", {"propensities": "estimated", "max_weight": 100})),
        examples(dataset, mixed, recipe("tiny", {"max_weight": 100})),
    )
    inverse = np.where(some, 1 / true, 1)
    assert np.allclose(plain.weights_X, inverse / inverse[train].mean(), rtol=1e-5)
    assert np.allclose(both.weights_X[some], plain.weights_X[some], rtol=1e-3)
    assert both.weights_X[~some & train].std() > 0.1 and both.weights_X[~some & train].mean() == pytest.approx(plain.weights_X[~some][0], rel=1e-3)
    assert (examples(dataset, hidden, recipe("tiny", {"propensities": "estimated", "debias": "position"})).weights_X == 1).all()


@pytest.mark.parametrize(("random_share", "max_weight"), [(0.06, 100), (0.3, 10)])
def test_what_a_recommender_chose_is_set_right_by_what_was_shown_at_random(tmp_path: Path, random_share: float, max_weight: float) -> None:
    """The recommender shows one shade only when it is going to be clicked, and nothing that is known of an exposure tells why; shown at random (``is_rand``) it is clicked least."""
    dataset, feedback, events = read(write_shop(tmp_path / "shop", num_users=150))
    rng = np.random.default_rng(5)
    drawn, bait = rng.random(len(feedback)) < random_share, feedback.items % COLOURS == 0
    clicked = rng.random(len(feedback)) < np.where(bait, np.where(drawn, 0.1, 0.7), 0.35)
    order = feedback.signals.index("order")
    signals_XS = np.stack([(clicked & (number != order)) for number in range(len(feedback.signals))], 1)
    propensities = np.where(drawn, 1 / RANDOM_POOL, np.nan).astype(np.float32)
    told = replace(feedback, signals_XS=signals_XS, propensities=propensities)
    config, rates = recipe("tiny", {"epochs": 8, "batch_exposures": 256, "learning_rate": 0.01, "max_weight": max_weight}), {}
    weights = (found := examples(dataset, told, config)).weights_X
    train = found.use_X == TRAIN
    assert (
        weights[drawn].min() > 5 * weights[~drawn].max() and weights[train].mean() == pytest.approx(1, abs=1e-4) and weights[train].max() <= max_weight * 1.001
    )
    for debias in ("both", "position"):
        model = build(dataset, told, events, replace(config, debias=debias), {"click": 1.0}, 0, tmp_path / debias)
        preferences = np.mean([every_item(model, dataset, user)[0] for user in range(12)], 0)
        rates[debias] = [preferences[np.arange(NUM_ITEMS) % COLOURS == shade].mean() for shade in range(COLOURS)]
        click = model.header["metrics"]["signals"]["click"]
        debiased = model.header["metrics"]["debiased"]
        test = found.rows(TEST)
        chosen, target = (float(np.average(clicked[test], weights=by)) for by in (None, weights[test]))
        assert click["shown"]["rate"] == pytest.approx(chosen) and click["rate"] == pytest.approx(target if debias == "both" else chosen, rel=1e-5)
        # What calibration aims at is what is reported.
        foretold = np.average([mean for mean, *_ in click["reliability"]], weights=[weight for *_, weight in click["reliability"]])
        assert foretold == pytest.approx(click["rate"], abs=0.08) and debiased["effective_share"] >= (0.999 / max_weight if debias == "both" else 1)
    assert rates["position"][0] > 1.2 * max(rates["position"][1:]), "the bias is there"
    assert rates["both"][0] < 0.8 * min(rates["both"][1:])


@pytest.mark.parametrize("how", ["none", "one", "all", "unheard", "rare"])
def test_feedback_that_nothing_can_be_learned_from_is_refused(shop: Path, tmp_path: Path, how: str) -> None:
    dataset, feedback, events = read(shop)
    config: dict[str, Any] = {}
    words = {
        "none": "no exposures to learn from",
        "one": "nothing can be told apart",
        "all": "nothing can be told apart",
        "unheard": "signals hate were never given",
        "rare": "order .* lower min_signals",
    }
    if how == "none":
        feedback = feedback.take(np.zeros(0, np.int64))
    elif how == "one":
        feedback = feedback.take(~feedback.signals_XS.any(1))
    elif how == "all":
        feedback = feedback.take(feedback.signals_XS.all(1))
    elif how == "unheard":
        config["signals"] = ["click", "hate"]
    else:
        config |= {"signals": ["click", "order"], "min_signals": int(feedback.among(["order"]).sum()) + 1}
    with pytest.raises(BadData, match=words[how]):
        build(dataset, feedback, events, recipe("tiny", config), WEIGHTS, 0, tmp_path)


def test_a_preference_weighs_what_the_model_knows(shop: Path, trained: Path, tmp_path: Path) -> None:
    with pytest.raises(BadData, match="weighs hate, and this feedback"):
        made(shop, tmp_path, recipe("tiny", {"preference": {"hate": -1, "click": 1}, "epochs": 1}))
    model = PreferenceModel.load(trained)
    for weights in ({"click": -1.0}, {}, {"click": float("nan")}):
        with pytest.raises(ValueError, match="positive weight"):
            model.weighted(weights)
    p = np.array([[0.5, 0.25], [1.0, 0.0]])
    assert combined(p, ("a", "b"), {"a": 1, "b": 3}).tolist() == pytest.approx([0.3125, 0.25])
    assert combined(p, ("a", "b"), {"a": 1, "b": -1}).tolist() == pytest.approx([0.25, 1.0])


def test_items_without_any_description_and_users_without_history_are_judged(tmp_path: Path) -> None:
    folder = write_shop(tmp_path / "bare", described=False, pages=4)
    model = made(folder, tmp_path / "fitting", recipe("tiny", {"epochs": 1, "collaborative_size": 0, "content_size": 0}))
    nobody = model.judge(np.array([-1]), Histories(np.zeros(0, np.int64), np.zeros(0, np.int64)), np.array([0, 0]), np.zeros(3, np.int64), np.array([0, 5, -1]))
    assert nobody.gate_X.tolist() == [True, True, False] and nobody.preference_X[2] == 0 and np.isfinite(nobody.preference_X).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epoch": 1}, "known are signals"), ({"epochs": 1.5}, "whole number"), ({"signals": "click"}, "give a list"), ({"preference": {"click": "much"}}, "give weights"),
        ({"debias": "all"}, "give one of position"), ({"propensities": "all"}, "give one of logged, estimated"), ({"gate_quantile": 2}, "number from 0 to 0.99"), ({"held_out": 0.5, "test": 0.5}, "leave nothing to train on"),
        ({"dropout": "x"}, "give a number"), ({"layer_sizes": [1.5]}, "give a list"),
        ({"layer_sizes": [16, 0]}, "give widths from 1"), ({"layer_sizes": [-4]}, "give widths from 1"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        recipe("", changes)


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(ValueError, match="known are standard, tiny"):
        recipe("huge", {})
