"""Requirements of the package in pyproject.toml, one a line: ``python docker/requirements.py EXTRA...``, with ``--only`` those of the extras alone."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(project: dict[str, object], extras: list[str], *, only: bool) -> list[str]:
    """As pip reads them."""
    optional = project["optional-dependencies"]
    own = project["dependencies"]
    assert isinstance(optional, dict) and isinstance(own, list)
    if unknown := [extra for extra in extras if extra not in optional]:
        raise SystemExit(f"the package has no extra {unknown[0]!r}: take one of {', '.join(optional)}")
    return [*([] if only else own), *(need for extra in extras for need in optional[extra])]


if __name__ == "__main__":
    words = sys.argv[1:]
    found = requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], [word for word in words if word != "--only"], only="--only" in words)
    sys.stdout.write("\n".join(found) + "\n")
