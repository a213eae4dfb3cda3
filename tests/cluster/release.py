"""The chart as a release on a control plane, by real Helm."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from .api import Api, Object, Refused, until

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "charts" / "semantide"
PREVIOUS_CHART = Path(__file__).with_name("semantide-0.1.0.tgz")
"""The chart as it was published before this one."""

BY_CLIENT = "--server-side=false"
"""For that one: a port without `protocol` cannot be applied by the server of these tests, whose schema has no default for it. Upgrades go on as it began."""


def _lint() -> ModuleType:
    """The script that finds Helm; it runs without a package around it."""
    if "chart_lint" not in sys.modules:
        spec = importlib.util.spec_from_file_location("chart_lint", REPOSITORY / "tests" / "charts" / "lint.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["chart_lint"] = module
        spec.loader.exec_module(module)
    return sys.modules["chart_lint"]


class Release:
    """One release of the chart in one namespace."""

    def __init__(self, name: str, namespace: str, kubeconfig: Path) -> None:
        self.name, self.namespace, self._kubeconfig = name, namespace, kubeconfig

    def install(self, chart: Path = CHART, *options: str) -> str:
        """Raises: AssertionError with Helm's words."""
        return self._helm("install", self.name, str(chart), *options)

    def upgrade(self, chart: Path = CHART, *options: str) -> str:
        """Raises: AssertionError with Helm's words."""
        return self._helm("upgrade", self.name, str(chart), *options)

    def roll_back(self, revision: int) -> str:
        """Raises: AssertionError with Helm's words."""
        return self._helm("rollback", self.name, str(revision))

    def test(self, *options: str) -> str:
        """What Helm's own test of the release prints.

        Raises: AssertionError with Helm's words.
        """
        return self._helm("test", self.name, *options)

    def uninstall(self) -> str:
        """Raises: AssertionError with Helm's words."""
        return self._helm("uninstall", self.name)

    def template(self, *options: str) -> list[dict[str, Any]]:
        """What would be installed, hooks included."""
        return [one for one in yaml.safe_load_all(self._helm("template", self.name, str(CHART), *options)) if one]

    def _helm(self, *arguments: str) -> str:
        lint = _lint()
        folder = lint.cache_folder() / "helm"
        own = {f"HELM_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
        environment = {**os.environ, **own, "KUBECONFIG": str(self._kubeconfig)}
        command = [str(lint.helm_binary()), *arguments, "--namespace", self.namespace]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert outcome.returncode == 0, f"helm {' '.join(arguments)}:\n{outcome.stderr}"
        return outcome.stdout


def chart_without(chart: Path, folder: Path, template: str, field: str) -> Path:
    """A copy of the chart whose custom resource lacks one field of its spec: an older one."""
    copy = folder / "older"
    shutil.copytree(chart, copy)
    path = copy / "templates" / template
    lines, kept, inside = path.read_text().splitlines(), [], -1
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if inside >= 0 and (indent > inside or not line.strip()):
            continue
        inside = indent if line.strip().startswith(f"{field}:") else -1
        if inside < 0:
            kept.append(line)
    assert len(kept) < len(lines), f"{path} has no field {field}"
    path.write_text("\n".join(kept) + "\n")
    return copy


def unpacked(archive: Path, folder: Path) -> Path:
    """The folder of a packed chart."""
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")
    return folder / "semantide"


def unbound(chart: Path, folder: Path) -> Path:
    """A copy of the chart that an old control plane may install: the one of these tests is older than what the chart asks for."""
    copy = folder / f"{chart.parent.name}-{chart.name}-unbound"
    shutil.copytree(chart, copy)
    path = copy / "Chart.yaml"
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if not line.startswith("kubeVersion:")))
    return copy


def apply(api: Api, kubeconfig: Path, namespace: str, kinds: tuple[str, ...], *options: str) -> None:
    """Put the chart's objects of some kinds on the control plane, apart from the rest of the chart."""
    plurals = {"CustomResourceDefinition": "customresourcedefinitions", "ServiceAccount": "serviceaccounts"}
    plurals |= {"Role": "roles", "RoleBinding": "rolebindings", "ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings"}
    for manifest in Release("semantide", namespace, kubeconfig).template(*options):
        if manifest["kind"] not in kinds:
            continue
        plural = plurals[manifest["kind"]]
        where = "" if plural == "customresourcedefinitions" or plural.startswith("cluster") else namespace
        try:
            api.create(plural, manifest, where)
        except Refused as error:
            if error.status != 409:
                raise


def definitions(api: Api) -> list[Object]:
    """The definitions of our custom resources that the API server has."""
    return [one for one in api.list("customresourcedefinitions") if one["spec"]["group"] == "semantide.io"]


def remove_definitions(api: Api) -> None:
    """Take the custom resources away, with what there is of them: a release never does that itself, and another one may not take them over."""
    for one in definitions(api):
        api.delete("customresourcedefinitions", one["metadata"]["name"])
    until(lambda: not definitions(api), "the custom resources are gone")


def served(api: Api) -> bool:
    """Whether the API server takes objects of both custom resources."""
    named = definitions(api)
    return len(named) == 2 and all(
        any(c["type"] == "Established" and c["status"] == "True" for c in one.get("status", {}).get("conditions") or ()) for one in named
    )


def kubectl(kubeconfig: Path, *arguments: str) -> str:
    """What kubectl prints.

    Raises: subprocess.CalledProcessError.
    """
    command = [str(_lint().kubectl_binary()), f"--kubeconfig={kubeconfig}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
