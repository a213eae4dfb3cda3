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
Intervals are over worlds where there are several (Student's t), over people in one. Each arm's optimiser tokens stand beside it, an aligned arm's with those of the model that it began with: no arm is held to another's.
A world of the full form takes ten minutes of a core; ``--large`` one of the size of a small shop, hours.
Usage: python tests/benchmarks/satisfaction.py [--seeds 3] [--arms page-wise grpo-sr ...] [--large] [--quick] [--json]
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from scipy.stats import t as student
from stopwatch import arguments_parser, finish  # type: ignore[import-not-found]

from semantide.services.commandline.client import Client
from semantide.services.commandline.simulation import StackVariant, recommender
from semantide.services.commandline.stack import Stack
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.contracts import ENDED, JobRecord, JobSpec
from semantide.shared.errors import PermanentError
from semantide.shared.paired import Interval
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


def size(quick: bool, large: bool, seed: int) -> Size:
    """A whole world, or one that is lived through within a minute."""
    if large:
        return Size(SimulatorConfig(users=4000, items=1500, sessions=8, seed=seed), {}, {}, "", 1000, 4)
    if quick:
        training: dict[str, Any] = {"epochs": 2, "evaluate_every": 2, "valid_users": 50}
        return Size(
            SimulatorConfig(users=120, items=150, topics=8, sessions=3, seed=seed), training, {"steps": 6, "evaluate_every": 3}, "tiny", 40, 1, ("popular",)
        )
    training = {
        "generator": {"num_layers": 2, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 128}, "learning_rate": 3e-3, "epochs": 12, "patience": 3,
        "evaluate_every": 2, "valid_users": 300,
    }  # fmt: skip
    return Size(SimulatorConfig(users=1200, items=600, seed=seed), training, {"held_out_users": 400, "probes": 100, "evaluate_every": 50}, "", 600, 3)


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

    def tokens(self, job: str) -> float:
        """How many tokens a job's model was optimised on."""
        return float(sum(row.get("tokens", 0) for row in self.client.get(f"/v1/jobs/{job}/metrics")))

    def live(self, models: dict[str, str]) -> None:
        """Make the base live and the others variants that only those who name them get."""
        self.client.promote(models[BASE], patience_seconds=_PATIENCE_SECONDS)
        wanted = [{"name": name, "model": model, "share": 0.0} for name, model in models.items() if name != BASE]
        self.client.call("PUT", "/v1/serving/variants", json={"variants": wanted, "force": True}, timeout_seconds=_PATIENCE_SECONDS)
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


def trained(walk: Walk, log: Path, arms: list[str], wanted: Size) -> tuple[dict[str, str], dict[str, float]]:
    """Import a log and make every arm's model of it; the models, and how many tokens each was optimised on."""
    walk.job("import", "/v1/imports", {"path": str(log)})
    inputs = {"dataset": walk.job("dataset").artifacts["dataset"]}
    inputs["catalog"] = walk.job("tokenize", inputs=inputs).artifacts["catalog"]
    aligned = [name for name in arms if name in _ALIGNED]
    models, tokens = {}, {}

    def made(name: str, began: float, *arguments: Any, **spec: Any) -> None:
        begin, record = time.monotonic(), walk.job(*arguments, **spec)
        models[name], tokens[name] = record.artifacts["model"], began + walk.tokens(record.id)
        sys.stderr.write(f"{name}: {time.monotonic() - begin:.0f} s, {tokens[name] / 1e6:.2f} M tokens\n")

    for name, recipe in _RECIPES.items():
        if name == BASE or name in arms or (name == "page-wise" and aligned):
            made(name, 0.0, "train", recipe=recipe, inputs=inputs, config=wanted.training)
    if aligned:
        reward = walk.job("reward", recipe=wanted.reward, inputs={"dataset": inputs["dataset"]}).artifacts["reward"]
        given = {**inputs, "model": models["page-wise"], "reward": reward}
        for name in aligned:
            recipe, changes = _ALIGNED[name]
            made(name, tokens["page-wise"], "align", recipe=recipe, inputs=given, config={**wanted.alignment, **changes})
    return models, tokens


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


def play(folder: Path, arms: list[str], wanted: Size, wrong: list[str]) -> tuple[ABTest, dict[str, float]]:
    """One world; the test, and tokens of each arm."""
    simulation = Simulation(wanted.world)
    simulation.write(folder / "log")
    with running(folder) as client:
        walk = Walk(client, wanted.world.seed)
        models, tokens = trained(walk, folder / "log", arms, wanted)
        walk.live(models)
        asked: dict[str, Recommender] = {name: StackVariant(client, "live" if name == BASE else name) for name in models}
        same_twice(simulation, asked[BASE], wrong)
        for name in wanted.own:
            asked[name] = recommender(name, simulation)
        return ab_test(simulation, asked, users=wanted.people, visits=wanted.visits, base=BASE), tokens


def over_worlds(lifts: Sequence[Interval]) -> Interval:
    """Mean over worlds with its interval; of one world that over its people."""
    if len(lifts) == 1:
        return lifts[0]
    values = np.array([lift.value for lift in lifts])
    reach = float(student.ppf(0.975, len(lifts) - 1) * values.std(ddof=1) / np.sqrt(len(lifts)))
    value = float(values.mean())
    return Interval(value, value - reach, value + reach, len(lifts))


def main() -> int:
    """Play all worlds and print what came out."""
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, default=3, help="worlds")
    parser.add_argument("--large", action="store_true", help="worlds of 4,000 people, the recipes as they are")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options = parser.parse_args()
    wrong: list[str] = []
    found: list[ABTest] = []
    spent: list[dict[str, float]] = []
    for seed in range(1 if options.quick else options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            arms = [name for name in options.arms if not options.quick or name in ("page-wise", "grpo-sr")]
            test, tokens = play(Path(folder), arms, size(options.quick, options.large, seed), wrong)
        found.append(test)
        spent.append(tokens)
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
            lift = over_worlds([test.lift(name, figure) for test in found])
            measure: dict[str, Any] = {
                "value": lift.value, "low": lift.low, "high": lift.high, "unit": "share", "better": "higher", "baseline": f"{BASE}, the same simulated people", "runs": len(found),
            }  # fmt: skip
            if (name, figure) in bounds:
                measure |= dict(zip(("at_least", "aim"), bounds[name, figure], strict=True))
            measures[f"{figure}_lift_{name}"] = measure
    for name in spent[0]:
        measures[f"tokens_{name}"] = {
            "value": statistics.mean(tokens[name] for tokens in spent) / 1e6,
            "unit": "M tokens",
            "better": "lower",
            "runs": len(spent),
        }
    return int(finish("satisfaction", options, measures, wrong))


if __name__ == "__main__":
    sys.exit(main())
