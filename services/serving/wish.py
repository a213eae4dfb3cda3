"""A request as a client means it: stored histories are not looked up yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from semantide.services.serving.engine import Query
from semantide.services.serving.exploration import seed_of
from semantide.services.serving.profile import Profile, TimedEvent


@dataclass(frozen=True)
class Wish:
    """A request as it waits in the queue. ``events`` are in order of time; None stands for what is stored of ``user``."""

    user: str | None
    events: tuple[TimedEvent, ...] | None
    n: int
    width: int
    exclude_ids: tuple[str, ...] = ()
    exclude_seen: bool = False
    categories_any: tuple[str, ...] = ()
    categories_all: tuple[str, ...] = ()
    variety: float = 0.0
    only_new: bool = False
    conditional: bool = False

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
        )
