"""What is asked of serving and what it answers: the bodies of ``POST /v1/recommendations``, for the room that answers and for clients.

Every limit is stated here, so the API's documentation shows it and a request beyond it is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from semantide.shared.contracts import ArtifactRef, Identifier

MAX_N = 1000
MAX_WIDTH = 4096
MAX_IDS = 10_000
MAX_CATEGORIES = 100
DEFAULT_WIDTH = 50

Source = Literal["auto", "generator", "retriever", "both"]


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

    Give ``user`` (whose stored history is continued; an unknown one is ranked without history) or ``history``; or, for a further page, ``cursor``.
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
    conditional_scores: bool = Field(
        default=False,
        description="Take each code's probability among the codes that the catalog has below its prefix (before filters), so that all items' probabilities "
        "sum to 1; by default over all codes of its level, as in training",
    )
    explain: bool = Field(
        default=False, description="Also say what each code of an item's id adds to its score, and which items of the history are nearest to it"
    )
    depth: int | None = Field(
        default=None,
        ge=1,
        le=MAX_N,
        strict=True,
        description="Rank this many items, at least n, and hand them out n at a time: the answer's `cursor` asks for the next ones",
    )
    cursor: str | None = Field(
        default=None, min_length=1, max_length=64, description="The next page of a ranking. Only `n` may be given along; by default that of the page before"
    )
    explore: bool = Field(default=True, description="Whether new items, or items drawn by chance, may take the places that this deployment gives them")
    source: Source | None = Field(
        default=None,
        description="Who ranks: `generator`, `retriever` (exact, needs no generator), `both` (their lists joined by place), or `auto`: the generator, and the "
        "retriever where no generator is live or too many requests wait for it. Default: what this deployment is set to",
    )
    split_by: Identifier | None = Field(
        default=None, description="With `history`: whom the split into variants goes by, for example a session. A `user` is split by their own id"
    )
    variant: Identifier | None = Field(default=None, description="Answer with this variant, whoever asks; `live` is the live model")

    @property
    def ranked(self) -> int:
        """How many items are to be ranked."""
        return self.n if self.depth is None else self.depth

    @property
    def width(self) -> int:
        """The beams asked for."""
        return self.beam_width if self.beam_width is not None else max(DEFAULT_WIDTH, self.ranked + self.ranked // 2)


class NearItem(Body):
    """An item of the history, and the cosine of the model's own vectors of both items."""

    item: str
    title: str | None = None
    similarity: float


class Explanation(Body):
    """How a score came about.

    The log-probability of each code given the history and the codes before it (they sum to the score), and the items of the history nearest to this one.
    """

    level_log_probabilities: list[float]
    nearest_history: list[NearItem] = []


class RecommendedItem(Body):
    """One item. ``score`` is its log-probability for ``source``, who gave it; ``codes`` its semantic id. ``explored``: it stands here because it is new.

    ``propensity`` is the chance with which it came to this place, given those before it and the variant; 1 where nothing was drawn, null where nobody knows.
    """

    item: str
    score: float
    title: str | None = None
    codes: list[int]
    source: Literal["generator", "retriever"] = "generator"
    explored: bool = False
    propensity: float | None = None
    explanation: Explanation | None = None


class Timing(Body):
    """Where the time went, milliseconds; with ``explain`` also stage by stage, in their order."""

    queue_ms: float
    search_ms: float
    total_ms: float
    stages_ms: dict[str, float] = {}


class RecommendationAnswer(Body):
    """Items, best first, and how they were found.

    ``beam_width`` is what was used: less than ``requested_beam_width`` where the search was ``narrowed`` because many requests waited.
    ``based_on`` is "unconditional" where no known history item was there to continue. ``exact`` says that no allowed item outside the list can score higher.
    ``source`` is who ranked; ``fallback`` says why that was the retriever although the generator should have. ``model`` is then the retriever, and
    ``beam_width`` 0. ``retriever`` is the model of the second source where both ranked.
    ``variant`` is the side of a split that answered, null outside of one, and ``share`` what it has of the users. Exposures and feedback name the ``request_id``. ``cursor`` asks for the next page, where ``depth`` was given and there is one.
    """

    items: list[RecommendedItem]
    model: ArtifactRef
    catalog: ArtifactRef | None
    source: Literal["generator", "retriever", "both"] = "generator"
    fallback: str | None = None
    retriever: ArtifactRef | None = None
    variant: str | None = None
    share: float | None = None
    cursor: str | None = None
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
