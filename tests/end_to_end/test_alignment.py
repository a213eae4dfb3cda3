"""From feedback to an aligned generator: the reward room's model, its queue, and the run that does without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.reward.job import run as run_reward
from semantide.services.reward.tasks import score_rollouts
from semantide.services.training.job import run as run_training
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.catalog import Catalog
from semantide.shared.contracts import JobSpec, Message, RolloutsToScore
from semantide.shared.errors import BrokerUnavailable, Conflict
from semantide.shared.jobs import JobContext, Jobs
from semantide.shared.room import Room

from ..reward.shade_shop import COLOURS, NUM_ITEMS, write_shop

ALIGN = {
    "steps": 6,
    "prompts": 16,
    "group": 6,
    "beams": 2,
    "evaluate_every": 3,
    "held_out_users": 40,
    "probes": 30,
    "learning_rate": 5e-3,
    "guard_loss": 1.0,
    "staleness": 1,
    "dropout": False,
}


class RoomInThisProcess:
    """Queues whose messages for the reward room are handled at once; ``dead`` and they are lost, as with a worker that is killed."""

    def __init__(self, room: Room) -> None:
        self.room, self.dead, self.handled = room, False, 0

    def send(self, message: Message) -> None:
        if isinstance(message, RolloutsToScore):
            if self.dead:
                raise BrokerUnavailable("nobody is there")
            self.handled += 1
            try:
                score_rollouts(message, self.room)
            except Conflict:
                pass  # parked with its cause; the board has it


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """The shop of the reward room's tests, with its last two events of each user held out."""
    folder = write_shop(tmp_path / "shop", pages=16)
    table = pq.read_table(folder / "users.parquet")
    lengths = np.array([len(items) for items in table["items"].to_pylist()])
    ends = [pa.array(np.maximum(lengths - held, 0).astype(np.int32)) for held in (2, 1)]
    pq.write_table(
        table.drop_columns(["train_end", "valid_end"]).append_column("train_end", ends[0]).append_column("valid_end", ends[1]), folder / "users.parquet"
    )
    return folder


def test_feedback_becomes_a_reward_and_the_reward_an_aligned_generator(
    broker: Any, settings: Any, make_room: Callable[[str], Room], shop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, queues = ArtifactStore(settings.artifacts_root), RoomInThisProcess(make_room("reward"))

    def job(kind: str, **fields: Any) -> JobContext:
        return JobContext(Jobs(broker).submit(JobSpec(kind=kind, **fields)), settings, store, broker, queues)  # type: ignore[arg-type]

    dataset = store.put("datasets", shop)
    codes = np.stack([np.arange(NUM_ITEMS) % COLOURS, np.arange(NUM_ITEMS) // COLOURS], 1).astype(np.int64)
    Catalog(tuple(f"item-{row}" for row in range(NUM_ITEMS)), codes, (COLOURS, NUM_ITEMS // COLOURS), "f" * 64).save(tmp_path / "catalog")
    catalog = store.put("catalogs", tmp_path / "catalog")
    rewards = [
        run_reward(job("reward", recipe="tiny", config={"min_signals": 5, "users": users}, inputs={"dataset": dataset})).artifacts["reward"]
        for users in ("even", "odd")
    ]
    quick = {"epochs": 4, "items_per_batch": 64, "warmup_steps": 5, "learning_rate": 1e-2, "valid_beam_width": 20}
    model = run_training(job("train", recipe="tiny", config=quick, inputs={"dataset": dataset, "catalog": catalog})).artifacts["model"]
    inputs = {"dataset": dataset, "catalog": catalog, "model": model, "reward": rewards[0], "judge": rewards[1]}

    by_room = run_training(job("align", recipe="grpo-sr", config=ALIGN, inputs=inputs))
    assert queues.handled == by_room.result["scored_by_room"] > ALIGN["steps"] and by_room.result["scored_here"] == 0
    assert by_room.result["steps"] == 6 and by_room.result["kept_step"] in (0, 3, 6)
    assert 0 < by_room.result["valid_before"]["gate_rate"] <= 1 and "judge" in by_room.result["test_after"]
    assert not store.list("rollouts") and not store.list("scores"), "what was used is taken away"

    queues.dead = True
    alone = run_training(job("align", recipe="grpo-sr", config=ALIGN, inputs=inputs))
    assert alone.result["scored_by_room"] == 0 < alone.result["scored_here"]
    assert alone.artifacts == by_room.artifacts, "who scores changes nothing"

    # Two processes share the prompts; one of them stores, and the job has one outcome.
    for name, value in (("DATA_DIR", settings.data_dir), ("REDIS_URL", settings.redis_url), ("REWARD_WAIT_SECONDS", 0)):
        monkeypatch.setenv(f"SEMANTIDE_{name}", str(value))
    together = job("align", recipe="grpo-sr", config={**ALIGN, "steps": 2, "processes": 2}, inputs=inputs)
    outcome = run_training(together)
    assert outcome.result["steps"] == 2 and outcome.result["scored_by_room"] == 0 < outcome.result["scored_here"] and store.exists(outcome.artifacts["model"])
    assert {row["step"] for row in Jobs(broker).metrics(together.id)} == {0, 1, 2}
    monkeypatch.undo()

    # A reward model of other items is refused by name, by the room and without it.
    other = store.put("datasets", write_shop(tmp_path / "other", first_item=1000))
    foreign = run_reward(job("reward", recipe="tiny", config={"min_signals": 5}, inputs={"dataset": other})).artifacts["reward"]
    for dead in (False, True):
        queues.dead = dead
        with pytest.raises(Conflict, match=f"reward model {foreign} knows 0 of the {NUM_ITEMS} items"):
            run_training(job("align", recipe="grpo-sr", config=ALIGN, inputs={**inputs, "reward": foreign}))
    card = json.loads((store.get(model) / "semantide.json").read_text())
    assert card["model_type"] == "generator"
