"""A request as a client means it, read from what was sent: stored histories are not looked up yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from semantide.services.serving.exploration import seed_of
from semantide.services.serving.prepared import Query
from semantide.services.serving.profile import Profile, TimedEvent
from semantide.shared.recommendation import HistoryItem, RecommendationRequest
from semantide.shared.scores import ScoreRequest


@dataclass(frozen=True)
class Wish:
    """A request as it waits in the queue. ``events`` are in order of time; None stands for what is stored of ``user``.

    With ``items`` these are scored and nothing is searched.
    """

    user: str | None
    events: tuple[TimedEvent, ...] | None
    n: int = 1
    width: int = 1
    exclude_ids: tuple[str, ...] = ()
    exclude_seen: bool = False
    categories_any: tuple[str, ...] = ()
    categories_all: tuple[str, ...] = ()
    variety: float = 0.0
    only_new: bool = False
    conditional: bool = False
    items: tuple[str, ...] = ()

    @property
    def who(self) -> str:
        """Whom draws are seeded by: the user, or the history that was sent."""
        return self.user if self.user is not None else "\n".join(item for item, _, _ in self.events or ())

    def query(self, profile: Profile, events: Sequence[TimedEvent] = ()) -> Query:
        """What the engine is asked, once the user's profile is known; with the ``events`` it was made of where the model looks at what was done in them."""
        excluded = (*self.exclude_ids, *profile.blocked, *(profile.seen if self.exclude_seen else ()))
        return Query(
            profile.history,
            self.n,
            self.width,
            excluded,
            self.categories_any,
            self.categories_all,
            self.variety,
            seed_of(self.who) if self.variety else 0,
            self.user,
            self.only_new,
            self.conditional,
            tuple(events[place][1:] for place in profile.places) if events else (),
            self.items,
        )


def wish_of(body: RecommendationRequest, actions: Mapping[str, float]) -> Wish:
    """What the request asks for.

    Raises: ValueError naming field, value and remedy.
    """
    if body.depth is not None and body.depth < body.n:
        raise ValueError(f"`depth` is {body.depth} and `n` {body.n}: rank at least as many items as the first page has")
    events = _given_events(body, actions)
    return Wish(
        user=body.user,
        events=events,
        n=body.ranked,
        width=body.width,
        exclude_ids=tuple(body.exclude_ids),
        exclude_seen=body.exclude_seen,
        categories_any=tuple(sorted(set(body.categories_any))),
        categories_all=tuple(sorted(set(body.categories_all))),
        variety=body.variety,
        conditional=body.conditional_scores,
    )


def score_wish_of(body: ScoreRequest, actions: Mapping[str, float], most: int) -> Wish:
    """What a request for scores asks for; ``most`` items are allowed.

    Raises: ValueError naming field, value and remedy.
    """
    if len(body.items) > most:
        raise ValueError(f"`items` has {len(body.items)} items: ask for at most {most} at a time (SEMANTIDE_SERVING_SCORED_ITEMS)")
    return Wish(user=body.user, events=_given_events(body, actions), conditional=body.conditional_scores, items=tuple(body.items))


def _given_events(body: RecommendationRequest | ScoreRequest, actions: Mapping[str, float]) -> tuple[TimedEvent, ...] | None:
    """The history that was sent, or None where a user is named."""
    if (body.user is None) == (body.history is None):
        given = "neither" if body.user is None else "both"
        raise ValueError(f"{given} of `user` and `history` given: send one of them (for an unknown visitor any new user id will do)")
    if body.split_by is not None and body.user is not None:
        raise ValueError(f"`split_by` is {body.split_by!r} and `user` {body.user!r}: a user is split by their own id; leave `split_by` out")
    if body.history is None:
        return None
    if not body.history:
        raise ValueError("`history` is []: give at least one item, or send `user` instead (an unknown user is ranked without history)")
    plain: tuple[TimedEvent, ...] = tuple(
        (entry, "click", None) for entry in body.history if isinstance(entry, str)
    )  # the usual case, without a model made of each entry
    if len(plain) == len(body.history) and "click" in actions:
        return plain
    return _events([entry if isinstance(entry, HistoryItem) else HistoryItem(item=entry) for entry in body.history], actions)


def _events(history: list[HistoryItem], actions: Mapping[str, float]) -> tuple[TimedEvent, ...]:
    for place, event in enumerate(history):
        if event.action not in actions:
            raise ValueError(f"`history[{place}].action` is {event.action!r}: use one of {', '.join(sorted(actions))}, or configure it in SEMANTIDE_ACTIONS")
    timed = [event.time is not None for event in history]
    if any(timed) and not all(timed):
        raise ValueError(f"`history[{timed.index(False)}].time` is missing: give a time for every event, or for none (then oldest first)")
    if all(timed):
        history = sorted(history, key=lambda event: event.time or 0)
    return tuple((event.item, event.action, event.time) for event in history)
