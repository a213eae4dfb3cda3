"""The commands of the documentation, page by page, line by line, in a shell beside a real stack that ``semantide up`` has started."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from semantide.services.commandline.client import Client
from semantide.shared.broker import free_port, server_binary
from semantide.shared.config import Settings

from .blocks import PAGES, ROOT, Block, blocks_of, commands, logical_lines
from .running import ORDER, Reader, by_hand, is_up, shortened, why_not_run

pytestmark = pytest.mark.docs

# Long work that several pages ask for in the same words is done for the first of them.
_MADE_ONCE = (
    "semantide train",
    "semantide evaluate",
    "semantide tokenize",
    "semantide dataset",
    "semantide ingest",
    "semantide reward",
    "semantide align",
    "semantide negatives",
)


def shell_blocks(page: str) -> list[Block]:
    return [block for block in blocks_of(ROOT / page) if block.language == "sh"]


def said_variables(page: str) -> dict[str, str]:
    """What a page exports for a process of its own."""
    lines = [line for block in shell_blocks(page) for line in logical_lines(block.text) if line.startswith("export SEMANTIDE_SERVING")]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line)[1:])


def surroundings(folder: Path) -> dict[str, str]:
    """The environment of a shell in a folder that has the command line, as after an installation, and nothing of another stack."""
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    programs = {"semantide": f"{shlex.quote(sys.executable)} -m semantide.services.commandline.main"}
    if shutil.which("redis-server") is None:
        programs["redis-server"] = shlex.quote(str(server_binary()))
    for name, command in programs.items():
        (binaries / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (binaries / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "KEY", "URL") and not name.startswith("SEMANTIDE_")}
    return kept | {"PATH": f"{binaries}:{os.environ['PATH']}"}


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Until a stack answers.

    Raises: AssertionError where it ends before, or takes minutes.
    """
    deadline = time.monotonic() + 600
    while True:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(f"{url}/readyz", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)


class Beside:
    """A folder with a stack, and a shell in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = surroundings(folder)
        # The settings that the page about latency gives are those of this stack.
        started = self.environment | said_variables("docs/latency.md") | {"SEMANTIDE_PORT": str(self.port)}
        with (folder / "up.log").open("w") as log:
            self.process = subprocess.Popen(["semantide", "up"], env=started, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self.reader: Reader | None = None
        self.done: dict[str, str] = {}

    def wait_ready(self) -> None:
        wait_ready(self.process, self.url, self.folder / "up.log")
        # The demo's folder is this one's.
        (self.folder / ".demo").mkdir()
        (self.folder / ".demo" / "kuairand").symlink_to(self.folder / ".semantide")
        self.reader = Reader(Client(Settings(url=self.url, data_dir=self.folder / ".semantide")), self.url)

    def run(self, line: str) -> str:
        """Run one line with the variables that those before it on the page have set; what it printed."""
        assert self.reader is not None
        typed = shortened(self.reader.fill(line))
        same = typed.replace(".venv/bin/", "").partition("  #")[0].strip()
        if same in self.done and same.startswith(_MADE_ONCE):
            return self.done[same]  # for another page; its answer would take as long again
        script = f"set -euo pipefail; [ ! -f .shell ] || . ./.shell; set -a\n{typed}\nset +a; export -p > .shell"
        outcome = subprocess.run(["bash", "-c", script], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False, timeout=1800)
        # With so few people a paired test may well hold a model back, and says so.
        held_back = "--if-not-worse" in typed and "\nheld back: " in outcome.stdout
        assert outcome.returncode == 0 or held_back, f"{typed}\nended with {outcome.returncode}\n{outcome.stdout[-3000:]}\n{outcome.stderr[-3000:]}"
        self.done[same] = outcome.stdout
        return outcome.stdout

    def forget_variables(self) -> None:
        (self.folder / ".shell").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    stack = Beside(tmp_path_factory.mktemp("reader"))
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.process.terminate()
        stack.process.wait(120)


def test_no_page_with_commands_is_forgotten() -> None:
    wanted = {
        block.page
        for page in PAGES
        for block in shell_blocks(page.relative_to(ROOT).as_posix())
        for line in logical_lines(block.text)
        if not why_not_run(block, line)
    }
    assert {page for page in wanted if page not in ORDER and any(not is_up(line) for line in runnable(page))} == set()


def runnable(page: str) -> list[str]:
    return [line for block in shell_blocks(page) if not by_hand(block) for line in logical_lines(block.text) if not why_not_run(block, line)]


@pytest.mark.parametrize("page", ORDER)
def test_the_commands_of_a_page_run(beside: Beside, page: str) -> None:
    """Each of them ends with status 0; pages stand on what those before them made."""
    beside.forget_variables()
    if page == "docs/data.md":
        for block in blocks_of(ROOT / page):
            if block.language == "python":
                subprocess.run([sys.executable, "-c", block.text], cwd=beside.folder, check=True, timeout=120)
    for line in runnable(page):
        if is_up(line):
            continue  # what the fixture runs
        said = beside.run(line)
        if any(command.program == "curl" for command in commands(line)):
            assert said.strip(), f"{line} printed nothing"
        if " recommend " in line:
            assert "\n" in said, f"{line} recommended nothing"


def test_the_stack_by_hand_starts(tmp_path: Path) -> None:
    """The block that starts a broker, every worker and the APIs one by one."""
    block = next(block for block in shell_blocks("docs/operations.md") if by_hand(block))
    port, broker = free_port(), free_port()
    script = block.text.replace("6400", str(broker))
    environment = surroundings(tmp_path) | {"SEMANTIDE_PORT": str(port)}
    with (tmp_path / "log").open("w") as log:
        shell = subprocess.Popen(
            ["bash", "-c", script], env=environment, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_ready(shell, url := f"http://127.0.0.1:{port}", tmp_path / "log")
        client = Client(Settings(url=url, data_dir=tmp_path / ".semantide"))
        assert client.send_interactions([{"user": "42", "item": "a-17", "time": 1767225600000}]).accepted == 1
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        try:
            shell.wait(60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
