"""The bodies of serving's routes.

Every limit is stated here, so the API's documentation shows it and a request beyond it is refused by name.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from semantide.services.serving.registry import Candidate, Decision, Pair
from semantide.shared.contracts import ArtifactRef, Identifier

MAX_N = 1000
MAX_WIDTH = 4096
MAX_IDS = 10_000
MAX_CATEGORIES = 100
DEFAULT_WIDTH = 50


class Body(BaseModel):
    """Base of the bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HistoryItem(Body):
    """One event of an explicit history. ``time`` in milliseconds since 1970; give it for all events or for none (then the order given counts, oldest first)."""

    item: Identifier
    action: Identifier = "click"
    time: int | None = None


class RecommendationRequest(Body):
    """For whom, how many, and what not.

    Give ``user`` (whose stored history is continued; an unknown one is ranked without history) or ``history``.
    """

    user: Identifier | None = None
    history: Annotated[list[Identifier | HistoryItem], Field(max_length=MAX_IDS)] | None = Field(
        default=None, description="Item ids or events, oldest first. Unknown items are skipped; of a longer history than the model reads, the end counts."
    )
    n: int = Field(default=10, ge=1, le=MAX_N, strict=True, description="How many items")
    beam_width: int | None = Field(
        default=None, ge=1, le=MAX_WIDTH, strict=True, description="Beams of the search; at least n are used. Default: max(50, 1.5 n)"
    )
    exclude_ids: list[Identifier] = Field(default=[], max_length=MAX_IDS, description="Items that must not come back")
    exclude_seen: bool = Field(default=False, description="Leave out what the user has already acted upon")
    categories_any: list[Identifier] = Field(default=[], max_length=MAX_CATEGORIES, description="Only items with at least one of these categories")
    categories_all: list[Identifier] = Field(default=[], max_length=MAX_CATEGORIES, description="Only items with all of these categories")
    variety: float = Field(
        default=0.0,
        ge=0,
        le=100,
        allow_inf_nan=False,
        description="Where no known history is there to continue: draw the n items among the found beams, the same for the same user. "
        "Temperature of the scores: 1 draws as the model believes, more makes all alike, 0 takes the best",
    )
    explain: bool = Field(default=False, description="Also say what each code of an item's id adds to its score")

    @property
    def width(self) -> int:
        """The beams asked for."""
        return self.beam_width if self.beam_width is not None else max(DEFAULT_WIDTH, self.n + self.n // 2)


class Explanation(Body):
    """How a score came about: the log-probability of each code given the history and the codes before it; they sum to the score."""

    level_log_probabilities: list[float]


class RecommendedItem(Body):
    """One item. ``score`` is its log-probability; ``codes`` its semantic id."""

    item: str
    score: float
    title: str | None = None
    codes: list[int]
    explanation: Explanation | None = None


class Timing(Body):
    """Where the time went, milliseconds."""

    queue_ms: float
    search_ms: float
    total_ms: float


class RecommendationAnswer(Body):
    """Items, best first, and how they were found.

    ``beam_width`` is what was used: less than ``requested_beam_width`` where the search was ``narrowed`` because many requests waited.
    ``based_on`` is "unconditional" where no known history item was there to continue. ``exact`` says that no allowed item outside the list can score higher.
    """

    items: list[RecommendedItem]
    model: ArtifactRef
    catalog: ArtifactRef
    request_id: str
    based_on: str
    beam_width: int
    requested_beam_width: int
    narrowed: bool
    history_items: int
    unknown_history_items: int
    exact: bool
    short_reason: str | None = None
    timing: Timing


class PromoteRequest(Body):
    """Which model shall serve. Without ``catalog``: the newest catalog of the line it was trained on. ``force`` also takes a model that is no candidate."""

    model: ArtifactRef
    catalog: ArtifactRef | None = None
    force: bool = False
    reason: str = Field(default="", max_length=500)


class RollbackRequest(Body):
    """Why the previous model comes back."""

    reason: str = Field(default="", max_length=500)


class LiveAnswer(Body):
    """What is live (``model``, ``catalog``) and what this process serves (``loaded_...``).

    ``error`` says why these differ, if they do for longer than a load takes. A rollback brings back the last of ``previous``.
    """

    model: ArtifactRef | None
    catalog: ArtifactRef | None
    loaded_model: ArtifactRef | None
    loaded_catalog: ArtifactRef | None
    error: str | None
    version: int
    previous: list[Pair]


class CandidatesAnswer(Body):
    """Models that may be promoted, oldest first."""

    candidates: list[Candidate]


class DecisionsAnswer(Body):
    """Promotions, rollbacks and catalog extensions, oldest first."""

    decisions: list[Decision]
