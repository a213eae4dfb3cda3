"""Ranks as threads of one process, whose world hands tensors over in memory: many small worlds in a second, with the interface of ``World``."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from semantide.services.training.world import Grid, Pending, Traffic

R = TypeVar("R")


class _Meeting:
    """Where the ranks of one group lay down their parts."""

    def __init__(self, size: int) -> None:
        self.barrier, self.parts = threading.Barrier(size, timeout=60), [[] for _ in range(size)]


class ThreadWorld:
    def __init__(self, rank: int, ranks: tuple[int, ...], registry: dict[Any, _Meeting], lock: Any, name: tuple[Any, ...] = ()) -> None:
        self.rank, self.ranks, self.size, self.device = ranks.index(rank), ranks, len(ranks), torch.device("cpu")
        self.traffic = Traffic()
        self._number, self._registry, self._lock, self._name, self._opened = rank, registry, lock, name, 0
        with lock:
            self._meeting = registry.setdefault((name, ranks), _Meeting(len(ranks)))

    def _open(self, ranks: Sequence[int]) -> Any:
        self._opened += 1
        return ThreadWorld(self._number, tuple(ranks), self._registry, self._lock, (*self._name, self._opened))

    def channel(self) -> Any:
        return self._open(self.ranks)

    def grid(self, shard_size: int) -> Grid:
        row, place = divmod(self.rank, shard_size)
        return Grid(self._open(self.ranks[row * shard_size : (row + 1) * shard_size]), self._open(self.ranks[place::shard_size]))

    def all_to_all(self, parts: Sequence[Tensor], received: Sequence[int] | None = None) -> list[Tensor]:
        assert len(parts) == self.size
        self.traffic.add(sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank), 0.0)
        self._meeting.parts[self.rank] = [part.clone() for part in parts]
        self._meeting.barrier.wait()
        got = [sent[self.rank] for sent in self._meeting.parts]
        self._meeting.barrier.wait()
        assert received is None or [len(part) for part in got] == list(received), (received, [part.shape for part in got])
        return got

    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        return self.all_to_all([tensor] * self.size)

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def gather_json(self, value: Any) -> list[Any]:
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(part.tolist())) for part in self.all_gather(text)]

    def start_all_reduce_sum(self, tensor: Tensor) -> Pending:
        return Pending(tensor.copy_(sum(self.all_gather(tensor.clone()), torch.zeros_like(tensor))))

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return self.start_all_reduce_sum(tensor).wait()

    def barrier(self) -> None:
        self.gather_json(None)

    def abort(self) -> None:
        with self._lock:
            for meeting in self._registry.values():
                meeting.barrier.abort()


def on_threads(size: int, work: Callable[[Any], R]) -> list[R]:
    """What ``work`` returns on every rank of a world; the first error ends all of them."""
    registry: dict[Any, _Meeting] = {}
    lock = threading.Lock()

    def one(rank: int) -> R:
        world = ThreadWorld(rank, tuple(range(size)), registry, lock)
        try:
            return work(world)
        except BaseException:
            world.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        return [future.result() for future in futures]
