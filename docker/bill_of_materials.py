"""What an image or a virtual environment is made of, as CycloneDX JSON: ``python docker/bill_of_materials.py NAME [ROOT]``, run inside of it.

Python distributions with their licences, Debian packages where there are any, and Python itself. With ROOT only what lies below that folder counts.
Time and random numbers are left out, so that the same image gives the same text.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

_DPKG = Path("/var/lib/dpkg")


def _licence(distribution: Distribution) -> list[dict[str, Any]]:
    metadata = distribution.metadata
    if expression := metadata.get("License-Expression"):
        return [{"expression": expression}]
    classifiers = [line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if line.startswith("License ::")]
    text = "; ".join(classifiers) or (metadata.get("License") or "").strip().partition("\n")[0][:100]
    return [{"license": {"name": text}}] if text else []


def python_components(folders: list[str]) -> Iterator[dict[str, Any]]:
    """Every installed distribution."""
    for distribution in distributions(path=folders):
        name, version = distribution.metadata["Name"], distribution.version
        yield {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}",
            "licenses": _licence(distribution),
        }


def debian_components(root: Path) -> Iterator[dict[str, Any]]:
    """Every Debian package of which a file lies below the root."""
    status = _DPKG / "status"
    for paragraph in status.read_text(errors="replace").split("\n\n") if status.exists() else ():
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if ": " in line and not line.startswith(" "))
        if fields.get("Status", "").endswith(" installed") and (root == Path("/") or _has_files(fields, root)):
            name, version = fields["Package"], fields["Version"]
            yield {"type": "library", "name": name, "version": version, "purl": f"pkg:deb/debian/{name}@{quote(version)}?arch={fields['Architecture']}"}


def _has_files(fields: dict[str, str], root: Path) -> bool:
    for name in (fields["Package"], f"{fields['Package']}:{fields['Architecture']}"):
        listing = _DPKG / "info" / f"{name}.list"
        if listing.exists():
            # /lib is /usr/lib today, whichever of the two a package names.
            paths = {line.removeprefix("/usr") for line in listing.read_text().splitlines()}
            return any((root / prefix.lstrip("/") / path.lstrip("/")).is_file() for path in paths for prefix in ("", "/usr"))
    return False


def bill(name: str, root: Path) -> dict[str, Any]:
    """The whole document."""
    folders = [str(path) for pattern in ("opt/*/lib", "lib") for path in root.glob(f"{pattern}/python*/site-packages")]
    parts = [*python_components(folders), *debian_components(root)]
    parts.append({"type": "platform", "name": "python", "version": platform.python_version(), "purl": f"pkg:generic/python@{platform.python_version()}"})
    unique = {part["purl"]: {"bom-ref": part["purl"], **part} for part in parts}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": name, "bom-ref": name}},
        "components": [unique[purl] for purl in sorted(unique)],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(bill(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else "/")), indent=1) + "\n")
