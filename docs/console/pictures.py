"""Takes the pictures of docs/console.md from a running stack: ``python docs/console/pictures.py --url http://127.0.0.1:8000 --key KEY``."""

from __future__ import annotations

import argparse
import base64
import shutil
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

FOLDER = Path(__file__).resolve().parent
_WIDTH = 1280
_HEIGHT = 1100


def prepare(page: Any, name: str, history: str) -> None:
    """Bring a page into the state that is shown."""
    if name == "try":
        page.get_by_label("History of items, oldest first").fill(history)
        page.get_by_label("How many").fill("5")
        page.get_by_role("button", name="Recommend").click()
        page.wait_for_selector("caption:has-text('items, best first')")
    elif name == "catalog":
        page.locator("[role=tree] .q-item").first.click()
        page.wait_for_selector("[role=tree] [role=group] [role=treeitem]")
    elif name == "job":
        page.get_by_role("link", name="train-").first.click()
        page.wait_for_selector("svg polyline")


def main() -> None:
    """All of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", required=True)
    parser.add_argument("--history", default="item-3, item-5, item-6", help="items of the stack's catalog")
    options = parser.parse_args()
    chromium = next(path for name in ("chromium", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": _WIDTH, "height": 800}, color_scheme="light")
        page.goto(options.url)
        page.fill("#key", options.key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#content h1")
        for name, path in (("overview", "/"), ("try", "/try"), ("catalog", "/catalog"), ("job", "/jobs"), ("models", "/models")):
            page.goto(f"{options.url}/console{path}")
            page.wait_for_selector("#content h1")
            page.wait_for_function("window.socket && window.socket.connected")
            prepare(page, name, options.history)
            page.wait_for_timeout(1500)
            height = min(page.evaluate("document.documentElement.scrollHeight"), _HEIGHT)
            clip = {"x": 0, "y": 0, "width": _WIDTH, "height": height, "scale": 1}
            taken = page.context.new_cdp_session(page).send(
                "Page.captureScreenshot", {"format": "webp", "quality": 80, "clip": clip, "captureBeyondViewport": True}
            )
            (FOLDER / f"{name}.webp").write_bytes(base64.b64decode(taken["data"]))
        browser.close()


if __name__ == "__main__":
    main()
