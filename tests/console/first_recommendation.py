"""How long a new user takes from ``git clone`` to a recommendation seen in the console: ``python tests/console/first_recommendation.py``.

Every step is what README.md says, typed into an empty folder: clone, `make demo`, `semantide up`, `semantide key`, sign in, *Try it*, Recommend. Packages are downloaded
and compiled anew (an empty pip cache); TORCH_INDEX is passed on. Needs Python 3.11, make, git and Chromium. Only the standard library is needed here; the browser is
driven from the environment that the clone makes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable") if (path := shutil.which(name))), None)
BOUND_SECONDS = 600.0


def look(url: str, key: str, user: str) -> None:
    """Sign in and ask for recommendations, in a browser; print the titles seen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(120_000)
        page.goto(url)
        page.fill("#key", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#content h1")
        page.get_by_role("link", name="Try it").click()
        page.wait_for_url("**/try")
        page.wait_for_function("window.socket && window.socket.connected")
        page.get_by_label("User").fill(user)
        page.get_by_role("button", name="Recommend").click()
        page.wait_for_selector("caption:has-text('items, best first')")
        sys.stdout.write(json.dumps([row.locator("td").nth(1).inner_text().split("\n")[0] for row in page.locator("tbody tr").all()]))
        browser.close()


def walk(source: str, folder: Path, told: Any) -> dict[str, float]:
    """Seconds of each step."""
    seconds: dict[str, float] = {}
    clone = folder / "semantide"
    environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith(("SEMANTIDE_", "VIRTUAL_ENV", "PYTHON"))}
    environment |= {"PIP_CACHE_DIR": str(folder / "pip"), "COLUMNS": "160"}

    @contextmanager
    def step(name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        seconds[name] = time.monotonic() - begin
        told(f"{seconds[name]:8.1f} s  {name}")

    def run(*command: str, **more: str) -> str:
        outcome = subprocess.run(command, cwd=clone, env=environment | more, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise SystemExit(f"{' '.join(command)} ended with status {outcome.returncode}\n{outcome.stdout[-4000:]}\n{outcome.stderr[-4000:]}")
        return outcome.stdout

    torch_index = f"TORCH_INDEX={os.environ.get('TORCH_INDEX', '')}"
    with step("git clone"):
        subprocess.run(["git", "clone", "--quiet", source, str(clone)], check=True)
    with step("make install (the first part of make demo)"):
        run("make", "install", torch_index)
    with step("make demo"):
        said = run("make", "demo", torch_index)
    user = re.search(r"^user (\S+), lately", said, re.MULTILINE)
    if user is None:
        raise SystemExit(f"the demo names no user:\n{said[-4000:]}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = {"SEMANTIDE_DATA_DIR": ".demo/kuairand", "SEMANTIDE_PORT": str(port)}
    semantide = str(clone / ".venv" / "bin" / "semantide")
    with step("semantide up"):
        stack = subprocess.Popen([semantide, "up"], cwd=clone, env=environment | here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _ready(stack, port)
        except BaseException:
            stack.terminate()
            raise
    try:
        with step("sign in, Try it, Recommend"):
            key = run(semantide, "key", **here).strip()
            script = str(clone / Path(__file__).relative_to(REPOSITORY))
            seen = json.loads(run(str(clone / ".venv" / "bin" / "python"), script, "--look", f"http://127.0.0.1:{port}", key, user[1]))
    finally:
        stack.send_signal(signal.SIGTERM)
        stack.wait(120)
    if not seen:
        raise SystemExit("the console showed no item")
    told(f"user {user[1]} is recommended: {'; '.join(seen[:3])}")
    return seconds


def _ready(stack: subprocess.Popen[bytes], port: int) -> None:
    while True:
        if stack.poll() is not None:
            raise SystemExit(f"semantide up ended with status {stack.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
                if json.load(answer)["status"] == "ok":
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)


def main() -> None:
    """Walk, and say how long it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=str(REPOSITORY), help="what to clone")
    parser.add_argument("--look", nargs=3, metavar=("URL", "KEY", "USER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.look:
        look(*options.look)
        return
    if CHROMIUM is None:
        raise SystemExit("no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory(prefix="semantide-new-user-") as folder:
        seconds = walk(options.source, Path(folder), lambda text: print(text, flush=True))
    total = sum(seconds.values())
    print(f"{total:8.1f} s  in all, {'within' if total < BOUND_SECONDS else 'BEYOND'} the {BOUND_SECONDS / 60:.0f} minutes that are asked for")
    print(json.dumps({"seconds": {name: round(value, 1) for name, value in seconds.items()}, "total": round(total, 1), "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
