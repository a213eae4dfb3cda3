"""REST door of serving: recommendations, and which model gives them."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from semantide.services.serving import explanation, exploration, randomisation
from semantide.services.serving.bundle import Bundle
from semantide.services.serving.contract import (
    CandidatesAnswer,
    DecisionsAnswer,
    LiveAnswer,
    PromoteRequest,
    RollbackRequest,
    SplitAnswer,
    SplitRequest,
)
from semantide.services.serving.engine import Answer, Recommendation
from semantide.services.serving.explanation import Neighbour
from semantide.services.serving.exploration import POOL, Mixed, seed_of
from semantide.services.serving.live_answers import live_answer, split_answer
from semantide.services.serving.pages import Ranking, read_cursor, turn, write_cursor
from semantide.services.serving.publishing import compare
from semantide.services.serving.registry_state import LIVE
from semantide.services.serving.retrieval import Retrieved
from semantide.services.serving.retrieval_answer import asking, joined_answer, retrieved_answer
from semantide.services.serving.scheduler import Overloaded
from semantide.services.serving.score_answer import score_answer
from semantide.services.serving.service import Service
from semantide.services.serving.ticket import A, Passage
from semantide.services.serving.wish import Wish, score_wish_of, wish_of
from semantide.shared.errors import NotFound, SemantideError, TransientError
from semantide.shared.http import OUR_FAULTS, APIRouter, HTTPException, Request, run_in_threadpool
from semantide.shared.jobs import Jobs
from semantide.shared.pseudonyms import Pseudonyms
from semantide.shared.recommendation import (
    Explanation,
    NearItem,
    RecommendationAnswer,
    RecommendationRequest,
    RecommendedItem,
    Timing,
)
from semantide.shared.room import Room
from semantide.shared.scores import ScoreAnswer, ScoreRequest
from semantide.shared.telemetry import continued_trace, logger, stage_spans

_Asked = TypeVar("_Asked", RecommendationRequest, ScoreRequest)
_DRAW_SECONDS = 3600  # for which one user's draw of new items stays as it is

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


def failed(room: Room) -> str:
    """What ended this process's work for good, so that only another one can go on; empty where nothing did."""
    return _service(room).scheduler.device_error


def build(room: Room) -> APIRouter:
    """Recommendations, promotion, rollback, splits."""
    router = APIRouter(prefix="/v1")
    service = _service(room)
    settings, pseudonyms = room.settings, Pseudonyms.of(room.settings)
    pseudonyms.agree(room.broker)

    @router.post("/recommendations", tags=["serving"], summary="Items for a user or a history, best first; with a cursor the next page")
    async def recommend(body: RecommendationRequest, request: Request) -> RecommendationAnswer:
        with continued_trace(request.headers.get("traceparent"), "POST /v1/recommendations", "serving"):
            answer = await answer_to(body, request)
            service.shown.note(answer)
            return answer

    def known(body: _Asked) -> _Asked:
        """The request under the ids that this stack keeps."""
        named = {name: pseudonyms.of_user(who) for name, who in (("user", body.user), ("split_by", body.split_by)) if who is not None} if pseudonyms else {}
        return body.model_copy(update=named) if named else body

    async def answer_to(body: RecommendationRequest, request: Request) -> RecommendationAnswer:
        begin = time.perf_counter()
        body = known(body)
        if body.cursor is not None:
            return await run_in_threadpool(_next_page, service, body, body.cursor, begin)
        variant: str | None = None
        assigned: float | None = None
        source = body.source or settings.serving_source
        beside: asyncio.Task[Retrieved] | None = None  # the retriever's own list, found while the generator searches
        try:
            wish = wish_of(body, settings.actions)
            if source == "retriever":
                return await retrieved(body, wish, begin)
            if source in ("auto", "both") and service.retrievers.current is not None and service.swapper.lineup is None and body.variant is None:
                return await retrieved(body, wish, begin, fallback="no generator is live in this process")
            choice = service.choose(body.user if body.user is not None else body.split_by, body.variant)
            bundle, variant, assigned = choice.bundle, choice.variant, choice.share
            # Under overload, when searches are narrowed, nobody gets a second one.
            draws = body.explore and service.narrowing.share == 1
            share = settings.serving_exploration if draws and bundle.new_items else 0.0
            by_chance = settings.serving_randomisation if draws and not body.variety else 0.0
            seed = seed_of(wish.who, bundle.pair.catalog, int(time.time() // _DRAW_SECONDS)) if share or by_chance else 0
            places = exploration.places(wish.n, share, seed) if share else ()
            more = randomisation.spare(wish.n, wish.width) if by_chance else 0
            wishes = [replace(wish, n=wish.n + more), *([replace(wish, n=POOL, width=POOL, only_new=True)] if places else [])]
            if source == "both" and service.retrievers.current is not None:
                beside = asyncio.create_task(_retrieve(service, body, wish, bundle))
                beside.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen, even where the search fails first
            searches = [service.submit(wishes[0], bundle)]
            for other in wishes[1:]:
                with suppress(TransientError):
                    searches.append(service.submit(other, bundle))
            (answer, passage), *fresh = await _answered(request, searches)
            second = None if beside is None else await beside
        except Exception as error:
            may_retrieve = source in ("auto", "both") and service.retrievers.current is not None and variant in (None, LIVE)
            if isinstance(error, Overloaded) and may_retrieve:
                return await retrieved(body, wish, begin, fallback="too many requests wait for the generator", beside=beside)
            raise _counted(error, service.meters.request, variant) from error.__cause__
        finally:
            if beside is not None:
                beside.cancel()
        answer, beyond = _cut(answer, wish.n)
        new = [hit for found, _ in fresh for hit in found.items]
        mixed = exploration.mix(answer.items, new, places if fresh else (), _new_items(bundle, answer.items), seed, n=wish.n, share=share)
        if body.variety and not answer.history_items:
            mixed = mixed._replace(propensities=())  # the list is itself a draw, and its places are in the order of scores
        if by_chance:
            # Whether anybody looked for new items at this moment must not decide what is drawn among.
            young = _new_items(bundle, beyond) if share else frozenset()
            mixed = randomisation.randomise(mixed, answer.items, [hit for hit in beyond if hit.item not in young], by_chance, seed)
        total = time.perf_counter() - begin
        service.meters.request("short" if answer.short_reason else "ok", variant)
        service.meters.stage("total", total)
        if mixed.explored:
            service.meters.explored(len(mixed.explored))
        stage_spans("serving", passage.marks)
        near = await run_in_threadpool(explanation.nearest, bundle, [hit.item for hit in mixed.items], answer.history_rows) if body.explain else None
        whole = _answer(answer, passage, (variant, assigned), mixed, near, total)
        if second is not None:
            service.meters.stage("retrieve", second.seconds)
            whole = joined_answer(whole, second, bundle, wish.n)
        if body.depth is None or len(whole.items) <= body.n:
            return whole
        return await run_in_threadpool(_first_page, service, whole, body)

    async def retrieved(
        body: RecommendationRequest, wish: Wish, begin: float, fallback: str | None = None, beside: asyncio.Task[Retrieved] | None = None
    ) -> RecommendationAnswer:
        """The retriever's own answer; ``beside`` is one that is being found already."""
        lineup = service.swapper.lineup
        bundle = lineup.live if lineup is not None else None
        found = await (beside or _retrieve(service, body, wish, bundle))
        total = time.perf_counter() - begin
        service.meters.request("short" if found.short_reason else "ok", None)
        service.meters.retrieved("fallback" if fallback else "asked")
        service.meters.stage("retrieve", found.seconds)
        service.meters.stage("total", total)
        whole = retrieved_answer(found, bundle, fallback, _request_id(), total)
        if body.depth is None or len(whole.items) <= body.n:
            return whole
        return await run_in_threadpool(_first_page, service, whole, body)

    @router.post("/scores", tags=["serving"], summary="How probable given items are for a user or a history")
    async def score(body: ScoreRequest, request: Request) -> ScoreAnswer:
        begin, variant = time.perf_counter(), None
        with continued_trace(request.headers.get("traceparent"), "POST /v1/scores", "serving"):
            try:
                body = known(body)
                wish = score_wish_of(body, settings.actions, settings.serving_scored_items)
                choice = service.choose(body.user if body.user is not None else body.split_by, body.variant)
                variant = choice.variant
                ((found, passage),) = await _answered(request, [service.score(wish, choice.bundle)])
            except Exception as error:
                raise _counted(error, service.meters.scores, variant) from error.__cause__
            service.meters.scores("ok", variant)
            stage_spans("serving", passage.marks)
            return score_answer(found, passage, variant, time.perf_counter() - begin)

    @router.post("/serving/promote", tags=["serving"], summary="Make a model live; it is loaded and tried first")
    def promote(body: PromoteRequest) -> LiveAnswer:
        if body.if_not_worse:
            candidate = service.prepare(body.model, body.catalog, body.force)
            judging = compare(service.registry, candidate, room.store, settings, Jobs(room.broker, room.queues).submit)
            if judging is not None:
                return live_answer(service, service.registry.read()).model_copy(update={"judging": judging})
        return live_answer(service, service.promote(body.model, body.catalog, body.force, body.reason))

    @router.post("/serving/rollback", tags=["serving"], summary="Bring back what was live before")
    def rollback(body: RollbackRequest | None = None) -> LiveAnswer:
        return live_answer(service, service.rollback(body.reason if body else ""))

    @router.get("/serving/live", tags=["serving"], summary="What is live")
    def live() -> LiveAnswer:
        return live_answer(service, service.registry.read())

    @router.delete("/serving/retriever", tags=["serving"], summary="Take the retriever away; the generator ranks alone")
    def without_retriever() -> LiveAnswer:
        state = service.registry.retrieve(None)
        service.retrievers.poll()
        return live_answer(service, state)

    @router.put("/serving/variants", tags=["serving"], summary="Give some of the users to other models; these are loaded and tried first")
    def divide(body: SplitRequest) -> SplitAnswer:
        wanted = [(wish.name, wish.model, wish.catalog, wish.share) for wish in body.variants]
        return split_answer(service, service.divide(body.salt, wanted, body.force, body.reason))

    @router.get("/serving/variants", tags=["serving"], summary="How users are divided between the live model and variants")
    def split() -> SplitAnswer:
        return split_answer(service, service.registry.read())

    @router.get("/serving/candidates", tags=["serving"], summary="Models that may be promoted")
    def candidates() -> CandidatesAnswer:
        return CandidatesAnswer(candidates=list(service.registry.read().candidates))

    @router.get("/serving/decisions", tags=["serving"], summary="Promotions, candidates held back, rollbacks, splits and catalog extensions")
    def decisions() -> DecisionsAnswer:
        return DecisionsAnswer(decisions=list(service.registry.read().decisions))

    return router


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def _retrieve(service: Service, body: RecommendationRequest, wish: Wish, bundle: Bundle | None) -> Retrieved:
    return await run_in_threadpool(service.retrieve, body.user, wish.events, partial(asking, body, wish, bundle))


def _counted(error: Exception, count: Callable[[str, str | None], None], variant: str | None) -> Exception:
    """What a failed request is told; it is counted by how it ended."""
    if isinstance(error, Overloaded):
        count("overloaded", variant)
        return HTTPException(429, str(error), headers={"Retry-After": str(math.ceil(error.retry_after_seconds))})
    if isinstance(error, ClientGone):
        count("cancelled", variant)
        return HTTPException(499, str(error))
    if isinstance(error, TransientError):
        count("unavailable", variant)
    else:
        count("refused" if isinstance(error, ValueError | NotFound) and not isinstance(error, OUR_FAULTS) else "failed", variant)
    return error


async def _answered(request: Request, futures: Sequence[Future[tuple[A, Passage]]]) -> list[tuple[A, Passage]]:
    """Answers of the first search and of those others that went well: their failure takes nothing from the first.

    Should the client leave, the work is given up.

    Raises: ClientGone, and what the first search raises.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for future in futures:
            future.cancel()

    watching = asyncio.create_task(watch())
    try:
        first, *others = await asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    finally:
        watching.cancel()
    if isinstance(first, BaseException):
        if isinstance(first, asyncio.CancelledError):
            raise ClientGone("the client left before the answer") from None
        raise first
    for other in others:
        if isinstance(other, Exception) and not isinstance(other, SemantideError):
            logger("serving").error("the search among new items failed", error=str(other), exc_info=other)
    return [first, *(other for other in others if not isinstance(other, BaseException))]


def _cut(answer: Answer, n: int) -> tuple[Answer, Sequence[Recommendation]]:
    """The first n items of an answer, and those beyond them, which draws may be made among."""
    if len(answer.items) < n:
        return answer, ()
    return replace(answer, items=answer.items[:n], short_reason=None), answer.items[n:]


def _new_items(bundle: Bundle, hits: Sequence[Recommendation]) -> frozenset[str]:
    return frozenset(hit.item for hit in hits if bundle.catalog.row_of[hit.item] >= bundle.trained_items)


def _first_page(service: Service, answer: RecommendationAnswer, body: RecommendationRequest) -> RecommendationAnswer:
    """The first page of an answer, and a cursor for the next one."""
    token = service.pages.keep(Ranking(answer=answer, user=body.user, n=body.n))
    return answer.model_copy(update={"items": answer.items[: body.n], "cursor": write_cursor(token, body.n), "short_reason": None})


def _next_page(service: Service, body: RecommendationRequest, cursor: str, begin: float) -> RecommendationAnswer:
    """A further page of a kept ranking.

    Raises: ValueError, NotFound, BrokerUnavailable.
    """
    if others := sorted(body.model_fields_set - {"cursor", "n"}):
        raise ValueError(
            f"{', '.join(f'`{name}`' for name in others)} given together with `cursor`: a further page is pinned to what its first page was asked for; send `cursor` and at most `n`"
        )
    token, place = read_cursor(cursor)
    try:
        ranking = service.pages.read(token)
    except NotFound:
        service.meters.page("expired")
        raise
    n = body.n if "n" in body.model_fields_set else ranking.n
    page = turn(ranking.answer.items, place, n, service.hidden(ranking.user))
    service.meters.page("ok")
    ended = f"the ranking of {len(ranking.answer.items)} items ends here: ask for a first page with a larger `depth`"
    return ranking.answer.model_copy(
        update={
            "items": page.items,
            "cursor": None if page.following is None else write_cursor(token, page.following),
            "request_id": _request_id(),
            "short_reason": None if len(page.items) == n else ranking.answer.short_reason or ended,
            "timing": Timing(queue_ms=0.0, search_ms=0.0, total_ms=(time.perf_counter() - begin) * 1e3),
        }
    )


def _request_id() -> str:
    return f"{_process}-{next(_numbers):x}"


def _answer(
    answer: Answer, passage: Passage, side: tuple[str | None, float | None], mixed: Mixed, near: list[tuple[Neighbour, ...]] | None, total: float
) -> RecommendationAnswer:
    # Where the list itself is a draw among the beams, nobody knows the chance of a place.
    chances: Sequence[float | None] = mixed.propensities or [None] * len(mixed.items)

    def item(place: int, hit: Recommendation) -> RecommendedItem:
        explained = None
        if near is not None:
            nearest = [NearItem(item=one.item, title=one.title or None, similarity=one.similarity) for one in near[place]]
            explained = Explanation(level_log_probabilities=list(hit.level_scores), nearest_history=nearest)
        explored = hit.item in mixed.explored
        return RecommendedItem(
            item=hit.item, score=hit.score, title=hit.title or None, codes=list(hit.codes), explored=explored, propensity=chances[place], explanation=explained
        )

    return RecommendationAnswer(
        items=[item(place, hit) for place, hit in enumerate(mixed.items)],
        model=answer.pair.model,
        catalog=answer.pair.catalog,
        variant=side[0],
        share=side[1],
        request_id=_request_id(),
        based_on="history" if answer.history_items else "unconditional",
        beam_width=answer.width,
        requested_beam_width=answer.requested_width,
        narrowed=answer.narrowed,
        history_items=answer.history_items,
        unknown_history_items=answer.unknown_history_items,
        exact=answer.complete and mixed.items == tuple(answer.items),
        short_reason=answer.short_reason,
        timing=Timing(
            queue_ms=passage.seconds("queue", "wait") * 1e3,
            search_ms=sum(answer.seconds.values()) * 1e3,
            total_ms=total * 1e3,
            stages_ms={} if near is None else {stage: passage.seconds(stage) * 1e3 for stage, _, _ in passage.marks},
        ),
    )
