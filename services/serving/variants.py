"""What answers at one moment: the live bundle, and beside it the variants that a split gives to some of the users."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from semantide.services.serving.bundle import Bundle
from semantide.services.serving.registry_state import LIVE, Split
from semantide.shared.errors import NotFound


@dataclass(frozen=True)
class Choice:
    """The bundle for a request; ``variant`` is its name where a split or the request itself chose it, ``share`` the part of the users that has it where the split did."""

    bundle: Bundle
    variant: str | None = None
    share: float | None = None


@dataclass(frozen=True)
class Lineup:
    """The live bundle, and those of the split's variants that could be loaded."""

    live: Bundle
    split: Split = field(default_factory=Split)
    bundles: Mapping[str, Bundle] = field(default_factory=dict)

    def choose(self, who: str | None, variant: str | None = None) -> Choice:
        """The bundle for somebody, or the named one; without either the live one, outside the split.

        Users of a variant that could not be loaded get the live one, outside the split too: their answers must not count for it.

        Raises: NotFound for a name that is not in the split.
        """
        if variant is not None:
            if variant == LIVE:
                return Choice(self.live, LIVE)
            if variant not in self.bundles:
                known = ", ".join([LIVE, *self.bundles])
                raise NotFound(f"variant {variant!r} is not among those loaded ({known}): name one of them, or leave `variant` out")
            return Choice(self.bundles[variant], variant)
        if who is None or not self.split.variants:
            return Choice(self.live)
        name = self.split.assign(who)
        share = self.split.shares[name]
        if name == LIVE:
            return Choice(self.live, LIVE, share)
        return Choice(self.bundles[name], name, share) if name in self.bundles else Choice(self.live)
