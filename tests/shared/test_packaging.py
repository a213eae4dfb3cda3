"""The package list in pyproject.toml is the tree."""

import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
ROOMS = ("client", "kernels", "shared", "services", "operators")


def test_the_package_list_matches_the_tree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = set(project["tool"]["setuptools"]["packages"])
    found = {"semantide." + path.parent.relative_to(ROOT).as_posix().replace("/", ".") for room in ROOMS for path in (ROOT / room).rglob("__init__.py")}
    assert listed == found
    assert not (ROOT / "semantide").exists()


def test_every_room_is_mapped_typed_and_linted() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rooms = {room for room in ROOMS if (ROOT / room / "__init__.py").exists()}
    assert {name.removeprefix("semantide.") for name in project["tool"]["setuptools"]["package-dir"]} == rooms
    assert set(project["tool"]["importlinter"]["root_packages"]) == {f"semantide.{room}" for room in rooms}
    makefile = (ROOT / "Makefile").read_text()
    listed = next(line for line in makefile.splitlines() if line.startswith("ROOMS :="))
    assert set(listed.split()[2:]) == rooms


def test_files_stay_readable() -> None:
    long = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            lines = len(path.read_text().splitlines())
            if lines > 450:
                long[path.relative_to(ROOT).as_posix()] = lines
    assert not long, f"files far beyond 400 lines: {long}"


def test_no_tracked_file_names_a_registry_or_this_machine() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if tracked.returncode:
        return  # an unpacked archive has no index to look at
    needles = [("py" + "pi.org").encode(), ("pythonhost" + "ed").encode(), ("registry.np" + "mjs").encode(), ("deb.deb" + "ian").encode()]
    for name in filter(None, tracked.stdout.split(b"\0")):
        path = ROOT / name.decode()
        if path.is_file():
            content = path.read_bytes()
            assert not any(needle in content for needle in needles), f"{name.decode()} names a package registry's host"
