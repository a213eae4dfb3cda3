"""How a reward model is trained: every number, and what a job may change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from semantide.shared.models.calibration import METHODS, Method

Debias = Literal["position", "propensity", "both", "none"]
Propensities = Literal["logged", "estimated"]
Users = Literal["all", "even", "odd"]


@dataclass(frozen=True)
class RewardTraining:
    """How a reward model is trained and what it weighs."""

    signals: tuple[str, ...] = ()
    """Feedback signals to foresee. Empty: all that are frequent enough."""
    min_signals: int = 50
    """Least number of times that a signal must have been given, and not given, in training to be foreseen."""
    preference: Mapping[str, float] | None = None
    """Weight of each signal in the preference. None: the deployment's ``reward_preference``, else the intensities of its actions."""
    users: Users = "all"
    """Whose feedback is learned from: a model of one half is independent of a model of the other, and can judge it."""
    debias: Debias = "both"
    """What is taken into account of how items came to be shown: effects of place and tab, and propensities where they are logged."""
    propensities: Propensities = "logged"
    """Of exposures whose propensity nobody logged: each counts as one that was sure to be shown, or by the share that its item had of what was shown in its tab (``estimated``). Then
    all items count alike, however often they were shown: right for what ranks the whole catalog, and of more variance."""
    max_weight: float = 10.0
    """Most that an exposure may count, times the mean, because it was unlikely: in effect at least 1 / this of the exposures are learned from."""
    calibration: Method = "auto"
    gate_quantile: float = 0.05
    """Share of held-out positives that the relevance gate may shut out."""
    held_out: float = 0.1
    """Share of the exposures, the latest but for the test, that stop training, calibrate and set the gate."""
    test: float = 0.1
    """Share of the exposures, the latest of all, that only the report is made of."""
    hidden_size: int = 32
    num_heads: int = 2
    layer_sizes: tuple[int, ...] = (128, 64)
    num_found: int = 20
    num_recent: int = 10
    max_history: int = 1000
    content_size: int = 64
    """Width of the content vectors that are made of texts; 0: texts are not read."""
    collaborative_size: int = 32
    dropout: float = 0.1
    id_dropout: float = 0.2
    epochs: int = 10
    """Most passes over the exposures; training stops after the first one that does not help."""
    patience: int = 2
    batch_exposures: int = 1024
    learning_rate: float = 1e-3
    id_decay: float = 1e-5
    """L2 penalty of item ids, which else learn single exposures by heart."""
    max_exposures: int = 0
    """Exposures to train on, the latest ones; 0: all."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("min_signals", 1, 1 << 40), ("max_weight", 1, 1e9), ("gate_quantile", 0, 0.99), ("held_out", 0.01, 0.5), ("test", 0, 0.5), ("content_size", 0, 4096),
            ("collaborative_size", 0, 4096), ("epochs", 1, 1000), ("patience", 1, 1000), ("batch_exposures", 1, 1 << 20), ("learning_rate", 1e-7, 1),
            ("id_decay", 0, 1), ("max_exposures", 0, 1 << 40),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"reward {name} is {getattr(self, name)!r}: give a number from {low} to {high}")
        for name, choices in (("users", get_args(Users)), ("debias", get_args(Debias)), ("propensities", get_args(Propensities)), ("calibration", METHODS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"reward {name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        if not all(1 <= size <= 1 << 16 for size in self.layer_sizes):
            raise ValueError(f"reward layer_sizes is {list(self.layer_sizes)}: give widths from 1 to {1 << 16}, or none")
        if self.held_out + self.test >= 0.9:
            raise ValueError(f"reward held_out {self.held_out} and test {self.test} leave nothing to train on: together they stay below 0.9")

    def overridden(self, changes: Mapping[str, Any]) -> RewardTraining:
        """This with some fields replaced, as a job's ``config`` gives them.

        Raises: ValueError that names the field.
        """
        values: dict[str, Any] = {}
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in changes.items():
            if name not in known:
                raise ValueError(f"reward config field {name!r} is unknown: known are {', '.join(known)}")
            default = known[name]
            if name == "preference":
                if not isinstance(value, Mapping) or not all(isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in value.values()):
                    raise ValueError(f"reward preference is {value!r}: give weights of signals such as {{'click': 1, 'long_view': 2}}")
                values[name] = {str(signal): float(weight) for signal, weight in value.items()}
            elif isinstance(default, tuple):
                kind = str if name == "signals" else int
                if not isinstance(value, (list, tuple)) or not all(isinstance(entry, kind) and not isinstance(entry, bool) for entry in value):
                    raise ValueError(f"reward {name} is {value!r}: give a list such as {list(default) or ['click']}")
                values[name] = tuple(value)
            elif isinstance(default, str) != isinstance(value, str) or isinstance(value, bool) or not isinstance(value, (str, int, float)):
                raise ValueError(f"reward {name} is {value!r}: give a {'text' if isinstance(default, str) else 'number'} such as {default!r}")
            elif isinstance(default, int) and value != int(value):
                raise ValueError(f"reward {name} is {value!r}: give a whole number such as {default!r}")
            else:
                values[name] = type(default)(value)
        return replace(self, **values)


def standard() -> RewardTraining:
    """For logs with exposures of some thousand users and more."""
    return RewardTraining()


def tiny() -> RewardTraining:
    """For tests and first looks: seconds on one core."""
    return RewardTraining(
        hidden_size=8, num_heads=1, layer_sizes=(16,), num_found=4, num_recent=2, content_size=16, collaborative_size=8, epochs=3, min_signals=5
    )


RECIPES = {"standard": standard, "tiny": tiny}


def recipe(name: str, changes: Mapping[str, Any]) -> RewardTraining:
    """A recipe's numbers with some of them changed.

    Raises: ValueError for a name or field that is not known.
    """
    if (name or "standard") not in RECIPES:
        raise ValueError(f"reward recipe {name!r} is unknown: known are {', '.join(RECIPES)}")
    return RECIPES[name or "standard"]().overridden(changes)
