from semantide.services.serving.profile import Profile, Reading, profile_of

ACTIONS = {"exposure": 0.0, "click": 1.0, "order": 3.0, "hate": -1.0}


def test_only_positive_actions_are_continued_and_exposures_are_not_seen():
    events = [("a", "exposure"), ("b", "click"), ("c", "order"), ("a", "unknown action"), ("b", "click")]
    assert profile_of(events, ACTIONS) == Profile(("b", "c", "b"), ("b", "c"), ())


def test_repeats_in_a_row_count_once_as_in_training():
    events = [("a", "click"), ("a", "order"), ("b", "exposure"), ("a", "click"), ("b", "click"), ("a", "click")]
    assert profile_of(events, ACTIONS).history == ("a", "b", "a")


def test_a_disliked_item_is_blocked_until_it_is_wanted_again():
    assert profile_of([("a", "click"), ("a", "hate"), ("b", "hate")], ACTIONS).blocked == ("a", "b")
    assert profile_of([("a", "hate"), ("a", "click"), ("b", "hate")], ACTIONS).blocked == ("b",)


def test_the_intensities_are_the_deployments():
    assert profile_of([("a", "exposure")], {"exposure": 1.0}).history == ("a",)
    assert profile_of([], ACTIONS) == Profile()


def test_a_history_is_read_as_the_models_data_set_was():
    events = [("a", "order"), ("b", "click"), ("a", "order"), ("c", "order"), ("c", "order"), ("a", "order")]
    assert profile_of(events, ACTIONS, Reading(3.0)).history == ("a", "c", "a")
    assert profile_of(events, ACTIONS, Reading(3.0, "all")).history == ("a", "c")
    assert profile_of(events, ACTIONS, Reading(1.0, "none")).history == ("a", "b", "a", "c", "c", "a")
    assert profile_of(events, ACTIONS, Reading(3.0)).seen == ("a", "b", "c")
