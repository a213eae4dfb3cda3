"""Licences of everything that this project may install: ``python tests/licences.py`` writes docs/licences.md anew, with ``--check`` it only says what is wrong.

Each package of constraints.txt must be under a licence of the list below. What is not installed here keeps the row that the page has.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "licences.md"
CONSTRAINTS = ROOT / "constraints.txt"

# What the texts of packages' metadata say, as SPDX names; the first that is found counts.
NAMES = {
    "Apache-2.0": r"apache",
    "MPL-2.0": r"\bmpl|mozilla public",
    "BSD-3-Clause": r"\bbsd",
    "PSF-2.0": r"\bpsf|python software foundation|python-2\.0",
    "ISC": r"\bisc\b",
    "Unlicense": r"unlicense|public domain",
    "0BSD": r"\b0bsd\b",
    "HPND": r"hpnd|historical permission",
    "MIT": r"\bmit\b|mit license|mit-cmu|expat",
}
_NOT_FREE = re.compile(r"gpl|affero|commons clause|proprietary|sspl|busl", re.IGNORECASE)


def licence(name: str) -> str | None:
    """The SPDX name of an installed package's licence; empty where its metadata say none that is known, None where it is not installed."""
    try:
        said = metadata(name)
    except PackageNotFoundError:
        return None
    classifiers = [text.rpartition("::")[2] for text in said.get_all("Classifier") or [] if text.startswith("License ::")]
    # A long text is the licence itself, whose first lines name it.
    for text in (said.get("License-Expression") or "", *classifiers, (said.get("License") or "")[:200]):
        found = [spdx for spdx, pattern in NAMES.items() if re.search(pattern, text, re.IGNORECASE)]
        if found and not _NOT_FREE.search(text):
            return found[0]
    return ""


def pinned() -> list[str]:
    """Names of the packages of constraints.txt."""
    return [line.partition("==")[0].strip() for line in CONSTRAINTS.read_text().splitlines() if "==" in line and not line.startswith("#")]


def rows() -> tuple[list[tuple[str, str]], list[str]]:
    """(package, licence) of each, and what is wrong."""
    kept = dict(re.findall(r"^\| (\S+) \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)) if PAGE.exists() else {}
    found, wrong = [], []
    for name in pinned():
        spdx = licence(name)
        if spdx is None:
            spdx = kept.get(name, "")
        if spdx not in NAMES:
            said = metadata(name).get("License-Expression") or metadata(name).get("License") if licence(name) is not None else "not installed"
            wrong.append(
                f"{name}: no licence of the list is known ({str(said)[:80]!r}): install it and run this again, add a free licence to NAMES, or do without the package"
            )
        found.append((name, spdx))
    return found, wrong


def page(found: list[tuple[str, str]]) -> str:
    """The page."""
    lines = "\n".join(f"| {name} | {spdx} |" for name, spdx in found)
    return f"""# Licences

Semantide is under Apache-2.0. This is what it may install, with the versions of `constraints.txt`, development tools included; why each is there is in [architecture](architecture.md).
`python tests/licences.py` writes this page, `make check` holds it to the list of licences that are allowed.

| package | licence |
|---|---|
{lines}
"""


def main() -> int:
    """Write or check; the exit status."""
    found, wrong = rows()
    text = page(found)
    if "--check" not in sys.argv:
        PAGE.write_text(text)
    elif not PAGE.exists() or PAGE.read_text() != text:
        wrong.append("docs/licences.md is not what constraints.txt says: write it anew with `python tests/licences.py`")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
