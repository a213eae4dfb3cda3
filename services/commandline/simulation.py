"""``semantide simulate`` and ``semantide abtest``: people whose true preference is known write a log, and later say what a recommender is worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson
from semantide.shared.config import Settings

if TYPE_CHECKING:
    from semantide.shared.simulator.log import Simulation
    from semantide.shared.simulator.recommenders import Recommender, Request

_AT_ONCE = 8  # requests that wait for the stack together

Folder = Annotated[Path, typer.Argument(help="A folder that `semantide simulate` has written")]


def simulate(
    out: Annotated[Path, typer.Argument(help="Folder for interactions, items and the card of the world")],
    users: int = 2000,
    items: int = 2000,
    sessions: Annotated[float, typer.Option(help="Visits of a person on average; each has one to eight pages of 5 to 10 items")] = 8.0,
    days: Annotated[int, typer.Option(help="Days that the log covers")] = 14,
    topics: int = 24,
    sharpness: Annotated[float, typer.Option(help="Of the logging policy: 0 shows what is popular, more shows what people like")] = 2.0,
    order_share: Annotated[float, typer.Option(help="Share of clicks that become orders")] = 0.1,
    answer_seconds: Annotated[float, typer.Option(help="Mean seconds from an exposure to its answer, then an event of its own; 0: one event for both")] = 0.0,
    form: Annotated[str, typer.Option(help="parquet or jsonl")] = "parquet",
    seed: int = 0,
    as_json: AsJson = False,
) -> None:
    """Write a log of simulated people, with pages, places, propensities and all signals, for `semantide ingest OUT`. The same seed writes the same log."""
    from semantide.shared.simulator.log import Simulation
    from semantide.shared.simulator.users import SimulatorConfig

    config = SimulatorConfig(
        users=users,
        items=items,
        sessions=sessions,
        days=days,
        topics=topics,
        sharpness=sharpness,
        order_share=order_share,
        answer_seconds=answer_seconds,
        seed=seed,
    )
    counts = Simulation(config).write(out, form)
    if as_json:
        display.as_json(counts)
        return
    display.console.print(", ".join(f"{name} {count:,}" for name, count in counts.items()) + f"\nimport it: semantide ingest {out}", highlight=False)


def abtest(
    folder: Folder,
    names: Annotated[list[str], typer.Argument(help="Whom to compare, the first is the base: `live`, variants of the split, or popular, chance, oracle")],
    users: Annotated[int | None, typer.Option(help="So many people; default: all")] = None,
    visits: Annotated[int, typer.Option(help="Visits of each person to each recommender")] = 4,
    as_json: AsJson = False,
) -> None:
    """Let the simulated people of a folder visit recommenders, and count what they truly open and order. Import their log and train on it first."""
    from semantide.shared.simulator.ab_test import ab_test
    from semantide.shared.simulator.log import Simulation

    if len(set(names)) < len(names):
        raise ValueError(f"{' '.join(names)} names a recommender twice: each is compared with the others once")
    simulation = Simulation.of(folder)
    found = ab_test(simulation, {name: recommender(name, simulation) for name in names}, users=users, visits=visits)
    if as_json:
        display.as_json({"base": found.base, "users": len(found.arms[found.base].figures["clicks"]), "visits": visits, "recommenders": found.rows()})
        return
    rows = [
        [
            name,
            *[cell for figure in ("clicks", "orders") for cell in (arm.per_visit(figure).value, _shown(found.lift(name, figure)))],
            arm.per_visit("pages").value,
        ]
        for name, arm in found.arms.items()
    ]
    heading = ["recommender", "clicks a visit", f"against {found.base}", "orders a visit", f"against {found.base}", "pages a visit"]
    display.table(f"{visits} visits of each person; 95 % intervals, paired by person", heading, rows)
    for name, arm in found.arms.items():
        if foreign := int(arm.figures["foreign"].sum()):
            display.problems.print(f"{name} gave {foreign:,} items that this world does not have: was another log imported, too?", highlight=False)


def recommender(name: str, simulation: Simulation) -> Recommender:
    """One of the simulator's own, or a variant of the stack that runs."""
    from semantide.shared.simulator.recommenders import Chance, Oracle, Popular

    if name == "popular":
        clicks: Counter[str] = Counter()
        for block in simulation.blocks():
            for _, table in simulation.pages(block):
                clicks.update(item for item, signals in zip(table["item"].to_pylist(), table["signals"].to_pylist(), strict=True) if "click" in signals)
        return Popular(simulation, clicks)
    own: dict[str, Callable[[Any], Recommender]] = {"chance": Chance, "oracle": Oracle}
    return own[name](simulation) if name in own else StackVariant(Client(Settings()), name)


class StackVariant:
    """A variant of a stack, asked over REST."""

    def __init__(self, client: Client, variant: str) -> None:
        self._client, self._variant = client, variant

    def __call__(self, requests: Sequence[Request]) -> list[list[str]]:
        """See ``Recommender``."""
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(self._ask, requests))

    def _ask(self, request: Request) -> list[str]:
        past = [{"item": event.item, "action": event.action, "time": event.time} for event in request.history]
        body: dict[str, Any] = {
            **({"history": past} if past else {"user": request.user}),
            "n": request.n,
            "exclude_ids": sorted(request.exclude),
            "variant": self._variant,
        }
        return [item["item"] for item in self._client.post("/v1/recommendations", body)["items"]]


def _shown(interval: Any) -> str:
    return f"{interval.value:+.1%} ({interval.low:+.1%} to {interval.high:+.1%})" if math.isfinite(interval.high) else "too few to tell"
