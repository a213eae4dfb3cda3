"""How probable given items are: the bodies of ``POST /v1/scores``, for the room that answers and for clients."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from semantide.shared.contracts import ArtifactRef, Identifier
from semantide.shared.recommendation import MAX_IDS, Body, HistoryItem, Timing


class ScoreRequest(Body):
    """For whom, and which items. Give ``user`` (whose stored history is continued; an unknown one has none) or ``history``."""

    items: Annotated[list[Identifier], Field(min_length=1, max_length=MAX_IDS)] = Field(
        description="Items of the catalog, in any order; a deployment may allow fewer at a time"
    )
    user: Identifier | None = None
    history: Annotated[list[Identifier | HistoryItem], Field(max_length=MAX_IDS)] | None = Field(
        default=None, description="Item ids or events, oldest first. Unknown items are skipped; of a longer history than the model reads, the end counts."
    )
    conditional_scores: bool = Field(default=False, description="As in a recommendation: probabilities among the catalog's codes only")
    split_by: Identifier | None = Field(default=None, description="With `history`: whom the split into variants goes by")
    variant: Identifier | None = Field(default=None, description="Score with this variant, whoever asks; `live` is the live model")


class ScoredItem(Body):
    """One item. ``score`` is its log-probability: the sum of those of its codes, each given the history and the codes before it."""

    item: str
    score: float
    codes: list[int]
    level_log_probabilities: list[float]


class ScoreAnswer(Body):
    """The items in the order in which they were asked for, with the scores that a search would give them.

    ``based_on`` is "unconditional" where no known history item was there to continue. ``variant`` is the side of a split that answered, null outside of one.
    """

    items: list[ScoredItem]
    model: ArtifactRef
    catalog: ArtifactRef
    variant: str | None = None
    based_on: str
    history_items: int
    unknown_history_items: int
    timing: Timing
