"""The gate before what is live: candidates wait for the verdict of an evaluation."""

from typing import Any

import pytest

from semantide.services.serving import tasks
from semantide.services.serving.registry import Candidate, Pair, Registry, RegistryState
from semantide.shared.contracts import CandidateJudged, ModelTrained
from semantide.shared.errors import Conflict
from semantide.shared.jobs import Jobs

from .world import Server, World

FIGURES = {"hr@50": {"live": 0.2, "candidate": 0.21, "difference": 0.01, "low": 0.005, "bound": -0.004}}


def model(number: int) -> str:
    return f"models/sha256-{number:064x}"


def pair(number: int) -> Pair:
    return Pair(model=model(number), catalog=f"catalogs/sha256-{1:064x}")


def verdict(candidate: Pair, against: str, not_worse: bool, job_id: str = "evaluate-1") -> CandidateJudged:
    reason = "" if not_worse else "hr@50 may have lost too much"
    return CandidateJudged(
        job_id=job_id, model=candidate.model, catalog=candidate.catalog, against=against, not_worse=not_worse, reason=reason, cases=500, figures=FIGURES
    )


def test_a_verdict_promotes_or_holds_and_its_figures_are_kept() -> None:
    state = RegistryState().registered(Candidate(model=model(2), catalog=pair(2).catalog)).promoted(pair(1), 10).judging(model(2), "evaluate-1")
    waiting = state.candidate(model(2))
    assert waiting is not None and waiting.judging == "evaluate-1" and state.live == pair(1)
    held = state.judged(pair(2), verdict(pair(2), model(1), False), 20)
    assert held.live == pair(1) and held.previous == ()
    last = held.decisions[-1]
    assert (last.action, last.model, last.against, last.cases, last.figures, last.evaluation) == ("hold", model(2), model(1), 500, FIGURES, "evaluate-1")
    assert "lost too much" in last.reason
    assert held.judged(pair(2), verdict(pair(2), model(1), False), 30) is held, "a message that comes twice changes nothing"
    better = state.judged(pair(2), verdict(pair(2), model(1), True), 20)
    assert better.live == pair(2) and better.previous == (pair(1),) and better.decisions[-1].action == "promote" and better.decisions[-1].figures == FIGURES
    assert better.rolled_back(30).live == pair(1)
    assert better.rolled_back(30).judged(pair(2), verdict(pair(2), model(1), True), 40).live == pair(1), "nor does it undo a rollback"


def test_a_verdict_against_a_model_that_is_no_longer_live_decides_nothing() -> None:
    state = RegistryState().promoted(pair(1), 10).promoted(pair(3), 20)
    with pytest.raises(Conflict, match="is live"):
        state.judged(pair(2), verdict(pair(2), model(1), True), 30)


def jobs(world: World) -> list[Any]:
    return list(reversed(Jobs(world.room.broker).recent(kind="evaluate")))


def test_a_trained_model_waits_for_its_test_and_goes_live_by_the_verdict(world: World) -> None:
    registry = Registry(world.room.broker)
    first, second = world.add_model(1), world.add_model(2)
    tasks.keep_candidate(ModelTrained(job_id="train-1", model=first, catalog=world.catalog_ref, promote="if-not-worse"), world.room)
    assert registry.read().live == Pair(model=first, catalog=world.catalog_ref) and not jobs(world), "there was nothing to compare it with"
    message = ModelTrained(job_id="train-2", model=second, catalog=world.catalog_ref, promote="if-not-worse")
    for _ in range(2):  # delivered twice
        tasks.keep_candidate(message, world.room)
    (record,) = jobs(world)
    assert record.spec.inputs == {
        "dataset": f"datasets/sha256-{0:064x}", "model": second, "catalog": world.catalog_ref, "live": first, "live_catalog": world.catalog_ref
    }  # fmt: skip
    assert record.spec.config == {"bounds": dict(world.room.settings.promotion_bounds), "publish": True}
    told = verdict(Pair(model=second, catalog=world.catalog_ref), first, True, record.id)
    tasks.decide(told, world.room)
    tasks.decide(told, world.room)
    state = registry.read()
    assert state.live == Pair(model=second, catalog=world.catalog_ref) and [one.action for one in state.decisions] == ["promote", "promote"]


def test_another_live_model_makes_another_test(world: World) -> None:
    registry = Registry(world.room.broker)
    old = world.live(0)
    candidate = Pair(model=world.candidate(1), catalog=world.catalog_ref)
    now = world.live(2)
    tasks.decide(verdict(candidate, old.model, True), world.room)
    assert registry.read().live == now
    (record,) = jobs(world)
    assert record.spec.inputs["live"] == now.model and record.spec.inputs["model"] == candidate.model


def test_over_rest_a_promotion_may_wait_for_the_test(server: Server, world: World) -> None:
    live = Registry(world.room.broker).read().live
    assert live is not None
    candidate = world.candidate(3)
    answer = server.client.post("/v1/serving/promote", json={"model": candidate, "if_not_worse": True})
    assert answer.status_code == 200 and answer.json()["model"] == live.model
    (record,) = jobs(world)
    assert answer.json()["judging"] == record.id
    assert next(one for one in server.client.get("/v1/serving/candidates").json()["candidates"] if one["model"] == candidate)["judging"] == record.id
    tasks.decide(verdict(Pair(model=candidate, catalog=world.catalog_ref), live.model, False, record.id), world.room)
    last = server.client.get("/v1/serving/decisions").json()["decisions"][-1]
    assert last["action"] == "hold" and last["figures"] == FIGURES and last["evaluation"] == record.id
    again = server.client.post("/v1/serving/promote", json={"model": live.model, "if_not_worse": True})
    assert again.json()["judging"] is None, "what is live needs no test against itself"
    unknown = server.client.post("/v1/serving/promote", json={"model": model(9), "if_not_worse": True})
    assert unknown.status_code == 404
