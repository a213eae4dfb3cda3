"""What jobs of this room are given: inputs by name, the cards of stored models, the wish to go live."""

from __future__ import annotations

import json
from typing import Any

from semantide.shared.contracts import Promotion
from semantide.shared.errors import BadData, Conflict
from semantide.shared.jobs import JobContext

TOKENIZE_AGAIN = "tokenize this data set and use the catalog that comes out, or wait until new items have been spelled"


def promotion_of(changes: dict[str, Any]) -> Promotion:
    """Take ``promote`` out of a job's config.

    Raises: BadData.
    """
    said = changes.pop("promote", False)
    if isinstance(said, bool):
        return said
    if said != "if-not-worse":
        raise BadData(f"config promote is {said!r}: give true, false or 'if-not-worse'")
    return "if-not-worse"


def input_of(job: JobContext, name: str) -> str:
    """The reference of an input.

    Raises: Conflict where the job has none of that name.
    """
    if name not in job.spec.inputs:
        raise Conflict(f"a {job.spec.kind} job needs the input {name!r}: give inputs {{{name!r}: '{name}s/sha256-...'}}")
    return job.spec.inputs[name]


def card_of(job: JobContext, ref: str) -> dict[str, Any]:
    """What a stored model says of itself."""
    card: dict[str, Any] = json.loads((job.store.get(ref) / "semantide.json").read_text())
    return card
