"""The scores of given items in the form of an answer."""

from __future__ import annotations

from semantide.services.serving.scoring import Scored
from semantide.services.serving.ticket import Passage
from semantide.shared.recommendation import Timing
from semantide.shared.scores import ScoreAnswer, ScoredItem


def score_answer(found: Scored, passage: Passage, variant: str | None, total: float) -> ScoreAnswer:
    """What is answered; ``total`` is how many seconds it took."""
    return ScoreAnswer(
        items=[ScoredItem(item=each.item, score=each.score, codes=list(each.codes), level_log_probabilities=list(each.level_scores)) for each in found.items],
        model=found.pair.model,
        catalog=found.pair.catalog,
        variant=variant,
        based_on="history" if found.history_items else "unconditional",
        history_items=found.history_items,
        unknown_history_items=found.unknown_history_items,
        timing=Timing(
            queue_ms=passage.seconds("queue", "wait") * 1e3,
            search_ms=sum(found.seconds.values()) * 1e3,
            total_ms=total * 1e3,
            stages_ms={stage: passage.seconds(stage) * 1e3 for stage, _, _ in passage.marks},
        ),
    )
