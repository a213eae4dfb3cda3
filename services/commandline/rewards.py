"""``semantide reward``: train the model that tells what users would like, or weigh its signals anew."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.jobs import AsJson, Wait, run_kind
from semantide.services.commandline.overrides import OnCluster, Overrides
from semantide.shared.config import Settings

_ALIKE = 0.999  # share of exposures in effect from which on their weights need no words


def reward(
    recipe: Annotated[str, typer.Option(help="standard, or tiny for a first look")] = "",
    dataset: str | None = None,
    retriever: Annotated[str | None, typer.Option(help="A trained retriever (models/...) whose item vectors the model sees too")] = None,
    weigh: Annotated[
        str | None, typer.Option(help="A reward model (rewards/...): nothing is trained, its signals get the weights of --set preference=")
    ] = None,
    seed: int = 0,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Train a reward model of all feedback: what a user would do with an item, calibrated, and how relevant it is to him. Weights of its signals are
    --set preference='{"click": 1, "order": 3}', or SEMANTIDE_REWARD_PREFERENCE."""
    client = Client(Settings())
    if weigh is not None:
        if dataset or retriever:
            raise ValueError("--weigh trains nothing: leave --dataset and --retriever out")
        inputs: dict[str, str | None] = {"reward": weigh}
    else:
        inputs = {"dataset": dataset or client.latest("dataset", "dataset"), "retriever": retriever}
    record = run_kind(client, "reward", inputs, recipe=recipe, overrides=overrides, seed=seed, cluster=cluster, wait=wait, as_json=as_json)
    if wait and not as_json:
        _show(record.result)


def _show(result: dict[str, Any]) -> None:
    rows = [
        [
            name,
            f"{found['rate']:.2%}",
            "-" if found["auc"] is None else f"{found['auc']:.4f}",
            f"{found['calibration_error']:.2%}",
            f"{found['calibration_error_placed']:.2%}",
            found["calibration"],
            f"{result['preference'].get(name, 0):g}",
        ]
        for name, found in result["signals"].items()
    ]
    display.table(f"Signals, measured on {result['measured_on']}", ["signal", "rate", "AUC", "calibration error", "where shown", "calibration", "weight"], rows)
    share = result.get("debiased", {}).get("effective_share", 1.0)
    if share < _ALIKE:
        shown = {name: found.get("shown", found)["auc"] for name, found in result["signals"].items()}  # one of an earlier version had those alone
        alike = ", ".join(f"{name} {auc:.4f}" for name, auc in shown.items() if auc is not None)
        display.console.print(
            f"exposures count by inverse propensities: {share:.1%} of them would say as much if they counted alike; AUC where they do: {alike}",
            highlight=False,
        )
    gate = result["gate"]
    display.console.print(
        f"the gate lets {gate['positives_pass']:.1%} of held-out positives pass, and {gate['others_pass']:.1%} of other items", highlight=False
    )
