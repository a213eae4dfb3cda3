"""Full configurations of alignment by name; a job's ``config`` may override single numbers. Every option of generation and of the loss stands here, and on the card of what comes out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from semantide.services.training.recipes import TrainConfig, overridden
from semantide.shared.decoding.sampling import Sampling


@dataclass(frozen=True)
class AlignConfig:
    """Everything that decides what an alignment computes.

    Source: GenRec (arXiv 2604.14878), GRPO-SR: group-relative advantages, the ratio to the policy as it was, and a supervised term in the place of KL.
    """

    recipe: str
    steps: int = 200
    """Groups of rollouts are drawn, scored and learned from so many times."""
    prompts: int = 64
    """Places of training histories in a step, all of one epoch once."""
    updates: int = 1
    """Updates from the same rollouts; from the second on the policy is no longer the one that drew them."""
    staleness: int = 0
    """How many steps ahead rollouts are drawn, so that the reward room scores some while others are learned from. 0: on-policy."""
    history_events: int = 1000
    """Most events of a history that the reward model is told, events."""

    group: int = 16
    """Rollouts of a prompt, one item each."""
    beams: int = 4
    """How many of them are the policy's best beams; the others are drawn."""
    temperature: float = 1.0
    """Of the policy that draws and is learned: its logits are divided by it. Serving's beams are those of temperature 1."""
    distinct: bool = True
    """Whether the items of a group are all different (drawn without replacement)."""
    exclude_seen: bool = True
    """Whether the policy, and the held-out test, leave out what the history holds already."""

    gate: bool = True
    """Whether the reward is 0 where the relevance gate is closed."""
    page_positives: int = 20
    """Rollouts begin before pages, and so many of what was ordered or clicked there, the strongest first, are known positives. 0: pages are not looked at."""
    positives: int = 1
    """How many of the next items of the training history count as known positives where there are no pages."""
    clicked_from: float = 0.0
    """Least intensity of what was clicked on a page and so is a known positive. 0: the one that the model was trained with (``pages.clicked_from``), 1 where it was not by pages."""
    positive_reward: float = 1.0
    """Reward of a known positive, in the place of what the reward model says."""
    least_spread: float = 1e-3
    """Groups whose rewards have a smaller standard deviation are skipped and counted."""
    baseline: Literal["group", "prefix"] = "group"
    """What a code's reward is compared with: the mean of its group, or of those of the group that share the codes before it, drawn towards the mean above."""
    spread: Literal["group", "none"] = "group"
    """Whether advantages are divided by the group's standard deviation."""
    weighing: Literal["equal", "policy"] = "equal"
    """What rollouts of a group count in the loss: all the same, beams and draws alike, or each as much as it stands for of the policy (``policy``), so that the gradient is that of the
    expected reward."""
    clip: float = 0.0
    """The ratio counts between 1 - this and 1 + this only. 0: all of it."""
    kl_weight: float = 0.0
    """Weight of the divergence from the start. 0: it is only reported."""
    supervised_weight: float = 0.0
    """Weight of the known positives' negative log-likelihood: the supervised regulariser."""
    validity_weight: float = 0.0
    """Weight of -log(1 - p), p the probability that falls, at the prefixes of the rollouts, on codes that lead to no item: it is exact, and needs no invalid rollouts."""

    learning_rate: float = 2e-4
    warmup_steps: int = 10
    final_rate_share: float = 0.1
    """The cosine ends at this share of the learning rate."""
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    clip_norm: float = 1.0
    ema: float = 0.0
    """Decay of the running average of weights that is tested and kept. 0: the weights themselves."""
    dropout: bool = False
    """Whether the model's dropout acts while it learns; rollouts never have any, so that the ratio to them would be noise: only on-policy, where it is 1."""

    evaluate_every: int = 25
    """Steps from one held-out test, after which the guard decides, to the next."""
    held_out_users: int = 1000
    """Users of the validation part in each test; 0: all."""
    beam_width: int = 50
    """Beams of the held-out test, at least 50."""
    probes: int = 256
    """Users of the test whose rollouts both reward models judge, and whose free decoding is looked at: 30 at least beside a judge, for of few users no change is beyond noise."""
    guard_deviations: float = 2.5
    """A change counts as real from so many standard errors of the paired difference on."""
    guard_loss: float = 0.0
    """A loss of HR@50 up to this share of the start's is borne however sure it is."""
    constant_steps: int = 10
    """After so many steps in a row without a single group whose rewards differ, the run is refused."""
    log_every: int = 1
    """Steps from one row of live metrics to the next."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("steps", 1, 1 << 30), ("prompts", 1, 1 << 20), ("updates", 1, 64), ("staleness", 0, 8), ("history_events", 1, 1 << 20), ("positives", 1, 1000),
            ("page_positives", 0, 10_000), ("clicked_from", 0, 1 << 30),
            ("positive_reward", 0, 1000), ("least_spread", 0, 1000), ("clip", 0, 10), ("kl_weight", 0, 1000), ("supervised_weight", 0, 1000), ("validity_weight", 0, 1000),
            ("learning_rate", 0, 10), ("warmup_steps", 0, 1 << 30), ("final_rate_share", 0, 1), ("weight_decay", 0, 10), ("beta1", 0, 1), ("beta2", 0, 1), ("clip_norm", 1e-9, 1e9),
            ("ema", 0, 0.999999), ("evaluate_every", 1, 1 << 30), ("held_out_users", 0, 1 << 30), ("beam_width", 50, 10_000), ("probes", 2, 1 << 30), ("guard_deviations", 0, 100),
            ("guard_loss", 0, 1), ("constant_steps", 1, 1 << 30), ("log_every", 1, 1 << 30),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name} is {getattr(self, name)}: give a number from {low} to {high}")
        for name, choices in (("baseline", ("group", "prefix")), ("spread", ("group", "none")), ("weighing", ("equal", "policy"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}: give one of {', '.join(choices)}")
        if self.held_out_users == 1:
            raise ValueError("held_out_users is 1: of one user nothing is beyond noise; give at least 2, or 0 for all")
        if self.group < 2:
            raise ValueError(f"group is {self.group}: a rollout is compared with others of its group, give at least 2")
        if self.dropout and (self.staleness or self.updates > 1):
            raise ValueError(
                f"dropout is on with staleness {self.staleness} and updates {self.updates}: rollouts are drawn without dropout, and off-policy its noise would stand in the "
                "ratio to them; give dropout false too, or staleness 0 and updates 1"
            )
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """How groups are drawn."""
        return Sampling(self.group, self.beams, self.temperature, self.distinct)

    @property
    def training(self) -> TrainConfig:
        """The numbers that the optimiser and the average of weights take."""
        return TrainConfig(
            self.recipe,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            final_rate_share=self.final_rate_share,
            weight_decay=self.weight_decay,
            beta1=self.beta1,
            beta2=self.beta2,
            clip_norm=self.clip_norm,
            ema=self.ema,
        )


def grpo() -> AlignConfig:
    """Group-relative policy optimisation alone: nothing but the guard keeps the generator near the data."""
    return AlignConfig("grpo")


def grpo_sr() -> AlignConfig:
    """With the supervised regulariser, and with what keeps free decoding inside the catalog."""
    return replace(grpo(), recipe="grpo-sr", supervised_weight=2.0, validity_weight=1.0, learning_rate=4e-4, ema=0.95, dropout=True)


ALIGN_RECIPES: dict[str, Callable[[], AlignConfig]] = {"grpo": grpo, "grpo-sr": grpo_sr}


def align_recipe(name: str, changes: Mapping[str, Any] | None = None) -> AlignConfig:
    """A recipe with some numbers replaced.

    Raises: ValueError that names the recipe or the field.
    """
    if name not in ALIGN_RECIPES:
        raise ValueError(f"recipe {name!r} is unknown: give one of {', '.join(ALIGN_RECIPES)}")
    return overridden(ALIGN_RECIPES[name](), changes or {}, "")
