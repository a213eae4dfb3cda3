"""Copies a Python program with all that it needs to run, and nothing else, into an empty root: ``python docker/bare_root.py ROOT FOLDER``.

The interpreter, its library without what serves development, FOLDER (a virtual environment), every shared library that any of these is linked to,
certificates and a user. There is no shell and no package manager in such a root, which is how the operator's image is small and has little to attack.
"""

from __future__ import annotations

import compileall
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

_UNUSED = (
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "turtle.py",
    "lib2to3",
    "ensurepip",
    "distutils",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "config-*",
)
_FILES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/nsswitch.conf", "/etc/ld.so.cache", "/etc/ssl/openssl.cnf", "/usr/lib/ssl/openssl.cnf")
_USER = "semantide:x:10001:10001::/tmp:/sbin/nologin\n"


def _copy(source: Path, root: Path) -> None:
    """One file to the same path below the root; what a link leads to is copied as a file."""
    target = root / source.relative_to("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source.resolve(), target)


def linked(files: Iterable[Path]) -> set[Path]:
    """Shared libraries, with the loader, that these files need."""
    found: set[Path] = set()
    for file in files:
        answer = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=False).stdout
        found |= {Path(path) for path in re.findall(r"(?:=>\s*|^\s*)(/\S+)", answer, re.MULTILINE)}
    return found


def _binaries(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and path.open("rb").read(4) == b"\x7fELF"]


def build(root: Path, program: Path) -> None:
    """Fill the root."""
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    _copy(interpreter, root)
    shutil.copytree(library, root / library.relative_to("/"), ignore=shutil.ignore_patterns(*_UNUSED), symlinks=False)
    shutil.copytree(program, root / program.relative_to("/"), symlinks=True, ignore=shutil.ignore_patterns("pip", "pip-*", "__pycache__", "[Aa]ctivate*"))
    # The environment's python is a chain of links that may lead by way of files that are not copied.
    for name in ("python", "python3", interpreter.name):
        link = root / (program / "bin" / name).relative_to("/")
        link.unlink(missing_ok=True)
        link.symlink_to(interpreter)
    for path in linked(_binaries(root)):
        _copy(path, root)
    for name in _FILES:
        if Path(name).exists():
            _copy(Path(name), root)
    for name, line in (("passwd", _USER), ("group", "semantide:x:10001:\n")):
        (root / "etc" / name).write_text(line)
    (root / "tmp").mkdir(mode=0o1777)
    (root / "tmp").chmod(0o1777)
    _compile(root / library.relative_to("/"), root / program.relative_to("/"))


def _compile(library: Path, program: Path) -> None:
    # The root is read-only when it runs: what is not compiled now would be compiled at every start.
    for folder in (library, program):
        compileall.compile_dir(folder, quiet=2)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
