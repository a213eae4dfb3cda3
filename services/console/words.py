"""Numbers, times and references as people read them."""

from __future__ import annotations

from typing import Any

from semantide.shared.plots import number

_AGES = ((86400 * 2, 86400, "days"), (3600 * 2, 3600, "hours"), (120, 60, "minutes"), (0, 1, "seconds"))


def count(value: Any) -> str:
    """A number with thousands apart; a dash where it is not known."""
    if value is None:
        return "-"
    return f"{value:,.0f}".replace(",", "\u202f") if isinstance(value, int) or abs(value) >= 1000 else number(float(value))


def share(value: float | None) -> str:
    """A share as a percentage."""
    return "-" if value is None else f"{100 * value:.3g} %"


def ago(then_ms: float | None, now: float) -> str:
    """How long ago; ``now`` is seconds since 1970."""
    if not then_ms:
        return "-"
    seconds = max(0.0, now - then_ms / 1000)
    _, unit, name = next(row for row in _AGES if seconds >= row[0])
    return f"{seconds / unit:.0f} {name} ago"


def lasting(seconds: float) -> str:
    """A time span."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def short(ref: str | None) -> str:
    """A reference that is long enough to be told from others."""
    if not ref:
        return "-"
    kind, _, digest = ref.partition("/")
    return f"{kind}/{digest.removeprefix('sha256-')[:10]}" if digest else ref


def figure(value: Any) -> str:
    """A value of a table: figures shortened, all else as it is."""
    if isinstance(value, bool) or value is None:
        return "-" if value is None else "yes" if value else "no"
    return number(float(value)) if isinstance(value, int | float) else str(value)
