"""Users under pseudonyms: callers use their own ids, and nothing behind the door holds one."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.ingestion import api, job
from semantide.shared import operations_api
from semantide.shared.config import Settings
from semantide.shared.contracts import JobSpec
from semantide.shared.errors import BadData
from semantide.shared.forgetting import KEY as FORGETTING
from semantide.shared.http import build_app
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.pseudonyms import Pseudonyms
from semantide.shared.redaction import Redaction
from semantide.shared.room import Room

from .test_forgetting import OTHER, WHO, events, places, room, store, work

__all__ = ["room"]

KEY, ANOTHER = "a-key-of-the-tests-for-pseudonyms", "another-key-of-these-tests"


def opened(room: Room, key: str = KEY) -> TestClient:
    room.settings.user_id_key = key
    return TestClient(build_app([room], [operations_api.build(room), api.build(room)]), headers={"X-API-Key": "test-key"})


@given(st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=20, unique=True))
def test_everybody_has_one_pseudonym_under_one_key_and_nobody_shares_it(users: list[str]) -> None:
    ours, others = Pseudonyms(KEY), Pseudonyms(ANOTHER)
    names = [ours.of_user(user) for user in users]
    assert len(set(names)) == len(users) and names == [Pseudonyms(KEY).of_user(user) for user in users]
    assert not set(names) & {others.of_user(user) for user in users} and all(len(name) == 42 and name.startswith("u-") for name in names)
    assert [Pseudonyms("").of_user(user) for user in users] == users
    plain = [user for user in users if user.isascii()]
    assert ours.column(pa.array([*plain, *plain])).to_pylist() == [ours.of_user(user) for user in [*plain, *plain]]
    assert ours.column(pa.chunked_array([plain, plain], pa.string())).to_pylist() == [ours.of_user(user) for user in [*plain, *plain]]


def test_a_key_is_never_told() -> None:
    settings = Settings(user_id_key=KEY)
    assert KEY not in repr(settings) and KEY not in repr(Pseudonyms(KEY)) and ANOTHER not in Pseudonyms(ANOTHER).fingerprint
    assert Redaction.of(settings).text(f"it is {KEY}") == "it is ***"
    with pytest.raises(ValueError, match="at least 16"):
        Pseudonyms("short")


def test_no_id_of_a_user_is_anywhere_and_callers_use_their_own(room: Room, tmp_path: Path) -> None:
    client = opened(room)
    for user in (WHO, OTHER):
        assert client.post("/v1/interactions", json={"interactions": events(user, 20)}).status_code == 202
    assert places(room, WHO) == set(), "the accepted batch waits in the broker"
    store(room)
    log = tmp_path / "log.csv"
    long = WHO * 20
    log.write_text(
        "user,item,time\n"
        + "".join(f"{user},i{n % 5},{1_700_010_000_000 + n}\n" for n in range(9) for user in (WHO, OTHER))
        + f"{WHO},i1,nonsense\n{long},i1,1700010000000\n{WHO},i1,1,2,3,{WHO}\n"
    )
    record = Jobs(room.broker, room.queues).submit(JobSpec(kind="import", config={"path": str(log)}))
    assert client.post("/v1/jobs", json={"kind": "dataset"}).status_code == 202
    imported, made = work(room)
    assert imported.result["accepted"] == 18 and imported.result["rejected"] >= 2
    assert all(WHO not in json.dumps(each) for each in imported.result["rejects"])
    assert places(room, WHO) == set()
    assert record.id == Jobs(room.broker).recent(kind="import")[0].id

    told = client.get(f"/v1/users/{WHO}/export").json()
    assert told["user"] == WHO and {event["user"] for event in told["events"]} == {WHO}
    assert len(told["events"]) == 29 and len(told["history"]) == 29 and told["datasets"] == [made.artifacts["dataset"]]
    history = client.get(f"/v1/users/{WHO}/history").json()
    assert history["user"] == WHO and len(history["events"]) == 29
    # The same event over the other way is the same event.
    again = events(WHO, 20)
    assert client.post("/v1/interactions", json={"interactions": again}).json()["accepted"] == 20
    store(room)
    assert len(client.get(f"/v1/users/{WHO}/export").json()["events"]) == 29

    assert client.delete(f"/v1/users/{WHO}").status_code == 202
    assert WHO.encode() not in b"".join(room.broker.hgetall(FORGETTING).values())
    (outcome,) = work(room)
    assert outcome.result["events"] == 29
    assert client.get(f"/v1/users/{WHO}/export").json()["events"] == [] and places(room, Pseudonyms(KEY).of_user(WHO)) == set()
    assert len(client.get(f"/v1/users/{OTHER}/export").json()["events"]) == 29
    client.post("/v1/interactions", json={"interactions": events(WHO, 3, 100)})
    store(room)
    assert client.get(f"/v1/users/{WHO}/export").json()["events"] == []


@pytest.mark.parametrize("lost", ["", "broker", "log"])
def test_a_key_that_is_missing_or_another_one_is_refused_and_the_right_one_goes_on(room: Room, lost: str) -> None:
    assert opened(room).post("/v1/interactions", json={"interactions": events(WHO, 5)}).status_code == 202
    store(room)
    if lost == "broker":
        room.broker.flushall()
    elif lost == "log":
        import shutil

        shutil.rmtree(room.settings.data_dir / "events")
    with pytest.raises(ValueError, match="SEMANTIDE_USER_ID_KEY is not set"):
        opened(room, "")
    with pytest.raises(ValueError, match=f"fingerprint {Pseudonyms(ANOTHER).fingerprint}.*fingerprint {Pseudonyms(KEY).fingerprint}"):
        opened(room, ANOTHER)
    assert opened(room).get(f"/v1/users/{WHO}/history").status_code == 200


def test_a_log_of_plain_ids_takes_no_key_and_an_empty_one_does(room: Room) -> None:
    opened(room, "")
    assert opened(room).post("/v1/interactions", json={"interactions": events(WHO, 5)}).status_code == 202


def test_events_under_plain_ids_are_not_mixed_with_pseudonyms(room: Room) -> None:
    client = opened(room, "")
    client.post("/v1/interactions", json={"interactions": events(WHO, 5)})
    for _ in range(2):  # in the stream, then in the log
        with pytest.raises(ValueError, match="users' own ids"):
            opened(room)
        store(room)
    assert len(opened(room, "").get(f"/v1/users/{WHO}/export").json()["events"]) == 5


def test_an_import_without_the_key_fails_and_says_so(room: Room, tmp_path: Path) -> None:
    opened(room).post("/v1/interactions", json={"interactions": events(WHO, 5)})
    store(room)
    (tmp_path / "log.csv").write_text(f"user,item,time\n{WHO},i1,1700010000000\n")
    record = Jobs(room.broker).submit(JobSpec(kind="import", config={"path": str(tmp_path / "log.csv")}))
    room.settings.user_id_key = ""
    with pytest.raises(ValueError, match="SEMANTIDE_USER_ID_KEY is not set"):
        job.run(JobContext(record, room.settings, room.store, room.broker, room.queues))


def test_a_file_of_another_encoding_is_refused_without_its_lines(room: Room, tmp_path: Path) -> None:
    opened(room)
    log = tmp_path / "log.csv"
    log.write_bytes(f"{WHO}-müller,i1,1700010000000\n".encode("latin-1"))
    record = Jobs(room.broker).submit(JobSpec(kind="import", config={"path": str(log)}))
    with pytest.raises(BadData, match=r"log.csv: row 0: not UTF-8") as refused:
        job.run(JobContext(record, room.settings, room.store, room.broker, room.queues))
    assert WHO not in str(refused.value)
