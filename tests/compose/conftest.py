"""The stack of docker-compose.yml in real containers, on an engine of the tests' own; built once, up for all tests of a session."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from semantide.services.commandline.client import Client
from semantide.shared.broker import free_port
from semantide.shared.config import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
_INDEX_PORT = 28417
PATIENCE_SECONDS = 600.0
ROOMS = ("api", *(f"{room}-worker" for room in ("ingestion", "tokenization", "negatives", "training", "reward", "serving")))


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def wait(until: Callable[[], Any], what: str) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := until()):
        assert time.monotonic() < deadline, f"{what} did not come about within {PATIENCE_SECONDS:.0f} s"
        time.sleep(0.1)
    return found


def show(capsys: pytest.CaptureFixture[str], *lines: str) -> None:
    """Print it, captured or not."""
    with capsys.disabled():
        print("", *lines, sep="\n")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


def _serve(folder: Path) -> ThreadingHTTPServer:
    handler = functools.partial(_Quiet, directory=str(folder))
    # The address is an argument of the build: as long as it is the same one, layers of an earlier build are.
    try:
        return ThreadingHTTPServer(("127.0.0.1", _INDEX_PORT), handler)
    except OSError:
        return ThreadingHTTPServer(("127.0.0.1", 0), handler)


@contextmanager
def torch_index(folder: Path) -> Iterator[str]:
    """An index of torch's wheels for the build: TORCH_INDEX where it is set, else one that serves the wheel which pip would install on this machine."""
    if given := os.environ.get("TORCH_INDEX"):
        yield given
        return
    pins = dict(line.split("==") for line in (REPOSITORY / "constraints.txt").read_text().split() if "==" in line)
    wheels = folder / "torch"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), f"torch=={pins['torch']}"]
    subprocess.run(command, check=True)
    server = _serve(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()


@dataclass
class ComposeStack:
    """A project of docker compose, and how to reach it."""

    engine: Any
    project: str
    override: Path
    port: int
    router_port: int
    prometheus_port: int
    console_port: int
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def url(self) -> str:
        """Address of its API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What docker compose, and the command line, get."""
        ports = {"SEMANTIDE_PORT": self.port, "ROUTER_PORT": self.router_port, "PROMETHEUS_PORT": self.prometheus_port, "CONSOLE_PORT": self.console_port}
        return {"SEMANTIDE_API_KEYS": self.key, "SEMANTIDE_IMAGE_TAG": "test", **{name: str(port) for name, port in ports.items()}}

    def compose(self, *arguments: str, timeout: float = 1800, **variables: str) -> str:
        """Run ``docker compose ARGUMENTS`` of this project."""
        files = ("--file", str(REPOSITORY / "docker-compose.yml"), "--file", str(self.override), "--project-directory", str(REPOSITORY))
        found = self.engine.docker("compose", *files, "--project-name", self.project, *arguments, timeout=timeout, **self.environment, **variables)
        return str(found.stdout)

    def client(self, url: str = "") -> Client:
        """A client of its API, or of another address with its key."""
        return Client(Settings(url=url or self.url, api_keys=self.key))

    def container(self, service: str, number: int = 1) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        name = f"{self.project}-{service}-{number}"
        found: dict[str, Any] = json.loads(self.engine.docker("inspect", name).stdout)[0]
        return found

    def kill(self, service: str, number: int = 1) -> Callable[[], bool]:
        """Kill a container's first process; a question that is true once the container runs again and is healthy."""
        before = self.container(service, number)["State"]
        # Not `docker kill`, which counts as a stop that somebody wanted.
        os.kill(before["Pid"], signal.SIGKILL)

        def back() -> bool:
            state = self.container(service, number)["State"]
            return bool(state["Running"] and state["StartedAt"] != before["StartedAt"] and state["Health"]["Status"] == "healthy")

        return back


@pytest.fixture(scope="session")
def docker_engine() -> ModuleType:
    """tests/cluster/docker_engine.py."""
    return _load(REPOSITORY / "tests" / "cluster" / "docker_engine.py")


@pytest.fixture(scope="session")
def engine(docker_engine: Any) -> Iterator[Any]:
    """A Docker engine with the base images. Where none can run: a failure if SEMANTIDE_TEST_COMPOSE is set, a skip elsewhere."""
    module = docker_engine
    with ExitStack() as ends:
        try:
            running = ends.enter_context(module.engine())
            module.base_image(running)
            module.redis_image(running)
        except module.EngineMissing as error:
            if os.environ.get("SEMANTIDE_TEST_COMPOSE"):
                raise
            pytest.skip(f"THE COMPOSE STACK IS NOT TESTED: {error}")
        yield running


@pytest.fixture(scope="session")
def image(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A function that builds one target of the Dockerfile and gives the image's name."""
    with torch_index(tmp_path_factory.mktemp("wheels")) as address:

        @functools.cache
        def build(target: str, tag: str, *options: str) -> str:
            # The build reaches the package index by way of this machine's own network.
            arguments = ("--network", "host", "--build-arg", f"TORCH_INDEX={address}", "--target", target, "--tag", tag, *options)
            engine.docker("build", "--quiet", *arguments, str(REPOSITORY), timeout=3000)
            return tag

        yield build


@pytest.fixture(scope="session")
def stack(engine: Any, image: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """The whole stack, up and ready."""
    image("semantide", "semantide:test")
    override = tmp_path_factory.mktemp("compose") / "override.yml"
    # Half of a small machine for each tensor operation, and two trainings side by side; the containers share it.
    quiet = {"environment": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "SEMANTIDE_JOB_SLOTS": "2"}}
    override.write_text(json.dumps({"services": {name: quiet for name in (*ROOMS, "replica", "router", "console")}}))
    running = ComposeStack(engine, f"semantide-test-{os.getpid()}", override, free_port(), free_port(), free_port(), free_port())
    try:
        running.compose("up", "--no-build", "--wait", "--quiet-pull")
        yield running
    finally:
        running.compose("--profile", "observability", "--profile", "replicas", "down", "--volumes", "--timeout", "20")


@pytest.fixture(scope="session")
def walked(stack: ComposeStack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `semantide demo --running` prints of the stack; after it a model is live."""
    environment = {**os.environ, **stack.environment, "SEMANTIDE_URL": stack.url, "SEMANTIDE_DATA_DIR": str(tmp_path_factory.mktemp("demo")), "COLUMNS": "160"}
    command = [sys.executable, "-m", "semantide.services.commandline.main", "demo", "--running"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-3000:] + stack.compose("logs", "--no-color", "--tail", "60")
    return outcome.stdout


@pytest.fixture(scope="session")
def items(stack: ComposeStack, walked: str) -> list[str]:
    """Some items that the live model knows."""
    answer = stack.client().post("/v1/recommendations", {"user": "nobody", "n": 60})
    return [item["item"] for item in answer["items"]]


@pytest.fixture(scope="session")
def questions(items: list[str]) -> list[dict[str, Any]]:
    """Requests whose answers depend on nothing but the model."""
    return [{"history": items[place : place + 5], "n": 10} for place in range(0, 40, 5)]
