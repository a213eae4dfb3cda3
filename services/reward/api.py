"""HTTP door: what reward models there are and what they are worth, and scores of items for users."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from pydantic import Field

from semantide.services.reward.newest_rewards import NewestRewards
from semantide.services.reward.recipes import RECIPES
from semantide.shared.artifacts import ArtifactStore, readable
from semantide.shared.contracts import ArtifactRef, Contract, Identifier
from semantide.shared.dataset import StoredDataset
from semantide.shared.errors import BadData, Conflict, Corrupt, NotFound
from semantide.shared.history import Histories as OnlineHistories
from semantide.shared.http import APIRouter
from semantide.shared.models.preference import PreferenceModel, combined
from semantide.shared.models.reward_pairs import Histories
from semantide.shared.models.reward_scorer import matched
from semantide.shared.pseudonyms import Pseudonyms
from semantide.shared.room import Room

_MOST_PAIRS, _MOST_EVENTS = 100_000, 500_000  # of a request, all its users together


class HistoryEntry(Contract):
    """One event of a history."""

    item: Identifier
    action: Identifier = "click"


class ScoredUser(Contract):
    """Items to be scored for one user. Without ``history`` that of the user is taken, as serving knows it; oldest first."""

    user: Identifier | None = None
    history: tuple[HistoryEntry, ...] | None = Field(default=None, max_length=10_000)
    items: tuple[Identifier, ...] = Field(min_length=1, max_length=10_000)


class ScoresWanted(Contract):
    """A batch of users. Without ``reward`` the reward model that was made last; ``preference`` weighs its signals in another way. Items that came after the model are
    known by their description in ``dataset``, where that is named."""

    users: tuple[ScoredUser, ...] = Field(min_length=1, max_length=10_000)
    reward: ArtifactRef | None = None
    dataset: ArtifactRef | None = None
    preference: dict[str, float] | None = None


def build(room: Room) -> APIRouter:
    """The routes of this room."""
    router = APIRouter(prefix="/v1/reward", tags=["reward"])
    newest, pseudonyms = NewestRewards(room.broker), Pseudonyms.of(room.settings)
    pseudonyms.agree(room.broker)
    online = OnlineHistories(room.broker, room.settings.history_length, room.settings.history_ttl_seconds)

    def card(ref: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(room.store.text(ref, "reward.json"))
        return {"reward": ref, **{name: value for name, value in read.items() if name != "calibrations"}}

    def named(reward: str | None) -> str:
        ref = reward or newest.newest(room.store.exists)
        if ref is None:
            raise NotFound("no reward model has been made yet: run `semantide reward`, or POST /v1/jobs of kind reward")
        if not room.store.exists(ref):
            raise NotFound(f"no reward model {ref!r}: GET /v1/reward lists them")
        return ref

    @router.get("", summary="Reward models, the newest first, with what their signals are worth")
    def rewards() -> dict[str, Any]:
        known = newest.all()
        refs = [ref for ref in known if room.store.exists(ref)] + [ref for ref in room.store.list("rewards") if ref not in known]
        return {"rewards": readable(refs, card), "recipes": sorted(RECIPES)}

    @router.get("/{ref:path}", summary="One reward model: signals, calibration, gate, preference")
    def reward(ref: str) -> dict[str, Any]:
        return card(named(ref if ref.startswith("rewards/") else f"rewards/{ref}"))

    @router.post("/scores", summary="What users would do with items: each signal's probability, the preference, relevance and gate")
    def scores(wanted: ScoresWanted) -> dict[str, Any]:
        total = sum(len(user.items) for user in wanted.users)
        if total > _MOST_PAIRS:
            raise BadData(f"{total} items are to be scored at once: send at most {_MOST_PAIRS} in a request")
        ref = named(wanted.reward)
        if wanted.dataset is not None and not (wanted.dataset.startswith("datasets/") and room.store.exists(wanted.dataset)):
            raise NotFound(f"no data set {wanted.dataset!r}: name one (datasets/...) that `semantide dataset` made, or none")
        model, row_of = loaded(ref, room.store, wanted.dataset)
        if wanted.preference is not None:
            unknown = sorted(set(wanted.preference) - set(model.signals))
            if unknown:
                raise Conflict(f"preference weighs {', '.join(unknown)}, and {ref[:24]}... foresees {', '.join(model.signals)}: weigh some of these")
            try:
                combined(np.zeros((1, len(model.signals))), model.signals, wanted.preference)
            except ValueError as error:
                raise BadData(str(error)) from error
            model = model.weighted(wanted.preference)
        known_as = [user.user and pseudonyms.of_user(user.user) for user in wanted.users]
        told = told_of(
            [user.model_copy(update={"user": name}) for user, name in zip(wanted.users, known_as, strict=True)] if pseudonyms else wanted.users, online
        )
        if (events := sum(map(len, told))) > _MOST_EVENTS:
            raise BadData(
                f"the histories of {len(told)} users have {events} events, those sent and those stored together: send at most {_MOST_EVENTS} in a request, with fewer "
                "users or shorter histories"
            )
        histories = [events_of(own, room.settings.actions, model.header.get("history", {})) for own in told]
        place = {name: number for number, name in enumerate(model.network.config.actions, 1)}
        flat = [event for history in histories for event in history]
        items_E = np.array([row_of.get(item, -1) for item, _ in flat], dtype=np.int64)
        actions_E = np.array([place.get(action, 0) for _, action in flat], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(history) for history in histories])]).astype(np.int64)
        items_X = np.array([row_of.get(item, -1) for user in wanted.users for item in user.items], dtype=np.int64)
        group_X = np.repeat(np.arange(len(wanted.users)), [len(user.items) for user in wanted.users])
        judged = model.judge(model.user_rows(known_as), Histories(items_E, actions_E), offsets, group_X, items_X)
        answers, at = [], 0
        for user in wanted.users:
            rows = range(at, at + len(user.items))
            at = rows.stop
            entries = [
                {
                    "item": item,
                    "known": bool(items_X[row] >= 0),
                    "preference": float(judged.preference_X[row]),
                    "relevance": float(judged.relevance_X[row]),
                    "gate": bool(judged.gate_X[row]),
                    "signals": {name: float(judged.probabilities_XS[row, column]) for column, name in enumerate(model.signals)},
                }
                for item, row in zip(user.items, rows, strict=True)
            ]
            answers.append({"user": user.user, "items": entries})
        return {"reward": ref, "preference": dict(model.weights), "users": answers}

    return router


def told_of(users: Sequence[ScoredUser], online: OnlineHistories) -> list[list[tuple[str, str]]]:
    """(item, action) of each user, oldest first: what was sent, or what is stored.

    Raises: Corrupt for what is no history.
    """
    stored = online.get_many({user.user for user in users if user.history is None and user.user is not None})
    told = []
    for user in users:
        events = user.history if user.history is not None else stored.get(user.user or "", [])
        if isinstance(events, Corrupt):
            raise events
        told.append([(event.item, event.action) for event in events])
    return told


def events_of(told: Sequence[tuple[str, str]], actions: Mapping[str, float], reading: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(item, action) of a user, oldest first, as the data set that the model was trained on made histories of events."""
    least, folding = float(reading.get("positive_intensity", 1.0)), reading.get("deduplicate", "consecutive")
    events: list[tuple[str, str]] = []
    known: set[str] = set()
    for item, action in told:
        repeated = item in known if folding == "all" else folding == "consecutive" and bool(events) and events[-1][0] == item
        if repeated and folding == "consecutive" and actions.get(action, 0.0) > actions.get(events[-1][1], 0.0):
            events[-1] = (item, action)  # the strongest of what was done in a row
        if actions.get(action, 0.0) >= least and not repeated:
            events.append((item, action))
            known.add(item)
    return events


@lru_cache(maxsize=2)
def loaded(ref: str, store: ArtifactStore, dataset: str | None = None) -> tuple[PreferenceModel, dict[str, int]]:
    """A reward model and the rows of its items, those of a newer data set among them.

    Raises: Conflict for a reward model of another catalog than the data set's.
    """
    model = PreferenceModel.load(store.get(ref))
    row_of = {item: row for row, item in enumerate(model.item_ids)}
    if dataset is None:
        return model, row_of
    stored = StoredDataset(store.get(dataset))
    model, rows_N = matched(ref, model, dataset, stored)
    return model, row_of | dict(zip(stored.item_ids, rows_N.tolist(), strict=True))
