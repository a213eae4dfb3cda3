"""Artifacts: same files, same reference; nothing half-stored is visible; changed bytes are refused."""

import ast
import os
import shutil
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as limits
from hypothesis import strategies as st

from semantide.shared import artifacts
from semantide.shared.artifacts import ArtifactStore, readable
from semantide.shared.errors import Corrupt, NotFound

REPOSITORY = Path(__file__).resolve().parents[2]
names = st.text(st.characters(categories=("Ll", "Nd")), min_size=1, max_size=8)
trees = st.dictionaries(names, st.binary(max_size=64), min_size=1, max_size=5)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@limits(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(first=trees, second=trees)
def test_the_reference_is_the_content(tmp_path_factory: pytest.TempPathFactory, first: dict[str, bytes], second: dict[str, bytes]) -> None:
    root = tmp_path_factory.mktemp("store")
    store = ArtifactStore(str(root / "artifacts"))
    refs = [store.put("things", write(tmp_path_factory.mktemp("in"), files), config={"n": n}) for n, files in enumerate((first, second, first))]
    assert refs[0] == refs[2]
    assert (refs[0] == refs[1]) == (first == second)
    for ref, files in zip(refs, (first, second), strict=False):
        folder = store.get(ref)
        assert {p.name: p.read_bytes() for p in folder.iterdir() if p.name != "manifest.json"} == files
    assert store.list("things") == sorted(set(refs))


def test_a_manifest_says_what_made_it(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    ref = store.put("things", write(tmp_path / "in", {"a": b"1"}), config={"k": 256}, inputs={"dataset": "datasets/x"}, seed=7)
    manifest = store.manifest(ref)
    assert (manifest["config"], manifest["inputs"], manifest["seed"]) == ({"k": 256}, {"dataset": "datasets/x"}, 7)
    assert manifest["code"].count("+src.") == 1


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_changed_bytes_are_refused(tmp_path: Path, damage: str) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    ref = store.put("things", write(tmp_path / "in", {"a": b"0123456789", "b": b"x"}))
    path = tmp_path / "store" / ref / "a"
    if damage == "cut":
        path.write_bytes(b"01234")
    elif damage == "flip":
        path.write_bytes(b"012345678X")
    else:
        path.unlink()
    with pytest.raises(Corrupt, match=r"file a does not have the digest"):
        store.get(ref)


def test_an_unknown_reference_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="semantide artifacts"):
        ArtifactStore(str(tmp_path)).get("models/sha256-" + "0" * 64)


def test_empty_folders_and_the_stores_own_name_are_refused(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no files"):
        store.put("things", tmp_path / "empty")
    with pytest.raises(ValueError, match=r"manifest\.json"):
        store.put("things", write(tmp_path / "own", {"manifest.json": b"{}"}))


def test_many_writers_of_one_content_agree(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    source = write(tmp_path / "in", {"a": b"x" * 10_000})
    refs: list[str] = []
    threads = [threading.Thread(target=lambda: refs.append(store.put("things", source))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refs) == 8 and len(set(refs)) == 1
    assert not list((tmp_path / "store").glob(".incoming*"))


def test_what_an_input_holds_takes_no_room_again(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    first = store.put("things", write(tmp_path / "one", {"deep/same": b"0" * 1000, "other": b"1", "broken": b"2"}))
    (store.get(first) / "broken").write_bytes(b"X")
    second = store.put("things", write(tmp_path / "two", {"deep/same": b"0" * 1000, "other": b"3", "broken": b"2"}), inputs={"a": first, "b": "gone"})
    folders = [tmp_path / "store" / ref for ref in (first, second)]
    same = [[(folder / name).stat().st_ino for folder in folders] for name in ("deep/same", "other", "broken")]
    assert same[0][0] == same[0][1] and same[1][0] != same[1][1] and same[2][0] != same[2][1]
    assert (store.get(second) / "broken").read_bytes() == b"2"
    shutil.rmtree(folders[0])
    assert store.get(second).is_dir() and store.list() == [second]


def test_what_a_killed_writer_left_is_removed_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    write(tmp_path / "store" / ".incoming-dead", {"a": b"x"})
    os.utime(tmp_path / "store" / ".incoming-dead", (0, 0))
    store.put("things", write(tmp_path / "one", {"a": b"1"}))
    assert (tmp_path / "store" / ".incoming-dead").exists(), "it may be a copy of an old folder that is still being made"
    now = time.time()
    monkeypatch.setattr(artifacts.time, "time", lambda: now + 2 * 86400)
    refs = [store.put("things", write(tmp_path / "two", {"a": b"2"}))]
    assert not (tmp_path / "store" / ".incoming-dead").exists() and store.list() and store.exists(refs[0])


def test_an_object_store_gives_the_same_reference(tmp_path: Path) -> None:
    source = write(tmp_path / "in", {"a": b"1", "deep/b": b"2"})
    local = ArtifactStore(str(tmp_path / "store")).put("things", source)
    remote = ArtifactStore("memory://bucket/prefix", cache=tmp_path / "cache")
    assert remote.put("things", source) == local
    assert (remote.get(local) / "deep" / "b").read_bytes() == b"2"
    assert remote.list() == [local]


def test_a_reference_never_leads_out_of_the_store(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere", {"manifest.json": b'{"files": {}}', "report.json": b"{}"})
    store = ArtifactStore(str(tmp_path / "artifacts"))
    (tmp_path / "artifacts" / "catalogs").mkdir(parents=True)
    for ref in ("catalogs/../../elsewhere", "../elsewhere", f"catalogs/sha256-{'0' * 64}/../../../elsewhere"):
        assert not store.exists(ref)
        with pytest.raises(NotFound):
            store.get(ref, files=())


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_removed_is_gone_and_can_be_made_again(tmp_path: Path, remote: bool) -> None:
    root = f"memory://removed-{tmp_path.name}" if remote else str(tmp_path / "artifacts")
    store = ArtifactStore(root, tmp_path / "cache")
    first, second = (store.put("things", write(tmp_path / name, {"a/b": name.encode()})) for name in ("one", "two"))
    store.get(first)
    store.remove(first)
    store.remove(first)
    assert store.list("things") == [second] and not store.exists(first)
    with pytest.raises(NotFound):
        store.get(first)
    assert store.put("things", tmp_path / "one") == first and (store.get(first) / "a" / "b").read_bytes() == b"one"
    for nothing in ("things/../..", "things/sha256-" + "0" * 64):
        store.remove(nothing)
    assert store.exists(second)


ROOMS_WITH_ARTIFACTS = ("client", "kernels", "operators", "services", "shared")
KINDS = ("beams", "catalogs", "datasets", "evaluations", "items", "models", "negatives", "rewards", "rollouts", "snapshots")


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """Every call of a method of some store in the code."""
    found = []
    for path in (path for room in ROOMS_WITH_ARTIFACTS for path in (REPOSITORY / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == name and "store" in ast.unparse(node.func.value):
                found.append((path.relative_to(REPOSITORY).as_posix(), node))
    return found


def test_the_kinds_are_those_that_the_code_stores() -> None:
    said = {ast.unparse(node.args[0]) for _, node in calls("put") if len(node.args) > 1} | {
        ast.unparse(node.args[0]) for _, node in calls("store_made") if node.args
    }
    named = {text.strip("'") for text in said if text.startswith("'")}
    assert named <= set(KINDS), named
    assert len(calls("get")) > 25


def test_nobody_reads_an_artifact_past_its_digests() -> None:
    for path, node in calls("get"):
        files = next((ast.unparse(word.value) for word in node.keywords if word.arg == "files"), None)
        assert files != "()" or path == "services/ingestion/sweep.py", f"{path}: {ast.unparse(node)} is read without a check"
    for path in (path for room in ROOMS_WITH_ARTIFACTS for path in (REPOSITORY / room).rglob("*.py")):
        text = path.read_text()
        assert path.name == "artifacts.py" or ("store.fs" not in text and "fsspec.core" not in text and "fsspec.open" not in text), path


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_byte_in_any_file_of_any_kind_is_refused_by_name(tmp_path: Path, kind: str, remote: bool) -> None:
    root = f"memory://{tmp_path.name}" if remote else str(tmp_path / "store")
    files = {"weights.safetensors": os.urandom(100), "card.json": b'{"a": 1}', "below/rows.parquet": b"PAR1", "last": b"x"}
    store = ArtifactStore(root, tmp_path / "cache")
    ref = store.put(kind, write(tmp_path / "in", files))
    for name, content in files.items():
        for place in {0, len(content) // 2, len(content) - 1}:
            damaged = bytearray(content)
            damaged[place] ^= 1 << (place % 8)
            store.fs.pipe_file(f"{store.root}/{ref}/{name}", bytes(damaged))
            reader = ArtifactStore(root, tmp_path / f"cache-{name.replace('/', '-')}-{place}")
            for read in (partial(reader.get, ref), partial(reader.get, ref, files=(name,)), partial(reader.text, ref, name)):
                with pytest.raises(Corrupt) as refused:
                    read()
                assert ref in str(refused.value) and name in str(refused.value)
            for other in set(files) - {name}:
                assert reader.text(ref, other) == files[other].decode(errors="replace")
        store.fs.pipe_file(f"{store.root}/{ref}/{name}", content)
    assert store.get(ref).is_dir()


def test_a_damaged_artifact_takes_nothing_from_a_list_of_the_others(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "store"))
    good, bad = (store.put("models", write(tmp_path / name, {"card.json": name.encode()})) for name in ("good", "bad"))
    (tmp_path / "store" / bad / "card.json").write_text("else")
    assert readable([bad, good, "models/sha256-" + "0" * 64], lambda ref: store.text(ref, "card.json")) == ["good"]
    with pytest.raises(Corrupt, match="nothing"):
        store.text(good, "nothing")


@pytest.mark.parametrize("remote", [False, True])
def test_what_is_hidden_does_not_exist_and_can_come_back_or_go(tmp_path: Path, remote: bool) -> None:
    root = f"memory://hidden-{tmp_path.name}" if remote else str(tmp_path / "artifacts")
    store = ArtifactStore(root, tmp_path / "cache")
    sources = {name: write(tmp_path / name, {"a/b": name.encode()}) for name in ("back", "gone", "anew", "crashed")}
    refs = {name: store.put("things", source) for name, source in sources.items()}
    for name in refs:
        store.get(refs[name])
        store.hide(refs[name])
    assert store.list() == [] and store.hidden() == sorted(refs.values()) and all(time.time() - store.stored_at(ref) < 3600 for ref in refs.values())
    for ref in refs.values():
        with pytest.raises(NotFound):
            store.hide(ref)
        with pytest.raises(NotFound):
            store.manifest(ref)
    store.show(refs["back"])
    store.remove_hidden(refs["gone"])
    assert store.put("things", sources["anew"]) == refs["anew"]
    store.show(refs["anew"])
    store.remove_hidden(refs["anew"])
    assert store.list() == sorted([refs["back"], refs["anew"]]) and store.hidden() == [refs["crashed"]]
    assert [(store.get(refs[name]) / "a" / "b").read_bytes() for name in ("back", "anew")] == [b"back", b"anew"]
    with pytest.raises(NotFound):
        store.stored_at(refs["gone"])
    if remote:
        reader = ArtifactStore(root, tmp_path / "other")
        reader.get(refs["back"])
        store.remove(refs["back"])
        assert (reader.forget_fetched(), reader.forget_fetched()) == (1, 0)


def test_what_a_killed_removal_has_left_stands_in_nobodys_way(tmp_path: Path) -> None:
    store = ArtifactStore(str(tmp_path / "artifacts"))
    ref = store.put("things", write(tmp_path / "in", {"a": b"1"}))
    (tmp_path / "artifacts" / ref / "manifest.json").unlink()  # as versions before this one began
    assert store.put("things", tmp_path / "in") == ref and store.get(ref).is_dir()
