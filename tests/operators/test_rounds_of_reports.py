"""What jobs say of themselves, and what is told of them, over whole rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from semantide.operators.pods import AGAIN
from semantide.operators.resources import CHECKPOINT_ANNOTATION, IMBALANCE_ANNOTATION, PROGRESS_ANNOTATION, SLOW_ANNOTATION, STEP_SECONDS_ANNOTATION

Worlds = Callable[..., Any]


def test_what_a_job_says_of_itself_is_shown(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    said = {
        PROGRESS_ANNOTATION: json.dumps({"done": 3, "total": 9, "unit": "epochs", "stage": "train"}),
        CHECKPOINT_ANNOTATION: "step-120",
        STEP_SECONDS_ANNOTATION: json.dumps({"0": 0.1, "1": 0.15}),
    }
    lab.cluster.annotate("NPUJob", "lab", "train", said)
    lab.settle()
    status = lab.status("train")
    assert status["progress"]["done"] == 3 and status["checkpoint"] == "step-120"
    slow = status["placement"][1]["node"]
    assert status["slow"] == [{"node": slow, "ratio": 1.5}] and slow in status["message"]
    lab.end("train")
    lab.settle()
    lab.cluster.annotate("NPUJob", "lab", "train", {PROGRESS_ANNOTATION: json.dumps({"done": 9, "total": 9, "unit": "epochs", "stage": "train"})})
    lab.settle()
    assert lab.phase("train") == "Succeeded" and lab.status("train")["progress"]["done"] == 9, "what it said last may come after its end"
    lab.submit("next", npus=8)
    lab.settle()
    assert lab.status("next")["placement"][0]["node"] != slow


@pytest.mark.parametrize("annotation", ["", "[1]", "{", '{"0": "x"}', '{"a": 1}', '{"done": "much"}'])
def test_nonsense_in_annotations_is_passed_over(world: Worlds, annotation: str) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.cluster.annotate("NPUJob", "lab", "train", {PROGRESS_ANNOTATION: annotation, STEP_SECONDS_ANNOTATION: annotation})
    lab.settle()
    assert lab.phase("train") == "Running"


@pytest.mark.parametrize("number", ["Infinity", "-Infinity", "NaN", "1e999", "1" * 400, "1e308"])
def test_numbers_that_no_json_has_reach_no_status(world: Worlds, number: str) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8)
    lab.settle()
    said = {
        PROGRESS_ANNOTATION: f'{{"done": {number}, "total": 9}}',
        STEP_SECONDS_ANNOTATION: f'{{"0": {number}, "1": 1e-308}}',
    }
    lab.cluster.annotate("NPUJob", "lab", "train", said | {IMBALANCE_ANNOTATION: number})
    lab.cluster.annotate("Node", "", "a", {SLOW_ANNOTATION: number})
    lab.settle()
    assert not lab.operator.turn().stumbles
    lab.cluster.annotate("NPUJob", "lab", "train", {CHECKPOINT_ANNOTATION: "step-1"})
    lab.settle()
    status = lab.status("train")
    assert status["phase"] == "Running" and status["checkpoint"] == "step-1" and not status.get("slow")


def test_events_tell_what_happened_and_are_told_once(world: Worlds) -> None:
    lab = world(["a"])
    lab.submit("train")
    lab.settle()
    for _ in range(5):
        lab.turn(1, seconds=10)
    assert sorted(body["reason"] for body in lab.cluster.of("Event")) == ["Placed", "Running"]


def test_what_one_gang_said_of_its_nodes_is_not_said_of_the_next_ones(world: Worlds) -> None:
    lab = world(["a", "b", "c"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"backoffSeconds": 0})
    lab.settle()
    first = [place["node"] for place in lab.status("train")["placement"]]
    lab.cluster.annotate("NPUJob", "lab", "train", {STEP_SECONDS_ANNOTATION: json.dumps({"attempt": 1, "0": 0.1, "1": 0.3})})
    lab.settle()
    blamed = [{"node": first[1], "ratio": 3.0}]
    assert lab.status("train")["slow"] == blamed
    lab.end("train", rank=0, status=AGAIN)
    lab.settle()
    status = lab.status("train")
    second = [place["node"] for place in status["placement"]]
    assert status["phase"] == "Running" and first[1] not in second, "it keeps off the slow one"
    assert status["slow"] == blamed and first[1] not in status["message"], "and nothing is known of where it is now"
    lab.now += 3600
    lab.cluster.annotate("NPUJob", "lab", "train", {STEP_SECONDS_ANNOTATION: json.dumps({"attempt": 2, "0": 0.3, "1": 0.2})})
    lab.settle()
    status = lab.status("train")
    assert status["slow"] == [{"node": first[1], "ratio": 2.0}, {"node": second[0], "ratio": 1.5}], "after its half-life half of it is believed"
    lab.cluster.annotate("NPUJob", "lab", "train", {STEP_SECONDS_ANNOTATION: json.dumps({"attempt": 2, "0": 0.2, "1": 0.2})})
    lab.settle()
    assert [entry["node"] for entry in lab.status("train")["slow"]] == [first[1]]


def test_how_unequal_an_earlier_gang_was_is_not_said_of_the_next_one(world: Worlds) -> None:
    lab = world(["a", "b"])
    lab.submit("train", pods=2, npus=8, restartPolicy={"backoffSeconds": 0})
    lab.settle()

    def say(attempt: int, imbalance: str, *seconds: float) -> float | None:
        steps = {"attempt": attempt, **{str(pod): value for pod, value in enumerate(seconds)}}
        lab.cluster.annotate("NPUJob", "lab", "train", {IMBALANCE_ANNOTATION: imbalance, STEP_SECONDS_ANNOTATION: json.dumps(steps)})
        lab.settle()
        return lab.status("train").get("imbalance")  # type: ignore[no-any-return]

    assert say(1, "0.5", 0.1, 0.3) == 0.5
    lab.end("train", rank=0, status=AGAIN)
    for _ in range(8):
        lab.turn(1, 1.0)
        assert (lab.phase("train") == "Running" and lab.status("train")["attempt"] == 1) or "imbalance" not in lab.status("train")
    assert lab.phase("train") == "Running" and lab.status("train")["attempt"] == 2
    assert say(2, "0.5") is None, "it has said nothing of itself yet"
    assert say(2, "0.25", 0.1, 0.15) == 0.25
    lab.end("train")
    lab.settle()
    assert lab.phase("train") == "Succeeded" and lab.status("train")["imbalance"] == 0.25
