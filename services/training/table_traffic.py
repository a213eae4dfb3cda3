"""What the exchange of tables' rows costs: bytes on the wire by what they were, and how far copies of a table come apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class TableTraffic:
    """Figures of some tables since the last report; nothing for tables in one process."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self._tables = [table for table in tables.values() if hasattr(table, "traffic")]
        self._step, self._before = 0, self._bytes()

    def report(self, step: int) -> dict[str, float]:
        """Bytes that left this rank a step, of all tables together, and the largest drift of any."""
        now, steps = self._bytes(), max(1, step - self._step)
        values = {f"wire_{name}": (num_bytes - self._before.get(name, 0)) / steps for name, num_bytes in now.items()}
        drifts = [table.drift for table in self._tables if table.drift is not None]
        self._step, self._before = step, now
        return values | ({"drift": max(drifts)} if drifts else {})

    def _bytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for table in self._tables:
            for name, traffic in table.traffic().items():
                total[name] = total.get(name, 0) + traffic.num_bytes
        return total
