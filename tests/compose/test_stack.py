"""The stack in containers: the demo through it, what its containers may do, and what the images are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import REPOSITORY, ComposeStack, show

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


def test_the_demo_runs_through_it(walked: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "log probability" in walked and "where the time went" in walked
    show(capsys, walked[walked.index("where the time went") :])


def test_helm_s_own_test_would_pass(stack: ComposeStack, walked: str) -> None:
    command = [sys.executable, str(REPOSITORY / "charts" / "semantide" / "files" / "ask.py"), stack.url]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "SEMANTIDE_API_KEYS": stack.key})
    assert outcome.returncode == 0 and "recommends" in outcome.stdout, outcome.stderr


def test_containers_have_no_rights_and_write_nowhere(stack: ComposeStack) -> None:
    inside = ("exec", "--no-TTY", "api")
    assert stack.compose(*inside, "id", "--user").strip() == "10001"
    assert "read-only" in stack.compose(*inside, "sh", "-c", "touch /opt/semantide/x 2>&1 || true").lower()


def test_the_console_asks_the_api_and_reaches_nothing_else(stack: ComposeStack) -> None:
    console = f"http://127.0.0.1:{stack.console_port}"
    assert httpx.get(f"{console}/readyz").json() == {"status": "ok", "problems": [], "state": []}
    assert httpx.get(f"{console}/console/").status_code == 401
    page = httpx.get(f"{console}/console/models", auth=("anybody", stack.key), timeout=60)
    assert page.status_code == 200 and "Trained models, newest first" in page.text
    assert httpx.get(f"{console}/v1/jobs", auth=("anybody", stack.key)).status_code == 404
    assert httpx.get(f"{stack.url}/console/", auth=("anybody", stack.key)).status_code == 404, "the API's process has no pages"
    inside = ("exec", "--no-TTY", "console", "sh", "-c")
    assert stack.compose(*inside, "getent hosts redis || echo nobody").strip() == "nobody"
    assert "read-only" in stack.compose(*inside, "touch /data/x 2>&1 || true").lower()


def test_images_are_small(stack: ComposeStack, image: Any, engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    operator = image("operator", "semantide-operator:test")
    sizes = {name: int(engine.docker("image", "inspect", "--format", "{{.Size}}", name).stdout) for name in ("semantide:test", operator)}
    layers = engine.docker("history", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", "semantide:test").stdout.splitlines()
    show(capsys, *(f"  {name}: {size / 1e6:,.0f} MB" for name, size in sizes.items()), *(f"    {line[:110]}" for line in layers if not line.startswith("0 ")))
    assert sizes[operator] < 150e6 and sizes["semantide:test"] < 1.2e9


def test_the_operator_starts_without_torch(image: Any, engine: Any) -> None:
    operator = image("operator", "semantide-operator:test")
    run = ("run", "--rm", "--read-only", "--network", "none")
    code = "import sys, semantide.operators.operator, semantide.operators.reconcile; assert not {'torch', 'numpy'} & set(sys.modules); print('loaded')"
    assert "loaded" in engine.docker(*run, "--entrypoint", "/opt/operator/bin/python", operator, "-c", code).stdout
    assert "SEMANTIDE_OPERATOR_" in engine.docker(*run, operator, "--help").stdout


def test_the_bill_names_what_is_inside(image: Any, tmp_path: Path) -> None:
    image("sbom", "semantide-bill:test", "--output", f"type=local,dest={tmp_path}")
    bill, operator = (json.loads((tmp_path / name).read_text()) for name in ("semantide.json", "operator.json"))
    names = {part["name"] for part in bill["components"]}
    assert {"torch", "numpy", "redis", "semantide", "python"} <= names and any(part["purl"].startswith("pkg:deb/") for part in bill["components"])
    inside = {part["name"] for part in operator["components"]}
    assert {"kopf", "kubernetes", "semantide", "python"} <= inside and not {"torch", "numpy"} & inside
    assert len({part["purl"] for part in bill["components"]}) == len(bill["components"])
