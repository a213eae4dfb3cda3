"""Takes out of installed packages what no process of ours reads: ``python docker/trim.py FOLDER...`` in a build, with binutils beside it.

Compiled modules (``docker/compiled.py`` makes those that are imported), test suites, C and C++ headers, static libraries and programs that only serve to build or test; sources of compiled modules, pyarrow's libraries for what we
have from elsewhere (object stores: s3fs) or nobody here speaks;
symbol tables of the largest libraries, which only debuggers read. What is left is imported at the end of the build, so a wrong cut ends it.
"""

from __future__ import annotations

import compileall
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_PATTERNS = (
    "torch/test",
    "torch/include",
    "torch/share",
    "torch/lib/*test*.so",
    "pyarrow/include",
    "pyarrow/src",
    "pyarrow/libarrow_flight.so*",
    "pyarrow/_flight*.so",
    "pyarrow/libarrow_s3.so*",
    "pyarrow/_s3fs*.so",
    "numpy/_core/include",
    "kubernetes/aio",
    "kubernetes/e2e_test",
    # Components that the console has none of, each with a library of its own; what its library would need beside them, it imports when they are used.
    *(f"nicegui/elements/{name}/dist" for name in ("aggrid", "codemirror", "echart", "json_editor", "leaflet", "mermaid", "plotly", "scene", "xterm")),
    "nicegui/static/sass*",
    "nicegui/static/tailwindcss.min.js",
    "nicegui/static/unocss",
    "nicegui/testing",
    "docutils",
    "watchfiles",
)
# Their suites are folders of this name at any depth. A package of ours or torch's own tests are found by name above.
_WITH_TESTS = ("numpy", "scipy", "sklearn", "sympy", "networkx", "pyarrow", "pandas", "joblib", "threadpoolctl")
# Large libraries as their linker left them. What auditwheel has patched (numpy, scipy) does not survive strip.
_STRIPPED = ("torch/lib/libtorch_cpu.so", "torch/lib/libtorch_python.so", "_polars_runtime*/*.so", "uvloop/*.so", "yaml/*.so")
# Thousands of generated modules that one import loads all of: their compiled form alone is kept, without documentation.
_COMPILED = ("kubernetes",)
_PROGRAMS_KEPT = ("torch_shm_manager",)


def unread(site: Path) -> Iterator[Path]:
    """Files and folders below one site-packages that may go."""
    for pattern in _PATTERNS:
        yield from site.glob(pattern)
    for package in _WITH_TESTS:
        if (site / package).is_dir():
            yield from (path for path in (site / package).rglob("tests") if path.is_dir())
    yield from (path for path in site.glob("torch/bin/*") if path.name not in _PROGRAMS_KEPT)
    for name in ("*.a", "__pycache__", "*.pyx", "*.pxd", "*.pxi", "*.c", "*.cpp", "*.h", "*.pyi"):
        yield from site.rglob(name)


def trim(site: Path) -> int:
    """Remove it; the bytes that were freed."""
    freed = 0
    for path in list(unread(site)):
        if path.is_dir() and not path.is_symlink():
            freed += _bytes(path)
            shutil.rmtree(path)
        elif path.exists() or path.is_symlink():
            freed += path.lstat().st_size
            path.unlink()
    for package in (site / name for name in _COMPILED if (site / name).is_dir()):
        freed -= _compile(package)
    if strip := shutil.which("strip"):
        for library in (path for pattern in _STRIPPED for path in site.glob(pattern)):
            before = library.stat().st_size
            subprocess.run([strip, "--preserve-dates", "--strip-unneeded", str(library)], check=True)
            freed += before - library.stat().st_size
    return freed


def _compile(package: Path) -> int:
    """Put compiled modules in the place of their sources; the bytes that this takes more."""
    before = _bytes(package)
    compileall.compile_dir(package, quiet=2, legacy=True, optimize=2, force=True)
    for source in package.rglob("*.py"):
        if source.with_suffix(".pyc").exists():
            source.unlink()
    return _bytes(package) - before


def _bytes(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir())


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        for packages in Path(folder).rglob("site-packages"):
            sys.stdout.write(f"{packages}: {trim(packages) / 1e6:.0f} MB freed\n")
