"""What a stack keeps no longer goes, and what anybody needs stays, whoever names it when, and wherever a look is killed."""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.services.serving import job as door
from semantide.services.serving import tasks
from semantide.services.serving.needed import needed, note_loaded, registered
from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Candidate, Decision, Pair, RegistryState, Split, Variant
from semantide.services.serving.retention import Policy, Retention
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Lineages
from semantide.shared.contracts import ItemsChanged, JobSpec
from semantide.shared.jobs import JobContext, JobOutcome, Jobs
from semantide.shared.lineage import Lineage
from semantide.shared.retention_account import RetentionAccount
from semantide.shared.room import Room

DAY = 86_400.0
AGES = Policy(artifact_seconds=10 * DAY, artifacts_kept=1, job_seconds=0, upload_seconds=0)
KINDS = ("datasets", "catalogs", "models", "items", "snapshots")


class Killed(BaseException):
    """A process that ends here and does nothing more."""


_armed: list[int] = []


def _count(event: str, _: Any) -> None:
    if _armed and event in ("os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.mkdir"):
        _armed[0] -= 1
        if _armed[0] < 0:
            raise Killed


sys.addaudithook(_count)


@contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """Whatever runs within ends before its so-many-th change of a folder."""
    _armed.append(operation)
    try:
        with suppress(Killed):
            yield
    finally:
        _armed.clear()


def put(store: ArtifactStore, kind: str, number: int, inputs: dict[str, str], age_days: float, card: dict[str, Any] | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_bytes(b"%d" % number)
        (Path(folder) / "card.json").write_text(json.dumps(card or {}))
        ref = store.put(kind, Path(folder), inputs=inputs, config={"extends": inputs.get("catalog")} if kind == "catalogs" else None)
    aged(store, ref, age_days)
    return ref


def aged(store: ArtifactStore, ref: str, age_days: float) -> None:
    moment = time.time() - age_days * DAY
    os.utime(Path(store.root) / ref / "manifest.json", (moment, moment))


def whole(store: ArtifactStore) -> set[str]:
    """What is there, each file of it as it was stored."""
    found = store.list()
    for ref in found:
        store.get(ref)
    return set(found)


def look(room: Room, policy: Policy = AGES, **options: Any) -> Retention:
    work = Retention(room.store, room.broker, room.settings.data_dir, policy, **options)
    work.artifacts(lambda: None)
    work.jobs(lambda: None)
    work.uploads()
    return work


@pytest.fixture
def room(make_room: Any) -> Room:
    return make_room("serving")  # type: ignore[no-any-return]


made = st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 11), max_size=2), st.sampled_from([0.0, 5.0, 20.0, 40.0])), min_size=1, max_size=12)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made, st.sets(st.integers(0, 11), max_size=2), st.sets(st.integers(0, 11), max_size=1), st.integers(0, 40))
def test_what_is_needed_stays_and_the_rest_goes_wherever_a_look_is_killed(
    room: Room, world: list[Any], candidates: set[int], jobs: set[int], kill: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(folder)
        room.broker.flushall()
        refs: list[str] = []
        parents: dict[str, set[str]] = {}
        ages: dict[str, float] = {}
        for number, (kind, inputs, age) in enumerate(world):
            made_of = {f"input-{place}": refs[place] for place in inputs if place < len(refs)}
            age += (100 - number) / 1000  # of two equally old ones nobody could say which is the newest
            ref = put(store, kind, number, made_of, age)
            refs.append(ref)
            ages[ref] = age
            parents[ref] = {parent for parent in made_of.values() if not (kind == "catalogs" and parent.startswith("catalogs/"))}
        roots = {refs[place] for place in candidates if place < len(refs)}
        for ref in roots:
            Registry(room.broker).register(Candidate(model=ref))
        for place in jobs:
            if place < len(refs):
                Jobs(room.broker).submit(JobSpec(kind="evaluate", inputs={"model": refs[place]}))
                roots.add(refs[place])
        # By the definition: young ones, the newest of each kind, what is named, and what all these were made of.
        roots |= {ref for ref in refs if ages[ref] < 10}
        for kind in KINDS:
            own = sorted((ref for ref in refs if ref.startswith(f"{kind}/")), key=lambda ref: (ages[ref], ref))
            roots |= set(own[:1])
        kept, waiting = set[str](), list(roots)
        while waiting:
            ref = waiting.pop()
            kept.add(ref)
            waiting += parents[ref] - kept
        with_store = Room(room.name, room.settings, room.broker, store, room.queues)
        told = look(with_store, dry=True).removed.artifacts
        assert whole(store) == set(refs) and set(told) == set(refs) - kept
        with killed_at(kill):
            look(with_store)
        assert kept <= whole(store) <= set(refs)
        look(with_store)
        assert whole(store) == kept and not store.hidden()
        assert {"/".join(path.relative_to(folder).parts[:2]) for path in Path(folder).rglob("*") if path.is_file() and ".incoming" not in str(path)} == kept


def test_everybody_who_names_an_artifact_keeps_it(room: Room) -> None:
    numbers = iter(range(1000))

    def old(kind: str, **inputs: str) -> str:
        return put(room.store, kind, next(numbers), inputs, 40)

    dataset = old("datasets")
    live, before, arm, candidate, rival, retriever, pinned, queued, errand, base, unneeded = (old("models") for _ in range(11))
    catalogs = [old("catalogs") for _ in range(5)]
    link = put(room.store, "snapshots", 99, {}, 40, {"before": base})
    carded = put(room.store, "models", 100, {}, 40, {"dataset": dataset})
    state = RegistryState(
        live=Pair(model=live, catalog=catalogs[0]),
        previous=(Pair(model=before, catalog=catalogs[1]),),
        candidates=(Candidate(model=candidate, catalog=catalogs[2]), Candidate(model=carded)),
        decisions=(Decision(action="hold", model=candidate, time=1, against=rival), Decision(action="hold", model=unneeded, time=1, against=unneeded)),
        extensions={catalogs[4]: catalogs[3]},
        split=Split(variants=(Variant(name="b", pair=Pair(model=arm, catalog=catalogs[3]), share=0.5),)),
        retriever=link,
    )
    Registry(room.broker).change(lambda _: state)
    note_loaded(room.broker, RegistryState(live=Pair(model=pinned, catalog=catalogs[0])), time.time())
    room.queues.send(ItemsChanged(items=queued.replace("models/", "items/")))
    other = put(room.store, "items", 3, {}, 40)
    room.queues.send(ItemsChanged(items=other))
    room.broker.set("semantide:errands:NegativesWanted:x", errand)
    newest = put(room.store, "models", 101, {}, 39)
    put(room.store, "catalogs", 101, {}, 39)
    look(room)
    left = whole(room.store)
    assert {dataset, live, before, arm, candidate, rival, retriever, pinned, errand, base, link, carded, other, newest, *catalogs[:4]} - left == {retriever}
    assert not {unneeded, catalogs[4], queued} & left, "what only the past names goes"
    assert registered(RegistryState()) == set()


@pytest.mark.parametrize("named", ["catalog", "model"])
def test_between_a_jobs_catalog_and_its_newest_form_all_stay_while_it_trains(room: Room, named: str) -> None:
    chain = [put(room.store, "catalogs", 0, {}, 40)]
    for number in range(1, 6):
        chain.append(put(room.store, "catalogs", number, {"catalog": chain[-1]}, 40 - number))
    lineages = Lineages(room.broker)
    lineages.begin("t", chain[0])
    for old, new in pairwise(chain):
        assert lineages.extend(old, new)
    jobs = Jobs(room.broker)
    # A job that names a model alone takes the catalog of that one.
    made = {"model": put(room.store, "models", 9, {"catalog": chain[2]}, 40)} if named == "model" else {}
    record = jobs.submit(JobSpec(kind="train", inputs=made or {"catalog": chain[2]}))
    look(room)
    # The base is what the lineage itself names; what the job's catalog was made of stays with it.
    assert whole(room.store) >= {chain[0], *chain[2:], *made.values()}
    jobs.end(record, "succeeded", outcome=JobOutcome())
    room.broker.hset(Jobs.key(record.id), "finished", json.dumps(1000))
    look(room)
    # Of models the newest ones are kept, with what they were made of.
    assert whole(room.store) == {chain[0], chain[-1], *made.values(), *([chain[2]] if made else [])}


@pytest.mark.parametrize("how", ["named", "stored again"])
def test_what_is_named_while_it_is_hidden_comes_back_with_what_it_was_made_of(room: Room, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    dataset = put(room.store, "datasets", 0, {}, 40)
    model = put(room.store, "models", 1, {"dataset": dataset}, 40)
    gone = put(room.store, "models", 2, {}, 40)
    for kind in ("datasets", "models"):
        put(room.store, kind, 3, {}, 20)  # the newest
    hide, hidden = room.store.hide, list[str]()

    def hiding(ref: str) -> None:
        hide(ref)
        hidden.append(ref)
        if ref == model and how == "named":
            Jobs(room.broker).submit(JobSpec(kind="evaluate", inputs={"model": model}))
        elif ref == model:
            assert put(room.store, "models", 1, {"dataset": dataset}, 0) == model

    monkeypatch.setattr(room.store, "hide", hiding)
    work = look(room)
    assert model in hidden and gone in work.removed.artifacts and not {dataset, model} & set(work.removed.artifacts)
    assert {dataset, model} <= whole(room.store) and not room.store.hidden()


def test_what_is_used_again_is_young_again(room: Room) -> None:
    ref = put(room.store, "models", 1, {}, 40)
    put(room.store, "models", 2, {}, 0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_bytes(b"1")
        (Path(folder) / "card.json").write_text("{}")
        assert room.store.put("models", Path(folder)) == ref
    assert look(room).removed.artifacts == []


def test_jobs_that_ended_long_ago_go_with_their_folders_but_not_those_that_a_promotion_depends_on(room: Room) -> None:
    jobs, folder = Jobs(room.broker), room.settings.data_dir / "jobs"
    policy = Policy(0, 1, 10 * DAY, 0)

    def ended(days_ago: float, state: str = "succeeded") -> str:
        record = jobs.submit(JobSpec(kind="train"))
        (folder / record.id / "checkpoints").mkdir(parents=True)
        (folder / record.id / "checkpoints" / "step").write_text("x")
        jobs.end(record, state)
        room.broker.hset(Jobs.key(record.id), "finished", json.dumps(int((time.time() - days_ago * DAY) * 1000)))
        room.broker.xadd(Jobs.metrics_key(record.id), {"row": "{}"})
        return record.id

    old, failed, young, judging = ended(20), ended(20, "failed"), ended(5), ended(20)
    running = jobs.submit(JobSpec(kind="train")).id
    Registry(room.broker).register(Candidate(model="models/sha256-" + "0" * 64, judging=judging))
    orphan = folder / "train-of-a-broker-that-is-lost"
    orphan.mkdir()
    assert sorted(look(room, policy, dry=True).removed.jobs) == sorted([old, failed]) and len(jobs.recent()) == 5
    resumed = jobs.get(failed)
    jobs.resume(failed)
    assert not jobs.forget(resumed), "one that was resumed meanwhile stays"
    room.broker.hset(Jobs.key(failed), mapping={"state": '"failed"', "finished": json.dumps(resumed.finished)})
    with killed_at(0):
        look(room, policy)
    look(room, policy)
    assert {record.id for record in jobs.recent()} == {young, judging, running}
    assert not room.broker.exists(Jobs.metrics_key(old)) and room.broker.exists(Jobs.metrics_key(young))
    moment = time.time() - 20 * DAY
    for path in (*folder.rglob("*"), orphan):
        if path.name not in (young, judging):
            os.utime(path, (moment, moment))
    look(room, policy)
    assert {path.name for path in folder.iterdir()} == {young, judging}


def test_uploads_go_when_nothing_reads_them(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    file = room.settings.data_dir / "uploads" / "in" / "a.csv"
    file.parent.mkdir(parents=True)
    file.write_text("x")
    late = Retention(room.store, room.broker, room.settings.data_dir, Policy(0, 1, 0, 5 * DAY), lambda: time.time() + 6 * DAY)
    record = Jobs(room.broker).submit(JobSpec(kind="import"))
    late.uploads()
    assert file.exists()
    Jobs(room.broker).end(record, "succeeded")
    look(room, Policy(0, 1, 0, 5 * DAY))
    assert file.exists()
    late.uploads()
    assert not file.exists() and late.removed.uploads == ["in/a.csv"] and not file.parent.exists()


def test_nothing_is_removed_unless_somebody_says_how_long_things_are_kept(room: Room) -> None:
    refs = {put(room.store, "models", number, {}, 4000) for number in range(9)}
    policy = Policy.of(room.settings)
    assert policy.artifact_seconds == policy.upload_seconds == 0 and policy.job_seconds == 365 * DAY
    look(room, policy)
    assert whole(room.store) == refs


def test_the_job_tells_what_it_removed_and_a_repeated_start_counts_it_once(room: Room) -> None:
    room.settings.artifact_days, room.settings.artifacts_kept = 10, 1
    ref, kept = (put(room.store, "models", number, {}, 40 - number) for number in range(2))
    jobs = Jobs(room.broker)

    def run(**config: Any) -> dict[str, Any]:
        record = jobs.submit(JobSpec(kind="retention", config=config))
        return door.run(JobContext(record, room.settings, room.store, room.broker, room.queues)).result

    told = run(dry_run=True)
    assert told["artifacts"] == [ref] and told["num_artifacts"] == 1 and whole(room.store) == {ref, kept}
    assert run()["artifacts"] == [ref] and whole(room.store) == {kept}
    counts, num_bytes, looked = RetentionAccount(room.broker).read()
    assert counts == {"artifacts": 1, "jobs": 0, "uploads": 0} and num_bytes == told["artifact_bytes"] > 0 and looked is not None
    RetentionAccount(room.broker).add(jobs.recent()[0].id, {"artifacts": 5}, 5, looked)
    assert RetentionAccount(room.broker).read()[0]["artifacts"] == 1
    for wrong in ({"dry": True}, {"dry_run": "yes"}):
        with pytest.raises(ValueError, match="dry_run"):
            run(**wrong)


def test_workers_ask_for_one_look_when_its_time_has_come(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    class Once:
        def wait(self, _: float) -> bool:
            return True

    account, jobs = RetentionAccount(room.broker), Jobs(room.broker)
    for _ in range(3):
        tasks.background(room, Once())  # type: ignore[arg-type]
    assert jobs.recent(kind="retention") == [], "a stack that has just begun has nothing old"
    account.add("x", {}, 0, time.time() - 2 * DAY)
    for _ in range(3):
        tasks.background(room, Once())  # type: ignore[arg-type]
    (asked,) = jobs.recent(kind="retention")
    # Whoever cancels it, or a store that cannot be reached, puts it off for a period.
    jobs.cancel(asked.id)
    now = time.time()
    for later, wanted in ((0, 1), (DAY, 2), (DAY, 2)):
        monkeypatch.setattr(tasks.time, "time", lambda later=later: now + later)
        tasks.background(room, Once())  # type: ignore[arg-type]
        assert len(jobs.recent(kind="retention")) == wanted
    monkeypatch.undo()
    room.settings.retention_hours = 0
    tasks.background(room, Once())  # type: ignore[arg-type]
    account.add("y", {}, 0, time.time() + 9 * DAY)
    room.settings.retention_hours = 24
    tasks.background(room, Once())  # type: ignore[arg-type]
    assert len(jobs.recent(kind="retention")) == 3


def test_what_is_needed_is_read_from_every_kind_of_key(room: Room) -> None:
    refs = [put(room.store, "models", number, {}, 40) for number in range(5)]
    room.broker.lpush("semantide:queue:x", refs[0])
    room.broker.sadd("semantide:new:set", refs[1])
    room.broker.zadd("semantide:new:zset", {refs[2]: 1})
    room.broker.hset("semantide:new:hash", "a", json.dumps({"ref": refs[3]}))
    room.broker.set("semantide:history:u", refs[4])
    assert needed(room.broker, Lineage(room.store), [], time.time()) == set(refs[:4])
