"""``semantide align``: let a generator learn from a reward model."""

from __future__ import annotations

from typing import Annotated

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson, Wait, run_kind
from semantide.services.commandline.overrides import OnCluster, Overrides, Processes
from semantide.services.commandline.publishing import IfNotWorse, promotion
from semantide.shared.config import Settings


def align(
    recipe: str = "grpo-sr",
    model: Annotated[str | None, typer.Option(help="The generator to begin with; left out, the newest")] = None,
    reward: Annotated[str | None, typer.Option(help="The reward model that scores rollouts; left out, the newest")] = None,
    judge: Annotated[
        str | None, typer.Option(help="A second reward model, of other users or another seed: the run stops when the reward rises and the judge falls")
    ] = None,
    dataset: str | None = None,
    catalog: str | None = None,
    seed: int = 0,
    promote: Annotated[
        bool, typer.Option("--promote", help="Make it live when it is done, unless the guard stopped it or nothing was better than the start")
    ] = False,
    if_not_worse: IfNotWorse = False,
    processes: Processes = None,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Align a generator with what users prefer: recipe grpo-sr (with the supervised regulariser) or grpo. It stops and goes back by itself when held-out quality falls."""
    client = Client(Settings())
    model = model or client.latest_generator()
    made_from = client.get(f"/v1/artifacts/{model}")["inputs"]
    inputs = {
        "model": model,
        "reward": reward or client.latest("reward", "reward"),
        "dataset": dataset or made_from.get("dataset") or client.latest("dataset", "dataset"),
        "catalog": catalog or made_from.get("catalog") or client.current_catalog(),
        "judge": judge,
    }
    record = run_kind(
        client,
        "align",
        inputs,
        recipe=recipe,
        overrides=overrides,
        seed=seed,
        cluster=cluster,
        wait=wait,
        as_json=as_json,
        promote=promotion(promote, if_not_worse),
        processes=processes,
    )
    if wait and not as_json:
        display.alignment(record.result)
