"""The console in a real browser: every page opens and every action works, by mouse and by keyboard, wide and narrow, light and dark."""

from __future__ import annotations

from typing import Any

import pytest

from tests.console.conftest import WEAKER, Site, Visitor, until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]

PAGES = ["/", "/try", "/catalog", "/jobs", "/models", "/cluster", "/compare"]


_NAMELESS = """() => [...document.querySelectorAll('a[href], button, input, select, textarea, [role=checkbox], [role=combobox]')].filter(node => node.offsetParent)
  .filter(node => !(node.innerText || node.getAttribute('aria-label') || node.closest('label')?.innerText || document.querySelector(`label[for="${node.id}"]`)?.innerText))
  .map(node => node.outerHTML.slice(0, 200))"""


@pytest.mark.parametrize("path", PAGES)
def test_every_page_opens_and_fits(visitor: Visitor, path: str) -> None:
    page = visitor.open(path)
    assert page.locator("#content h1").count() == 1 and page.title().endswith("Semantide")
    assert page.locator("[role=alert]").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "wider than the screen"
    assert page.evaluate(_NAMELESS) == []
    dark = page.evaluate("matchMedia('(prefers-color-scheme: dark)').matches")
    page.wait_for_function(f"document.body.classList.contains('body--dark') === {str(dark).lower()}")
    assert _contrast(page, "#content h1") > 7 and _contrast(page, ".note, caption div, td div") > 4.5


def _contrast(page: Any, selector: str) -> float:
    """The least contrast of texts with what is behind them, as WCAG counts it."""
    return float(
        page.evaluate(
            """selector => {
  const light = text => { const c = text.match(/[0-9.]+/g).map(Number).slice(0, 3).map(v => v / 255).map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2] };
  const behind = node => { for (; node; node = node.parentElement) { const b = getComputedStyle(node).backgroundColor; if (!/, 0\\)|transparent/.test(b)) return b } return 'rgb(255, 255, 255)' };
  const found = [...document.querySelectorAll(selector)].filter(node => node.offsetParent && node.textContent.trim());
  return Math.min(21, ...found.map(node => { const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05) })) }""",
            selector,
        )
    )


def test_overview_is_live(visitor: Visitor, site: Site) -> None:
    page = visitor.open("/")
    picture = page.locator("#content svg:visible").first
    assert "ingestion" in picture.get_attribute("aria-label")
    before = site.client.get("/v1/interactions/stats")["interactions"]
    site.client.post("/v1/interactions", {"interactions": [{"user": f"visitor-{before}", "item": "item-1", "time": 1_700_000_000_000}]})
    until(lambda: site.client.get("/v1/interactions/stats")["interactions"] == before + 1)
    page.wait_for_function(f"document.querySelector('#content svg').getAttribute('aria-label').replace(/\\D*interactions.*/, '').endsWith('{before + 1}')")
    assert page.get_by_text("Nothing: all is well.").is_visible()
    assert page.locator("td", has_text="live").first.is_visible()


def test_light_and_dark_are_kept(visitor: Visitor) -> None:
    page = visitor.open("/")
    dark = page.evaluate("document.body.classList.contains('body--dark')")
    page.get_by_role("button", name="Light or dark").click()
    for _ in range(2):
        page.wait_for_function(f"document.body.classList.contains('body--dark') === {str(not dark).lower()}")
        visitor.open("/cluster")


def test_keyboard_alone_asks_for_recommendations(visitor: Visitor) -> None:
    page = visitor.open("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Try it":
            break
    page.keyboard.press("Enter")
    page.wait_for_url("**/try")
    page.wait_for_function("window.socket && window.socket.connected")
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('aria-label')") == "User":
            break
    page.keyboard.type("user-3")
    page.keyboard.press("Enter")
    page.wait_for_selector("caption:has-text('items, best first')")


def test_recommendations_are_explained_and_filtered(visitor: Visitor) -> None:
    page = visitor.open("/try")
    page.get_by_label("History of items, oldest first").fill("item-3, item-5")
    page.get_by_label("How many").fill("4")
    page.get_by_label("Beams").fill("48")
    page.get_by_text("Filters and source").click()
    page.get_by_label("Any of these categories").fill("even")
    page.get_by_role("button", name="Recommend").click()
    page.wait_for_selector("caption:has-text('4 items, best first')")
    rows = page.locator("tbody tr")
    assert rows.count() == 4
    for row in rows.all():
        assert int(row.locator(".mono").inner_text().removeprefix("item-")) % 2 == 0
        assert row.locator("svg").get_attribute("aria-label").count("then") == 2
        assert "%" in row.locator("svg").text_content() and "thing" in row.locator("td").nth(4).inner_text()
    assert "48 beams" in page.locator("#content").inner_text() and "prefill" in page.locator("#content").inner_text()
    page.get_by_label("User").fill("user-3")
    page.get_by_role("button", name="Recommend").click()
    assert "not both" in page.wait_for_selector("[role=alert]").inner_text()


def test_items_are_found_and_the_tree_opens(visitor: Visitor) -> None:
    page = visitor.open("/catalog")
    page.get_by_label("Words of a title, or of an id").fill("RED")
    page.wait_for_selector("caption:has-text('found')")
    page.get_by_role("button", name="item-0", exact=True).click()
    page.wait_for_selector("h2:has-text('Item item-0')")
    page.wait_for_selector("caption:has-text('Near by code')")
    tree = page.get_by_role("tree")
    for level in range(2):
        tree.locator(".q-expansion-item").nth(level).locator(".q-item").first.click()
        page.wait_for_function(f"document.querySelectorAll('[role=tree] [role=group] [role=treeitem]').length > {level}")
    leaf = tree.locator("[role=treeitem] button").first
    leaf.wait_for(state="visible")
    leaf.click()
    page.wait_for_function("[...document.querySelectorAll('h2')].some(node => /^Item item-\\d+$/.test(node.textContent))")


def test_jobs_are_followed_cancelled_resumed_reported_and_compared(visitor: Visitor, site: Site) -> None:
    inputs = site.client.get("/v1/jobs", kind="train", state="succeeded")[0]["spec"]["inputs"]
    job = site.client.post("/v1/jobs", {"kind": "train", "recipe": "tiny", "config": {"epochs": 100_000, "log_every": 1}, "inputs": inputs})["id"]
    path = f"/v1/jobs/{job}"
    try:
        page = visitor.open("/jobs")
        page.get_by_role("link", name=job).click()
        page.wait_for_url(f"**/jobs/{job}")
        until(lambda: sum("loss" in row for row in site.client.get(f"{path}/metrics")) >= 2)
        page.wait_for_selector("svg[aria-label=Loss] polyline")
        page.get_by_role("button", name="Cancel").click()
        until(lambda: site.client.get(path)["state"] == "cancelled")
        page.wait_for_selector("td:has-text('cancelled')")
        page.get_by_role("button", name="Resume").click()
        until(lambda: site.client.get(path)["state"] in ("queued", "running"))
        site.client.post(f"{path}/cancel")
        until(lambda: site.client.get(path)["state"] == "cancelled")
        report = visitor.page.context.request.get(f"{site.url}/console/reports/{job}")
        assert report.ok and job in report.text() and "Configuration" in report.text()
    finally:
        if site.client.get(path)["state"] in ("queued", "running"):
            site.client.post(f"{path}/cancel")
    visitor.open("/jobs")
    trained = [each["id"] for each in site.client.get("/v1/jobs", kind="train", state="succeeded")][:2]
    for each in trained:
        page.get_by_role("checkbox", name=f"Choose {each} to compare").click()
    page.get_by_role("button", name="Compare the chosen ones").click()
    page.wait_for_selector("caption:has-text('In what they differ')")
    assert page.locator("svg[aria-label=loss]").count() == 1 and page.locator("th", has_text=trained[1]).count() == 1


def test_models_are_promoted_split_and_rolled_back(visitor: Visitor, site: Site) -> None:
    page = visitor.open("/models")
    live = site.client.get("/v1/serving/live")["model"]
    other = next(model for model in site.models if model != live)
    short = f"models/{other.partition('sha256-')[2][:10]}"
    page.get_by_role("button", name=f"Promote {short}", exact=True).click()
    until(lambda: site.client.get("/v1/serving/live")["model"] == other)
    page.wait_for_selector(f"text={short} is live.")
    page.get_by_label("Reason").fill("as before")
    page.get_by_role("button", name="Roll back").click()
    until(lambda: site.client.get("/v1/serving/live")["model"] == live)
    assert site.client.get("/v1/serving/decisions")["decisions"][-1]["reason"] == "as before"
    page.wait_for_selector("text=is live again.")
    page.get_by_label("Model", exact=True).click()
    page.get_by_role("option", name=short).click()
    page.get_by_role("button", name="Begin or change").click()
    until(lambda: len(site.client.get("/v1/serving/variants")["variants"]) == 2)
    visitor.open("/try")
    page.get_by_label("User").fill("user-5")
    page.get_by_label("Model B, beside it").click()
    page.get_by_role("option", name="challenger").click()
    page.get_by_role("button", name="Recommend").click()
    page.wait_for_selector("h2:has-text('Model B')")
    assert page.locator("th", has_text="place in the other").count() == 2
    visitor.open("/models")
    page.get_by_role("button", name="End the split").click()
    until(lambda: len(site.client.get("/v1/serving/variants")["variants"]) == 1)


@pytest.mark.parametrize("role", WEAKER)
def test_a_weaker_key_sees_every_page_and_why_it_may_not_act(visitor: Visitor, site: Site, role: str) -> None:
    job = site.client.get("/v1/jobs", kind="train", limit=1)[0]["id"]
    visitor.sign_in(WEAKER[role])
    wanted = {"/": 1, f"/jobs/{job}": 2, "/models": 3}
    for path in [*PAGES, f"/jobs/{job}"]:
        page = visitor.open(path)
        assert page.locator("[role=alert]").count() == 0 and page.get_by_text(f"somebody ({role})").is_visible()
        reasons = page.get_by_text(f"This wants a key with the role admin, and yours has the role {role}.")
        assert reasons.count() == wanted.get(path, 0), path
        assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth"), "wider than the screen"
        if path in wanted:
            assert all(reason.is_visible() for reason in reasons.all()) and _contrast(page, ".note.warn") > 4.5
    for path, names in ((f"/jobs/{job}", ("Cancel", "Resume")), ("/models", ("Roll back", "Promote", "If not worse", "Begin or change", "End the split"))):
        page = visitor.open(path)
        for name in names:
            found = page.locator("button", has_text=name)
            assert found.count() and all(button.is_disabled() for button in found.all()), name
    visitor.open("/try")
    page.get_by_label("User").fill("user-5")
    page.get_by_role("button", name="Recommend").click()
    page.wait_for_selector("caption:has-text('items, best first')")


def test_without_a_cluster_the_page_says_so(visitor: Visitor) -> None:
    assert "runs on one machine" in visitor.open("/cluster").locator("#content").inner_text()


def test_signing_out_ends_it(visitor: Visitor) -> None:
    page = visitor.open("/")
    page.get_by_role("link", name="Sign out").click()
    page.wait_for_selector("#key")
    page.goto(f"{visitor.url}/console/jobs")
    page.wait_for_selector("#key")
