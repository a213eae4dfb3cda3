"""REST door of serving: recommendations, and which model gives them."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

from semantide.services.serving.contract import (
    CandidatesAnswer,
    DecisionsAnswer,
    Explanation,
    HistoryItem,
    LiveAnswer,
    PromoteRequest,
    RecommendationAnswer,
    RecommendationRequest,
    RecommendedItem,
    RollbackRequest,
    Timing,
)
from semantide.services.serving.engine import Answer, Recommendation
from semantide.services.serving.registry import RegistryState
from semantide.services.serving.scheduler import Overloaded
from semantide.services.serving.service import Service
from semantide.services.serving.ticket import Passage
from semantide.services.serving.wish import Wish
from semantide.shared.errors import TransientError
from semantide.shared.http import APIRouter, HTTPException, Request
from semantide.shared.room import Room
from semantide.shared.telemetry import stage_spans

_services: dict[int, Service] = {}
_process = secrets.token_hex(6)  # with a counter, an id of every request without asking the system for randomness each time
_numbers = itertools.count(1)


def _service(room: Room) -> Service:
    if id(room) not in _services:
        _services[id(room)] = Service(room.settings, room.broker, room.store)
    return _services[id(room)]


def start(room: Room) -> Callable[[], None]:
    """Begin to serve; what is returned ends it."""
    service = _service(room)
    service.start()

    def stop() -> None:
        service.stop()
        _services.pop(id(room), None)

    return stop


def ready(room: Room) -> tuple[bool, str]:
    """Whether recommendations can be given; a stack without any model counts as ready."""
    return _service(room).ready()


def build(room: Room) -> APIRouter:
    """Recommendations, promotion, rollback."""
    router = APIRouter(prefix="/v1")
    service = _service(room)
    actions = room.settings.actions

    @router.post("/recommendations", tags=["serving"], summary="Items for a user or a history, best first")
    async def recommend(body: RecommendationRequest, request: Request) -> RecommendationAnswer:
        begin = time.perf_counter()
        wish = _wish(body, actions)
        try:
            answer, passage = await _unless_gone(request, service.submit(wish))
        except Overloaded as error:
            service.meters.request("overloaded")
            raise HTTPException(429, str(error), headers={"Retry-After": str(math.ceil(error.retry_after_seconds))}) from error
        except ClientGone as error:
            service.meters.request("cancelled")
            raise HTTPException(499, str(error)) from error
        except TransientError:
            service.meters.request("unavailable")
            raise
        except Exception:
            service.meters.request("failed")
            raise
        service.meters.request("short" if answer.short_reason else "ok")
        total = time.perf_counter() - begin
        service.meters.stage("total", total)
        stage_spans("serving", passage.marks)
        return _answer(answer, passage, body.explain, total)

    @router.post("/serving/promote", tags=["serving"], summary="Make a model live; it is loaded and tried first")
    def promote(body: PromoteRequest) -> LiveAnswer:
        return _live(service, service.promote(body.model, body.catalog, body.force, body.reason))

    @router.post("/serving/rollback", tags=["serving"], summary="Bring back what was live before")
    def rollback(body: RollbackRequest | None = None) -> LiveAnswer:
        return _live(service, service.rollback(body.reason if body else ""))

    @router.get("/serving/live", tags=["serving"], summary="What is live")
    def live() -> LiveAnswer:
        return _live(service, service.registry.read())

    @router.get("/serving/candidates", tags=["serving"], summary="Models that may be promoted")
    def candidates() -> CandidatesAnswer:
        return CandidatesAnswer(candidates=list(service.registry.read().candidates))

    @router.get("/serving/decisions", tags=["serving"], summary="Promotions, rollbacks and catalog extensions")
    def decisions() -> DecisionsAnswer:
        return DecisionsAnswer(decisions=list(service.registry.read().decisions))

    return router


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _unless_gone(request: Request, future: Future[tuple[Answer, Passage]]) -> tuple[Answer, Passage]:
    """Wait for an answer; should the client leave, the request's work is given up.

    Raises: ClientGone, and what the request itself raises.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        future.cancel()

    watching = asyncio.create_task(watch())
    try:
        return await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        if watching.done():
            raise ClientGone("the client left before the answer") from None
        raise
    finally:
        watching.cancel()


def _wish(body: RecommendationRequest, actions: Mapping[str, float]) -> Wish:
    """What the request asks for.

    Raises: ValueError naming field, value and remedy.
    """
    if (body.user is None) == (body.history is None):
        given = "neither" if body.user is None else "both"
        raise ValueError(f"{given} of `user` and `history` given: send one of them (for an unknown visitor any new user id will do)")
    events = None
    if body.history is not None:
        if not body.history:
            raise ValueError("`history` is []: give at least one item, or send `user` instead (an unknown user is ranked without history)")
        events = _events([entry if isinstance(entry, HistoryItem) else HistoryItem(item=entry) for entry in body.history], actions)
    return Wish(
        user=body.user,
        events=events,
        n=body.n,
        width=body.width,
        exclude_ids=tuple(body.exclude_ids),
        exclude_seen=body.exclude_seen,
        categories_any=tuple(sorted(set(body.categories_any))),
        categories_all=tuple(sorted(set(body.categories_all))),
        variety=body.variety,
    )


def _events(history: list[HistoryItem], actions: Mapping[str, float]) -> tuple[tuple[str, str], ...]:
    for place, event in enumerate(history):
        if event.action not in actions:
            raise ValueError(f"`history[{place}].action` is {event.action!r}: use one of {', '.join(sorted(actions))}, or configure it in SEMANTIDE_ACTIONS")
    timed = [event.time is not None for event in history]
    if any(timed) and not all(timed):
        raise ValueError(f"`history[{timed.index(False)}].time` is missing: give a time for every event, or for none (then oldest first)")
    if all(timed):
        history = sorted(history, key=lambda event: event.time or 0)
    return tuple((event.item, event.action) for event in history)


def _answer(answer: Answer, passage: Passage, explain: bool, total: float) -> RecommendationAnswer:
    def item(hit: Recommendation) -> RecommendedItem:
        explanation = Explanation(level_log_probabilities=list(hit.level_scores)) if explain else None
        return RecommendedItem(item=hit.item, score=hit.score, title=hit.title or None, codes=list(hit.codes), explanation=explanation)

    return RecommendationAnswer(
        items=[item(hit) for hit in answer.items],
        model=answer.pair.model,
        catalog=answer.pair.catalog,
        request_id=f"{_process}-{next(_numbers):x}",
        based_on="history" if answer.history_items else "unconditional",
        beam_width=answer.width,
        requested_beam_width=answer.requested_width,
        narrowed=answer.narrowed,
        history_items=answer.history_items,
        unknown_history_items=answer.unknown_history_items,
        exact=answer.complete,
        short_reason=answer.short_reason,
        timing=Timing(queue_ms=passage.seconds("queue", "wait") * 1e3, search_ms=sum(answer.seconds.values()) * 1e3, total_ms=total * 1e3),
    )


def _live(service: Service, state: RegistryState) -> LiveAnswer:
    status, live = service.swapper.status, state.live
    return LiveAnswer(
        model=live.model if live else None,
        catalog=live.catalog if live else None,
        loaded_model=status.loaded.model if status.loaded else None,
        loaded_catalog=status.loaded.catalog if status.loaded else None,
        error=status.error,
        version=state.version,
        previous=list(state.previous),
    )
