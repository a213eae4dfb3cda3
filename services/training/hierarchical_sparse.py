"""Tables that are sharded inside a group of ranks and exist once per group, so that the exchange of ids, vectors and gradients stays inside it.

    hierarchical_table(...)     a ShardedTable over the group's ranks, whose share is
        the share alone         one group: the flat form, every rank a part of one table
        ExactReplicas           the groups' copies act as one table: equal to a single process
        PeriodicReplicas        each group changes its own copy; every N updates the touched rows become the mean

The links between groups are the slow ones. Pushing every touched row to every group costs more bytes there than the flat form as soon as there are several groups (simulated
with rare rows: 0.9 times at two groups of two, 1.5 at four of four, 5 at sixteen of eight), since the others do not need most of them now. So in the exact mode **one
group at a time owns a row's truth**. Groups tell each other which rows a batch touches; that alone decides, everywhere alike, who sends what:

    fetch     who touches a row and does not own it gets its vector from the owner; where the owner does not touch it, one of those who do becomes the owner and
              gets the optimiser's state as well
    update    who touches a row and does not own it sends its gradient to the owner, which adds them up in the order of groups and steps once
    settle    owners send what changed to all others: before a checkpoint, or before whole copies are read

A row that one group needs costs one vector when it moves there and nothing while it stays; one that all need costs the least there is, a gradient up and a vector down per
group. Sums are the same whoever owns a row, so a run has the same bits wherever rows begin.

Legend: T ids of a batch, U unique ids among them, S rows of this share that any group touches, K rows that this group owns among them, M groups, N rows of the
share, D vector size, C numbers of optimiser state per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from semantide.services.training.sharded_table import ShardedTable, index_type, rows_of_share
from semantide.services.training.world import Traffic, World
from semantide.shared.models.item_table import LocalTable, Route

_ROWS_PER_MESSAGE = 1 << 16


@dataclass(frozen=True)
class Touched:
    """Which groups touch which rows of this share in one step; the same at all of them.

    Shapes: ``rows_S`` ascending; ``by_SM`` bool.
    """

    rows_S: Tensor
    by_SM: Tensor

    @classmethod
    def gather(cls, rows_U: Tensor, num_rows: int, replicas: World) -> Touched:
        """Tell the other groups this one's unique rows, and hear theirs."""
        told = replicas.all_gather(rows_U.cpu().to(index_type(num_rows)))
        rows_S, places = torch.cat(told).long().unique(return_inverse=True)
        by_SM = torch.zeros(len(rows_S), len(told), dtype=torch.bool)
        by_SM[places, torch.arange(len(told)).repeat_interleave(torch.tensor([len(rows) for rows in told]))] = True
        return cls(rows_S, by_SM)

    def one_of_S(self) -> Tensor:
        """One of the groups that touch each row, mostly another one for the next row, so that the work spreads."""
        number_S = self.rows_S % self.by_SM.sum(1)
        return (self.by_SM & (self.by_SM.cumsum(1) == number_S.unsqueeze(1) + 1)).byte().argmax(1)


@dataclass(frozen=True)
class ReplicaRoute:
    """A route in the group's own copy, and what all groups touch."""

    own: Route
    touched: Touched

    @property
    def ids_U(self) -> Tensor:
        """Unique rows, ascending."""
        return self.own.ids_U

    @property
    def inverse_T(self) -> Tensor:
        """Place of each asked row among them."""
        return self.own.inverse_T


class _Copy:
    """How a group's copy of a share sends rows: all vectors, then the optimiser's state of those rows whose state goes along, as one line of numbers."""

    def __init__(self, table: LocalTable, replicas: World) -> None:
        self.replicas, self._weight_ND = replicas, table.weight_ND
        self._states = [tensor for name, tensor in table.state().items() if name != "weight"]
        self._state_widths = [math.prod(tensor.shape[1:]) for tensor in self._states]
        self._widths = table.weight_ND.shape[1], sum(self._state_widths)

    def vectors(self, rows: Tensor) -> Tensor:
        """Vectors of rows: [K, D]."""
        return self._weight_ND[rows.to(self._weight_ND.device)]

    def states(self, rows: Tensor) -> Tensor:
        """Everything else that belongs to rows: [K, C]."""
        place = rows.to(self._weight_ND.device)
        return torch.cat([tensor[place].view(len(rows), width) for tensor, width in zip(self._states, self._state_widths, strict=True)], 1)

    def write(self, rows: Tensor, vectors_KD: Tensor, rows_with_state: Tensor, states_KC: Tensor) -> None:
        """Put what another copy sent in the place of what is here."""
        self._weight_ND[rows.to(self._weight_ND.device)] = vectors_KD
        place = rows_with_state.to(self._weight_ND.device)
        for tensor, part in zip(self._states, states_KC.split(self._state_widths, 1), strict=True):
            tensor[place] = part.reshape(len(place), *tensor.shape[1:])

    def exchange(self, world: World, given: list[tuple[Tensor, Tensor]], taken: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        """Send rows (vectors of the first, states of the second) to every group, and get the vectors and states of what is taken from each."""
        parts = [torch.cat([self.vectors(rows).flatten(), self.states(with_state).flatten()]) for rows, with_state in given]
        lengths = [len(rows) * self._widths[0] + len(with_state) * self._widths[1] for rows, with_state in taken]
        blocks = []
        for (rows, with_state), got in zip(taken, world.all_to_all(parts, lengths), strict=True):
            vectors, states = got.split([len(rows) * self._widths[0], len(with_state) * self._widths[1]])
            blocks.append((vectors.view(len(rows), self._widths[0]), states.view(len(with_state), self._widths[1])))
        return blocks

    def settle(self, world: World, rows: Tensor, owner: Tensor) -> None:
        """Rows of all copies become their owner's."""
        for part, owners in zip(rows.split(_ROWS_PER_MESSAGE), owner.split(_ROWS_PER_MESSAGE), strict=True):
            me, of = self.replicas.rank, [part[owners == group] for group in range(self.replicas.size)]
            none = part[:0]
            given = [(none, none) if group == me else (of[me], of[me]) for group in range(self.replicas.size)]
            taken = [(none, none) if group == me else (of[group], of[group]) for group in range(self.replicas.size)]
            for (group_rows, _), (vectors, states) in zip(taken, self.exchange(world, given, taken), strict=True):
                self.write(group_rows, vectors, group_rows, states)


class ExactReplicas:
    """This group's copy of a share, which together with the other groups' acts as one table.

    ``fetch``, ``update`` and ``settle`` must be called in one order everywhere: that order decides who owns which row.
    """

    def __init__(self, table: LocalTable, replicas: World) -> None:
        self.table, self._replicas, self._copy = table, replicas, _Copy(table, replicas)
        self._ids, self._vectors, self._gradients = replicas.channel(), replicas.channel(), replicas.channel()
        self._owner_N = (torch.arange(len(table.weight_ND)) % replicas.size).to(torch.int16)
        self._changed_N = torch.zeros(len(table.weight_ND), dtype=torch.bool)

    def route(self, ids_T: Tensor) -> ReplicaRoute:
        """Find the rows, and tell the other groups."""
        own = self.table.route(ids_T)
        return ReplicaRoute(own, Touched.gather(own.ids_U, len(self.table.weight_ND), self._ids))

    def fetch(self, route: ReplicaRoute) -> Tensor:
        """The vectors [U, D], once this group has those that it touches and does not own."""
        rows_S, by_SM, me = route.touched.rows_S, route.touched.by_SM, self._replicas.rank
        owner_S = self._owner_N[rows_S].long()
        next_S = torch.where(by_SM.gather(1, owner_S.unsqueeze(1)).squeeze(1), owner_S, route.touched.one_of_S())
        moved_S = next_S != owner_S
        given, taken = [], []
        for group in range(self._replicas.size):
            gives_S, takes_S = by_SM[:, group] & (owner_S == me), by_SM[:, me] & (owner_S == group)
            if group == me:
                gives_S = takes_S = torch.zeros_like(moved_S)
            given.append((rows_S[gives_S], rows_S[gives_S & moved_S & (next_S == group)]))
            taken.append((rows_S[takes_S], rows_S[takes_S & moved_S & (next_S == me)]))
        for (rows, with_state), (vectors, states) in zip(taken, self._copy.exchange(self._vectors, given, taken), strict=True):
            self._copy.write(rows, vectors, with_state, states)
        self._owner_N[rows_S] = next_S.to(torch.int16)
        return self.table.fetch(route.own)

    def update(self, route: ReplicaRoute, gradients_UD: Tensor, rate: float) -> None:
        """Add up all groups' gradients of each row at its owner, which steps once."""
        rows_S, by_SM, me, device = route.touched.rows_S, route.touched.by_SM, self._replicas.rank, gradients_UD.device
        owner_S = self._owner_N[rows_S]
        mine_S, touched_S = owner_S == me, by_SM[:, me]
        gradient_S, slot_S = touched_S.cumsum(0) - 1, mine_S.cumsum(0) - 1
        parts = [gradients_UD[gradient_S[touched_S & (owner_S == group)].to(device)] for group in range(self._replicas.size)]
        slots = [slot_S[by_SM[:, group] & mine_S] for group in range(self._replicas.size)]
        own, parts[me] = parts[me], parts[me][:0]
        got = self._gradients.all_to_all(parts, [0 if group == me else len(slot) for group, slot in enumerate(slots)])
        got[me] = own
        sums_KD = gradients_UD.new_zeros(int(mine_S.sum()), gradients_UD.shape[1])
        # Group after group, each row at most once in each: the order of the sum is the groups', whoever owns the row.
        for slot, part in zip(slots, got, strict=True):
            sums_KD[slot.to(device)] += part
        self.table.update(self.table.route(rows_S[mine_S].to(device)), sums_KD, rate)
        self._changed_N[rows_S] = True

    def read(self, ids_T: Tensor) -> Tensor:
        """The vectors [T, D] of some rows of this group's copy, which ``settle`` makes whole."""
        return self.table.read(ids_T)

    def state(self) -> dict[str, Tensor]:
        """This group's copy; all groups' are alike after ``settle``, which a checkpoint needs first."""
        return self.table.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a settled copy, the same in all groups."""
        self.table.load(state)
        self._changed_N.zero_()

    def traffic(self) -> dict[str, Traffic]:
        """What went between groups, by what it was."""
        return {"replica_ids": self._ids.traffic, "replica_vectors": self._vectors.traffic, "replica_gradients": self._gradients.traffic}

    def settle(self) -> None:
        """Make all groups' copies alike, optimiser's state included."""
        changed = self._changed_N.nonzero().squeeze(1)
        self._copy.settle(self._vectors, changed, self._owner_N[changed])
        self._changed_N.zero_()


class PeriodicReplicas:
    """This group's copy of a share, changed by this group alone; ``every`` updates after the last meeting the rows that any group touched become their mean.

    ``settle`` is a meeting too, so that what comes after a checkpoint does not depend on whether the run was started again from it.

    The mean, of vectors and of optimiser's state, is over the groups that touched a row: one that a single group touched since the last meeting is then exactly as in the
    exact mode. ``drift`` says how far copies had come apart at the last meeting: the distance of copies from the mean over the mean's length, of
    the rows that several groups touched and this one averaged.
    """

    def __init__(self, table: LocalTable, replicas: World, every: int) -> None:
        if every < 1:
            raise ValueError(f"copies are to meet every {every} updates: give at least 1")
        self.table, self._replicas, self._copy, self._every = table, replicas, _Copy(table, replicas), every
        self._ids, self._vectors = replicas.channel(), replicas.channel()
        self._touched_N = torch.zeros(len(table.weight_ND), dtype=torch.bool)
        self._updates = 0
        self.drift = 0.0

    def route(self, ids_T: Tensor) -> Route:
        """Find the rows; nobody else is asked."""
        return self.table.route(ids_T)

    def fetch(self, route: Route) -> Tensor:
        """The vectors [U, D] of this group's copy."""
        return self.table.fetch(route)

    def update(self, route: Route, gradients_UD: Tensor, rate: float) -> None:
        """Step in this group's copy, and meet the others when it is time."""
        self.table.update(route, gradients_UD, rate)
        self._touched_N[route.ids_U.cpu()] = True
        self._updates += 1
        if self._updates >= self._every:
            self.settle()

    def read(self, ids_T: Tensor) -> Tensor:
        """The vectors [T, D] of some rows of this group's copy, which ``settle`` makes whole."""
        return self.table.read(ids_T)

    def state(self) -> dict[str, Tensor]:
        """This group's copy; all groups' are alike after ``settle``, which a checkpoint needs first."""
        return self.table.state()

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a settled copy, the same in all groups."""
        self.table.load(state)
        self._touched_N.zero_()
        self._updates = 0

    def traffic(self) -> dict[str, Traffic]:
        """What went between groups, by what it was."""
        return {"replica_ids": self._ids.traffic, "replica_vectors": self._vectors.traffic}

    def settle(self) -> None:
        """Make all groups' copies alike: the mean of those that changed."""
        touched = Touched.gather(self._touched_N.nonzero().squeeze(1), len(self.table.weight_ND), self._ids)
        owner_S = touched.one_of_S()
        distance, length = 0.0, 0.0
        for rows, by_M, owner in zip(
            touched.rows_S.split(_ROWS_PER_MESSAGE), touched.by_SM.split(_ROWS_PER_MESSAGE), owner_S.split(_ROWS_PER_MESSAGE), strict=True
        ):
            far, long = self._average(rows, by_M, owner)
            distance, length = distance + far, length + long
        self._copy.settle(self._vectors, touched.rows_S, owner_S)
        self._touched_N.zero_()
        self._updates = 0
        if length:
            self.drift = distance / length

    def _average(self, rows_S: Tensor, by_SM: Tensor, owner_S: Tensor) -> tuple[float, float]:
        """Owners take the mean of what the groups have; of copies that had company the sum of distances from it, and of its lengths."""
        me, size = self._replicas.rank, self._replicas.size
        mine_S = owner_S == me
        taken_S = [by_SM[:, group] & mine_S for group in range(size)]
        given = [rows_S[by_SM[:, me] & (owner_S == group)] for group in range(size)]
        blocks = self._copy.exchange(self._vectors, [(rows, rows) for rows in given], [(rows_S[taken], rows_S[taken]) for taken in taken_S])
        slot_S, count_K1 = mine_S.cumsum(0) - 1, by_SM[mine_S].sum(1, keepdim=True).to(blocks[0][0].device)
        vectors_KD, states_KC = (block.new_zeros(len(count_K1), block.shape[1]) for block in blocks[0])
        for taken, (vectors, states) in zip(taken_S, blocks, strict=True):
            vectors_KD[slot_S[taken]] += vectors
            states_KC[slot_S[taken]] += states
        vectors_KD /= count_K1
        states_KC /= count_K1
        distance, length = 0.0, 0.0
        for taken, (vectors, _) in zip(taken_S, blocks, strict=True):
            place = slot_S[taken][count_K1[slot_S[taken], 0] > 1]
            copies, mean = vectors[count_K1[slot_S[taken], 0] > 1], vectors_KD[place]
            distance, length = distance + float((copies - mean).norm(dim=1).sum()), length + float(mean.norm(dim=1).sum())
        self._copy.write(rows_S[mine_S], vectors_KD, rows_S[mine_S], states_KC)
        return distance, length


def hierarchical_table(
    num_rows: int, world: World, group_size: int, share: Callable[[int, slice], LocalTable], *, every: int = 0, places_N: Tensor | None = None
) -> ShardedTable:
    """A table over all ranks, in groups of ``group_size``: exact copies, or with ``every`` copies that meet every so many updates.

    ``share`` makes the table of some rows: how many, and which of all they are. It must give equal rows on every rank. ``places_N`` is the row of each id, where
    ids are not rows. ``world``'s ranks all call this.

    Raises: ValueError when groups of that size do not fill the world.
    """
    cut = world.grid(group_size)
    own: Any = share(rows_of_share(num_rows, cut.shards), slice(cut.shards.rank, None, cut.shards.size))
    if cut.replicas.size > 1:
        own = PeriodicReplicas(own, cut.replicas, every) if every else ExactReplicas(own, cut.replicas)
    return ShardedTable(own, num_rows, cut.shards, places_N)
