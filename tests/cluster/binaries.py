"""The programs of a real control plane, built once from Debian's source package: ``python tests/cluster/binaries.py``.

    folder/etcd                       from the binary package etcd-server
    folder/kube-{apiserver,controller-manager,scheduler}, folder/kubelet
                                      from the source package kubernetes (1.20.2, with all it is made of) and Debian's Go 1.19

They are kept in SEMANTIDE_CLUSTER_CACHE (else ~/.cache/semantide-cluster), outside the repository. Nothing is installed: packages are unpacked into
the build's own folder. Only the standard library is needed, on a Debian machine with apt, a C compiler and make.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SERVERS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet")
_RELEASE = "bookworm"
_SOURCE = "1.20.5+really1.20.2"
_VERSION = "v1.20.2"
_PACKAGES = (
    "etcd-server",
    "golang-1.19-go",
    "golang-1.19-src",
    "golang-github-modern-go-reflect2-dev",
    # What Kubernetes' makefile calls, with the libraries that a small machine lacks.
    "rsync",
    "libpopt0",
    "libxxhash0",
    "jq",
    "libjq1",
    "libonig5",
)
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_NEEDED = ("apt-get", "apt-cache", "dpkg", "dpkg-source", "make", "gcc")
_FREE_BYTES = 8 * 2**30


class BinariesMissing(Exception):
    """The programs are neither kept nor can be built here."""


def cache_folder() -> Path:
    """Where built programs are kept."""
    return Path(os.environ.get("SEMANTIDE_CLUSTER_CACHE") or Path.home() / ".cache" / "semantide-cluster")


def kept() -> Path | None:
    """The folder of the programs, where they have been built already."""
    folder = cache_folder() / _SOURCE
    return folder if all((folder / name).exists() for name in ("etcd", *SERVERS)) else None


def obstacle() -> str:
    """Why the programs cannot be built on this machine; empty where they can."""
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: this needs Debian with build-essential"
    if not _KEYRING.exists():
        return f"{_KEYRING} not found: this needs Debian"
    if not _mirror():
        return "apt knows no Debian mirror"
    cache_folder().mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(cache_folder()).free) < _FREE_BYTES:
        return f"{free / 2**30:.1f} GiB free in {cache_folder()}, {_FREE_BYTES >> 30} are needed while it builds"
    return ""


def binaries() -> Path:
    """The folder of the programs; they are built first where they are absent, in about ten minutes of two cores.

    Raises: BinariesMissing.
    """
    if (folder := kept()) is not None:
        return folder
    if reason := obstacle():
        raise BinariesMissing(f"no control plane in {cache_folder()}, and none can be built: {reason}")
    with (cache_folder() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder := kept()) is None:
            for left in cache_folder().glob("build-*"):
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(prefix="build-", dir=cache_folder()) as work:
                folder = _build(Path(work))
    return folder


def _mirror() -> str:
    """The machine's own mirror of Debian, as apt names it."""
    outcome = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(ORIGIN) $(SITE) $(REPO_URI)"], capture_output=True, text=True, check=False
    )
    for line in outcome.stdout.splitlines():
        kind, origin, _, address = (line.split(" ") + [""] * 4)[:4]
        if kind == "Packages" and origin == "Debian" and "security" not in address:
            return address
    return ""


def _build(work: Path) -> Path:
    apt = _private_apt(work)
    root = work / "root"
    _run(["apt-get", *apt, "download", *_PACKAGES], work)
    for package in sorted(work.glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(root)], work)
        package.unlink()
    version = _source_version(apt)
    _run(["apt-get", *apt, "source", "--download-only", f"kubernetes={version}"], work)
    _run(["dpkg-source", "--no-check", "-x", next(work.glob("kubernetes_*.dsc")).name, "kubernetes"], work)
    source = work / "kubernetes"
    # The vendored version of this package crashes under Go 1.19 at the first write of a custom resource.
    vendored = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(root / "usr/share/gocode/src/github.com/modern-go/reflect2", vendored)
    _run(["make", "all", "WHAT=" + " ".join(f"cmd/{name}" for name in SERVERS)], source, _build_environment(work, root))
    finished = work / "finished"
    finished.mkdir()
    for name in SERVERS:
        shutil.copy2(source / "_output/local/go/bin" / name, finished / name)
    shutil.copy2(root / "usr/bin/etcd", finished / "etcd")
    folder = cache_folder() / _SOURCE
    shutil.rmtree(folder, ignore_errors=True)
    finished.rename(folder)
    return folder


def _private_apt(work: Path) -> list[str]:
    """Options that make apt read this release's packages and sources, and nothing of the machine's own lists."""
    (work / "sources.list").write_text("".join(f"{kind} [signed-by={_KEYRING}] {_mirror()} {_RELEASE} main\n" for kind in ("deb", "deb-src")))
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        (work / folder).mkdir(parents=True)
    said = {
        "Dir::Etc::SourceList": work / "sources.list",
        "Dir::Etc::SourceParts": work / "parts",
        "Dir::Etc::PreferencesParts": work / "parts",
        "Dir::State::Lists": work / "lists",
        "Dir::Cache": work / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }
    options = [part for name, value in said.items() for part in ("-o", f"{name}={value}")]
    _run(["apt-get", *options, "update"], work)
    return options


def _source_version(apt: list[str]) -> str:
    outcome = subprocess.run(["apt-cache", *apt, "showsrc", "--only-source", "kubernetes"], capture_output=True, text=True, check=True)
    versions = [version for version in re.findall(r"^Version: (\S+)$", outcome.stdout, re.MULTILINE) if version.startswith(_SOURCE)]
    if not versions:
        raise BinariesMissing(f"the mirror has no source package kubernetes {_SOURCE}")
    return versions[0]


def _build_environment(work: Path, root: Path) -> dict[str, str]:
    go = root / "usr/lib/go-1.19"
    return {
        "PATH": f"{go / 'bin'}:{root / 'usr/bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(str(folder) for folder in (root / "usr/lib").glob("*-linux-gnu*")),
        "HOME": str(work),
        "GOROOT": str(go),
        "GOCACHE": str(work / "gocache"),
        "GOFLAGS": "-tags=providerless",
        "GOLDFLAGS": "-s -w",
        "GOPROXY": "off",
        "KUBE_GIT_VERSION": _VERSION,
        "KUBE_GIT_COMMIT": "debian",
        "KUBE_GIT_TREE_STATE": "clean",
        "KUBE_GIT_MAJOR": "1",
        "KUBE_GIT_MINOR": "20",
        "SOURCE_DATE_EPOCH": "1700000000",
    }


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    with (cache_folder() / "build.log").open("a") as log:
        outcome = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if outcome.returncode:
        end = (cache_folder() / "build.log").read_text(errors="replace")[-2000:]
        raise BinariesMissing(f"`{' '.join(command[:4])} ...` ended with {outcome.returncode}; the end of {cache_folder()}/build.log:\n{end}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{binaries()}\n")
    except BinariesMissing as error:
        sys.exit(str(error))
