"""HTTP door: what this room has drawn and searched."""

from __future__ import annotations

import json
from typing import Any

from semantide.services.negatives.newest_models import NewestModels
from semantide.shared.artifacts import readable
from semantide.shared.contracts import NegativesWanted
from semantide.shared.errands import Errands
from semantide.shared.errors import NotFound
from semantide.shared.http import APIRouter
from semantide.shared.room import Room


def build(room: Room) -> APIRouter:
    """The routes of this room."""
    router = APIRouter(prefix="/v1/negatives", tags=["negatives"])
    errands, models = Errands(NegativesWanted, room.broker, room.store), NewestModels(room.broker)

    def figures(ref: str) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(room.store.text(ref, "beams.json"))
        return {"beams": ref, **read}

    @router.get("", summary="Shards that are kept for training, searched beams, and the newest generator of each tokenizer")
    def negatives() -> dict[str, Any]:
        return {"shards": errands.waiting(), "beams": readable(room.store.list("beams"), figures), "models": models.all()}

    @router.get("/beams/{ref:path}", summary="How some beams were searched, and how often the next item was among them")
    def beams(ref: str) -> dict[str, Any]:
        full = ref if ref.startswith("beams/") else f"beams/{ref}"
        if not room.store.exists(full):
            raise NotFound(f"no beams {ref!r}: GET /v1/negatives lists them")
        return figures(full)

    return router
