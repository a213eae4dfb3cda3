"""Takes the pictures of docs/console.md from a running stack: ``python docs/console/pictures.py --url http://127.0.0.1:8000 --key KEY``."""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Any

from PIL import Image
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
            picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
            picture.crop((0, 0, picture.width, min(picture.height, _HEIGHT))).save(FOLDER / f"{name}.webp", quality=80, method=6)
        browser.close()


if __name__ == "__main__":
    main()
