"""The version before this one, from the repository's history."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BEFORE = os.environ.get("SEMANTIDE_CHAOS_BEFORE", "")
"""A commit; empty: the last one of the version before."""
_ROOMS = ("kernels", "shared", "services", "operators", "client")


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", "-C", str(REPOSITORY), *arguments], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else ""


def older_commit() -> str:
    """The commit before the one that gave this version its number; empty where the history does not go so far back."""
    number = next(line for line in (REPOSITORY / "pyproject.toml").read_text().splitlines() if line.startswith("version = "))
    changed = _git("log", "--format=%H", "-S", number, "--", "pyproject.toml").splitlines()
    return _git("rev-parse", "--verify", "--quiet", BEFORE or (f"{changed[-1]}^" if changed else "none"))


def missing() -> str:
    """Why there is none; empty where there is one."""
    return "" if older_commit() else "the repository's history has no older version: fetch it, or name a commit in SEMANTIDE_CHAOS_BEFORE"


def older_version(root: Path) -> Path:
    """The folder that ``semantide`` of the version before is imported from, made once below ``root``."""
    tree, links = root / "older", root / "older-links"
    if not links.exists():
        tree.mkdir()
        archive = subprocess.run(["git", "-C", str(REPOSITORY), "archive", older_commit()], capture_output=True, check=True)
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        (links / "semantide").mkdir(parents=True)
        for room in _ROOMS:
            if (tree / room).exists():
                (links / "semantide" / room).symlink_to(tree / room)
    return links
