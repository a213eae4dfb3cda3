"""The bodies of serving's routes for operation; those of recommendations are ``shared/recommendation.py``.

Every limit is stated here, so the API's documentation shows it and a request beyond it is refused by name.
"""

from __future__ import annotations

from pydantic import Field

from semantide.services.serving.registry_state import Candidate, Decision, Following, Pair
from semantide.shared.contracts import ArtifactRef, Identifier
from semantide.shared.recommendation import Body

MAX_VARIANTS = 16


class PromoteRequest(Body):
    """Which model shall serve: a generator, or a retriever as second source. Without ``catalog``: the newest catalog of the line it was trained on. ``force`` also takes a model that is no candidate.

    With ``if_not_worse`` it is first compared with the live generator or retriever on held-out users; the answer's ``judging`` is the job that decides.
    """

    model: ArtifactRef
    catalog: ArtifactRef | None = None
    force: bool = False
    if_not_worse: bool = Field(default=False, description="Only once a paired test shows that it loses no more than this deployment allows")
    reason: str = Field(default="", max_length=500)


class RollbackRequest(Body):
    """Why the previous model comes back."""

    reason: str = Field(default="", max_length=500)


class VariantWish(Body):
    """A model that shall answer a share of the users. Without ``catalog``: as in a promotion."""

    name: Identifier
    model: ArtifactRef
    catalog: ArtifactRef | None = None
    share: float = Field(ge=0, le=1, allow_inf_nan=False, description="Of all users, 0 to 1, kept to a hundredth of a percent; 0: only requests that name it")


class SplitRequest(Body):
    """Variants beside the live model, which keeps the rest of the users. An empty list ends the split."""

    variants: list[VariantWish] = Field(max_length=MAX_VARIANTS)
    salt: str | None = Field(
        default=None, max_length=256, description="Another salt divides the users anew. Default: the present one, so that nobody moves needlessly"
    )
    force: bool = False
    reason: str = Field(default="", max_length=500)


class VariantAnswer(Body):
    """A variant as it is. ``loaded``: this process answers with it; ``error`` says why not."""

    name: str
    model: ArtifactRef
    catalog: ArtifactRef
    share: float
    loaded: bool
    error: str | None = None


class SplitAnswer(Body):
    """How users are divided; the live model is among the variants."""

    salt: str
    variants: list[VariantAnswer]


class LiveAnswer(Body):
    """What is live (``model``, ``catalog``) and what this process serves (``loaded_...``).

    ``retriever`` is the second source of candidates, ``loaded_retriever`` the one that answers here; ``following`` names the training run that keeps it up to date.
    ``error`` says why these differ, if they do for longer than a load takes. A rollback brings back the last of ``previous``.
    """

    model: ArtifactRef | None
    catalog: ArtifactRef | None
    loaded_model: ArtifactRef | None
    loaded_catalog: ArtifactRef | None
    retriever: ArtifactRef | None = None
    loaded_retriever: ArtifactRef | None = None
    retriever_error: str | None = None
    following: Following | None = None
    error: str | None
    version: int
    previous: list[Pair]
    judging: str | None = Field(default=None, description="Of a promotion `if_not_worse`: the job whose verdict it waits for")


class CandidatesAnswer(Body):
    """Models that may be promoted, oldest first."""

    candidates: list[Candidate]


class DecisionsAnswer(Body):
    """Promotions, candidates that were held back, rollbacks, splits and catalog extensions, oldest first."""

    decisions: list[Decision]
