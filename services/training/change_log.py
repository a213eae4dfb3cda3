"""Which rows of a table have changed since serving was last told: what the next link to serving must hold.

A rank keeps the log of what the ranks of its group asked of its share and then changed; the union over all ranks is what changed at all, also where groups have copies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChangeLog:
    """A bit for each row that this rank has of one table."""

    def __init__(self, table: Any) -> None:
        shards = getattr(table, "shards", None)
        self._rank, self._size = (0, 1) if shards is None else (int(shards.rank), int(shards.size))
        self.changed_N = torch.zeros(len(table.state()["weight"]), dtype=torch.bool)

    def touch(self, rows_K: Tensor) -> None:
        """These rows of the share are changed."""
        self.changed_N[rows_K.cpu()] = True

    def touch_all(self) -> None:
        """Nobody knows what has changed, so everything counts as changed."""
        self.changed_N.fill_(True)

    def rows(self) -> Tensor:
        """What has changed, as rows of the whole table, ascending."""
        return self.changed_N.nonzero().squeeze(1) * self._size + self._rank

    def clear(self) -> None:
        """Serving has been told."""
        self.changed_N.zero_()
