"""Conditions of a resource, as ``kubectl wait --for=condition=...`` reads them: the time changes only when the answer does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from semantide.operators.pods import time_of
from semantide.operators.resources import Condition


def with_conditions(
    old: Sequence[Condition], answers: Mapping[str, bool], reason: str, message: str, generation: int, now: float, words: Mapping[str, str] | None = None
) -> tuple[Condition, ...]:
    """The conditions after these answers, in the order of the answers' names; the reason belongs to those that are true, but for those that ``words`` has a message of
    their own for: their reason is their name.
    """
    own = words or {}
    known = {condition.type: condition for condition in old}
    result = []
    for kind, answer in answers.items():
        before = known.get(kind)
        status = "True" if answer else "False"
        same = before is not None and before.status == status
        result.append(
            Condition(
                type=kind,
                status="True" if answer else "False",
                reason=(kind if kind in own else reason) if answer else "No",
                message=own.get(kind, message) if answer else "",
                last_transition_time=before.last_transition_time if before is not None and same else time_of(now),
                observed_generation=generation,
            )
        )
    return tuple(result)


def since(conditions: Sequence[Condition], kind: str) -> str | None:
    """Since when a condition is true; None while it is not."""
    return next((condition.last_transition_time for condition in conditions if condition.type == kind and condition.status == "True"), None)
