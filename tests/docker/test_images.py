"""The scripts that images are built with, on small folders of their kind."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCKER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(site: Path, *names: str) -> None:
    for name in names:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text("x" * 10)


def left(site: Path) -> set[str]:
    return {str(path.relative_to(site)) for path in site.rglob("*") if path.is_file()}


def test_only_what_nobody_reads_is_cut_out(tmp_path: Path) -> None:
    kept = {"torch/nn/__init__.py", "torch/bin/torch_shm_manager", "torch/testing/__init__.py", "numpy/core.py", "semantide/tests/own.py", "pyarrow/lib.so.py"}
    gone = (
        "torch/test/a.py",
        "torch/include/c10.h",
        "torch/bin/test_api",
        "numpy/linalg/tests/t.py",
        "pyarrow/include/a.h",
        "scipy/x/lib.a",
        "pyarrow/libarrow_s3.so.1",
        "numpy/core.pyx",
        "numpy/__pycache__/core.pyc",
        "kubernetes/aio/a.py",
        "nicegui/elements/plotly/dist/index.js",
        "docutils/core.py",
    )
    made(tmp_path, *kept, *gone)
    assert load("trim").trim(tmp_path) == 10 * len(gone)
    assert left(tmp_path) == kept


def test_sources_of_generated_modules_are_compiled_in_their_place(tmp_path: Path) -> None:
    made(tmp_path, "kubernetes/client/__init__.py", "kubernetes/__init__.py")
    for source in tmp_path.rglob("*.py"):
        source.write_text('"""What nobody reads."""\nanswer = 42\n')
    load("trim").trim(tmp_path)
    assert left(tmp_path) == {"kubernetes/client/__init__.pyc", "kubernetes/__init__.pyc"}
    code = "import kubernetes.client as module; print(module.answer, module.__doc__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path).stdout == "42 None\n"


def test_what_our_processes_import_is_compiled() -> None:
    """A module that is missing in the list would be compiled at every start of every container."""
    found = set()
    for path in (path for room in ("kernels", "shared", "services") for path in (DOCKER.parent / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module)
    module = load("compiled")
    others = {name for name in found if name.partition(".")[0] not in (*sys.stdlib_module_names, "semantide")}
    assert list(module.IMPORTED) == sorted(others)
    assert not others & set(module.LOADED_LATER)


def test_only_what_was_imported_lies_compiled_and_always_with_one_date(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    made(site, "used/__init__.py", "used/part.py", "unused/__init__.py")
    (site / "used" / "__init__.py").write_text("import used.part\n")
    (site / "used" / "part.py").write_text("")
    code = f"import sys; sys.path[:0] = [{str(DOCKER)!r}, {str(site)!r}]; sys.dont_write_bytecode = False; import compiled; compiled.IMPORTED = ('used', 'absent'); "
    code += f"compiled.LOADED_LATER = (); print(*compiled.load()); import pathlib; print(compiled.date(pathlib.Path({str(site)!r})))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout.split() == ["absent", "2"]
    assert {path.parent.parent.name for path in site.rglob("*.pyc")} == {"used"}
    assert len({path.stat().st_mtime for path in (site, *site.rglob("*.pyc"), site / "unused")}) == 1


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError", "OSError"])
@pytest.mark.parametrize("name", ["torch_npu", "numpy_like"])
def test_what_wants_a_driver_is_passed_over_and_nothing_else(tmp_path: Path, name: str, error: str) -> None:
    (tmp_path / f"{name}.py").write_text(f"raise {error}('libascend_hal.so: cannot open shared object file')\n")
    code = f"import sys; sys.path[:0] = [{str(DOCKER)!r}, {str(tmp_path)!r}]; import compiled; compiled.IMPORTED, compiled.LOADED_LATER = ({name!r},), (); print(*compiled.load())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stdout.split()) == ((0, [name]) if name == "torch_npu" else (1, []))


def test_images_are_built_where_no_driver_is() -> None:
    steps = (DOCKER.parent / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    importing = [step for step in steps if step.startswith("RUN") and ("import torch" in step or "compiled.py" in step)]
    assert len(importing) == 2 and all("TORCH_DEVICE_BACKEND_AUTOLOAD=0 python" in step for step in importing)


@pytest.mark.skipif(shutil.which("cc") is None or shutil.which("strip") is None, reason="no compiler and binutils here")
def test_a_library_loads_without_its_symbol_table(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("static int hidden(void) { return 41; } int answer(void) { return hidden() + 1; }")
    site = tmp_path / "site"
    library = site / "torch" / "lib" / "libtorch_cpu.so"
    library.parent.mkdir(parents=True)
    other = site / "numpy.libs" / "libblas.so"
    other.parent.mkdir()
    subprocess.run(["cc", "-shared", "-fPIC", "-g", "-o", str(library), str(tmp_path / "a.c")], check=True)
    before = library.stat().st_size
    shutil.copy(library, other)
    assert load("trim").trim(site) == before - library.stat().st_size > 0
    assert other.stat().st_size == before, "auditwheel has patched it: strip would break it"
    code = f"import ctypes; print(ctypes.CDLL({str(library)!r}).answer())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "42"


def test_the_bill_has_every_distribution_once_and_the_same_text_each_time(tmp_path: Path) -> None:
    module = load("bill_of_materials")
    site = tmp_path / "opt" / "semantide" / "lib" / "python3.11" / "site-packages"
    for name, version, licence in (("Some_Thing", "1.2", "License-Expression: MIT"), ("other", "3", "Classifier: License :: OSI Approved :: BSD License")):
        made(site, f"{name}-{version}.dist-info/METADATA")
        (site / f"{name}-{version}.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{licence}\n")
    bill = module.bill("image", tmp_path)
    parts = {part["purl"]: part for part in bill["components"] if part["purl"].startswith("pkg:pypi/")}
    assert set(parts) == {"pkg:pypi/some-thing@1.2", "pkg:pypi/other@3"}
    assert parts["pkg:pypi/some-thing@1.2"]["licenses"] == [{"expression": "MIT"}]
    assert parts["pkg:pypi/other@3"]["licenses"] == [{"license": {"name": "BSD License"}}]
    assert bill["bomFormat"] == "CycloneDX" and bill == module.bill("image", tmp_path)


@pytest.mark.skipif(shutil.which("ldd") is None, reason="no ldd here")
def test_a_bare_root_has_what_a_binary_is_linked_to(tmp_path: Path) -> None:
    module = load("bare_root")
    needed = module.linked([Path(os.path.realpath(sys.executable))])
    assert any("libc." in path.name or "ld-" in path.name for path in needed) and all(path.exists() for path in needed)
    module._copy(next(iter(sorted(needed))), tmp_path)
    (copied,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert Path("/") / copied.relative_to(tmp_path) in needed and not copied.is_symlink()


def test_the_bill_of_an_environment_lists_what_is_installed_there(tmp_path: Path) -> None:
    """Of this very environment: what its own metadata say, each with its version."""
    site = Path(next(path for path in sys.path if path.endswith("site-packages")))
    root = site.parents[2]
    command = [sys.executable, str(DOCKER / "bill_of_materials.py"), "semantide", str(root)]
    bill = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    listed = {(part["name"], part["version"]) for part in bill["components"] if part["purl"].startswith("pkg:pypi/")}
    installed = {(found.metadata["Name"], found.version) for found in importlib.metadata.distributions(path=[str(site)])}
    assert listed == installed and len(installed) > 50
    assert all(part.get("licenses") for part in bill["components"] if part["name"] in ("torch", "numpy", "redis", "pydantic"))
