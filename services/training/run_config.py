"""The configuration of a run as its checkpoints keep it, and whether one that was kept is that of the run that finds it."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any


def plain(config: Any) -> Any:
    """A configuration as it comes back from JSON."""
    return json.loads(json.dumps(asdict(config)))


def same(saved: Any, config: Any) -> bool:
    """Whether a checkpoint's configuration is this one. What an older version did not know yet counts as left at its default, so a run outlives an upgrade."""
    if not (is_dataclass(config) and isinstance(saved, dict)):
        return bool(saved == json.loads(json.dumps(config, default=asdict)))
    known = {field.name: field for field in fields(config)}
    if set(saved) - set(known):
        return False
    for name, field in known.items():
        value = getattr(config, name)
        if name in saved:
            if not same(saved[name], value):
                return False
        elif value != (field.default_factory() if field.default_factory is not MISSING else field.default):
            return False
    return True
