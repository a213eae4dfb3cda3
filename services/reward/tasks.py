"""Queue door: rollouts of alignment runs are scored for those that wait for them."""

from __future__ import annotations

import time
from functools import lru_cache

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.contracts import RolloutsToScore
from semantide.shared.errands import Errands
from semantide.shared.errors import NotFound, PermanentError
from semantide.shared.models.preference import PreferenceModel
from semantide.shared.models.reward_scorer import RewardScorer
from semantide.shared.queues import handler
from semantide.shared.rollout_scores import store_scores
from semantide.shared.rollouts import Rollouts
from semantide.shared.room import Room
from semantide.shared.telemetry import logger, meter

_scored = meter("reward").create_counter("reward_rollouts", description="Items of rollouts that were scored")


@handler(RolloutsToScore)
def score_rollouts(message: RolloutsToScore, room: Room) -> None:
    """Score rollouts and say where the scores are; what has been scored already is not scored again.

    Raises: PermanentError for a reward model that cannot score them; who waits is told.
    """
    errands = Errands(RolloutsToScore, room.broker, room.store)
    swept = errands.sweep(time.time())
    if swept:
        logger(room.name).info("rollouts and scores of runs that are gone were taken away", artifacts=swept)
    found = errands.find(message)
    if found is not None and room.store.exists(found):
        return
    try:
        folder = room.store.get(message.rollouts)
    except NotFound:
        return  # the run has not waited, or has ended
    try:
        rollouts = Rollouts.load(folder)
        scores = scorer_of(message.reward, rollouts.dataset, room.store).score(rollouts)
    except PermanentError as error:
        errands.refuse(message, str(error))
        raise
    errands.put(message, store_scores(message, scores, room.store), time.time())
    _scored.add(rollouts.items_BG.size)


@lru_cache(maxsize=2)
def scorer_of(reward: str, dataset: str, store: ArtifactStore) -> RewardScorer:
    """A reward model for a data set's rollouts; those of a run follow one another, so it is loaded once."""
    return RewardScorer(reward, PreferenceModel.load(store.get(reward)), dataset, store.get(dataset))
