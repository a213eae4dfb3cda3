"""REST routes of this room: trained models and recipes. Jobs have routes of their own."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from semantide.services.training.alignment_recipes import ALIGN_RECIPES
from semantide.services.training.recipes import RECIPES
from semantide.shared.artifacts import readable
from semantide.shared.errors import NotFound
from semantide.shared.http import APIRouter
from semantide.shared.room import Room


def build(room: Room) -> APIRouter:
    """Models and recipes."""
    router = APIRouter(prefix="/v1", tags=["models"])

    def card(ref: str) -> dict[str, Any]:
        manifest = room.store.manifest(ref)
        text = room.store.text(ref, "semantide.json") if "semantide.json" in manifest["files"] else "{}"
        size = sum(file["bytes"] for file in manifest["files"].values())
        return {"model": ref, **json.loads(text), "seed": manifest["seed"], "code": manifest["code"], "size_bytes": size}

    @router.get("/models", summary="Trained models, without their configurations")
    def models() -> list[dict[str, Any]]:
        cards = readable(room.store.list("models"), card)
        return [{name: value for name, value in entry.items() if name != "config"} for entry in cards]

    @router.get("/models/{ref:path}", summary="One model: recipe, metrics, catalog")
    def model(ref: str) -> dict[str, Any]:
        full = ref if ref.startswith("models/") else f"models/{ref}"
        if full not in room.store.list("models"):
            raise NotFound(f"no model {ref!r}: GET /v1/models lists them")
        return card(full)

    @router.get("/recipes", summary="Recipes that a train or an align job can name, with all their numbers")
    def recipes() -> dict[str, Any]:
        trained, aligned = ({name: asdict(build()) for name, build in table.items()} for table in (RECIPES, ALIGN_RECIPES))
        return {**trained, **aligned}

    return router
