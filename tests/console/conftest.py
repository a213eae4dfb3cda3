"""A stack with two models, one of them live, and a browser that complains about whatever a page complains about."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from semantide.services.commandline.client import Client
from semantide.services.commandline.stack import Stack
from semantide.shared.broker import free_port
from semantide.shared.config import Settings

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable") if (path := shutil.which(name))), None)
KEY = "console-test-key"
WEAKER = {role: f"console-test-{role}-key" for role in ("read", "write")}
KEYS = ",".join([KEY, *(f"somebody@{role}:{key}" for role, key in WEAKER.items())])
NUM_ITEMS, NUM_USERS = 48, 90
_PATIENCE_MS = 60_000


@dataclass
class Site:
    """A running stack and its key."""

    url: str
    client: Client
    models: list[str] = field(default_factory=list)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One stack for all pages, brought up by the command line; or, to look at pages again and again, one that SEMANTIDE_TEST_STACK names (with these keys)."""
    if running := os.environ.get("SEMANTIDE_TEST_STACK"):
        client = Client(Settings(url=running, api_keys=KEY))
        yield Site(running, client, [job["artifacts"]["model"] for job in client.get("/v1/jobs", kind="train", state="succeeded", limit=2)])
        client._http.close()
        return
    folder = tmp_path_factory.mktemp("console")
    _write_input(folder / "in")
    settings = Settings(data_dir=folder / "data", port=free_port(), host="127.0.0.1", redis_url="", api_keys=KEYS, import_roots=str(folder / "in"))
    stack = Stack(settings, lambda text: None)
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith("SEMANTIDE_")}
    environment |= {"SEMANTIDE_DATA_DIR": str(folder / "data"), "SEMANTIDE_URL": stack.url, "SEMANTIDE_API_KEYS": KEY}

    def run(*arguments: str) -> None:
        command = [sys.executable, "-m", "semantide.services.commandline.main", *arguments]
        outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280, cwd=folder)
        assert outcome.returncode == 0, f"{arguments}\n{outcome.stdout}\n{outcome.stderr}"

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SEMANTIDE_API_KEYS", KEYS)
        try:
            stack.start()
            client = Client(Settings(url=stack.url, data_dir=folder / "data", api_keys=KEY))
            run("ingest", str(folder / "in"))
            run("dataset")
            run("tokenize", "--set", "level_sizes=[8,8,8]")
            run("train", "--recipe", "tiny", "--set", "epochs=2", "--set", "log_every=1")
            run("promote")
            run("train", "--recipe", "tiny", "--set", "epochs=1", "--set", "log_every=1", "--seed", "3")
            until(lambda: client.get("/v1/serving/live")["loaded_model"] is not None)
            models = [job["artifacts"]["model"] for job in client.get("/v1/jobs", kind="train")]
            yield Site(stack.url, client, models)
            client._http.close()
        finally:
            stack.stop()


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """A headless browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install -e '.[dev]'")
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Visitor:
    """A signed-in page, and what it complained about."""

    page: Any
    url: str
    complaints: list[str] = field(default_factory=list)

    def sign_in(self, key: str) -> None:
        """Be that key's holder, by the keyboard alone."""
        self.page.goto(f"{self.url}/console/logout")
        self.page.goto(self.url)
        self.page.wait_for_function("document.activeElement.id === 'key'")
        self.page.keyboard.type(key)
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector("#content h1")

    def open(self, path: str) -> Any:
        """Go to a page of the console and wait until it is there and listens."""
        self.page.goto(f"{self.url}/console{path}")
        self.page.wait_for_selector("#content h1")
        self.page.wait_for_function("window.socket && window.socket.connected")
        return self.page


@pytest.fixture(params=[(1280, "light"), (400, "dark")], ids=["wide-light", "narrow-dark"])
def visitor(request: pytest.FixtureRequest, chromium: Any, site: Site) -> Iterator[Visitor]:
    """Somebody who has signed in with the keyboard; a complaint of the browser fails the test."""
    width, look = request.param
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=look)
    context.set_default_timeout(_PATIENCE_MS)
    page = context.new_page()
    visitor = Visitor(page, site.url)
    page.on("console", lambda message: visitor.complaints.append(f"{message.type}: {message.text}") if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: visitor.complaints.append(str(error)))
    page.on("request", lambda asked: visitor.complaints.append(f"foreign: {asked.url}") if not asked.url.startswith((site.url, "data:", "blob:")) else None)
    visitor.sign_in(KEY)
    yield visitor
    context.close()
    assert visitor.complaints == []


def _write_input(folder: Path) -> None:
    """Everybody walks along a ring of items."""
    folder.mkdir()
    words = ("red", "blue", "green", "small", "large", "old", "new", "soft", "hard", "round", "flat", "warm")
    items = [
        {"id": f"item-{n}", "title": f"{words[n % 12]} {words[n // 4]} thing {n}", "categories": ["even" if n % 2 == 0 else "odd"]} for n in range(NUM_ITEMS)
    ]
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    rng = np.random.default_rng(5)
    start = int(time.time() * 1000) - 10**9
    rows = ["user,item,time,action"]
    for user in range(NUM_USERS):
        walk = (rng.integers(NUM_ITEMS) + np.cumsum(rng.integers(1, 3, rng.integers(6, 12)))) % NUM_ITEMS
        rows += [f"user-{user},item-{item},{start + user * 1000 + step},click" for step, item in enumerate(walk)]
    (folder / "interactions.csv").write_text("\n".join(rows) + "\n")
