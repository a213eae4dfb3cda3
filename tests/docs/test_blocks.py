"""Every fenced block of the documentation belongs to a class, and whatever of it can be checked without being run is right."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from . import checks
from .blocks import PAGES, ROOT, Block, Command, all_blocks, commands, logical_lines, script
from .running import CHECKED_ALONE, PLAIN, RUN, why_not_run

BLOCKS = all_blocks()
SHELL = [block for block in BLOCKS if block.language == "sh"]
# Languages other than the shell's: python blocks run in test_python.py.
DATA = ("yaml", "json", "ini", "promql")


@pytest.fixture(scope="session")
def lint() -> ModuleType:
    """Finds a Helm that runs."""
    module = checks.load("lint", ROOT / "tests" / "charts" / "lint.py")
    try:
        module.helm_binary()
    except module.HelmMissing as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(f"HELM'S BLOCKS ARE NOT TESTED: {error}")
    return module


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, lint: ModuleType) -> Path:
    """A folder with the files of values that pages show under a name."""
    folder = tmp_path_factory.mktemp("pages")
    for block in BLOCKS:
        if block.language == "yaml":
            checks.yaml_block(block, lint.helm, folder)
    return folder


@pytest.fixture(scope="session")
def manifests(lint: ModuleType) -> list[dict[str, Any]]:
    """What the chart makes with everything on, of the release ``semantide``."""
    options = ("--set", "servingReplicas.main.replicas.min=1", "--api-versions", "semantide.io/v1alpha1/NPUService")
    outcome = lint.helm("template", "semantide", str(lint.CHART), *options)
    assert outcome.returncode == 0, outcome.stderr
    return [each for each in yaml.safe_load_all(outcome.stdout) if each]


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The OpenAPI document of all rooms."""
    found: dict[str, Any] = checks.load("reference", ROOT / "docs" / "reference.py").document()
    return found


def named(*programs: str) -> list[Command]:
    return [command for block in SHELL for command in script(block) if command.program in programs]


def test_every_block_is_in_a_class() -> None:
    """Shell blocks line by line: run in test_shell.py, or in the one list of what cannot be, with a reason, and checked here all the same."""
    counts: Counter[str] = Counter()
    for block in BLOCKS:
        if block.language == "sh":
            assert script(block), f"{block} has no command"
            for line in logical_lines(block.text):
                for command in commands(line):
                    assert command.program in RUN | PLAIN | CHECKED_ALONE.keys(), f"{block}: nobody knows how to run or check {command.program!r}"
                counts["checked only" if why_not_run(block, line) else "run"] += 1
        elif block.language == "python":
            counts["python"] += 1
        elif block.language in DATA:
            counts[block.language] += 1
        else:
            assert block.language == "" and block.page == "README.md", f"{block}: a block in {block.language or 'no language'} is in no class"
            assert not re.search(r"^(semantide|make|curl|docker|helm|kubectl) ", block.text, re.MULTILINE)
            counts["drawing"] += 1
    print(dict(counts))
    assert counts["run"] > counts["checked only"]


def test_what_is_not_run_is_listed_once_and_each_entry_is_needed() -> None:
    unused = set(CHECKED_ALONE)
    for block in SHELL:
        for line in logical_lines(block.text):
            unused -= {command.program for command in commands(line)}
    assert not unused, f"{unused} are listed and in no block"


@pytest.mark.parametrize("check", ["semantide", "make", "docker", "python"])
def test_commands_are_right(check: str) -> None:
    programs = {"python": ("python", "python3")}.get(check, (check,))
    found = named(*programs)
    assert found
    for command in found:
        getattr(checks, check)(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_and_variables_within_sentences_are_right(page: Path) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for words in re.findall(r"`((?:\.venv/bin/)?semantide [^`]+)`", text):
        checks.inline(words)
    for target in re.findall(r"`make ([a-z-]+)[^`]*`", text):
        checks.make(Command(("make", target), target))
    for name in re.findall(r"`(SEMANTIDE_[A-Z_]+[A-Z])(?:=[^`]*)?`", text):
        checks.assert_variable(name)


def test_charts_of_helm_s_blocks_render(lint: ModuleType, files: Path) -> None:
    found = named("helm")
    assert len(found) > 5
    for command in found:
        checks.helm(command, lint.helm, files)


def test_kubectl_names_what_there_is(manifests: list[dict[str, Any]]) -> None:
    for command in named("kubectl"):
        checks.kubectl(command, manifests)


def test_routes_and_bodies_of_curl_are_right(document: dict[str, Any]) -> None:
    found = named("curl")
    assert len(found) > 5
    for command in found:
        checks.curl(command, document)


def test_variables_are_settings() -> None:
    for block in SHELL:
        for name in re.findall(r"\b(SEMANTIDE_[A-Z_]+)=", block.text):
            checks.assert_variable(name)


@pytest.mark.parametrize(("language", "check"), [("json", checks.json_block), ("ini", checks.ini_block), ("promql", checks.promql_block)])
def test_blocks_of_data_are_right(language: str, check: Callable[[Block], None]) -> None:
    found = [block for block in BLOCKS if block.language == language]
    assert found
    for block in found:
        check(block)


def test_blocks_of_yaml_are_values_or_resources(files: Path) -> None:
    assert (files / "replicas.yaml").exists()


@pytest.mark.parametrize(
    "line",
    [
        "semantide trian",
        "semantide train --recipy tiny",
        "semantide train --recipe enormous",
        "semantide dataset --set x",
        "semantide train --set epoch=3",
        "semantide align --set groop=3",
    ],
)
def test_a_wrong_command_is_found(line: str) -> None:
    with pytest.raises(Exception, match=r"no such|[Nn]o such|unknown|not NAME=VALUE"):
        for command in commands(line):
            checks.semantide(command)
