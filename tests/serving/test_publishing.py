"""The gate before what is live: candidates wait for the verdict of an evaluation."""

import json
import shutil
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.serving import tasks
from semantide.services.serving.publishing import Comparisons
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Pair, RegistryState
from semantide.shared.contracts import CandidateJudged, ModelTrained
from semantide.shared.errors import Conflict
from semantide.shared.jobs import Jobs

from .test_retrieval import add_retriever
from .world import Server, World, wait_until

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


def waiting() -> RegistryState:
    """Model 1 is live, and model 2 is compared with it."""
    return RegistryState().registered(Candidate(model=model(2), catalog=pair(2).catalog)).promoted(pair(1), 10).judging(model(2), "evaluate-1")


def test_a_verdict_promotes_or_holds_and_its_figures_are_kept() -> None:
    state = waiting()
    held = state.judged(verdict(pair(2), model(1), False), 20)
    assert held.live == pair(1) and held.previous == ()
    last = held.decisions[-1]
    assert (last.action, last.model, last.against, last.cases, last.figures, last.evaluation) == ("hold", model(2), model(1), 500, FIGURES, "evaluate-1")
    assert "lost too much" in last.reason
    assert held.judged(verdict(pair(2), model(1), False), 30) is held, "a message that comes twice changes nothing"
    better = state.judged(verdict(pair(2), model(1), True), 20)
    assert better.live == pair(2) and better.previous == (pair(1),) and better.decisions[-1].action == "promote" and better.decisions[-1].figures == FIGURES


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_verdict_decides_once_and_never_what_somebody_decided_after_it_was_asked_for(data: st.DataObject) -> None:
    """Whatever happens in whatever order, what a person last wanted stays: only the newest comparison of a candidate, asked for after it, may make that candidate live."""
    state = RegistryState().promoted(pair(1), 1)
    for number in (1, 2, 3):
        state = state.registered(Candidate(model=model(number), catalog=pair(number).catalog))
    asked: dict[str, tuple[int, str]] = {}
    open_jobs: dict[int, str] = {}
    for step in range(data.draw(st.integers(4, 14))):
        action = data.draw(st.sampled_from(["ask", "ask", "verdict", "verdict", "promote", "rollback", "fail"]))
        number = data.draw(st.sampled_from([1, 2, 3]))
        before = state
        if action == "ask" and state.live != pair(number) and state.live is not None:
            job = f"evaluate-{step}"
            state = state.judging(model(number), job)
            asked[job], open_jobs[number] = (number, state.live.model), job
        elif action == "verdict" and asked:
            job = data.draw(st.sampled_from(sorted(asked)))
            number, against = asked[job]
            wanted = open_jobs.get(number) == job
            message = verdict(pair(number), against, data.draw(st.booleans()), job)
            assert state.live is not None
            if wanted and state.live.model not in (against, model(number)):
                with pytest.raises(Conflict, match="has to be compared"):
                    state.judged(message, step)
                continue
            state = state.judged(message, step)
            if not wanted:
                assert state is before, "nobody waited for it"
                continue
            del open_jobs[number]
            assert (state.live == pair(number)) == message.not_worse and state.judged(message, step) is state
            assert state.decisions[-1].evaluation == job and state.decisions[-1].action == ("promote" if message.not_worse else "hold")
        elif action == "promote":
            state = state.promoted(pair(number), step)
            open_jobs.pop(number, None)
        elif action == "rollback" and state.previous:
            gone = int(state.live.model[-1]) if state.live else 0
            state = state.rolled_back(step)
            open_jobs.pop(gone, None)
            open_jobs.pop(int(state.live.model[-1]) if state.live else 0, None)
        elif action == "fail" and number in open_jobs:
            state = state.held(model(number), "its comparison failed", step, evaluation=open_jobs.pop(number))
            assert state.decisions[-1].action == "hold" and state.live == before.live
        assert {one.model[-1]: one.judging for one in state.candidates if one.judging} == {str(number): job for number, job in open_jobs.items()}


def test_a_verdict_against_a_model_that_is_no_longer_live_decides_nothing() -> None:
    with pytest.raises(Conflict, match="is live"):
        waiting().promoted(pair(3), 20).judged(verdict(pair(2), model(1), True), 30)


def test_retrievers_are_judged_beside_the_generators() -> None:
    state = waiting().retrieving(model(7), 12, "asked for").registered(Candidate(model=model(8))).judging(model(8), "evaluate-2")
    message = CandidateJudged(job_id="evaluate-2", model=model(8), against=model(7), not_worse=True, reason="the live model lacks 3 of the 90 items", cases=40)
    after = state.judged(message, 20)
    assert after.retriever == model(8) and after.live == pair(1) and after.following is None
    assert [(one.action, one.model, one.catalog) for one in after.decisions[-2:]] == [("promote", model(7), None), ("promote", model(8), None)]
    assert after.decisions[-1].reason == "not worse than the live model on 40 held-out users; the live model lacks 3 of the 90 items"
    held = state.judged(message.model_copy(update={"not_worse": False}), 20)
    assert held.retriever == model(7) and held.decisions[-1].action == "hold"
    with pytest.raises(Conflict, match="is live"):
        state.retrieving(model(9)).judged(message, 20)
    assert state.retrieving(model(8), 15).judged(message, 20).decisions[-1].time == 15, "somebody was quicker"
    assert state.retrieving(None).judged(message, 20).retriever == model(8), "nothing is in its place"
    assert state.extended(pair(1).catalog, f"catalogs/sha256-{2:064x}", 30).candidate(model(8)) == state.candidate(model(8))


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
    registry.judging(candidate.model, "evaluate-1")
    now = world.live(2)
    for _ in range(2):  # delivered twice
        tasks.decide(verdict(candidate, old.model, True), world.room)
    assert registry.read().live == now
    (record,) = jobs(world)
    assert record.spec.inputs["live"] == now.model and record.spec.inputs["model"] == candidate.model


@pytest.mark.parametrize("ends", ["failed", "cancelled", "forgotten", "succeeded", "running"])
def test_a_comparison_without_a_verdict_holds_the_candidate_back_with_the_reason(world: World, ends: str) -> None:
    registry, work = Registry(world.room.broker), Jobs(world.room.broker)
    first, second = world.live(0), world.add_model(1)
    message = ModelTrained(job_id="train-2", model=second, catalog=world.catalog_ref, promote="if-not-worse")
    tasks.keep_candidate(message, world.room)
    (record,) = jobs(world)
    if ends == "forgotten":
        world.room.broker.delete(Jobs.key(record.id))
    elif ends == "running":
        work.write(record.id, state="running")
    else:
        work.end(record, ends, error="BadData: too few users")
    comparisons = Comparisons(registry, work)
    for _ in range(2):
        comparisons.poll()
    state = registry.read()
    assert state.live == first
    if ends in ("succeeded", "running"):  # the verdict may be on its way
        assert len(state.decisions) == 1
        return
    said = {
        "failed": "its comparison failed (BadData: too few users)",
        "cancelled": "its comparison was cancelled",
        "forgotten": "nothing is known of its comparison",
    }
    assert [(one.action, one.evaluation) for one in state.decisions[1:]] == [("hold", record.id)] and said[ends] in state.decisions[-1].reason
    tasks.decide(verdict(Pair(model=second, catalog=world.catalog_ref), first.model, True, record.id), world.room)
    tasks.keep_candidate(message, world.room)
    assert registry.read() == state and len(jobs(world)) == (ends != "forgotten"), "a late verdict and a message that comes again change nothing"


@pytest.mark.parametrize("seen", [True, False], ids=["looked after", "quicker than any look"])
@pytest.mark.parametrize("kind", ["generator", "retriever"])
def test_a_comparison_that_is_resumed_ends_in_the_decision_of_its_first_run(world: World, kind: str, seen: bool) -> None:
    registry, work = Registry(world.room.broker), Jobs(world.room.broker, world.room.queues)
    comparisons = Comparisons(registry, work)
    if kind == "generator":
        live, second, catalog = world.live(0).model, world.add_model(1), world.catalog_ref
    else:
        live, second, catalog = add_retriever(world, 1), add_retriever(world, 2), None
        registry.retrieve(live)
    tasks.keep_candidate(ModelTrained(job_id="train-2", model=second, catalog=catalog, promote="if-not-worse"), world.room)
    (record,) = jobs(world)
    for error in ("RankLost: a pod was lost", "RankLost: another one"):
        work.end(record, "failed", error=error)
        comparisons.poll()
        assert registry.read().decisions[-1].action == "hold" and error in registry.read().decisions[-1].reason
        work.resume(record.id)
        if seen:
            comparisons.poll()
            assert registry.read().candidate(second).judging == record.id  # type: ignore[union-attr]
        else:
            break
    message = CandidateJudged(job_id=record.id, model=second, catalog=catalog, against=live, not_worse=True, cases=90, figures=FIGURES)
    for _ in range(2):
        tasks.decide(message, world.room)
    state = registry.read()
    assert (state.live.model if kind == "generator" and state.live else state.retriever) == second
    assert [one.action for one in state.decisions if one.evaluation == record.id] == ["hold"] * (2 if seen else 1) + ["promote"]
    assert state.decisions[-1].figures == FIGURES and not state.undecided


@pytest.mark.parametrize("since", ["promoted and rolled back", "compared again", "taken away"])
def test_a_resumed_comparison_overrules_nobody(since: str) -> None:
    one = pair(2)
    state = waiting().held(one.model, "its comparison failed", 20, evaluation="evaluate-1")
    assert state.undecided == {one.model: "evaluate-1"} and state.reopened(one.model, "evaluate-1").candidate(one.model).judging  # type: ignore[union-attr]
    if since == "promoted and rolled back":
        state = state.promoted(one, 30).rolled_back(40)
        # Compared while it was live before, and taken away after that came to nothing.
        again = state.promoted(one, 50).judging(one.model, "evaluate-2").held(one.model, "its comparison failed", 60, evaluation="evaluate-2").rolled_back(70)
        assert again.reopened(one.model, "evaluate-2") is again
    elif since == "compared again":
        state = state.judging(one.model, "evaluate-2")
    else:
        state = RegistryState().retrieving(model(7)).registered(Candidate(model=model(7))).judging(model(7), "evaluate-1")
        state = state.held(model(7), "its comparison failed", 20, evaluation="evaluate-1").retrieving(None)
        assert state.reopened(model(7), "evaluate-1") is state
    assert state.reopened(one.model, "evaluate-1") is state


def spoiled(world: World, ref: str, **card: Any) -> str:
    """A copy of a model whose card says something else."""
    folder = world.folder / f"spoiled-{len(list(world.folder.iterdir()))}"
    shutil.copytree(world.room.store.get(ref), folder, ignore=shutil.ignore_patterns("manifest.json"))
    said = json.loads((folder / "semantide.json").read_text())
    (folder / "semantide.json").write_text(json.dumps({name: value for name, value in {**said, **card}.items() if value is not None}))
    return world.room.store.put("models", folder)


def test_what_cannot_be_compared_or_served_ends_in_a_decision_too(world: World) -> None:
    registry = Registry(world.room.broker)
    live, good = world.live(0), world.add_model(1)
    homeless = spoiled(world, good, dataset=None)
    message = ModelTrained(job_id="train-3", model=homeless, catalog=world.catalog_ref, promote="if-not-worse")
    for _ in range(2):
        tasks.keep_candidate(message, world.room)
    foreign = spoiled(world, good, tokenizer_digest="0" * 64)
    tasks.keep_candidate(ModelTrained(job_id="train-4", model=foreign, catalog=world.catalog_ref, promote=True), world.room)
    holds = registry.read().decisions[1:]
    assert [(one.action, one.model) for one in holds] == [("hold", homeless), ("hold", foreign)]
    assert "does not say which data set" in holds[0].reason and "Conflict" in holds[1].reason
    # Judged well, but broken: the figures are kept, and what was live stays.
    registry.judging(foreign, "evaluate-9")
    tasks.decide(verdict(Pair(model=foreign, catalog=world.catalog_ref), live.model, True, "evaluate-9"), world.room)
    last = registry.read().decisions[-1]
    assert (last.action, last.figures, registry.read().live) == ("hold", FIGURES, live) and "cannot be served" in last.reason


def test_a_trained_retriever_waits_for_its_test(world: World) -> None:
    registry = Registry(world.room.broker)
    refs = [add_retriever(world, seed) for seed in range(3)]
    for number, ref in enumerate(refs[:2]):
        tasks.keep_candidate(ModelTrained(job_id=f"train-{number}", model=ref, promote="if-not-worse"), world.room)
    assert registry.read().retriever == refs[0], "there was nothing to compare it with"
    (record,) = jobs(world)
    assert record.spec.inputs == {"dataset": f"datasets/sha256-{0:064x}", "model": refs[1], "live": refs[0]}
    message = CandidateJudged(job_id=record.id, model=refs[1], against=refs[0], not_worse=True, cases=500, figures=FIGURES)
    for _ in range(2):
        tasks.decide(message, world.room)
    state = registry.read()
    assert state.retriever == refs[1] and state.live is None and [one.action for one in state.decisions] == ["promote", "promote"]
    registry.retrieve(refs[2])
    tasks.decide(message, world.room)
    assert registry.read().retriever == refs[2]


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
    forced = world.add_model(4)
    assert server.client.post("/v1/serving/promote", json={"model": forced, "if_not_worse": True}).status_code == 404
    judging = server.client.post("/v1/serving/promote", json={"model": forced, "if_not_worse": True, "force": True}).json()["judging"]
    tasks.decide(verdict(Pair(model=forced, catalog=world.catalog_ref), live.model, True, judging), world.room)
    assert Registry(world.room.broker).read().live == Pair(model=forced, catalog=world.catalog_ref)


def test_a_server_looks_after_comparisons_and_judges_retrievers(server: Server, world: World) -> None:
    live = Registry(world.room.broker).read().live
    first, second = add_retriever(world, 1), add_retriever(world, 2)
    answer = server.client.post("/v1/serving/promote", json={"model": first, "if_not_worse": True}).json()
    assert answer["judging"] is None and answer["retriever"] == first
    judging = server.client.post("/v1/serving/promote", json={"model": second, "if_not_worse": True}).json()["judging"]
    Jobs(world.room.broker).cancel(judging)
    wait_until(lambda: any(one["evaluation"] == judging for one in server.client.get("/v1/serving/decisions").json()["decisions"]))
    last = server.client.get("/v1/serving/decisions").json()["decisions"][-1]
    assert (last["action"], last["model"], last["catalog"]) == ("hold", second, None) and "cancelled" in last["reason"]
    state = Registry(world.room.broker).read()
    assert state.retriever == first and state.live == live
