"""Who may use the tests' own engine, who ends it, and what a machine that cannot have one hears; needs no engine."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import binaries, docker_engine


@pytest.fixture
def done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done to the engine and to the machine, none of it really."""
    calls: list[str] = []
    monkeypatch.setenv("SEMANTIDE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(docker_engine, "_MACHINE", tmp_path / "machine")
    monkeypatch.setattr(docker_engine, "_answers", lambda running: True)
    for name in ("_tidy", "_stop"):
        monkeypatch.setattr(docker_engine, name, lambda running, name=name: calls.append(name))
    monkeypatch.setattr(docker_engine, "_give_back", lambda: calls.append("_give_back"))
    return calls


def free(lock: Path) -> bool:
    with lock.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_who_leaves_last_ends_it(done: list[str]) -> None:
    with docker_engine.engine():
        with docker_engine.engine():
            pass
        docker_engine.end()
        assert done == [], "somebody uses it"
    assert done == ["_tidy", "_stop", "_give_back"]


def test_an_engine_whose_user_was_killed_is_ended_by_who_comes_after(done: list[str], tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import docker_engine
docker_engine._MACHINE, docker_engine._answers = Path(sys.argv[2]), lambda running: True
with docker_engine.engine():
    print("runs", flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(Path(docker_engine.__file__).parent), str(tmp_path / "machine")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
        assert user.stdout is not None and user.stdout.readline() == "runs\n"
        docker_engine.end()
        assert done == []
        os.kill(user.pid, signal.SIGKILL)
    assert docker_engine.main(["end"]) == 0
    assert done == ["_stop", "_give_back"]


def test_nothing_is_ended_where_nothing_ever_ran(done: list[str], tmp_path: Path) -> None:
    docker_engine.end()
    assert done == [] and not list(tmp_path.iterdir())


def test_engines_of_other_folders_do_not_wait_while_one_is_tidied(done: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[bool] = []

    def tidy(running: docker_engine.Engine) -> None:
        found.append(free(tmp_path / "machine" / "start.lock"))
        monkeypatch.setattr(docker_engine, "_tidy", lambda _: None)
        with docker_engine.engine():
            done.append("somebody came back")

    monkeypatch.setattr(docker_engine, "_tidy", tidy)
    with docker_engine.engine():
        pass
    assert found == [True] and done == ["somebody came back", "_stop", "_give_back"]


def test_packages_start_nothing_while_they_are_installed(tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    with pytest.raises(docker_engine.EngineMissing), docker_engine._no_services(policy):
        assert subprocess.run([str(policy), "docker", "start"], check=False).returncode == 101, "which Debian reads as: it may not"
        raise docker_engine.EngineMissing("no network")
    assert not policy.exists()
    policy.write_text("the machine's own")
    with docker_engine._no_services(policy):
        assert policy.read_text() == "the machine's own"
    assert policy.read_text() == "the machine's own"


@pytest.mark.parametrize(
    ("obstacle", "arguments", "status"),
    [
        ("dpkg-source not found: this needs Debian with dpkg-dev", ["kept"], 2),
        ("dpkg-source not found: this needs Debian with dpkg-dev", [], 2),
        ("", ["kept"], 1),
    ],
)
def test_a_machine_that_cannot_build_a_control_plane_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], obstacle: str, arguments: list[str], status: int
) -> None:
    monkeypatch.setenv("SEMANTIDE_CLUSTER_CACHE", str(tmp_path))
    monkeypatch.setattr(binaries, "obstacle", lambda: obstacle)
    assert binaries.main(arguments) == status
    assert obstacle in capsys.readouterr().err


def test_kept_programs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_build(work: Any) -> Path:
        raise AssertionError("they are there")

    monkeypatch.setenv("SEMANTIDE_CLUSTER_CACHE", str(tmp_path))
    monkeypatch.setattr(binaries, "_build", no_build)
    folder = tmp_path / binaries._SOURCE
    folder.mkdir()
    for name in ("etcd", *binaries.SERVERS):
        (folder / name).touch()
    assert binaries.main(["kept"]) == binaries.main([]) == 0 and str(folder) in capsys.readouterr().out
