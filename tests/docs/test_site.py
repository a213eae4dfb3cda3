"""What pages say of the repository is so: files, pages, papers; and the parts of the site that are made from the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from . import checks
from .blocks import PAGES, ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
_FOLDERS = "kernels|shared|services|operators|client|charts|docker|tests|docs|samples"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(rf"`((?:{_FOLDERS})/[\w./-]+\.(?:py|h|cpp|md|yaml|json|webp))`", page.read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_test_and_benchmark_that_a_page_names_is_there(page: Path) -> None:
    named = set(re.findall(r"(?:python |`)(tests/[\w/]+\.py)", page.read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


def test_each_paper_has_its_mechanisms_with_their_files() -> None:
    text = (ROOT / "docs" / "mechanisms.md").read_text()
    for paper, number, least in (("TurboGR", "2605.13433", 7), ("GenRec", "2604.14878", 5), ("xGR", "2512.11529", 6), ("OneLA", "2609.12399", 4)):
        section = next(part for part in re.split(r"^## ", text, flags=re.MULTILINE) if part.startswith(paper))
        rows = [row for row in section.splitlines() if row.startswith("| ") and not row.startswith("| mechanism")]
        assert number in section and len(rows) >= least
        assert all(re.search(rf"`({_FOLDERS})/", row) for row in rows), f"{paper}: a mechanism without its file"


def test_the_menu_has_every_page() -> None:
    # mkdocs itself refuses a page that is not there, and links and anchors that lead nowhere (`make docs`).
    menu = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(menu) == len(set(menu))
    made = set(re.findall(r'"([\w-]+\.md)": ', (ROOT / "docs" / "hooks.py").read_text()))
    assert set(menu) == {page.name for page in DOCS} | made
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text())["theme"]["font"] is False, "the site asks no other site for fonts"


def test_the_table_of_kernels_is_the_registry() -> None:
    reference = checks.load("reference", ROOT / "docs" / "reference.py")
    text = (ROOT / "docs" / "kernels.md").read_text()
    begin, end = reference.KERNELS
    assert text.partition(begin)[2].partition(end)[0].strip() == reference.kernels(), "run `python docs/reference.py`"


def test_the_reference_has_every_route_verb_and_method() -> None:
    from semantide.client import Client

    reference = checks.load("reference", ROOT / "docs" / "reference.py")
    document, rest = reference.document(), reference.rest()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"### {method.upper()} {path}\n" in rest
    assert all(f"### {name}\n" in rest for name in document["components"]["schemas"])
    commands = reference.commands()
    assert all(f"### {name}\n" in commands for name in reference.verbs()) and "### semantide users delete" in commands
    client = reference.python_client()
    assert all(f"### {kind}.{name}\n" in client for kind in ("Client", "AsyncClient") for name in dir(Client) if not name.startswith("_") and name != "url")
