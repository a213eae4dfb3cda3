"""The stack in containers: the demo through it, then every container killed in turn while events come in and recommendations go out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from semantide.services.commandline.client import Client
from semantide.shared.contracts import JobSpec

from .conftest import REPOSITORY, ComposeStack
from .load import Asker, Sender

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]
_PATIENCE_SECONDS = 600.0


def wait(until: Callable[[], Any], what: str) -> Any:
    """The first true answer."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (found := until()):
        assert time.monotonic() < deadline, f"{what} did not come about within {_PATIENCE_SECONDS:.0f} s"
        time.sleep(0.1)
    return found


def show(capsys: pytest.CaptureFixture[str], *lines: str) -> None:
    with capsys.disabled():
        print("", *lines, sep="\n")


@pytest.fixture(scope="session")
def walked(stack: ComposeStack, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What `semantide demo --running` prints of the stack; after it a model is live."""
    environment = {**os.environ, **stack.environment, "SEMANTIDE_URL": stack.url, "SEMANTIDE_DATA_DIR": str(tmp_path_factory.mktemp("demo")), "COLUMNS": "160"}
    command = [sys.executable, "-m", "semantide.services.commandline.main", "demo", "--running"]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert outcome.returncode == 0, outcome.stdout[-3000:] + outcome.stderr[-3000:] + stack.compose("logs", "--no-color", "--tail", "60")
    return outcome.stdout


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


def test_every_container_may_be_killed(stack: ComposeStack, walked: str, capsys: pytest.CaptureFixture[str]) -> None:
    client = stack.client()
    stored = client.get("/v1/interactions/stats")["interactions"]
    items = _some_items(client)
    questions = [{"history": items[place : place + 5], "n": 10} for place in range(0, 40, 5)]
    sender, asker = Sender(stack.client(), items), Asker(stack.client(), questions)
    sender.start()
    asker.start()
    jobs = [
        client.submit(JobSpec(kind="tokenize", inputs={"dataset": client.latest("dataset", "dataset")}, seed=1)),
        client.submit(JobSpec(kind="train", recipe="tiny", config={"epochs": 1}, inputs=_inputs(client), seed=1)),
        client.submit(JobSpec(kind="dataset", seed=1)),
    ]
    services = json.loads(stack.compose("config", "--format", "json"))["services"]
    rows = []
    for service in sorted(services):
        seconds = _kill(stack, service, sender, asker)
        rows.append(f"  {service:<22} back and both loads served after {seconds:5.1f} s")
    ended = [wait(lambda job=job: (found := client.job(job.id)).finished and found, f"the end of {job.id}") for job in jobs]
    for load in (sender, asker):
        load.ended.set()
        load.join(_PATIENCE_SECONDS)
    assert [(job.id, job.state, job.error) for job in ended if job.state != "succeeded"] == []
    wait(lambda: client.get("/v1/interactions/stats")["waiting_batches"] == 0, "an empty stream")
    found = client.get("/v1/interactions/stats")
    show(
        capsys,
        "every container killed with SIGKILL, one after the other:",
        *rows,
        f"  {sender.accepted:,} events accepted, {sender.again} batches sent again; stored {found['interactions'] - stored:,}",
        f"  {asker.right:,} right answers, {asker.refused} requests not answered while something was down, {len(asker.wrong)} wrong ones",
    )
    assert sender.wrong == [] and asker.wrong == []
    assert asker.right > 0 and sender.accepted > 0
    assert found["interactions"] == stored + sender.accepted


def _some_items(client: Client) -> list[str]:
    answer = client.post("/v1/recommendations", {"user": "nobody", "n": 60})
    return [item["item"] for item in answer["items"]]


def _inputs(client: Client) -> dict[str, str]:
    return {"dataset": client.latest("dataset", "dataset"), "catalog": client.current_catalog()}


def _kill(stack: ComposeStack, service: str, sender: Sender, asker: Asker) -> float:
    """Kill one container's first process and wait until it runs again, healthy, and both loads have been served since; the seconds this took."""
    before = stack.container(service)
    begin = time.monotonic()
    # Not `docker kill`, which counts as a stop that somebody wanted.
    os.kill(before["State"]["Pid"], signal.SIGKILL)

    def back() -> bool:
        state = stack.container(service)["State"]
        fresh = state["Running"] and state["StartedAt"] != before["State"]["StartedAt"]
        return fresh and state["Health"]["Status"] == "healthy"

    wait(back, f"{service} in health")
    healthy = time.monotonic()
    wait(lambda: sender.last > healthy and asker.last > healthy, f"answers after the loss of {service}")
    return time.monotonic() - begin


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
