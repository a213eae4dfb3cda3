"""What people truly want: models before the same simulated people, as in an A/B test, through a whole stack and its REST door.

Each seed is a world of its own: its log is imported, models are trained by jobs on it, promoted or set beside the live one as variants, and then asked by the people of that world, each with their whole
history. All arms meet the same people with the same luck; clicks and orders a visit are compared with the point-wise model, paired by person.

    next-item     recipe small: every next item of a history
    point-wise    recipe pointwise: one item of each page (the base)
    page-wise     recipe pagewise: all items of a page
    grpo          the page-wise model aligned by the reward model, without regulariser
    grpo-sr       with it
    no-gate       as grpo-sr, the reward without the gate of relevance
Beside them popular, chance and an oracle that knows everybody's taste: what is there to be won. Before anything is counted, the live model answers some people twice, and both answers must be the same.
Usage: python tests/benchmarks/satisfaction.py [--seeds 3] [--arms page-wise grpo-sr ...] [--quick] [--json]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from stopwatch import arguments_parser, finish  # type: ignore[import-not-found]

from semantide.services.commandline.client import Client
from semantide.services.commandline.simulation import StackVariant, recommender
from semantide.services.commandline.stack import Stack
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.contracts import ENDED, JobRecord, JobSpec
from semantide.shared.errors import PermanentError
from semantide.shared.simulator.ab_test import ABTest, ab_test
from semantide.shared.simulator.log import Simulation
from semantide.shared.simulator.recommenders import Recommender, Request
from semantide.shared.simulator.users import SimulatorConfig

BASE = "point-wise"
ARMS = ("next-item", "page-wise", "grpo", "grpo-sr", "no-gate")
_RECIPES = {"next-item": "small", BASE: "pointwise", "page-wise": "pagewise"}
_ALIGNED: dict[str, tuple[str, dict[str, Any]]] = {"grpo": ("grpo", {}), "grpo-sr": ("grpo-sr", {}), "no-gate": ("grpo-sr", {"gate": False})}
_PATIENCE_SECONDS = 120.0


@dataclass(frozen=True)
class Size:
    """How large a world is, and how long is trained."""

    world: SimulatorConfig
    training: dict[str, Any]
    alignment: dict[str, Any]
    reward: str
    people: int
    visits: int
    own: tuple[str, ...] = ("popular", "chance", "oracle")


def size(quick: bool, seed: int) -> Size:
    """A whole world, or one that is lived through within a minute."""
    if quick:
        training = {"epochs": 2, "evaluate_every": 2, "valid_users": 50}
        return Size(
            SimulatorConfig(users=120, items=150, topics=8, sessions=3, seed=seed), training, {"steps": 6, "evaluate_every": 3}, "tiny", 40, 1, ("popular",)
        )
    return Size(SimulatorConfig(users=4000, items=1500, sessions=8, seed=seed), {}, {}, "", 1000, 4)


class Walk:
    """Jobs of one stack, one after another."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self._seed = client, seed

    def job(self, kind: str, path: str = "/v1/jobs", body: dict[str, Any] | None = None, **spec: Any) -> JobRecord:
        """Run one to its end.

        Raises: PermanentError where it fails.
        """
        wanted = JobSpec(kind=kind, seed=self._seed, **spec).model_dump(mode="json") if body is None else body  # type: ignore[arg-type]
        record = JobRecord.model_validate(self.client.post(path, wanted))
        while record.state not in ENDED:
            time.sleep(0.2)
            record = self.client.job(record.id)
        if record.state != "succeeded":
            raise PermanentError(f"{record.id} {record.state}: {record.error}")
        return record

    def live(self, models: dict[str, str]) -> None:
        """Make the base live and the others variants that only those who name them get."""
        self.client.promote(models[BASE], patience_seconds=_PATIENCE_SECONDS)
        wanted = [{"name": name, "model": model, "share": 0.0} for name, model in models.items() if name != BASE]
        self.client.call("PUT", "/v1/serving/variants", json={"variants": wanted, "force": True}, timeout=_PATIENCE_SECONDS)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not all(one["loaded"] for one in self.client.get("/v1/serving/variants")["variants"]):
            if time.monotonic() > deadline:
                raise PermanentError(f"the variants were not loaded within {_PATIENCE_SECONDS:.0f} s: {self.client.get('/v1/serving/variants')}")
            time.sleep(0.2)


@contextmanager
def running(folder: Path) -> Iterator[Client]:
    """A stack of its own."""
    settings = Settings(
        data_dir=folder / "data", port=free_port(), import_roots=str(folder / "log"), redis_url="", host="127.0.0.1", api_keys="", metrics_port=0
    )
    # People who ask all at once shall get whole searches, not narrow ones.
    os.environ |= {"SEMANTIDE_SERVING_NARROWING_SECONDS": "0", "SEMANTIDE_SERVING_DEADLINE_SECONDS": "600"}
    stack = Stack(settings, lambda text: None)
    try:
        stack.start()
        yield Client(Settings(url=stack.url, data_dir=folder / "data", api_keys=""))
    finally:
        stack.stop()


def trained(walk: Walk, log: Path, arms: list[str], wanted: Size) -> dict[str, str]:
    """Import a log and make every arm's model of it."""
    walk.job("import", "/v1/imports", {"path": str(log)})
    inputs = {"dataset": walk.job("dataset").artifacts["dataset"]}
    inputs["catalog"] = walk.job("tokenize", inputs=inputs).artifacts["catalog"]
    aligned = [name for name in arms if name in _ALIGNED]
    models = {}
    for name, recipe in _RECIPES.items():
        if name == BASE or name in arms or (name == "page-wise" and aligned):
            models[name] = walk.job("train", recipe=recipe, inputs=inputs, config=wanted.training).artifacts["model"]
    if aligned:
        reward = walk.job("reward", recipe=wanted.reward, inputs={"dataset": inputs["dataset"]}).artifacts["reward"]
        given = {**inputs, "model": models["page-wise"], "reward": reward}
        for name in aligned:
            recipe, changes = _ALIGNED[name]
            models[name] = walk.job("align", recipe=recipe, inputs=given, config={**wanted.alignment, **changes}).artifacts["model"]
    return models


def same_twice(simulation: Simulation, arm: Recommender, wrong: list[str]) -> None:
    """Some people ask twice."""
    seen: list[Request] = []

    def spy(requests: Any) -> list[list[str]]:
        seen.extend(requests)
        return [[] for _ in requests]

    ab_test(simulation, {"spy": spy}, users=20, visits=1)
    first, second = ([list(names) for names in arm(seen)] for _ in range(2))
    if first != second:
        wrong.append(f"{sum(one != other for one, other in zip(first, second, strict=True))} of {len(seen)} people got another list when they asked again")


def play(folder: Path, arms: list[str], wanted: Size, wrong: list[str]) -> ABTest:
    """One world."""
    simulation = Simulation(wanted.world)
    simulation.write(folder / "log")
    with running(folder) as client:
        walk = Walk(client, wanted.world.seed)
        models = trained(walk, folder / "log", arms, wanted)
        walk.live(models)
        asked: dict[str, Recommender] = {name: StackVariant(client, "live" if name == BASE else name) for name in models}
        same_twice(simulation, asked[BASE], wrong)
        for name in wanted.own:
            asked[name] = recommender(name, simulation)
        return ab_test(simulation, asked, users=wanted.people, visits=wanted.visits, base=BASE)


def main() -> int:
    """Play all worlds and print what came out."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3, help="worlds")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    wrong: list[str] = []
    found: list[ABTest] = []
    for seed in range(1 if options.quick else options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            arms = [name for name in options.arms if not options.quick or name in ("page-wise", "grpo-sr")]
            test = play(Path(folder), arms, size(options.quick, seed), wrong)
        found.append(test)
        for row in test.rows():
            sys.stderr.write(
                f"seed {seed} {row['recommender']}: " + ", ".join(f"{name} {value:.4f}" for name, value in row.items() if name != "recommender") + "\n"
            )
    measures: dict[str, dict[str, Any]] = {}
    bounds = {("grpo-sr", "clicks"): (0.05, 0.1), ("grpo-sr", "orders"): (0.05, 0.1)}
    for name in found[0].arms:
        for figure in ("clicks", "orders"):
            if name == BASE:
                continue
            lifts = [test.lift(name, figure) for test in found]
            measure: dict[str, Any] = {
                "value": statistics.mean(lift.value for lift in lifts),
                "low": statistics.mean(lift.low for lift in lifts),
                "high": statistics.mean(lift.high for lift in lifts),
                "unit": "share",
                "better": "higher",
                "baseline": f"{BASE}, the same simulated people",
                "runs": len(lifts),
            }
            if (name, figure) in bounds:
                measure |= dict(zip(("at_least", "aim"), bounds[name, figure], strict=True))
            measures[f"{figure}_lift_{name}"] = measure
    return int(finish("satisfaction", options, measures, wrong))


if __name__ == "__main__":
    sys.exit(main())
