"""Options that many verbs share: ``--set`` for fields of a configuration, ``--cluster`` for what a job asks of a cluster."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from semantide.shared.contracts import ClusterWish


def wish_of(options: list[str] | None) -> ClusterWish:
    """What ``--cluster`` options ask for."""
    return ClusterWish.model_validate(config_of(options, "--cluster", "pods=4"))


def config_of(overrides: list[str] | None, option: str = "--set", example: str = "epochs=5") -> dict[str, Any]:
    """Options NAME=VALUE as a mapping; values are JSON, or texts where they are none.

    Raises: ValueError for one without a name or a value.
    """
    config: dict[str, Any] = {}
    for text in overrides or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"{option} {text!r} is not NAME=VALUE: write for example {option} {example}")
        try:
            config[name] = json.loads(value)
        except json.JSONDecodeError:
            config[name] = value
    return config


def _checked_config(given: list[str] | None) -> list[str] | None:
    """Refuse wrong use before a stack is looked for."""
    config_of(given)
    return given


def _checked_wish(given: list[str] | None) -> list[str] | None:
    wish_of(given)
    return given


Overrides = Annotated[
    list[str] | None, typer.Option("--set", "-s", help="Override a field of the configuration, as in --set epochs=5 (value in JSON)", callback=_checked_config)
]
OnCluster = Annotated[
    list[str] | None,
    typer.Option(
        "--cluster", "-c", help="What the job asks of a cluster: priority, pods, npus_per_pod, least_pods, most_pods, deadline_seconds", callback=_checked_wish
    ),
]
Processes = Annotated[int | None, typer.Option(help="Processes that do it together; 0: one per accelerator of the worker's machine")]
