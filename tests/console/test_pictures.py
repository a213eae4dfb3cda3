"""What pages say is worked out from answers alone: pictures are well-formed and complete, words are right."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from math import inf, log

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.console.alerts import alerts_of
from semantide.services.console.catalog import neighbours, spelled
from semantide.services.console.cluster import job_rows, node_rows
from semantide.services.console.intervals import Interval, intervals_picture, scatter_picture
from semantide.services.console.jobs import compared, curves, differences, progress, took
from semantide.services.console.loop import ROOMS, loop_picture, stations
from semantide.services.console.measures import Look
from semantide.services.console.models import alignment_points, evaluations, lifts, quality
from semantide.services.console.overview import last_made
from semantide.services.console.recommend import body_of, facts, path_picture, times_picture
from semantide.services.console.words import ago, count, figure, lasting, share, short

EVIL = "<script>&\"'"
finite = st.floats(-1e9, 1e9)


def marks(markup: str, tag: str) -> list[ElementTree.Element]:
    """The elements of one kind; what others wrote made none of its own."""
    found = ElementTree.fromstring(f"<all>{markup}</all>")
    assert not found.findall(".//script")
    return found.findall(f".//{tag}")


printable = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20) | st.just(EVIL)


@pytest.mark.parametrize("columns", [2, 3])
@given(st.dictionaries(st.sampled_from(ROOMS), st.lists(printable, max_size=5)), st.lists(st.sampled_from(ROOMS), max_size=5))
def test_the_loop_shows_every_room_once_and_closes(columns: int, said: dict[str, list[str]], open_jobs: list[str]) -> None:
    rooms = stations(said, {"semantide.training.RunJob": 3, "semantide.serving.ModelTrained": 2}, open_jobs)
    assert [room.waiting for room in rooms] == [0, 0, 0, 3, 0, 2] and sum(room.jobs for room in rooms) == len(open_jobs)
    picture = loop_picture(rooms, columns)
    assert [text.text for text in marks(picture, "text") if text.get("font-weight")] == list(ROOMS)
    assert len(marks(picture, "line")) == len(marks(picture, "rect")) == len(ROOMS)
    for line in marks(picture, "line"):  # arrows go straight from box to box
        assert line.attrib["x1"] == line.attrib["x2"] or line.attrib["y1"] == line.attrib["y2"]


@given(st.lists(st.tuples(st.integers(0, 999), st.floats(0.001, 1)), min_size=1, max_size=6))
def test_a_path_shows_every_code_with_its_probability(path: list[tuple[int, float]]) -> None:
    codes, shares = zip(*path, strict=True)
    picture = path_picture(codes, [log(part) for part in shares])
    assert [text.text for text in marks(picture, "text")][::2] == [str(code) for code in codes]
    assert len(marks(picture, "rect")) == 2 * len(codes)
    assert len(marks(path_picture(codes, []), "rect")) == len(codes)


@given(st.dictionaries(printable, st.floats(0, 1e4), max_size=8), st.floats(0, 1e4))
def test_the_milliseconds_are_all_accounted_for(stages: dict[str, float], total: float) -> None:
    picture = times_picture({"stages_ms": stages, "queue_ms": 0.0, "search_ms": 0.0, "total_ms": total})
    widths = [float(rect.attrib["width"]) for rect in marks(picture, "rect")]
    assert sum(widths) == pytest.approx(600, abs=0.5) or max(total, sum(stages.values())) < 1e-6


@given(st.lists(st.tuples(printable, finite, finite, finite), min_size=1, max_size=5))
def test_intervals_lie_on_one_axis(rows: list[tuple[str, float, float, float]]) -> None:
    intervals = [Interval(name, *sorted(values)[1:2], min(values), max(values)) for name, *values in rows]
    for line, point in zip(marks(picture := intervals_picture(EVIL, intervals), "line"), marks(picture, "circle"), strict=True):
        assert 150 <= float(line.attrib["x1"]) <= float(point.attrib["cx"]) <= float(line.attrib["x2"]) <= 620


@given(st.dictionaries(printable, st.lists(st.tuples(finite, finite), min_size=1, max_size=5), min_size=1, max_size=3))
def test_points_lie_within_the_plane(runs: dict[str, list[tuple[float, float]]]) -> None:
    picture = scatter_picture("t", "x", "y", runs)
    assert len(marks(picture, "circle")) == sum(map(len, runs.values()))
    assert all(55 <= float(mark.attrib["cx"]) <= 605 and 15 <= float(mark.attrib["cy"]) <= 225 for mark in marks(picture, "circle"))


def test_curves_of_one_run_and_of_several() -> None:
    rows = [{"step": float(step), "loss": 3.0 - step, "valid_hr@10": 0.1, "epoch": 1.0} for step in range(3)]
    assert [mark.attrib["aria-label"] for mark in marks(curves(rows), "svg")] == ["Loss", "Validation"] and curves([]) == ""
    both = compared({"train-1": rows, EVIL: rows[:2]})
    assert [mark.attrib["aria-label"] for mark in marks(both, "svg")] == ["loss", "valid hr@10"] and len(marks(both, "polyline")) == 4
    spec = {"recipe": "tiny", "seed": 0, "config": {"epochs": 2}, "inputs": {}}
    told = differences({"a": {"state": "succeeded", "spec": spec}, "b": {"state": "succeeded", "spec": {**spec, "seed": 1, "config": {}}}})
    assert told == [["seed", "0", "1"], ["config epochs", "2", "-"]]


def test_nodes_show_who_holds_what_and_who_waits_says_why() -> None:
    npus = [
        {"index": 0, "ring": 0, "healthy": True, "holder": f"job {EVIL}"},
        {"index": 1, "ring": 0, "healthy": False, "holder": None},
        {"index": 2, "ring": 1, "healthy": True, "holder": None},
    ]
    nodes = [
        {"name": EVIL, "unusable": "cordoned", "gone": True, "slow": 1.3, "npus": npus, "work": []},
        {"name": "b", "unusable": "", "gone": False, "slow": 1.0, "npus": [], "work": ["service x"]},
    ]
    picture = node_rows(nodes)
    assert len(marks(picture, "tr")) == 2 and len(marks(picture, "rect")) == 3 and len(marks(picture, "path")) == 1
    assert "1 of 3 NPUs free" in picture and "cordoned" in picture and "1.30 times the step time" in picture and "service x" in picture
    (row,) = job_rows([{"name": "n/j", "phase": "Pending", "priority": 3, "waits_seconds": 90.0, "nodes": [], "message": "no room: 8 NPUs"}])
    assert row[1] == ["n/j", "Pending", "3", "90 s", "-", "no room: 8 NPUs"]


def test_alerts_are_those_of_the_answers() -> None:
    job = {"id": "train-1", "state": "failed", "finished": 9_000_000, "created": 1}
    live = {"error": "cannot be loaded", "retriever_error": None}
    found = alerts_of(
        {"parked": {"q": 2, "r": 0}},
        [job, {**job, "finished": 1}, {**job, "state": "queued", "finished": None}],
        live,
        {"variants": [{"name": "live", "error": "cannot be loaded"}, {"name": "b", "error": "gone"}]},
        101,
        10_000_000,
    )
    assert [alert.name for alert in found] == [
        "SemantideBacklogGrows",
        "SemantideModelSwapFails",
        "SemantideModelSwapFails",
        "SemantideMessagesParked",
        "SemantideJobsFail",
        "SemantideJobsWait",
    ]
    assert "2 messages of q" in found[3].said and "1 jobs failed" in found[4].said
    assert alerts_of({}, [], None, None, 0, 0) == []


def test_rates_and_quantiles_are_of_the_time_between_two_looks() -> None:
    text = 'a_total{x="1"} %d\na_total{x="2"} 5\nb_bucket{le="1.0",s="t"} %d\nb_bucket{le="2.0",s="t"} %d\nb_bucket{le="+Inf",s="t"} %d\n# HELP a_total\n'
    first, second = Look.of(text % (10, 1, 1, 1), 0.0), Look.of(text % (30, 6, 11, 11), 10.0)
    assert second.total("a_total") == 35 and second.rate(first, "a_total", x="1") == 2.0 and first.rate(second, "a_total") is None
    assert (
        second.quantile(first, "b", 0.5, s="t") == 1.0
        and second.quantile(first, "b", 0.75, s="t") == 1.5
        and second.quantile(first, "b", 0.5, s="none") is None
    )
    assert Look.of(text % (30, 6, 11, 20), 20.0).quantile(second, "b", 0.5) == 2.0 and second.quantile(second, "b", 0.5) is None
    assert Look.of("nonsense\na 1 2 3 4\n", 0.0).values == {} and Look.of("a +Inf", 0.0).total("a") == inf


def test_a_form_becomes_a_request() -> None:
    empty = {
        "user": "",
        "history": "",
        "n": None,
        "width": None,
        "exclude_seen": False,
        "categories_any": "",
        "categories_all": None,
        "exclude_ids": "",
        "source": "",
    }
    for wrong in (empty, {**empty, "user": "u", "history": "i"}):
        with pytest.raises(ValueError, match="and not both"):
            body_of(wrong)
    assert body_of({**empty, "user": " u "}) == {"user": "u", "n": 10, "explain": True, "exclude_seen": False, "explore": False}
    full = body_of({**empty, "history": "a, b\nc,", "n": 3.0, "width": 64.0, "categories_any": "x", "source": "both"})
    assert (full["history"], full["n"], full["beam_width"], full["categories_any"], full["source"]) == (
        ["a", "b", "c"],
        3,
        64,
        ["x"],
        "both",
    ) and "exclude_ids" not in full


def test_an_answer_is_told_in_a_sentence() -> None:
    answer = {
        "source": "generator",
        "model": "models/sha256-" + "a" * 64,
        "variant": "b",
        "share": 0.25,
        "history_items": 2,
        "based_on": "history",
        "unknown_history_items": 1,
        "beam_width": 32,
        "requested_beam_width": 64,
        "narrowed": True,
        "exact": False,
    }
    assert (
        facts(answer)
        == "generator models/aaaaaaaaaa, variant b (25 % of users), continues 2 items, 1 unknown items skipped, 32 beams of 64 asked for, best found."
    )


def test_neighbours_share_the_first_codes() -> None:
    item = lambda name, *codes: {"item": name, "title": None, "codes": list(codes)}  # noqa: E731
    answers = [{"items": [item("me", 1, 2, 3), item("near", 1, 2, 4)]}, {"items": [item("near", 1, 2, 4), item("far", 1, 7, 3)]}]
    assert [(one["item"], one["common"]) for one in neighbours([1, 2, 3], answers)] == [("near", 2), ("far", 1)] and spelled([1, 2]) == "1-2"


def test_figures_of_models_evaluations_and_experiments() -> None:
    assert (
        quality({"metrics": {"valid": {"ndcg@10": 0.2, "epoch": 1}, "test": {"ndcg@10": 0.3, "hr@5": 1}}}) == {"ndcg@10": 0.2, "hr@5": 1.0}
        and quality({}) == {}
    )
    job = {
        "id": "e",
        "finished": 1,
        "spec": {"inputs": {"model": "m"}},
        "result": {
            "part": "test",
            "rows": [{"model": "popularity", "metrics": {}}, {"model": "sasrec", "ref": "b", "metrics": {}}, {"model": "generator", "ref": "m", "metrics": {}}],
        },
    }
    assert [(row["model"], row["ref"]) for row in evaluations([job])] == [("popularity", None), ("sasrec", "b"), ("generator", "m")]
    assert alignment_points([{"step": 0, "held_out_hr@50": 0.1, "held_out_reward": 0.2}, {"step": 1, "loss": 1}]) == [(0.1, 0.2)]
    variants = [
        {"name": "live", "rewards": {"clicks": {"mean": {"value": 1.0, "low": 0.5, "high": 1.5}}}},
        {"name": "b", "rewards": {"clicks": {"mean": {"value": None, "low": None, "high": None}}}},
    ]
    assert lifts({"variants": variants}, "clicks") == [Interval("live", 1.0, 0.5, 1.5)]


def test_what_was_made_last_is_one_of_each_kind() -> None:
    jobs = [{"id": f"{kind}-{when}", "finished": when, "artifacts": {"x": f"{kind}/{when}"}} for kind in ("models", "datasets") for when in (1, 3, 2)]
    assert [row["ref"] for row in last_made([*jobs, {"id": "r", "finished": None, "artifacts": {}}])] == ["datasets/3", "models/3"]


def test_words() -> None:
    assert [ago(1000.0, 1 + seconds) for seconds in (5, 300, 9000, 3 * 86400)] == ["5 seconds ago", "5 minutes ago", "2 hours ago", "3 days ago"] and ago(
        None, 1
    ) == "-"
    assert (count(None), count(1234567), share(0.123), share(None), lasting(5.25), lasting(600), lasting(8000)) == (
        "-",
        "1\u202f234\u202f567",
        "12.3 %",
        "-",
        "5.25 s",
        "10 min",
        "2.2 h",
    )
    assert (
        short("models/sha256-" + "ab" * 32) == "models/ababababab"
        and short(None) == "-"
        and (figure(True), figure(None), figure(0.12345), figure("x")) == ("yes", "-", "0.1235", "x")
    )
    job = {"state": "running", "done": 1, "total": 4, "stage": "epoch 1", "started": 1000, "finished": None}
    assert (
        progress(job) == "25 % epoch 1" and took(job, 11) == "10 s" and progress({**job, "state": "failed"}) == "" and took({**job, "started": None}, 1) == "-"
    )
