"""A Docker engine of the tests' own: ``python tests/cluster/docker_engine.py run COMMAND...`` runs a command beside one, and ``end`` ends one whose users were
killed.

dockerd gets a data root and a socket below SEMANTIDE_CACHE (else ~/.cache/semantide), outside the repository, so that layers survive from run to run.
Several users of one folder share it, and whoever leaves last ends it. Engines of other folders may run beside it, each with a bridge of its own: the last of
all gives the packet filter back as it was found. Nothing is pulled; images that a registry
would have are imported under the same names from Debian packages (``base_image``, ``redis_image``).

Needs root and Debian; what is missing is installed from Debian's packages. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

BASE_IMAGE = "python:3.11-slim-bookworm"
REDIS_IMAGE = "valkey/valkey:9.1"
_PACKAGES = {"dockerd": "docker.io", "iptables": "iptables", "ip": "iproute2", "mmdebstrap": "mmdebstrap"}
_PLUGINS = {"docker-compose": "docker-compose", "docker-buildx": "docker-buildx"}  # plugin -> Debian 13's package of it
_PLUGIN_SUITE = "trixie"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_START_SECONDS = 120
_KEPT_LAYERS = "8GB"
_RECIPE = "semantide.test/recipe"  # label of an imported image: by it one that is made otherwise by now is made anew
_POLICY = Path("/usr/sbin/policy-rc.d")
_MACHINE = Path("/run/semantide-engines")  # what all engines of this machine share: who uses any, and what the first one found

# runc refuses what an unprivileged root may not do: a negative OOM score, limits above the hard ones. This goes before it and asks for less.
_RUNC = """#!{python} -I
import json, os, resource, sys
arguments = sys.argv[1:]
for flag in ("--bundle", "-b"):
    if flag in arguments and "create" in arguments or flag in arguments and "run" in arguments:
        path = os.path.join(arguments[arguments.index(flag) + 1], "config.json")
        with open(path) as stream:
            bundle = json.load(stream)
        process = bundle["process"]
        process["oomScoreAdj"] = max(0, process.get("oomScoreAdj") or 0)
        for limit in process.get("rlimits") or []:
            hard = resource.getrlimit(getattr(resource, limit["type"]))[1]
            if hard != resource.RLIM_INFINITY:
                limit["hard"] = min(limit["hard"], hard)
                limit["soft"] = min(limit["soft"], limit["hard"])
        with open(path, "w") as stream:
            json.dump(bundle, stream)
os.execv("{runc}", ["runc", *arguments])
"""

_TABLES = {"filter": ("INPUT", "FORWARD", "OUTPUT"), "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING")}  # of the packet filter, which an engine writes to


class EngineMissing(Exception):
    """No engine can run here; the text says why."""


def engine_folder() -> Path:
    """Where the engine keeps everything."""
    return Path(os.environ.get("SEMANTIDE_CACHE") or Path.home() / ".cache" / "semantide") / "docker"


@dataclass(frozen=True)
class Engine:
    """A running engine: talk to it with ``docker``, or with any program that gets ``environment``."""

    folder: Path

    @property
    def socket(self) -> Path:
        """Its socket."""
        return self.folder / "docker.sock"

    @property
    def environment(self) -> dict[str, str]:
        """This process's environment, with the engine's address and the command-line plugins."""
        own = {"DOCKER_HOST": f"unix://{self.socket}", "DOCKER_CONFIG": str(self.folder / "config"), "DOCKER_BUILDKIT": "1"}
        return {**os.environ, **own}

    def docker(self, *arguments: str, check: bool = True, timeout: float | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``docker ARGUMENTS``.

        Raises: RuntimeError with its words where it fails and ``check`` is true.
        """
        environment = {**self.environment, **variables}
        outcome = subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False, env=environment, timeout=timeout)
        if check and outcome.returncode:
            raise RuntimeError(f"docker {shlex.join(arguments)} ended with status {outcome.returncode}:\n{(outcome.stdout + outcome.stderr)[-6000:]}")
        return outcome

    def has_image(self, name: str) -> bool:
        """Whether the image is here."""
        return self.docker("image", "inspect", name, check=False).returncode == 0


@contextmanager
def engine() -> Iterator[Engine]:
    """The engine, started where it does not run; ended when nobody uses it any more.

    Raises: EngineMissing.
    """
    folder = engine_folder()
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(_MACHINE.parent, os.W_OK):
        raise EngineMissing(f"the engine wants root on Debian, this is uid {os.geteuid()} on {platform.platform()}")
    _MACHINE.mkdir(exist_ok=True)
    with (_MACHINE / "start.lock").open("w") as start, (_MACHINE / "users.lock").open("w") as everybody, (folder / "users.lock").open("w") as users:
        with _held(start):
            for lock in (everybody, users):
                fcntl.flock(lock, fcntl.LOCK_SH)
            running = Engine(folder)
            if not _answers(running):
                _install(folder)
                _start(running)
        try:
            yield running
        finally:
            # It may take minutes, in which engines of other folders start and end, and in which somebody may come back to this one.
            if _alone(users):
                fcntl.flock(users, fcntl.LOCK_SH)
                _tidy(running)
            with _held(start):
                _leave(running, users, everybody)


def end() -> None:
    """End the engine where nobody uses it: its users were killed before they could. It outlives them, for there may be several."""
    folder = engine_folder()
    if not folder.is_dir() or not _MACHINE.is_dir():
        return
    locks = _MACHINE / "start.lock", _MACHINE / "users.lock", folder / "users.lock"
    with locks[0].open("w") as start, locks[1].open("w") as everybody, locks[2].open("w") as users, _held(start):
        _leave(Engine(folder), users, everybody)


def _leave(running: Engine, users: IO[str], everybody: IO[str]) -> None:
    if _alone(users):
        _stop(running)
        if _alone(everybody):
            _give_back()


def _alone(lock: IO[str]) -> bool:
    """Whether nobody else uses what this lock stands for: each user holds it shared."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def _held(lock: IO[str]) -> Iterator[None]:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def _run(*command: str, **variables: str) -> str:
    environment = {**os.environ, "PATH": _PATH, "DEBIAN_FRONTEND": "noninteractive", **variables}
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if outcome.returncode:
        raise EngineMissing(f"{shlex.join(command)} ended with status {outcome.returncode}:\n{(outcome.stdout + outcome.stderr).strip()[-3000:]}")
    return outcome.stdout


def _install(folder: Path) -> None:
    """Fetch what is missing: the engine from the machine's own packages, the plugins from Debian 13's."""
    if sys.platform != "linux" or os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        raise EngineMissing(f"the engine wants root on Debian, this is uid {os.geteuid()} on {platform.platform()}")
    wanted = [package for program, package in _PACKAGES.items() if shutil.which(program, path=_PATH) is None]
    if wanted:
        _run("apt-get", "update", "--quiet")
        with _no_services():
            _run("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", *wanted)
    plugins = folder / "config" / "cli-plugins"
    if absent := [package for plugin, package in _PLUGINS.items() if not (plugins / plugin).exists()]:
        _fetch_plugins(folder, absent)


@contextmanager
def _no_services(policy: Path = _POLICY) -> Iterator[None]:
    """Keep packages from starting what they bring, as Debian asks whether they may; a policy that the machine has stays as it is."""
    if policy.exists():
        yield
        return
    policy.write_text("#!/bin/sh\nexit 101\n")
    policy.chmod(0o755)
    try:
        yield
    finally:
        policy.unlink(missing_ok=True)


def _mirror() -> str:
    """Address of Debian's archive as this machine reads it."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in (file for file in files if file.is_file()):
        for line in file.read_text(errors="replace").splitlines():
            fields = line.split()
            if fields[:1] == ["URIs:"] or fields[:1] == ["deb"]:
                address = next((field for field in fields if "://" in field), "")
                if address.rstrip("/").endswith("/debian"):
                    return address.rstrip("/")
    raise EngineMissing("no line of Debian's archive was found below /etc/apt: the plugins of docker cannot be fetched")


def _fetch_plugins(folder: Path, packages: list[str]) -> None:
    apt = folder / "apt"
    for name in ("lists/partial", "archives/partial"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    keys = "/usr/share/keyrings/debian-archive-keyring.gpg"
    (apt / "sources.list").write_text(f"deb [signed-by={keys}] {_mirror()} {_PLUGIN_SUITE} main\n")
    own = {
        "Dir::Etc::SourceList": apt / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::State::Lists": apt / "lists",
        "Dir::Cache": apt,
        "Dir::Cache::Archives": apt / "archives",
    }
    options = [f"--option={name}={value}" for name, value in own.items()] + ["--option=APT::Sandbox::User=root"]
    _run("apt-get", *options, "update", "--quiet")
    outcome = subprocess.run(["apt-get", *options, "download", "--quiet", *packages], cwd=apt, capture_output=True, text=True, check=False)
    if outcome.returncode:
        raise EngineMissing(f"the packages {' '.join(packages)} could not be downloaded:\n{outcome.stderr.strip()[-2000:]}")
    plugins = folder / "config" / "cli-plugins"
    plugins.mkdir(parents=True, exist_ok=True)
    for package in packages:
        unpacked = apt / package
        _run("dpkg-deb", "--extract", str(next(apt.glob(f"{package}_*.deb"))), str(unpacked))
        program = next(path for path in unpacked.rglob(f"*{package}") if path.is_file() and os.access(path, os.X_OK))
        shutil.copy2(program, plugins / package)
    shutil.rmtree(apt)


def _answers(running: Engine) -> bool:
    return running.socket.exists() and shutil.which("docker") is not None and running.docker("version", check=False).returncode == 0


def _start(running: Engine) -> None:
    folder = running.folder
    for leftover in ("docker.pid", "docker.sock"):
        (folder / leftover).unlink(missing_ok=True)
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    wrapper, runc = programs / "runc", shutil.which("runc", path=_PATH)
    if runc is None:
        raise EngineMissing("runc is not installed: it comes with Debian's docker.io")
    wrapper.write_text(_RUNC.format(python=sys.executable, runc=runc))
    wrapper.chmod(0o755)
    filters = {tool: _run(f"{tool}-save") for tool in ("iptables", "ip6tables") if shutil.which(f"{tool}-save", path=_PATH)}
    forwarding = Path("/proc/sys/net/ipv4/ip_forward").read_text().strip()
    if not (_MACHINE / "found.json").exists():  # another one runs, or one that was killed has given nothing back
        (_MACHINE / "found.json").write_text(json.dumps({"filters": filters, "forwarding": forwarding}))
    command = ["dockerd", "--data-root", str(folder / "data"), "--exec-root", str(folder / "exec"), "--pidfile", str(folder / "docker.pid")]
    command += ["--bridge", _bridge(folder), "--host", f"unix://{running.socket}", "--group", "root", "--mtu", str(_mtu()), "--oom-score-adjust", "0"]
    with (folder / "dockerd.log").open("ab") as log:
        # The wrapper is the first runc on its path, for containers and for builds alike.
        environment = {**os.environ, "PATH": f"{programs}:{_PATH}"}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment)
    deadline = time.monotonic() + _START_SECONDS
    while not _answers(running):
        if process.poll() is not None or time.monotonic() > deadline:
            tail = (folder / "dockerd.log").read_text(errors="replace")[-3000:]
            process.kill()
            _remove_bridge(folder)
            raise EngineMissing(f"dockerd did not start (status {process.poll()}); the end of {folder}/dockerd.log:\n{tail}")
        time.sleep(0.2)


def _bridge_name(folder: Path) -> str:
    return f"semantide{zlib.crc32(str(folder).encode()) & 0xFFFFFF:06x}"


def _bridge(folder: Path) -> str:
    """A new bridge with the first addresses that no link of this machine has; its name."""
    _remove_bridge(folder)
    name, taken = _bridge_name(folder), _run("ip", "-4", "-oneline", "address")
    block = next(number for number in range(200, 256) if f" 10.{number}." not in taken)
    _run("ip", "link", "add", name, "type", "bridge")
    _run("ip", "address", "add", f"10.{block}.0.1/16", "dev", name)
    _run("ip", "link", "set", name, "up")
    return name


def _remove_bridge(folder: Path) -> None:
    environment = {**os.environ, "PATH": _PATH}
    subprocess.run(["ip", "link", "delete", _bridge_name(folder)], check=False, capture_output=True, env=environment)


def _mtu() -> int:
    """The smallest of this machine's links: larger packets of a container would be lost on the way out."""
    sizes = [int((link / "mtu").read_text()) for link in Path("/sys/class/net").iterdir() if link.name.startswith(("e", "w"))]
    return min([1500, *sizes])


def _tidy(running: Engine) -> None:
    """Layers that no image of this tree has any more would fill the disk in a week of runs."""
    if _answers(running):
        running.docker("image", "prune", "--force", check=False)
        running.docker("builder", "prune", "--force", "--keep-storage", _KEPT_LAYERS, check=False)


def _stop(running: Engine) -> None:
    pid_file = running.folder / "docker.pid"
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    try:
        if Path(f"/proc/{pid}/comm").read_text().strip() != "dockerd":
            raise ProcessLookupError
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 60
        while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.1)
    except (ProcessLookupError, FileNotFoundError):
        pass
    _remove_bridge(running.folder)


def _give_back() -> None:
    """The packet filter and forwarding as they were found."""
    found_file = _MACHINE / "found.json"
    if not found_file.exists():
        return
    found = json.loads(found_file.read_text())
    for tool, rules in found["filters"].items():
        for text in _restoring(rules):
            subprocess.run([f"{tool}-restore"], input=text, text=True, check=False, capture_output=True, env={**os.environ, "PATH": _PATH})
    Path("/proc/sys/net/ipv4/ip_forward").write_text(found["forwarding"])
    found_file.unlink()


def _restoring(rules: str) -> list[str]:
    """What brings the packet filter back: the tables that were saved, and those that were not there yet as empty ones."""
    absent = [table for table in _TABLES if f"*{table}\n" not in rules]
    empty = [f"*{table}\n" + "".join(f":{chain} ACCEPT [0:0]\n" for chain in _TABLES[table]) + "COMMIT\n" for table in absent]
    return [*([rules] if rules.strip() else []), *empty]


def base_image(running: Engine, name: str = BASE_IMAGE) -> str:
    """An image of Debian 12 with Python 3.11 and this machine's certificates under the name of the one that a registry has; its name."""
    # pip brings certificates of its own and would not look at the machine's.
    certificates = [f"ENV {variable}=/etc/ssl/certs/ca-certificates.crt" for variable in ("PIP_CERT", "SSL_CERT_FILE")]
    commands = ("ln -s python3 /usr/bin/python",)
    return _imported(running, name, "python3,python3-venv,ca-certificates", commands, [*certificates, 'CMD ["python3"]'])


def redis_image(running: Engine, name: str = REDIS_IMAGE) -> str:
    """Debian's redis-server, which Valkey's image has too, under the name of that image, with its user and folder; the image's name."""
    commands = ("groupmod --gid 999 redis", "usermod --uid 999 --gid 999 redis", "install --directory --owner=redis --group=redis /data")
    return _imported(running, name, "redis-server,ca-certificates", commands, ["USER redis"])


def prometheus_image(running: Engine, name: str) -> str:
    """Debian's Prometheus, started as the official image starts it; the image's name."""
    commands = ("install --directory --owner=nobody --group=nogroup /prometheus", "install --directory /etc/prometheus")
    return _imported(running, name, "prometheus,ca-certificates", commands, ["USER nobody", 'ENTRYPOINT ["prometheus"]'])


def _imported(running: Engine, name: str, packages: str, commands: tuple[str, ...], changes: list[str]) -> str:
    # The folders are merged from the start: the package that would merge them later brings the whole of Perl. What a slim image leaves out is left out.
    options = ["--variant=minbase", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr", f"--include=usr-is-merged,{packages}"]
    options += [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "info", "locale", "man")]
    options += [f'--customize-hook=chroot "$1" {command}' for command in commands]
    bundle = os.environ.get("SSL_CERT_FILE") or "/etc/ssl/certs/ca-certificates.crt"
    options += [f"--customize-hook=upload {bundle} /etc/ssl/certs/ca-certificates.crt"] if Path(bundle).exists() else []
    changes = [f"ENV PATH={_PATH}", "ENV LANG=C.UTF-8", *changes]
    recipe = f"{zlib.crc32(json.dumps([options, changes]).encode()):08x}"
    with (running.folder / "import.lock").open("w") as lock, _held(lock):
        if running.docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{_RECIPE}"}}}}', name, check=False).stdout.strip() == recipe:
            return name
        archive = running.folder / "root.tar"
        try:
            _run("mmdebstrap", "--quiet", *options, "bookworm", str(archive), _mirror())
            changes.append(f"LABEL {_RECIPE}={recipe}")
            running.docker("import", *(option for change in changes for option in ("--change", change)), str(archive), name)
        finally:
            archive.unlink(missing_ok=True)
    return name


def main(arguments: list[str] | None = None) -> int:
    """Run a command beside the engine; its exit status."""
    parser = argparse.ArgumentParser(prog="docker_engine.py", description=__doc__.partition("\n")[0] if __doc__ else "")
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run", help="start the engine, import the base images, run a command with DOCKER_HOST set")
    run.add_argument("command", nargs=argparse.REMAINDER)
    verbs.add_parser("end", help="end the engine where nobody uses it any more")
    options = parser.parse_args(arguments)
    if options.verb == "end":
        end()
        return 0
    try:
        with engine() as running:
            base_image(running)
            redis_image(running)
            return subprocess.run(options.command or [os.environ.get("SHELL", "sh")], env=running.environment, check=False).returncode
    except EngineMissing as error:
        sys.stderr.write(f"{error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
