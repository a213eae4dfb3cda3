"""The stack of docker-compose.yml in real containers, on an engine of the tests' own; built once, up for all tests of a session."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator
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


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


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
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=str(folder)))
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
    key: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def url(self) -> str:
        """Address of its API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """What docker compose, and the command line, get."""
        return {"SEMANTIDE_API_KEYS": self.key, "SEMANTIDE_PORT": str(self.port), "SEMANTIDE_IMAGE_TAG": "test"}

    def compose(self, *arguments: str, timeout: float = 1800) -> str:
        """Run ``docker compose ARGUMENTS`` of this project."""
        files = ("--file", str(REPOSITORY / "docker-compose.yml"), "--file", str(self.override), "--project-directory", str(REPOSITORY))
        found = self.engine.docker("compose", *files, "--project-name", self.project, *arguments, timeout=timeout, **self.environment)
        return str(found.stdout)

    def client(self) -> Client:
        """A client of its API."""
        return Client(Settings(url=self.url, api_keys=self.key))

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        name = f"{self.project}-{service}-1"
        found: dict[str, Any] = json.loads(self.engine.docker("inspect", name).stdout)[0]
        return found


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """A Docker engine with the base images. Where none can run: a failure if SEMANTIDE_TEST_COMPOSE is set, a skip elsewhere."""
    module = _load(REPOSITORY / "tests" / "cluster" / "docker_engine.py")
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
def image(engine: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that builds one target of the Dockerfile and gives the image's name."""
    folder = tmp_path_factory.mktemp("wheels")

    @functools.cache
    def build(target: str, tag: str, *options: str) -> str:
        with torch_index(folder) as address:
            # The build reaches the package index by way of this machine's own network.
            arguments = ("--network", "host", "--build-arg", f"TORCH_INDEX={address}", "--target", target, "--tag", tag, *options)
            engine.docker("build", "--quiet", *arguments, str(REPOSITORY), timeout=3000)
        return tag

    return build


@pytest.fixture(scope="session")
def stack(engine: Any, image: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """The whole stack, up and ready."""
    image("semantide", "semantide:test")
    override = tmp_path_factory.mktemp("compose") / "override.yml"
    # Half of a small machine for each tensor operation; the containers share it.
    services = ("api", *(f"{room}-worker" for room in ("ingestion", "tokenization", "negatives", "training", "reward", "serving")))
    override.write_text(json.dumps({"services": {name: {"environment": {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}} for name in services}}))
    running = ComposeStack(engine, f"semantide-test-{os.getpid()}", override, free_port())
    try:
        running.compose("up", "--no-build", "--wait", "--quiet-pull")
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "20")
