"""What variants were worth to the people who met them: an A/B report from the event log.

A request is one answer, known by its id; its rewards are the distinct items of it that were clicked (an action of intensity 1 or more) and ordered (3 or more). Only requests of which something came back are
known, so senders report exposures, too. People are assigned by chance, so requests of one person go together.

    mean            of the variant's own requests
    ips, snips      of all requests, each weighted by the inverse of the share of people that its variant had when it was answered: right while shares change, too
    doubly_robust   the same, with what people did before the experiment taken into account: narrower intervals where that says something
Legend: Q requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl

from semantide.shared.off_policy import Decisions, Estimate, doubly_robust, halves, ips, lift, snips
from semantide.shared.paired import Floats

COLUMNS = ("user", "item", "time", "action", "signals", "request_id", "propensity", "variant", "variant_share")
REWARDS: Mapping[str, float] = {"clicks": 1.0, "orders": 3.0}
"""Least intensity that counts, of each reward."""
_FEWEST = 20  # requests that a model of rewards is fitted on


@dataclass(frozen=True)
class VariantFigures:
    """One variant. ``exposures`` are events that say that an item was seen; ``drawn`` the share of its known places where chance chose the item. ``rewards`` has its estimates, by reward."""

    name: str
    users: int
    requests: int
    exposures: int
    drawn: float
    share: float
    rewards: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Report:
    """All variants of a stretch of time, and what to think of before believing it."""

    base: str
    users: int
    requests: int
    variants: list[VariantFigures]
    warnings: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: no number in it is infinite."""
        return asdict(self)


def report(events: pl.DataFrame, before: pl.DataFrame, actions: Mapping[str, float], base: str = "live") -> Report:
    """Compare the variants of these events (columns ``COLUMNS``) with ``base``; ``before`` has (user, action) of what the same people did earlier.

    Raises: ValueError for a base that answered nobody.
    """
    named = events.filter(pl.col("request_id").is_not_null() & pl.col("variant").is_not_null())
    # An answer is one variant's: what is said to be of several cannot be counted for any.
    said = named.group_by("request_id").agg(pl.col("variant").n_unique().alias("variants"), pl.col("user").n_unique().alias("users"))
    torn = said.filter(pl.col("variants") > 1).select("request_id")
    known = named.join(torn, on="request_id", how="anti", maintain_order="left")
    shared = known.select("request_id").unique().join(said.filter(pl.col("users") > 1), on="request_id", how="semi").height
    chosen = known.filter(pl.col("variant_share").is_null())["request_id"].n_unique()
    told = known.filter(pl.col("variant_share").is_not_null())
    # Who answered had a share above 0; whatever says otherwise would weigh infinitely.
    rows = told.filter(pl.col("variant_share").is_between(0, 1, closed="right"))
    impossible = told["request_id"].n_unique() - rows["request_id"].n_unique()
    requests = _requests(rows, actions)
    names = sorted(requests["variant"].unique().to_list(), key=lambda name: (name != base, name))
    if names and base not in names:
        raise ValueError(f"base is {base!r}, which answered nobody in this time: take one of {', '.join(names)}")
    past_Q2 = _past(requests, before, actions)
    groups = requests["user"].rank("dense").cast(pl.Int64).to_numpy() if requests.height else np.zeros(0, dtype=np.int64)
    judged = {name: {reward: _estimates(requests, name, reward, groups, past_Q2) for reward in REWARDS} for name in names}
    figures = []
    for name in names:
        own = rows.filter(pl.col("variant") == name)
        mine = requests.filter(pl.col("variant") == name)
        rewards = {reward: _shown(judged[name][reward], None if name == base else judged[base][reward]) for reward in REWARDS}
        exposures = own.filter(_intensity(pl.col("action"), actions).is_between(0, 1, closed="left")).height
        places = own.filter(pl.col("propensity").is_not_null())
        drawn = float((places["propensity"] < 1).mean() or 0.0) if places.height else 0.0  # type: ignore[arg-type]
        share = float(mine["share"][-1])
        figures.append(VariantFigures(name, mine["user"].n_unique(), mine.height, exposures, drawn, share, rewards))
    return Report(
        base, requests["user"].n_unique(), requests.height, figures, _warnings(figures, requests, chosen, impossible) + _ambiguous(torn.height, shared)
    )


def _requests(rows: pl.DataFrame, actions: Mapping[str, float]) -> pl.DataFrame:
    """One row for each request."""
    strongest = pl.concat_list(pl.col("action"), pl.col("signals").fill_null([])).list.eval(_intensity(pl.element(), actions)).list.max()
    counted = rows.with_columns(strength=strongest)
    rewards = [pl.col("item").filter(pl.col("strength") >= least).n_unique().cast(pl.Float64).alias(name) for name, least in REWARDS.items()]
    return (
        counted.group_by("request_id")
        .agg(pl.col("user").min(), pl.col("variant").min(), pl.col("variant_share").min().alias("share"), pl.col("time").min(), *rewards)
        .sort("time", "request_id")
    )


def _intensity(action: pl.Expr, actions: Mapping[str, float]) -> pl.Expr:
    return action.replace_strict(dict(actions), default=-1.0, return_dtype=pl.Float64)


def _past(requests: pl.DataFrame, before: pl.DataFrame, actions: Mapping[str, float]) -> Floats:
    """What each request's person did before: logarithms of the numbers of wanted things and of events [Q, 2]."""
    wanted = _intensity(pl.col("action"), actions) >= 1
    counts = before.group_by("user").agg(wanted.sum().alias("wanted"), pl.len().alias("events"))
    found = requests.select("user").join(counts, on="user", how="left", maintain_order="left").fill_null(0)
    past_Q2: Floats = np.log1p(found.select("wanted", "events").to_numpy().astype(np.float64))
    return past_Q2


@dataclass(frozen=True)
class _Estimates:
    mean: Estimate
    ips: Estimate
    snips: Estimate
    doubly_robust: Estimate


def _estimates(requests: pl.DataFrame, name: str, reward: str, groups: np.ndarray, past_Q2: Floats) -> _Estimates:
    rewards = requests[reward].to_numpy().astype(np.float64)
    mine = (requests["variant"] == name).to_numpy()
    decisions = Decisions(rewards, requests["share"].to_numpy().astype(np.float64), mine.astype(np.float64), groups)
    alike = Decisions(rewards, np.ones(len(rewards)), mine.astype(np.float64), groups)
    predicted = _predicted(rewards, mine, groups, past_Q2)
    return _Estimates(snips(alike), ips(decisions), snips(decisions), doubly_robust(decisions, predicted, predicted))


def _predicted(rewards: Floats, mine: np.ndarray, groups: np.ndarray, past_Q2: Floats) -> Floats:
    """What a line through the people's past expects of the variant for every request; fitted on the other half of the people."""
    half, predicted = halves(groups), np.zeros(len(rewards))
    table = np.column_stack([np.ones(len(rewards)), past_Q2])
    for side in (True, False):
        fit = mine & (half != side)
        if fit.sum() >= _FEWEST:
            line, *_ = np.linalg.lstsq(table[fit], rewards[fit], rcond=None)
            predicted[half == side] = table[half == side] @ line
        elif mine.any():
            predicted[half == side] = rewards[fit].mean() if fit.any() else 0.0
    return predicted


def _shown(found: _Estimates, base: _Estimates | None) -> dict[str, Any]:
    shown: dict[str, Any] = {}
    for name, estimate in vars(found).items():
        shown[name] = {**estimate.interval.as_dict()}
        if name != "mean":
            shown[name] |= {"effective": estimate.effective, "mean_weight": estimate.mean_weight.as_dict()}
        if base is not None:
            against = lift(estimate, getattr(base, name))
            shown[name]["lift"] = {**against.as_dict(), "beyond_noise": against.beyond_noise}
    return shown


def _ambiguous(torn: int, shared: int) -> list[str]:
    """What is wrong with request ids that stand for more than one answer."""
    warnings = []
    if torn:
        warnings.append(f"{torn} request ids are said to be of several variants, and count for none: give each answer an id of its own")
    if shared:
        warnings.append(
            f"{shared} request ids are named by several users, and count as one request each, of one of them: give each answer an id of its own, and each person one name"
        )
    return warnings


def _warnings(figures: Sequence[VariantFigures], requests: pl.DataFrame, chosen: int, impossible: int) -> list[str]:
    warnings = []
    if not figures:
        warnings.append(
            "no request of a split is in the log: divide the users (`semantide variants set`), and send exposures and feedback with the `request_id` of the answer"
        )
    for one in figures:
        if not one.exposures:
            warnings.append(
                f"no exposure of {one.name!r} came back: requests without feedback are unknown then, and its figures are too high; send action `exposure` for what was seen"
            )
        if (
            one.requests
            and abs(one.users / max(requests["user"].n_unique(), 1) - one.share)
            > 0.05 + 3 * (one.share * (1 - one.share) / max(requests["user"].n_unique(), 1)) ** 0.5
        ):
            warnings.append(
                f"{one.name!r} met {one.users} of {requests['user'].n_unique()} users although its share is {one.share:.2%}: its requests come back more, or less, often than others, or shares were changed"
            )
    if impossible:
        warnings.append(
            f"{impossible} requests have a share that is not above 0 and at most 1, and count for none: correct their `variant_share`, or leave it out"
        )
    if chosen:
        warnings.append(f"{chosen} requests named their variant themselves and count for none: their users were not assigned by chance")
    return warnings
