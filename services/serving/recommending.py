"""The stages that the scheduler runs: wishes are assembled into prepared queries, admitted by the memory they will hold, and searched, or their items scored, in groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from semantide.services.serving.bundle import Bundle, Unavailable
from semantide.services.serving.engine import Answer, Group
from semantide.services.serving.prepared import Prepared
from semantide.services.serving.profile import TimedEvent, profile_of
from semantide.services.serving.rounds import Rounds
from semantide.services.serving.scoring import Scored, ScoreGroup
from semantide.services.serving.wish import Wish
from semantide.shared.decoding.kv_pool import KVExhausted, KVLease, KVPool

Events = tuple[TimedEvent, ...]


@dataclass(frozen=True)
class Asked:
    """A wish, and the bundle that was chosen to answer it."""

    wish: Wish
    bundle: Bundle


@dataclass(frozen=True)
class Recommending:
    """What the stages need: ``look_up`` reads many users' stored events at once, or says why it cannot, all of them or one."""

    look_up: Callable[[list[str]], Mapping[str, Events | Exception] | Exception]
    actions: Mapping[str, float]
    unavailable: Callable[[], Unavailable]
    pool: KVPool
    clock: Callable[[], float]

    def assemble(self, asked: Sequence[Asked]) -> list[Prepared | Exception]:
        """Look up stored histories in one round trip, and spell every prompt; what is wrong with one request is its alone."""
        stored = self.look_up(list(dict.fromkeys(each.wish.user for each in asked if each.wish.user is not None and each.wish.events is None)))
        outcomes: list[Prepared | Exception] = []
        for each in asked:
            try:
                outcomes.append(self._prepare(each, stored))
            except Exception as error:
                outcomes.append(error)
        return outcomes

    def _prepare(self, asked: Asked, stored: Mapping[str, Events | Exception] | Exception) -> Prepared:
        wish, bundle = asked.wish, asked.bundle
        events = wish.events
        if events is None:
            found = stored if isinstance(stored, Exception) else stored[wish.user or ""]
            if isinstance(found, Exception):
                raise found
            events = found
        profile = profile_of(((item, action) for item, action, _ in events), self.actions, bundle.reading)
        prepared = Prepared.of(bundle, wish.query(profile, events if bundle.spelling.merger.features else ()))
        if prepared.kv_bytes > self.pool.budget_bytes:
            what, fewer = (f"`items` of {len(wish.items)}", "items") if wish.items else (f"`beam_width` {wish.width} with n = {wish.n}", "beams")
            raise ValueError(
                f"{what} needs {prepared.kv_bytes} bytes of keys and values, more than the {self.pool.budget_bytes} of SEMANTIDE_SERVING_KV_BYTES: "
                f"ask for fewer {fewer}"
            )
        if wish.items:
            return prepared
        bundle.mask(self.unavailable(), wish.categories_any, wish.categories_all, wish.only_new)  # made here, the search finds it
        return prepared

    def admit(self, request: Prepared) -> KVLease | None:
        """Reserve what a request will hold; None as long as others hold it."""
        try:
            return self.pool.reserve(request.kv_bytes)
        except KVExhausted:
            return None

    def begin(self, requests: Sequence[Prepared], leases: Sequence[KVLease], share: float) -> Rounds[Answer] | Rounds[Scored]:
        """Make the group; its rounds follow."""
        if requests[0].query.items:
            return ScoreGroup(requests, self.clock, leases=leases)
        return Group(requests, self.unavailable, self.clock, leases=leases, share=share)
