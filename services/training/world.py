"""The processes that train one model together; the only file that opens process groups.

    World.single()            one process: every collective returns what it was given, at no cost
    World.join(device)        what torchrun started: gloo for host tensors, and nccl (CUDA) or hccl (Ascend) for the device's
    world.channel()           the same ranks over a process group of its own; a thread that talks needs one, since the collectives of
                              one group must come in the same order on every rank
    world.grid(shard_size)    consecutive ranks as one group of shards, equal places of all groups as replicas

Every method but the properties is a collective: all ranks of the world call it, in the same order.
Legend: R ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from semantide.kernels.device import best_device
from semantide.shared.errors import RankLost

_DEVICE_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}


class Traffic:
    """What one world has moved: calls, bytes that left this rank for others, and seconds spent in collectives or waiting for them."""

    def __init__(self) -> None:
        self.calls, self.num_bytes, self.seconds = 0, 0, 0.0
        self._lock = Lock()

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count one collective."""
        with self._lock:
            self.calls, self.num_bytes, self.seconds = self.calls + 1, self.num_bytes + num_bytes, self.seconds + seconds


class Pending:
    """A collective under way; ``wait`` returns its result."""

    def __init__(self, result: Tensor, finish: Callable[[], None] | None = None) -> None:
        self._result, self._finish = result, finish

    def wait(self) -> Tensor:
        """Its result, once all ranks have given their part.

        Raises: RankLost when a rank is gone or does not answer in time.
        """
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return self._result


@dataclass(frozen=True)
class Grid:
    """A world cut in two ways: ``shards`` holds this rank's group, ``replicas`` the ranks with its place in every group."""

    shards: World
    replicas: World


@dataclass(frozen=True)
class World:
    """Ranks that work together.

    ``ranks`` are their numbers in the whole job; ``rank`` is this process's place among them. ``clock`` only measures ``traffic``.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    backend: str = "none"
    ranks: tuple[int, ...] = (0,)
    timeout_seconds: float = 600.0
    clock: Callable[[], float] = lambda: 0.0
    traffic: Traffic = field(default_factory=Traffic, compare=False)
    group: Any = field(default=None, repr=False, compare=False)
    cut: tuple[tuple[int, ...], ...] = ()
    """The groups of ranks that this one is part of one of; empty: all ranks are one."""

    @classmethod
    def single(cls, device: torch.device | str = "cpu") -> World:
        """This process alone."""
        return cls(device=torch.device(device))

    @classmethod
    def join(cls, device: torch.device | str | None = None, *, timeout_seconds: float = 600.0, clock: Callable[[], float] = lambda: 0.0) -> World:
        """The world that torchrun's environment describes; without one this process alone. Without ``device``: the best kind there is, by local rank.

        Raises: ValueError for fewer devices than local ranks, RankLost when the others do not come in time.
        """
        kind = torch.device(device) if device is not None else best_device()
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls.single(kind)
        local, rank, size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if kind.type != "cpu":
            accelerators = torch.accelerator.device_count()
            if local >= accelerators:
                raise ValueError(f"local rank {local} has no {kind.type} device of its own, there are {accelerators}: start at most that many processes here")
            kind = torch.device(kind.type, local)
            torch.accelerator.set_device_index(local)
        if kind.type not in _DEVICE_BACKENDS:
            raise ValueError(f"device {kind.type!r} has no collectives: train on one of {', '.join(_DEVICE_BACKENDS)}")
        own = _DEVICE_BACKENDS[kind.type]
        with _told(f"rank {rank} could not join the other {size - 1} ranks"):
            dist.init_process_group(
                "gloo" if own == "gloo" else f"cpu:gloo,{kind.type}:{own}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout_seconds)
            )
        return cls(rank, size, kind, own, tuple(range(size)), timeout_seconds, clock, Traffic(), dist.group.WORLD)

    @property
    def leads(self) -> bool:
        """Whether this rank writes what the whole world has to write once."""
        return self.rank == 0

    def channel(self) -> World:
        """The same ranks over a process group of its own, with its own count of traffic."""
        if self.size == 1:
            return replace(self, traffic=Traffic())
        # Every rank of the job opens every group, or their names would clash.
        return self._sub(self.ranks, self.cut or [self.ranks])

    def grid(self, shard_size: int) -> Grid:
        """Groups of ``shard_size`` consecutive ranks, and the replicas across them.

        Raises: ValueError when groups of that size do not fill the world.
        """
        if shard_size < 1 or self.size % shard_size:
            raise ValueError(f"{self.size} ranks cannot be cut into groups of {shard_size}: give a divisor of {self.size}")
        rows = [self.ranks[first : first + shard_size] for first in range(0, self.size, shard_size)]
        columns = [self.ranks[place::shard_size] for place in range(shard_size)]
        row, place = divmod(self.rank, shard_size)
        return Grid(self._sub(rows[row], rows), self._sub(columns[place], columns))

    def _sub(self, mine: Sequence[int], every: Sequence[Sequence[int]]) -> World:
        """One of several groups that together hold all ranks; every rank opens all of them, in order."""
        own = None
        for ranks in every:
            if len(ranks) == 1:
                continue
            with _told(f"rank {self.ranks[self.rank]} could not open a group with ranks {list(ranks)}"):
                group = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_seconds))
            if tuple(ranks) == tuple(mine):
                own = group
        place = list(mine).index(self.ranks[self.rank])
        return replace(self, rank=place, size=len(mine), ranks=tuple(mine), traffic=Traffic(), group=own, cut=tuple(tuple(ranks) for ranks in every))

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        """Sum ``tensor`` over all ranks, in place and in the background; every rank gets the same bits."""
        if self.size == 1:
            return Pending(tensor)
        # A ring sends every part round twice.
        num_bytes = 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._start("all-reduce", tensor, num_bytes, lambda: dist.all_reduce(tensor, group=self.group, async_op=True))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of ``tensor`` over all ranks, in place.

        Raises: RankLost when a rank is gone or does not answer in time.
        """
        return self.start_all_reduce_sum(tensor).wait()

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[int] | None = None) -> list[Tensor]:
        """What every rank has for this one: part r goes to rank r. Parts may differ in their first size only.

        ``received`` are the lengths to come, where they are known; otherwise they are exchanged first.

        Raises: ValueError for a wrong number of parts, RankLost when a rank is gone or does not answer in time.
        """
        if len(parts) != self.size:
            raise ValueError(f"{len(parts)} parts for {self.size} ranks: give one part per rank, empty ones included")
        if self.size == 1:
            return [parts[0]]
        lengths = [len(part) for part in parts]
        if received is None:
            told, heard = torch.tensor(lengths), torch.empty(self.size, dtype=torch.int64)
            self._start("exchange of sizes", heard, told.nbytes, lambda: dist.all_to_all_single(heard, told, group=self.group, async_op=True)).wait()
            received = heard.tolist()
        sent = torch.cat([part.detach() for part in parts])
        got = sent.new_empty(sum(received), *sent.shape[1:])
        # Seen as bytes where there are any: not every backend knows every type.
        width = sent[:1].nbytes if len(sent) else got[:1].nbytes
        num_bytes = sum(length for rank, length in enumerate(lengths) if rank != self.rank) * width
        self._start(
            "all-to-all",
            got,
            num_bytes,
            lambda: dist.all_to_all_single(_wire(got), _wire(sent), list(received), lengths, group=self.group, async_op=True),
        ).wait()
        return list(got.split(list(received)))

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in order of rank; they may differ in their first size."""
        return self.all_to_all([tensor] * self.size)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """The tensor of rank ``source``, in place."""
        if self.size == 1:
            return tensor
        num_bytes = tensor.nbytes if self.rank == source else 0
        return self._start("broadcast", tensor, num_bytes, lambda: dist.broadcast(_wire(tensor), self.ranks[source], group=self.group, async_op=True)).wait()

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, in order of rank; whatever JSON can say."""
        if self.size == 1:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather(text)]

    def barrier(self) -> None:
        """Wait until every rank has come here."""
        self.all_reduce_sum(torch.zeros(1))

    def close(self) -> None:
        """Leave: end the process groups of this process. What the others still wait for fails there."""
        if self.group is not None and dist.is_initialized():
            with suppress(RuntimeError):
                dist.destroy_process_group()

    def _start(self, what: str, result: Tensor, num_bytes: int, begin: Callable[[], Any]) -> Pending:
        failed = f"rank {self.ranks[self.rank]}: the {what} with ranks {list(self.ranks)} failed"
        started = self.clock()
        with _told(failed):
            work = begin()
        spent = self.clock() - started

        def finish() -> None:
            waited = self.clock()
            with _told(failed):
                work.wait()
            self.traffic.add(num_bytes, spent + self.clock() - waited)

        return Pending(result, finish)


class _told:
    """Turns what torch.distributed raises into our own error, whose remedy is to start all ranks again."""

    def __init__(self, failed: str) -> None:
        self._failed = failed

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise RankLost(f"{self._failed} ({first}): a rank ended or hangs, see its log; all ranks start again from the last checkpoint") from error


def _wire(tensor: Tensor) -> Tensor:
    """The same memory with every row as bytes."""
    rows = len(tensor) if tensor.ndim else 1
    return tensor.view(rows, math.prod(tensor.shape[1:])).view(torch.uint8)
