"""Artifacts on an S3-compatible store, spoken to over HTTP: the same references, nothing half-stored visible, and what other processes do is seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("s3fs", reason="artifacts on S3 want the [s3] extra")
from moto.server import ThreadedMotoServer

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.errors import Corrupt, NotFound, StoreUnavailable

OTHER = """
import sys
from pathlib import Path
from semantide.shared.artifacts import ArtifactStore
print(ArtifactStore(sys.argv[1], Path(sys.argv[2])).put("things", Path(sys.argv[3]), seed=1))
"""


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def root(endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    for name, value in {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    import s3fs

    bucket = f"bucket-{tmp_path.name}".lower().replace("_", "-")[:60]
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/semantide"


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def test_the_reference_is_that_of_a_local_store_and_files_come_back(root: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"a": b"1" * 100_000, "deep/er/b": b"2", "empty": b""})
    local = ArtifactStore(str(tmp_path / "store")).put("things", source, seed=3)
    store = ArtifactStore(root, tmp_path / "cache")
    assert store.put("things", source, seed=3) == local == store.put("things", source)
    folder = store.get(local)
    assert {name: (folder / name).read_bytes() for name in ("a", "deep/er/b", "empty")} == {"a": b"1" * 100_000, "deep/er/b": b"2", "empty": b""}
    assert store.list() == store.list("things") == [local] and store.manifest(local)["seed"] == 3
    assert json.loads(store.fs.cat_file(f"{store.root}/{local}/manifest.json"))["ref"] == local


def test_what_another_process_stores_or_removes_is_seen_at_once(root: str, tmp_path: Path) -> None:
    store = ArtifactStore(root, tmp_path / "cache")
    first = store.put("things", write(tmp_path / "one", {"a": b"1"}))
    assert store.list() == [first]
    write(tmp_path / "two", {"a": b"2"})
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", OTHER, root, str(tmp_path / "other"), str(tmp_path / "two")]
    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    assert store.exists(second) and store.list("things") == sorted([first, second])
    assert (store.get(second) / "a").read_bytes() == b"2"
    other = ArtifactStore(root, tmp_path / "third")
    other.remove(first)
    assert not store.exists(first) and store.list() == [second]
    with pytest.raises(NotFound, match="semantide artifacts"):
        store.get(first)


def test_without_its_manifest_an_artifact_does_not_exist(root: str, tmp_path: Path) -> None:
    store = ArtifactStore(root, tmp_path / "cache")
    source = write(tmp_path / "in", {"a": b"1", "b": b"2"})
    ref = store.put("things", source)
    # What a process that was killed while it wrote leaves.
    store.fs.rm(f"{store.root}/{ref}/manifest.json")
    store.fs.rm(f"{store.root}/{ref}/b")
    assert not store.exists(ref) and store.list() == []
    assert store.put("things", source) == ref and (store.get(ref) / "b").read_bytes() == b"2"


def test_changed_bytes_are_refused_and_fetched_anew(root: str, tmp_path: Path) -> None:
    store = ArtifactStore(root, tmp_path / "cache")
    ref = store.put("things", write(tmp_path / "in", {"a": b"1"}))
    store.fs.pipe_file(f"{store.root}/{ref}/a", b"X")
    with pytest.raises(Corrupt, match="file a does not have the digest"):
        store.get(ref)
    store.fs.pipe_file(f"{store.root}/{ref}/a", b"1")
    assert (store.get(ref) / "a").read_bytes() == b"1"


def test_a_store_that_is_away_is_a_passing_fault(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    store = ArtifactStore(root, tmp_path / "cache")
    monkeypatch.setattr(store, "fs", type(store.fs)(skip_instance_cache=True))
    source = write(tmp_path / "in", {"a": b"1"})
    for ask in (lambda: store.put("things", source), lambda: store.get("things/sha256-" + "0" * 64), store.list):
        with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:9.*SEMANTIDE_ARTIFACTS_URL"):
            ask()
