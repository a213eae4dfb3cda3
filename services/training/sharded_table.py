"""One table over the ranks of a group: every rank keeps a share of the rows, and only unique rows travel.

Row i lives on rank i mod G as row i div G of its share, so neighbouring ids, which are often alike in popularity, spread over all ranks. The share itself is a table
with the same three doors: a ``LocalTable``, or one whose copies in other groups follow it (``hierarchical_sparse``).

Each door talks over a process group of its own, so that a pipeline may have several batches at different doors at once. All ranks of the group
call a door in the same order.

Legend: T ids of a batch, U unique ids among them, A rows that the group asks of this rank, V unique rows among those, G ranks of the group, D vector size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semantide.kernels.jagged_embedding import segment_order, segment_sum, unique_ids
from semantide.services.training.world import Traffic, World
from semantide.shared.models.item_table import LocalTable, placed


@dataclass(frozen=True)
class ShardedRoute:
    """Where the ids of a batch live.

    Shapes: ``ids_U`` ascending; ``inverse_T`` into it; ``order_U`` sorts it by owner. ``asked_of`` and ``asked_by`` count rows per rank.
    """

    ids_U: Tensor
    inverse_T: Tensor
    order_U: Tensor
    asked_of: tuple[int, ...]
    asked_by: tuple[int, ...]
    share: Any


class ShardedTable:
    """A table of ``num_rows`` rows dealt out to the ranks of ``shards``; ``share`` is the table of this rank's rows.

    ``places_N``: the row of each id, where ids are not rows.
    """

    def __init__(self, share: Any, num_rows: int, shards: World, places_N: Tensor | None = None) -> None:
        self.share, self.num_rows, self.shards, self.places_N = share, num_rows, shards, places_N
        self._ids, self._vectors, self._gradients = shards.channel(), shards.channel(), shards.channel()
        self._reads = shards.channel()  # ids of later batches are on their way while somebody reads

    def route(self, ids_T: Tensor) -> ShardedRoute:
        """Find each id's owner and tell it.

        Raises: ValueError for an id outside the table, before anything is sent.
        """
        ids_U, inverse_T = unique_ids(placed(ids_T, self.places_N), self.num_rows)
        order_U, asked_of, asked = self._asked(ids_U, self._ids)
        return ShardedRoute(ids_U, inverse_T, order_U, asked_of, tuple(len(rows) for rows in asked), self.share.route(torch.cat(asked).long()))

    def _asked(self, ids_U: Tensor, channel: World) -> tuple[Tensor, tuple[int, ...], list[Tensor]]:
        """The order that sorts ids by owner, how many each has, and the rows that each rank asks of this one."""
        owner_U = ids_U % self.shards.size
        order_U = owner_U.argsort(stable=True)
        asked_of = torch.bincount(owner_U, minlength=self.shards.size).tolist()
        rows_U = (ids_U // self.shards.size)[order_U].to(index_type(self.num_rows))
        return order_U, tuple(asked_of), channel.all_to_all(rows_U.split(asked_of))

    def fetch(self, route: ShardedRoute) -> Tensor:
        """The vectors [U, D] of the route's unique ids, from their owners."""
        answers_AD = self.share.fetch(route.share)[route.share.inverse_T]
        got = self._vectors.all_to_all(answers_AD.split(route.asked_by), route.asked_of)
        vectors_UD: Tensor = answers_AD.new_empty(len(route.ids_U), answers_AD.shape[1])
        vectors_UD[route.order_U.to(vectors_UD.device)] = torch.cat(got)
        return vectors_UD

    def update(self, route: ShardedRoute, gradients_UD: Tensor, rate: float) -> None:
        """Send gradients to their rows' owners, which add them up in the order of ranks and step once a row."""
        sent = gradients_UD[route.order_U.to(gradients_UD.device)].split(route.asked_of)
        gradients_AD = torch.cat(self._gradients.all_to_all(sent, route.asked_by))
        order = segment_order(route.share.inverse_T, len(route.share.ids_U))
        self.share.update(route.share, segment_sum(gradients_AD, order), rate)

    def settle(self) -> None:
        """Make the copies of all groups alike, where there are several."""
        self.share.settle()

    def read(self, ids_T: Tensor) -> Tensor:
        """The vectors [T, D] of some rows from their owners in this group, whose copies ``settle`` has made whole; nothing about the table changes."""
        ids_U, inverse_T = unique_ids(placed(ids_T, self.places_N), self.num_rows)
        order_U, asked_of, asked = self._asked(ids_U, self._reads)
        answers_AD = self.share.read(torch.cat(asked).long())
        got = self._reads.all_to_all(answers_AD.split([len(rows) for rows in asked]), asked_of)
        vectors_UD: Tensor = answers_AD.new_empty(len(ids_U), answers_AD.shape[1])
        vectors_UD[order_U.to(vectors_UD.device)] = torch.cat(got)
        return vectors_UD[inverse_T.to(vectors_UD.device)]

    def state(self) -> dict[str, Tensor]:
        """This rank's share."""
        share: dict[str, Tensor] = self.share.state()
        return share

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from this rank's share."""
        self.share.load(state)

    @property
    def drift(self) -> float | None:
        """How far copies had come apart when they last met; None where they do not come apart."""
        found: float | None = getattr(self.share, "drift", None)
        return found

    def traffic(self) -> dict[str, Traffic]:
        """What went over the wire, by what it was."""
        own = {"ids": self._ids.traffic, "vectors": self._vectors.traffic, "gradients": self._gradients.traffic, "reads": self._reads.traffic}
        return own if isinstance(self.share, LocalTable) else own | self.share.traffic()


def rows_of_share(num_rows: int, shards: World) -> int:
    """How many of a table's rows are this rank's."""
    return (num_rows - shards.rank + shards.size - 1) // shards.size


def index_type(num_rows: int) -> torch.dtype:
    """The shortest type that rows are told in."""
    return torch.int32 if num_rows <= 1 << 31 else torch.int64
