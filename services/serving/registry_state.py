"""What the registry knows: which models serve with which catalog, what served before, and what waits. Every change is a pure function of the state, and a version counts them.

The last decisions are kept with their time and reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from semantide.services.serving.buckets import BUCKETS, Range, allocate, bucket, owner
from semantide.shared.contracts import ArtifactRef, CandidateJudged, Contract, Identifier
from semantide.shared.errors import Conflict

_PREVIOUS_KEPT = 10
_CANDIDATES_KEPT = 50
_DECISIONS_KEPT = 200
_EXTENSIONS_KEPT = 500
_FOLLOWED_KEPT = 50

LIVE = "live"  # the name, in a split, of what the registry has live


class Pair(Contract):
    """A model and the catalog it serves."""

    model: ArtifactRef
    catalog: ArtifactRef


class Variant(Contract):
    """A pair that answers a share (0 to 1) of the users beside the live one."""

    name: Identifier
    pair: Pair
    share: float = Field(ge=0, le=1, allow_inf_nan=False)


class Split(Contract):
    """How users are divided between the live pair and variants. Another ``salt`` divides them anew; ``ranges`` are the variants' buckets."""

    salt: str = Field(default="", max_length=256)
    variants: tuple[Variant, ...] = ()
    ranges: tuple[Range, ...] = ()

    @property
    def shares(self) -> dict[str, float]:
        """Share of the buckets that each name holds; the live pair has what the variants leave. Shares that were asked for are rounded to whole buckets."""
        held = dict.fromkeys((variant.name for variant in self.variants), 0)
        for first, end, name in self.ranges:
            held[name] += end - first
        return {LIVE: (BUCKETS - sum(held.values())) / BUCKETS, **{name: count / BUCKETS for name, count in held.items()}}

    def assign(self, who: str) -> str:
        """Name for a user: always the same one, as long as its share does not shrink."""
        return owner(self.ranges, bucket(who, self.salt)) or LIVE


class Candidate(Contract):
    """A trained model that may be promoted; one without ``catalog`` is a retriever. ``registered`` is in milliseconds since 1970; ``promoted`` says that its own job's wish was carried out.

    ``judging`` is the evaluation whose verdict is waited for, ``judged`` the last one that decided.
    """

    model: ArtifactRef
    catalog: ArtifactRef | None = None
    job_id: str = ""
    registered: int = 0
    recipe: str = ""
    metrics: dict[str, Any] = Field(default={})
    promoted: bool = False
    judging: str = ""
    judged: str = ""


class Decision(Contract):
    """One change of what is live, or why there was none (``hold``: a candidate was not shown to be as good). ``time`` is in milliseconds since 1970; ``shares`` are those of a split, with the live pair's.

    Of a retriever ``catalog`` is None.

    Of a judged candidate ``evaluation`` is the job that judged it on ``cases`` users against ``against``, and ``figures`` has for each metric both means, their difference, its lower bound and the bound allowed.
    """

    action: Literal["promote", "rollback", "extend", "split", "hold"]
    model: ArtifactRef
    catalog: ArtifactRef | None = None
    time: int
    reason: str = ""
    forced: bool = False
    shares: dict[str, float] = Field(default={})
    evaluation: str = ""
    against: ArtifactRef | None = None
    cases: int = 0
    figures: dict[str, dict[str, float]] = Field(default={})


class Following(Contract):
    """The training run whose newest table the retriever has, and the step that it is of."""

    job_id: str
    step: int


class RegistryState(Contract):
    """Everything the registry knows. ``previous`` is oldest first; ``extensions`` maps a catalog to the one that added items to it.

    ``retriever`` is the model of the second source of candidates, beside whatever is live; ``following`` is set while a run that still trains keeps it up to date, and
    ``followed`` are the runs that did, which do not come back once something else took their place.
    """

    version: int = 0
    live: Pair | None = None
    previous: tuple[Pair, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    decisions: tuple[Decision, ...] = ()
    extensions: dict[str, str] = Field(default={})
    split: Split = Split()
    retriever: ArtifactRef | None = None
    following: Following | None = None
    followed: tuple[str, ...] = ()

    def newest(self, catalog: str) -> str:
        """The catalog at the end of a chain of extensions."""
        seen = {catalog}
        while (following := self.extensions.get(catalog)) is not None and following not in seen:
            seen.add(following)
            catalog = following
        return catalog

    def candidate(self, model: str) -> Candidate | None:
        """What is known of a trained model."""
        return next((candidate for candidate in self.candidates if candidate.model == model), None)

    def registered(self, candidate: Candidate) -> RegistryState:
        """With one candidate more; a known model stays as it is."""
        if self.candidate(candidate.model) is not None:
            return self
        kept = [*self.candidates, candidate]
        in_use = {pair.model for pair in (*self.previous, *([self.live] if self.live else []), *(variant.pair for variant in self.split.variants))}
        while len(kept) > _CANDIDATES_KEPT:
            victim = next((old for old in kept[:-1] if not old.judging and old.model not in {*in_use, self.retriever}), kept[0])
            kept.remove(victim)
        return self._with(candidates=tuple(kept))

    def rival(self, candidate: Candidate) -> tuple[str, str | None] | None:
        """What answers in the place that a candidate would take, a model and its catalog: the live pair, or the retriever. None where nothing does."""
        if candidate.catalog is None:
            return None if self.retriever is None else (self.retriever, None)
        return None if self.live is None else (self.live.model, self.live.catalog)

    def promoted(self, pair: Pair, now_ms: int, reason: str = "", forced: bool = False) -> RegistryState:
        """With this pair live; what was live goes on the pile for a rollback."""
        candidates = self._noted(pair.model, promoted=True, judging="")
        if pair == self.live:
            return self if candidates == self.candidates else self._with(candidates=candidates)
        return self._decided("promote", pair, now_ms, reason, forced, previous=self._piled(), candidates=candidates)

    def judging(self, model: str, job_id: str) -> RegistryState:
        """With an evaluation under way that decides on a candidate; one before it decides no more."""
        return self._with(candidates=self._noted(model, judging=job_id))

    def judged(self, verdict: CandidateJudged, now_ms: int) -> RegistryState:
        """With a candidate live that was found to be not worse, or a note of why it is not. A verdict that nobody waits for changes nothing: one that came before, of an evaluation
        that another took the place of, or of a model that somebody promoted or rolled back meanwhile.

        Raises: Conflict where another model than the one it was compared with is live.
        """
        known = self.candidate(verdict.model)
        if known is None or known.judging != verdict.job_id:
            return self
        rival = self.rival(known)
        if rival is not None and rival[0] not in (verdict.against, known.model):
            raise Conflict(f"{known.model} was compared with {verdict.against}, and {rival[0]} is live: it has to be compared with that one")
        said: dict[str, Any] = {"evaluation": verdict.job_id, "against": verdict.against, "cases": verdict.cases, "figures": verdict.figures}
        if not verdict.not_worse:
            return self.held(known.model, verdict.reason, now_ms, **said)
        reason = "; ".join(filter(None, [f"not worse than the live model on {verdict.cases} held-out users", verdict.reason]))
        candidates = self._noted(known.model, judging="", judged=verdict.job_id, promoted=True)
        if verdict.catalog is None:
            return self._with(
                retriever=known.model, following=None, candidates=candidates, decisions=self._told("promote", known.model, None, now_ms, reason, **said)
            )
        pair = Pair(model=known.model, catalog=self.newest(verdict.catalog))
        if pair == self.live:
            return self._with(candidates=candidates)
        return self._decided("promote", pair, now_ms, reason, False, said=said, previous=self._piled(), candidates=candidates)

    def held(self, model: str, reason: str, now_ms: int, *, evaluation: str = "", **said: Any) -> RegistryState:
        """With a candidate held back that is waited for by this ``evaluation``, or by none; once for a reason."""
        known = self.candidate(model)
        if known is None or known.judging != evaluation:
            return self
        candidates = self._noted(model, judging="", judged=evaluation or known.judged)
        if any((old.action, old.model, old.reason, old.evaluation) == ("hold", model, reason, evaluation) for old in self.decisions):
            return self if candidates == self.candidates else self._with(candidates=candidates)
        return self._with(candidates=candidates, decisions=self._told("hold", model, known.catalog, now_ms, reason, evaluation=evaluation, **said))

    @property
    def undecided(self) -> dict[str, str]:
        """Evaluations that ended without a verdict and could be resumed, by the candidate on which nothing was decided since."""
        last = {one.model: one for one in self.decisions}
        return {
            one.model: one.judged
            for one in self.candidates
            if not one.judging and one.judged and (told := last.get(one.model)) and (told.action, told.evaluation, told.against) == ("hold", one.judged, None)
        }

    def reopened(self, model: str, job_id: str) -> RegistryState:
        """With an evaluation waited for again that was resumed, unless something was decided on its candidate since it ended without a verdict."""
        return self.judging(model, job_id) if self.undecided.get(model) == job_id else self

    def rolled_back(self, now_ms: int, reason: str = "") -> RegistryState:
        """With the pair live that was live before; evaluations of the one that goes and of the one that comes decide no more.

        Raises: Conflict when there is none.
        """
        if not self.previous:
            raise Conflict("nothing was live before the present model: promote one of the candidates instead (GET /v1/serving/candidates)")
        gone, back = self.live.model if self.live else "", self.previous[-1].model
        candidates = tuple(
            c.model_copy(update={"judging": "", "judged": ""} if c.model == gone else {"judging": ""}) if c.model in (gone, back) else c
            for c in self.candidates
        )
        return self._decided("rollback", self.previous[-1], now_ms, reason, False, previous=self.previous[:-1], candidates=candidates)

    def divided(self, split: Split, now_ms: int, reason: str = "") -> RegistryState:
        """With users divided so; a split without variants gives the live pair to all.

        Nobody changes sides who need not.

        Raises: Conflict when nothing is live; ValueError for names or shares that do not go together.
        """
        names = [variant.name for variant in split.variants]
        if wrong := next((name for name in names if name == LIVE or names.count(name) > 1), None):
            raise ValueError(f"the variant name {wrong!r} is taken: give every variant a name of its own, other than {LIVE!r}")
        kept = self.split.ranges if split.salt == self.split.salt else ()
        split = split.model_copy(update={"ranges": allocate(kept, {variant.name: variant.share for variant in split.variants})})
        if self.live is None:
            raise Conflict("no model is live yet, so there is nothing to divide: promote one first (POST /v1/serving/promote)")
        return self if split == self.split else self._decided("split", self.live, now_ms, reason, False, said={"shares": split.shares}, split=split)

    def retrieving(self, model: str | None, now_ms: int = 0, reason: str = "") -> RegistryState:
        """With this retriever as second source, or none; an evaluation of one that goes decides no more."""
        candidates = self._noted(model, promoted=True, judging="") if model else self._noted(self.retriever or "", promoted=True, judging="", judged="")
        if (model, candidates, None) == (self.retriever, self.candidates, self.following):
            return self
        told = self.decisions if model in (None, self.retriever) else self._told("promote", model, None, now_ms, reason)
        return self._with(retriever=model, candidates=candidates, following=None, decisions=told)

    def advanced(self, model: str, following: Following, promote: bool) -> RegistryState:
        """With a training run's newer table, where the run is the one that is followed or, with ``promote``, was not followed yet; else as it is."""
        if self.following is not None and self.following.job_id == following.job_id:
            wanted = following.step > self.following.step
        else:
            wanted = promote and following.job_id not in self.followed
        if not wanted:
            return self
        followed = tuple(job for job in self.followed if job != following.job_id)
        return self._with(retriever=model, following=following, followed=(*followed, following.job_id)[-_FOLLOWED_KEPT:])

    def extended(self, old: str, new: str, now_ms: int) -> RegistryState:
        """With the items that ``new`` adds to ``old``, wherever a catalog of that line is in use."""
        if self.extensions.get(old) == new:
            return self
        extensions = dict(list({**self.extensions, old: new}.items())[-_EXTENSIONS_KEPT:])
        line = self._with(extensions=extensions)

        def renew(pair: Pair) -> Pair:
            return Pair(model=pair.model, catalog=line.newest(pair.catalog))

        line = line.model_copy(
            update={
                "previous": tuple(map(renew, self.previous)),
                "candidates": tuple(c.model_copy(update={"catalog": c.catalog and line.newest(c.catalog)}) for c in self.candidates),
                "split": self.split.model_copy(
                    update={"variants": tuple(v.model_copy(update={"pair": renew(v.pair)}) for v in self.split.variants)},
                ),
            }
        )
        if self.live is None or renew(self.live) == self.live:
            return line
        return line._decided("extend", renew(self.live), now_ms, f"catalog {new} adds items to {old}", False).model_copy(update={"version": line.version})

    def _with(self, **changes: Any) -> RegistryState:
        return self.model_copy(update={**changes, "version": self.version + 1})

    def _noted(self, model: str, **said: Any) -> tuple[Candidate, ...]:
        return tuple(c.model_copy(update=said) if c.model == model else c for c in self.candidates)

    def _piled(self) -> tuple[Pair, ...]:
        return (*self.previous, self.live)[-_PREVIOUS_KEPT:] if self.live else self.previous

    def _told(self, action: str, model: str, catalog: str | None, now_ms: int, reason: str, **said: Any) -> tuple[Decision, ...]:
        told = Decision(action=action, model=model, catalog=catalog, time=now_ms, reason=reason, **said)  # type: ignore[arg-type]
        return (*self.decisions, told)[-_DECISIONS_KEPT:]

    def _decided(
        self, action: str, pair: Pair, now_ms: int, reason: str, forced: bool, *, said: Mapping[str, Any] | None = None, **changes: Any
    ) -> RegistryState:
        return self._with(live=pair, decisions=self._told(action, pair.model, pair.catalog, now_ms, reason, forced=forced, **(said or {})), **changes)
