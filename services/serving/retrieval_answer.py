"""What the retriever is asked by a request, and its candidates in the form of an answer: alone, or joined into the generator's."""

from __future__ import annotations

from semantide.services.serving.bundle import Bundle
from semantide.services.serving.retrieval import Asking, Hit, Retrieved, TimedEvents, fused, in_categories
from semantide.services.serving.wish import Wish
from semantide.shared.errors import TransientError
from semantide.shared.recommendation import RecommendationAnswer, RecommendationRequest, RecommendedItem, Timing


def asking(body: RecommendationRequest, wish: Wish, bundle: Bundle | None, events: TimedEvents) -> Asking:
    """What the retriever is asked.

    Raises: TransientError for categories without a catalog that knows them.
    """
    if bundle is None and (wish.categories_any or wish.categories_all):
        raise TransientError("no catalog is live that knows the items' categories: promote a generator, or leave `categories_any` and `categories_all` out")
    among = None if bundle is None else in_categories(bundle, wish.categories_any, wish.categories_all)
    return Asking(events, wish.n, wish.exclude_ids, wish.exclude_seen, among)


def retrieved_item(hit: Hit, bundle: Bundle | None) -> RecommendedItem:
    """One candidate, with what the catalog knows of it."""
    row = None if bundle is None else bundle.catalog.row_of.get(hit.item)
    if bundle is None or row is None:
        return RecommendedItem(item=hit.item, score=hit.score, codes=[], source="retriever", propensity=1.0)
    return RecommendedItem(
        item=hit.item, score=hit.score, title=bundle.titles[row] or None, codes=bundle.catalog.codes[row].tolist(), source="retriever", propensity=1.0
    )


def retrieved_answer(found: Retrieved, bundle: Bundle | None, fallback: str | None, request_id: str, total: float) -> RecommendationAnswer:
    """The retriever's candidates alone."""
    return RecommendationAnswer(
        items=[retrieved_item(hit, bundle) for hit in found.hits],
        model=found.model,
        catalog=bundle.pair.catalog if bundle is not None else None,
        source="retriever",
        fallback=fallback,
        request_id=request_id,
        based_on="history" if found.history_items else "unconditional",
        beam_width=0,
        requested_beam_width=0,
        narrowed=False,
        history_items=found.history_items,
        unknown_history_items=found.unknown_history_items,
        exact=True,
        short_reason=found.short_reason,
        timing=Timing(queue_ms=0.0, search_ms=found.seconds * 1e3, total_ms=total * 1e3),
    )


def joined_answer(whole: RecommendationAnswer, second: Retrieved, bundle: Bundle, n: int) -> RecommendationAnswer:
    """The generator's answer with the retriever's list joined in; who ranked an item higher gives its score."""
    first = {item.item: (place, item) for place, item in enumerate(whole.items)}
    others = {hit.item: (place, hit) for place, hit in enumerate(second.hits)}
    items = []
    for name in fused(list(first), list(others), n):
        if name in first and (name not in others or first[name][0] <= others[name][0]):
            items.append(first[name][1])
        else:
            items.append(retrieved_item(others[name][1], bundle))
    if any(item.propensity != 1 for item in whole.items):
        items = [item.model_copy(update={"propensity": None}) for item in items]  # draws moved the places of one list, and joining moved them again
    reason = whole.short_reason if len(items) < n else None
    return whole.model_copy(update={"items": items, "source": "both", "retriever": second.model, "exact": False, "short_reason": reason})
