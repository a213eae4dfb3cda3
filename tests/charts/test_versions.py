"""One version of the software, wherever it is named; a chart brings another one than the chart before it, or an upgrade would leave every process as it was."""

from __future__ import annotations

import re
import tarfile
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from semantide.operators.settings import OperatorSettings

from .test_chart import Manifest, Render, of_kind

REPOSITORY = Path(__file__).resolve().parents[2]
PREVIOUS = REPOSITORY / "tests" / "cluster" / "semantide-0.1.0.tgz"


def test_everybody_names_the_same_version(lint: ModuleType) -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((lint.CHART / "Chart.yaml").read_text())["appVersion"] == version
    places = [OperatorSettings.model_fields["image"].default]
    places += [path.read_text() for path in (*lint.CHART.glob("values*.yaml"), *(REPOSITORY / "docs").glob("*.md"))]
    named = {found for text in places for found in re.findall(r"(?<!/)semantide(?:-operator)?:([0-9][0-9.]*)", text)}
    assert named == {version}


def test_an_upgrade_from_the_chart_before_changes_every_image(lint: ModuleType, render: Render, tmp_path: Path) -> None:
    with tarfile.open(PREVIOUS) as archive:
        archive.extractall(tmp_path, filter="data")
    outcome = lint.helm("template", "shop", str(tmp_path / "semantide"), "--namespace", "shop")
    assert outcome.returncode == 0, outcome.stderr
    before, after = images([manifest for manifest in yaml.safe_load_all(outcome.stdout) if manifest]), images(render())
    assert before and before.keys() <= after.keys()
    for name, image in before.items():
        # The broker's is another maker's since, who reads the old one's files (test_broker.py).
        assert image != after[name] and (name.endswith("-redis") or image.partition(":")[0] == after[name].partition(":")[0]), name


def images(manifests: list[Manifest]) -> dict[str, Any]:
    """Image by Deployment or StatefulSet."""
    return {
        name: each["spec"]["template"]["spec"]["containers"][0]["image"]
        for kind in ("Deployment", "StatefulSet")
        for name, each in of_kind(manifests, kind).items()
    }
