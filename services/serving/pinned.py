"""The registry as a replica sees it that serves one model or one variant, whatever else is live for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from semantide.services.serving.registry import Registry
from semantide.services.serving.registry_state import Pair, RegistryState, Split
from semantide.shared.errors import NotFound


@dataclass(frozen=True)
class Pin:
    """What a replica shall serve: a model, with the newest of its catalogs where none is named; or what a split calls ``variant``."""

    model: str = ""
    catalog: str = ""
    variant: str = ""

    def __post_init__(self) -> None:
        if self.variant and (self.model or self.catalog):
            raise ValueError(f"SEMANTIDE_REPLICA_VARIANT is {self.variant!r} beside a model or catalog: give a variant, or a model")
        if self.catalog and not self.model:
            raise ValueError(f"SEMANTIDE_REPLICA_CATALOG is {self.catalog!r} without SEMANTIDE_REPLICA_MODEL: name the model too")

    def __bool__(self) -> bool:
        return bool(self.model or self.variant)

    def seen(self, state: RegistryState, trained_on: Callable[[str], str | None]) -> RegistryState:
        """The registry's state as if what is pinned were live, for everybody; ``trained_on`` tells a model's catalog.

        Raises: NotFound for a variant that the split has not, or a model whose catalog nobody knows.
        """
        if self.variant:
            named = next((variant for variant in state.split.variants if variant.name == self.variant), None)
            if named is None:
                known = ", ".join(variant.name for variant in state.split.variants) or "none"
                raise NotFound(f"variant {self.variant!r} is not among those of the split ({known}): `semantide variants set` makes one")
            return state.model_copy(update={"live": named.pair, "split": Split(), "previous": ()})
        candidate = state.candidate(self.model)
        catalog = self.catalog or (candidate.catalog if candidate else None) or trained_on(self.model)
        if catalog is None:
            raise NotFound(f"model {self.model} does not say which catalog it was trained for: name one in SEMANTIDE_REPLICA_CATALOG")
        pair = Pair(model=self.model, catalog=state.newest(catalog))
        return state.model_copy(update={"live": pair, "split": Split(), "previous": ()})


class PinnedRegistry(Registry):
    """Reads as if what is pinned were live; what is written is everybody's."""

    def __init__(self, broker: Any, pin: Pin, trained_on: Callable[[str], str | None]) -> None:
        super().__init__(broker)
        self._pin, self._trained_on = pin, trained_on

    def version(self) -> int:
        """Never 0: something is live from the start."""
        return super().version() + 1

    def read(self) -> RegistryState:
        """The whole state, with what is pinned as the live pair.

        Raises: NotFound as long as it is not there.
        """
        return self._pin.seen(super().read(), self._trained_on)
