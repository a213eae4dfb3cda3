"""What may be installed is under licences that are allowed, and the page says which."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "licences.py"


@pytest.fixture
def licences() -> Any:
    spec = importlib.util.spec_from_file_location("licences", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_is_pinned_and_all_of_it_is_free() -> None:
    outcome = subprocess.run([sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr


@pytest.mark.parametrize(
    "said", [{"License": "GPL-3.0"}, {"License": "Proprietary"}, {"Classifier": "License :: OSI Approved :: GNU Affero General Public License v3"}, {}]
)
def test_what_is_not_free_is_named(licences: Any, said: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Said(dict[str, str]):
        def get_all(self, name: str) -> list[str]:
            return [self[name]] if name in self else []

    (tmp_path / "constraints.txt").write_text("numpy==2\ntaken==1\n")
    monkeypatch.setattr(licences, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(licences, "PAGE", tmp_path / "page.md")
    told = licences.metadata
    monkeypatch.setattr(licences, "metadata", lambda name: Said(said) if name == "taken" else told(name))
    found, wrong = licences.rows()
    assert dict(found)["numpy"] == "BSD-3-Clause" and len(wrong) == 1 and wrong[0].startswith("taken: ")
