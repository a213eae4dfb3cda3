"""Every container of the stack killed in turn, while events come in, recommendations go out and a model is trained."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from semantide.services.commandline.client import Client, StackError
from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.errors import TransientError

from .conftest import PATIENCE_SECONDS, ComposeStack, show, wait
from .load import Asker, Sender

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]


@dataclass
class Trainings:
    """One training after the other, all the same: whatever is killed, each must go as the first one went."""

    client: Client
    spec: JobSpec
    ids: list[str] = field(default_factory=list)

    def look(self) -> JobRecord | None:
        """The newest one, while somebody answers."""
        try:
            return self.client.job(self.ids[-1])
        except (TransientError, StackError):
            return None

    def advancing(self) -> JobRecord | None:
        """The newest one, if it has begun and has most of its steps before it; another one is begun where it has ended."""
        found = self.look() if self.ids else None
        if not self.ids or (found and found.finished):
            self.ids.append(self.client.submit(self.spec).id)
        return found if found and found.state == "running" and 0 < found.done < found.total / 2 else None

    def losses(self, job_id: str) -> dict[int, float]:
        """Loss by step."""
        return {int(row["step"]): row["loss"] for row in self.client.get(f"/v1/jobs/{job_id}/metrics") if "loss" in row}


@dataclass(frozen=True)
class Recovery:
    """What the loss of one container cost, seconds: until it was healthy again, between two answers at most, until the training got on."""

    service: str
    healthy: float
    events: float
    answers: float
    training: float

    def __str__(self) -> str:
        return f"  {self.service:<22} {self.healthy:>12.1f} {self.events:>12.1f} {self.answers:>12.1f} {self.training:>12.1f}"


def _lose(stack: ComposeStack, service: str, sender: Sender, asker: Asker, trainings: Trainings) -> Recovery:
    wait(trainings.advancing, "a training that runs")
    begin = time.monotonic()
    back = stack.kill(service)
    healthy = got_on = 0.0
    seen: JobRecord | None = None
    deadline = begin + PATIENCE_SECONDS
    while not (healthy and got_on and sender.was_served(begin + healthy) and asker.was_served(begin + healthy)):
        assert time.monotonic() < deadline, f"after the loss of {service}: healthy {healthy}, training {got_on}, {trainings.look()}"
        if not healthy and back():
            healthy = time.monotonic() - begin
        found = None if got_on else trainings.look()
        # What is seen first was told before the loss. With its worker lost a training is begun again from a checkpoint, where it has done less.
        if found and seen and (found.finished or (found.attempt == seen.attempt and found.done != seen.done)):
            got_on = time.monotonic() - begin
        seen = found or seen
        time.sleep(0.1)
    return Recovery(service, healthy, sender.longest_pause(begin), asker.longest_pause(begin), got_on)


def test_every_container_may_be_killed(stack: ComposeStack, items: list[str], questions: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    client = stack.client()
    inputs = {"dataset": client.latest("dataset", "dataset"), "catalog": client.current_catalog()}
    trainings = Trainings(client, JobSpec(kind="train", recipe="tiny", config={"epochs": 4, "patience": 1000, "log_every": 1}, inputs=inputs, seed=1))
    stored = client.get("/v1/interactions/stats")["interactions"]
    sender, asker = Sender(stack.client(), items), Asker(stack.client(), questions)
    sender.start()
    asker.start()
    others = [client.submit(JobSpec(kind="tokenize", inputs={"dataset": inputs["dataset"]}, seed=1)), client.submit(JobSpec(kind="dataset", seed=1))]
    services = json.loads(stack.compose("config", "--format", "json"))["services"]
    lost = [_lose(stack, service, sender, asker, trainings) for service in sorted(services)]
    for _ in range(3):
        # A training may have ended in the moment before its worker was killed.
        if any(client.job(job).attempt > 1 for job in trainings.ids):
            break
        lost.append(_lose(stack, "training-worker", sender, asker, trainings))
    # One more, which nobody disturbs, to compare with.
    trainings.ids.append(client.submit(trainings.spec).id)
    ended = [wait(lambda job=job: (found := client.job(job)).finished and found, f"the end of {job}") for job in (*trainings.ids, *(job.id for job in others))]
    for load in (sender, asker):
        load.ended.set()
        load.join(PATIENCE_SECONDS)
    wait(lambda: client.get("/v1/interactions/stats")["waiting_batches"] == 0, "an empty stream")
    found = client.get("/v1/interactions/stats")
    models = [job.artifacts.get("model") for job in ended[: len(trainings.ids)]]
    curves = [trainings.losses(job) for job in trainings.ids]
    attempts = sum(job.attempt for job in ended[: len(models)])
    show(
        capsys,
        "every container killed with SIGKILL, one after the other; seconds:",
        f"  {'':<22} {'healthy':>12} {'events':>12} {'answers':>12} {'training':>12}",
        *map(str, lost),
        f"  {sender.accepted:,} events accepted, {sender.again} batches sent again; stored {found['interactions'] - stored:,}",
        f"  {len(asker.served):,} right answers, {asker.refused} requests not answered while something was down, {asker.replaced} answered by the retriever, "
        f"as they say, while the generator was being loaded, {len(asker.wrong)} wrong ones",
        f"  {len(models)} trainings of {len(curves[-1])} steps in {attempts} attempts, "
        f"{len({json.dumps(curve, sort_keys=True) for curve in curves})} loss curves, {len(set(models))} models",
    )
    assert [(job.id, job.state, job.error) for job in ended if job.state != "succeeded"] == []
    assert sender.wrong == [] and asker.wrong == []
    assert len(asker.served) > 0 and sender.accepted > 0
    assert found["interactions"] == stored + sender.accepted
    assert len(curves[-1]) > trainings.spec.config["epochs"], "no step told its loss"
    assert attempts > len(models), "no training lost its worker"
    assert all(curve == curves[-1] for curve in curves), "a training that lost its worker did not go as one that nobody disturbed"
    assert len(set(models)) == 1 and models[0], "the same training gives the same model, whatever it lost"
