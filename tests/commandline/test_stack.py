"""``semantide up`` as a user runs it: real processes on real ports."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from semantide.services.commandline import stack as stack_module
from semantide.services.commandline.overrides import config_of, wish_of
from semantide.services.commandline.stack import Child, Stack, running_stack, stop_running
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.errors import Conflict

COMMAND = [sys.executable, "-m", "semantide.services.commandline.main"]


class Up:
    """One ``semantide up``."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder, self.port = folder, free_port()
        self.environment = {**os.environ, "SEMANTIDE_DATA_DIR": str(folder), "SEMANTIDE_PORT": str(self.port), **environment}
        self.environment.pop("REDIS_URL", None)
        self.process = subprocess.Popen(
            [*COMMAND, "up"], env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder.parent
        )

    def wait_ready(self) -> dict[str, Any]:
        deadline = time.monotonic() + 90
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(self.process.stdout.read() if self.process.stdout else "")
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/readyz", timeout=1).status_code == 200:
                    state: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
                    return state
            except (httpx.HTTPError, FileNotFoundError):
                pass
            time.sleep(0.1)
        raise AssertionError("not ready in time")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*COMMAND, *arguments], env=self.environment, capture_output=True, text=True, check=False, timeout=120, cwd=self.folder.parent)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(**environment: str) -> Up:
        started.append(Up(tmp_path / "data", **environment))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.process.wait(60)
        if one.process.stdout:
            one.process.stdout.close()


def alive(pids: list[int]) -> list[int]:
    living = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                living.append(pid)
        except psutil.NoSuchProcess:
            continue
    return living


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


def wait_gone(pids: list[int], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while left := alive(pids):
        assert time.monotonic() < deadline, f"still running: {[psutil.Process(pid).cmdline() for pid in left]}"
        time.sleep(0.1)


def test_up_says_what_runs_revives_what_dies_and_leaves_nothing(up: Callable[..., Up]) -> None:
    stack = up()
    state = stack.wait_ready()
    assert set(state["processes"]) == {
        "broker",
        "api",
        "ingestion worker",
        "tokenization worker",
        "negatives worker",
        "training worker",
        "reward worker",
        "serving worker",
    }
    key = stack.run("key").stdout.strip()
    assert httpx.get(f"{state['url']}/v1/jobs", headers={"X-API-Key": key}).json() == []
    assert httpx.get(f"{state['url']}/docs", auth=("me", key)).status_code == 200
    assert "none yet" in stack.run("status").stdout

    for name in ("training worker", "broker"):
        before = json.loads((stack.folder / "stack.json").read_text())["processes"][name]
        os.kill(before, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while json.loads((stack.folder / "stack.json").read_text())["processes"][name] == before:
            assert time.monotonic() < deadline, f"{name} was not started again"
            time.sleep(0.1)
    stack.wait_ready()

    second = stack.run("up", "--port", str(free_port()))
    assert second.returncode == 1 and "already runs" in second.stderr

    pids = list(json.loads((stack.folder / "stack.json").read_text())["processes"].values())
    stack.process.send_signal(signal.SIGINT)
    output, _ = stack.process.communicate(timeout=60)
    assert stack.process.returncode == 0
    assert "Semantide is up" in output and f"http://127.0.0.1:{stack.port}" in output and "nothing is left running" in output
    wait_gone(pids, 1)
    assert not (stack.folder / "stack.json").exists()


def test_kill_9_of_up_leaves_no_orphan_and_up_works_again(up: Callable[..., Up]) -> None:
    stack = up()
    pids = list(stack.wait_ready()["processes"].values())
    stack.process.kill()
    stack.process.wait()
    wait_gone(pids)
    again = up()
    again.wait_ready()
    assert again.run("down").stdout.strip() == "stopped"
    again.process.wait(120)
    assert again.run("down").stdout.startswith("no stack runs")


def test_a_process_number_that_is_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "stack.json").write_text(json.dumps({"pid": stranger.pid, "url": "http://127.0.0.1:1"}))
        (tmp_path / "stack.lock").touch()
        assert running_stack(tmp_path) is None
        assert not stop_running(tmp_path)
        assert stranger.poll() is None
    finally:
        stranger.communicate(b"\n")


def test_every_worker_of_a_stack_has_a_metrics_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, dict[str, str]] = {}
    monkeypatch.setattr(Child, "start", lambda child, environment: started.update({child.name: {**environment, **child.own_environment}}))
    monkeypatch.setattr(Stack, "_wait_ready", lambda stack: None)
    stack = Stack(Settings(data_dir=tmp_path, port=free_port(), metrics_port=9100), lambda text: None)
    try:
        stack.start()
        ports = {name: environment["SEMANTIDE_METRICS_PORT"] for name, environment in started.items()}
        assert ports.pop("api") == "0" and sorted(ports.values()) == ["9100", "9101", "9102", "9103", "9104", "9105"]
        assert any("127.0.0.1:9103/metrics" in where for _, where, _ in stack.places())
    finally:
        stack.stop()


def test_a_disk_without_room_does_not_end_the_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what cannot be noted nor what cannot be said ends what goes on; once there is room, what was started again is noted."""
    said: list[str] = []
    full = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")

    noted = Stack._write_state

    def write_state(stack: Stack, redis_url: str) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        noted(stack, redis_url)

    monkeypatch.setattr(Stack, "_write_state", write_state)
    stack = Stack(Settings(data_dir=tmp_path, port=free_port()), say)
    stack.children = [Child("sleeper", [sys.executable, "-c", "input()"], tmp_path / "sleeper.log")]
    stack._environment = {**os.environ, "SEMANTIDE_REDIS_URL": "redis://127.0.0.1:1/0"}
    stack.children[0].start(stack._environment)
    watching = threading.Thread(target=stack.watch)
    try:
        full.set()
        watching.start()
        first = stack.children[0].process
        assert first is not None
        first.kill()
        until(lambda: any("No space left" in text for text in said))
        assert watching.is_alive() and not (tmp_path / "stack.json").exists()
        full.clear()
        until(lambda: (tmp_path / "stack.json").exists())
        second = json.loads((tmp_path / "stack.json").read_text())["processes"]["sleeper"]
        assert alive([second]) and second != first.pid
    finally:
        stack.stop()
        watching.join(60)


# As a room that cannot begin: its process lives, and its APIs, where they answer, are not ready.
UNREADY = """#!{python}
import http.server, os, sys, time
class Unready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503)
        self.end_headers()
        self.wfile.write(b'{{"problems": ["serving: the live model is being loaded"]}}')
    def log_message(self, *_):
        pass
if "api" in sys.argv and {answers}:
    http.server.HTTPServer(("127.0.0.1", int(os.environ["SEMANTIDE_PORT"])), Unready).serve_forever()
time.sleep(600)
"""


@pytest.mark.parametrize(("answers", "said"), [(False, "nothing answers yet"), (True, "the live model is being loaded")])
def test_rooms_that_do_not_begin_in_time_are_said_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: bool, said: str) -> None:
    unready = tmp_path / "unready"
    unready.write_text(UNREADY.format(python=sys.executable, answers=answers))
    unready.chmod(0o700)
    monkeypatch.setattr(stack_module, "_READY_SECONDS", 3.0)
    monkeypatch.setattr(stack_module.sys, "executable", str(unready))
    stack = Stack(Settings(data_dir=tmp_path / "data", port=free_port()), print)
    try:
        with pytest.raises(Conflict, match=rf"did not become ready within 3 s .*{said}.*{tmp_path}/data/logs") as refused:
            stack.start()
        pids = json.loads((tmp_path / "data" / "stack.json").read_text())["processes"].values()
        assert len(pids) == 8 and "start it again" in str(refused.value)
    finally:
        stack.stop()
    assert not alive(list(pids)) and running_stack(tmp_path / "data") is None and not (tmp_path / "data" / "stack.json").exists()


def test_a_taken_port_is_said_before_anything_starts(up: Callable[..., Up]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        stack = up(SEMANTIDE_PORT=str(holder.getsockname()[1]))
        output, _ = stack.process.communicate(timeout=60)
    assert stack.process.returncode == 1
    assert "is taken" in output and "--port" in output and "Traceback" not in output
    assert not (stack.folder / "broker").exists()


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"SEMANTIDE_REDIS_URL": "redis://:secret@127.0.0.1:1/0"}, "cannot be reached"),
        ({"SEMANTIDE_REDIS_URL": "http://nonsense"}, "is not understood"),
        ({"SEMANTIDE_HOST": "0.0.0.0"}, "SEMANTIDE_API_KEYS"),
        ({"SEMANTIDE_HOST": "203.0.113.7", "SEMANTIDE_API_KEYS": "k"}, "cannot listen on"),
        ({"SEMANTIDE_PORT": "99999"}, "SEMANTIDE_PORT"),
    ],
)
def test_wrong_settings_end_with_a_remedy(up: Callable[..., Up], environment: dict[str, str], words: str) -> None:
    stack = up(**environment)
    output, _ = stack.process.communicate(timeout=60)
    assert stack.process.returncode in (1, 2)
    assert words in output and "Traceback" not in output and "secret" not in output


def test_without_a_stack_commands_say_how_to_start_one(tmp_path: Path) -> None:
    environment = {**os.environ, "SEMANTIDE_DATA_DIR": str(tmp_path)}
    for arguments in (["status"], ["ingest", str(tmp_path)], ["recommend", "--user", "1"], ["jobs", "list"], ["train"]):
        outcome = subprocess.run([*COMMAND, *arguments], env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert outcome.returncode == 1 and "semantide up" in outcome.stderr and "Traceback" not in outcome.stderr, arguments


@pytest.mark.parametrize(
    "arguments", [["recommend"], ["ingest", "/does/not/exist"], ["train", "--set", "nonsense"], ["train", "--cluster", "pots=4"], ["demo", "--dataset", "x"]]
)
def test_wrong_use_has_status_2(tmp_path: Path, arguments: list[str]) -> None:
    outcome = subprocess.run(
        [*COMMAND, *arguments], env={**os.environ, "SEMANTIDE_DATA_DIR": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60
    )
    assert outcome.returncode == 2 and "Traceback" not in outcome.stderr and outcome.stderr.strip()


def test_a_wrong_option_is_called_by_its_name() -> None:
    assert wish_of(["pods=4", "priority=10"]).pods == 4
    with pytest.raises(ValueError, match=r"--cluster 'pods' is not NAME=VALUE: write for example --cluster pods=4"):
        wish_of(["pods"])
    with pytest.raises(ValueError, match=r"--set 'epochs' is not NAME=VALUE: write for example --set epochs=5"):
        config_of(["epochs"])
