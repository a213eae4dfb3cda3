"""The programs of a real control plane, built once from Debian's source package: ``python tests/cluster/binaries.py``; with ``kept`` it only answers
whether they are there. Its status is 0 where they are, 1 where they are not yet (or could not be built), and 2, with the reason, where this machine cannot build them.

    folder/etcd                       from the binary package etcd-server
    folder/kube-{apiserver,controller-manager,scheduler}, folder/kubelet
                                      from the source package kubernetes (1.20.2, with all it is made of) and Debian's Go 1.19

They are kept in SEMANTIDE_CLUSTER_CACHE (else ~/.cache/semantide-cluster), outside the repository. Nothing is installed: packages are unpacked into
the build's own folder. Only the standard library is needed, on a Debian machine with apt and dpkg-dev.
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
_PACKAGES = ("etcd-server", "golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_NEEDED = ("apt-get", "apt-cache", "dpkg", "dpkg-source")
_FREE_BYTES = 8 * 2**30


class BinariesMissing(Exception):
    """The programs are not kept, and could not be built."""


class NoPlace(BinariesMissing):
    """This machine cannot build them."""


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
        return f"{', '.join(missing)} not found: this needs Debian with dpkg-dev"
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

    Raises: BinariesMissing, NoPlace.
    """
    if (folder := kept()) is not None:
        return folder
    if reason := obstacle():
        raise NoPlace(f"no control plane in {cache_folder()}, and none can be built: {reason}")
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
    # Where Go looks for the package k8s.io/kubernetes.
    source = work / "go/src/k8s.io/kubernetes"
    source.parent.mkdir(parents=True)
    _run(["dpkg-source", "--no-check", "-x", next(work.glob("kubernetes_*.dsc")).name, str(source)], work)
    # The vendored version of this package crashes under Go 1.19 at the first write of a custom resource.
    vendored = source / "vendor/github.com/modern-go/reflect2"
    shutil.rmtree(vendored)
    shutil.copytree(root / "usr/share/gocode/src/github.com/modern-go/reflect2", vendored)
    finished = _compile(work, source, root / "usr/lib/go-1.19")
    shutil.copy2(root / "usr/bin/etcd", finished / "etcd")
    folder = cache_folder() / _SOURCE
    shutil.rmtree(folder, ignore_errors=True)
    finished.rename(folder)
    return folder


def _compile(work: Path, source: Path, go: Path) -> Path:
    """Build without the makefile, whose generators would first write anew what the source package holds already; all but one file."""
    environment = {
        "PATH": f"{go / 'bin'}:{os.environ['PATH']}",
        "HOME": str(work),
        "GOROOT": str(go),
        "GOPATH": str(work / "go"),
        "GOCACHE": str(work / "gocache"),
        "GO111MODULE": "off",
        "GOPROXY": "off",
        "CGO_ENABLED": "0",
        # The compiler is many short processes: collecting their garbage costs more than it frees.
        "GOGC": "400",
    }
    finished = work / "finished"
    finished.mkdir(exist_ok=True)
    generator = work / "openapi-gen"
    _run(["go", "build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen"], source, environment)
    mark, places = re.compile(rb"\+k8s:openapi-gen="), ("pkg", "cmd", "vendor/k8s.io")
    files = (
        file
        for place in places
        for folder, _, names in os.walk(source / place, followlinks=True)
        for name in names
        if (file := Path(folder, name)).suffix == ".go"
    )
    tagged = {str(file.parent.relative_to(source)) for file in files if mark.search(file.read_bytes())}
    wanted = sorted(f"k8s.io/kubernetes/{one}" for one in tagged if not re.search(r"/(code-generator|sample-apiserver|kube-openapi|gengo)/", f"{one}/"))
    to = "k8s.io/kubernetes/pkg/generated/openapi"
    options = ["-i", ",".join(wanted), "-p", to, "-O", "zz_generated.openapi", "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt", "-r", os.devnull]
    _run([str(generator), *options], source, environment)
    packages = [f"k8s.io/kubernetes/vendor/k8s.io/{name}" for name in ("client-go/pkg/version", "component-base/version")]
    said = {"gitVersion": _VERSION, "gitMajor": "1", "gitMinor": "20", "gitCommit": "debian", "gitTreeState": "clean", "buildDate": "2021-01-13T13:20:00Z"}
    flags = " ".join(["-s", "-w", *(f"-X {package}.{name}={value}" for package in packages for name, value in said.items())])
    _run(["go", "build", "-tags", "providerless", "-ldflags", flags, "-o", f"{finished}/", *(f"./cmd/{name}" for name in SERVERS)], source, environment)
    return finished


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


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    with (cache_folder() / "build.log").open("a") as log:
        outcome = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False)
    if outcome.returncode:
        end = (cache_folder() / "build.log").read_text(errors="replace")[-2000:]
        raise BinariesMissing(f"`{' '.join(command[:4])} ...` ended with {outcome.returncode}; the end of {cache_folder()}/build.log:\n{end}")


def main(arguments: list[str]) -> int:
    """Look, or build; the exit status."""
    only_look = arguments == ["kept"]
    try:
        if only_look and kept() is None and not obstacle():
            return 1
        sys.stdout.write(f"{binaries()}\n")
    except BinariesMissing as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, NoPlace) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
