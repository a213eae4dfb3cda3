"""What the pages say of the command line and the tree is so."""

import re
from pathlib import Path

import typer
import yaml

from semantide.operators.resources import NPUJob, NPUService
from semantide.services.commandline.main import app
from semantide.services.training.recipes import RECIPES

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_names_every_verb_and_no_other() -> None:
    group = typer.main.get_command(app)
    verbs = {f"{name} {inner}" if inner else name for name, command in group.commands.items() for inner in getattr(command, "commands", {"": None})}  # type: ignore[attr-defined]
    told: set[str] = set()
    page = (ROOT / "docs" / "operations.md").read_text().split("## The command line")[1].split("\n## ")[0]
    for cell in re.findall(r"^\| (`semantide .*?) \|", page, re.MULTILINE):
        first, *others = [" ".join(word for word in name.split() if word.islower()) for name in re.findall(r"`(?:semantide )?(.*?)`", cell)]
        before, _, _ = first.rpartition(" ")
        told |= {first, *(f"{before} {other}".strip() for other in others)}
    assert told == verbs


def test_the_operator_s_example_would_run() -> None:
    text = (ROOT / "docs" / "operator.md").read_text().split("```yaml\n")[1].split("```")[0]
    kinds = {"NPUJob": NPUJob, "NPUService": NPUService}
    shown = [kinds[each["kind"]].parse({**each, "metadata": {**each["metadata"], "namespace": "shop"}}) for each in yaml.safe_load_all(text)]
    assert [type(each) for each in shown] == [NPUJob, NPUService]
    assert isinstance(shown[0], NPUJob) and shown[0].spec.parameters["recipe"] in RECIPES


def test_make_runs_every_benchmark_that_has_a_quick_form() -> None:
    folder = ROOT / "tests" / "benchmarks"
    listed = set(re.split(r"[\s\\]+", re.search(r"^BENCHMARKS := ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]))  # type: ignore[index]
    runnable = {path.stem for path in folder.glob("*.py") if re.search(r"if __name__ == .*\n    (sys\.exit|raise SystemExit|main)", path.read_text())}
    # Those that want root or other packages than the project's, and the processes that others start.
    elsewhere = {"hierarchical_sparse", "retriever_rate", "rectools_hstu", "vllm_engine", "classic_app", "materialised_app"}
    assert listed == runnable - elsewhere


def test_the_readme_shows_the_tree_as_it_is() -> None:
    text = (ROOT / "README.md").read_text()
    tree = text.split("## The tree")[1].split("```")[1]
    shown, folder = set(), Path()
    for indent, name in re.findall(r"^( *)(\S+?)/? ", tree, re.MULTILINE):
        folder = folder if indent else Path(name)
        shown.add(folder / name if indent else folder)
    assert all((ROOT / path).exists() for path in shown)
    packages = {path.parent.relative_to(ROOT) for room in ("kernels", "shared", "services") for path in (ROOT / room).glob("**/__init__.py")}
    assert {path for path in packages if len(path.parts) < 3} <= shown
    pages = next(line for line in tree.splitlines() if line.startswith("docs/"))
    assert all(path.stem in pages for path in (ROOT / "docs").glob("*.md"))
