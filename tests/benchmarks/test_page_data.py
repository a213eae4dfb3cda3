"""Logs of the benchmarks become data sets with pages and feedback."""

from pathlib import Path

import pytest

from semantide.shared.dataset import Dataset
from semantide.shared.feedback import Feedback
from semantide.shared.pages import CLICKED, EXPOSED, Pages
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.users import SimulatorConfig

from .page_data import SAMPLE, Log, sample, simulated, written


def of_sample() -> Log:
    interactions, items = sample(SAMPLE)
    return interactions.slice(0, 20_000), items


def of_people() -> Log:
    return simulated(Simulation(SimulatorConfig(users=20, items=40, topics=3, sessions=3)))


@pytest.mark.parametrize("log", [of_sample, of_people])
def test_a_log_becomes_pages_with_positives_and_what_was_passed_over(log: object, tmp_path: Path) -> None:
    folder = written(log(), tmp_path)  # type: ignore[operator]
    data, feedback = Dataset.load(folder), Feedback.load(folder)
    answers = Pages.of(data, folder).answers()
    assert (answers >= CLICKED).any() and (answers == EXPOSED).any() and list(data.cases("test"))
    assert {"click", "long_view"} <= set(feedback.signals)
