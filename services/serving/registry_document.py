"""The registry as it stands in Redis, which processes of the versions before and after this one read too.

What a later version has added is left out on reading, and with it the decisions and candidates that this one cannot make sense of: they are notes, and what is
live does not depend on them. Versions before 0.2 want a catalog in each: that of a retriever, which has none, is written as the model itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from semantide.shared.contracts import Contract

State = TypeVar("State", bound=Contract)


def written(state: Contract, notes: Mapping[str, type[Contract]]) -> str:
    """The document of a state; ``notes`` has the class of each field that is a list of notes."""
    document = state.model_dump(mode="json")
    for name in notes:
        document[name] = [{**note, "catalog": note["catalog"] or note["model"]} for note in document[name]]
    return json.dumps(document)


def read(raw: bytes, kind: type[State], notes: Mapping[str, type[Contract]]) -> State:
    """The state of a document.

    Raises: ValidationError where even what is live cannot be read.
    """
    document = json.loads(raw)
    for name, note in notes.items():
        document[name] = [each for each in map(_with_its_catalog, document.get(name) or ()) if _makes_sense(each, note)]
    return kind.model_validate(document, extra="ignore")


def _with_its_catalog(note: Any) -> Any:
    same = isinstance(note, dict) and "model" in note and note.get("catalog") == note["model"]
    return {**note, "catalog": None} if same else note


def _makes_sense(note: Any, kind: type[Contract]) -> bool:
    try:
        kind.model_validate(note, extra="ignore")
    except ValidationError:
        return False
    return True
