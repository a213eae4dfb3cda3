"""Tables over several ranks give what one table gives, copies stay alike, and only unique rows travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from semantide.services.training.hierarchical_sparse import PeriodicReplicas, hierarchical_table
from semantide.services.training.sharded_table import ShardedTable
from semantide.services.training.world import World
from semantide.shared.models.item_table import LocalTable, TableOptimiser

from .rank_threads import on_threads

SIZE, RATE = 3, 0.1


def whole(num_rows: int, optimiser: TableOptimiser) -> LocalTable:
    table = LocalTable(num_rows, SIZE, optimiser=optimiser)
    table.weight_ND.copy_(torch.randn(num_rows, SIZE, generator=torch.Generator().manual_seed(3)))
    for name, tensor in table.state().items():
        if name != "weight":
            table._state[name] = tensor.double()
    table.weight_ND = table.weight_ND.double()
    return table


def part(num_rows: int, optimiser: TableOptimiser) -> Callable[[int, slice], LocalTable]:
    """A share of ``whole``."""

    def share(count: int, rows: slice) -> LocalTable:
        table, full = whole(count, optimiser), whole(num_rows, optimiser)
        table.load({name: tensor[rows] for name, tensor in full.state().items()})
        return table

    return share


def asked(num_rows: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """A rank's ids, popular ones often and sometimes none, and a gradient for each."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    count = int(torch.randint(0, 20, (1,), generator=generator))
    return (torch.rand(count, generator=generator) ** 3 * num_rows).long(), torch.randn(count, SIZE, generator=generator, dtype=torch.float64)


def step(table: Any, ids_T: Tensor, gradients_TD: Tensor) -> Tensor:
    """One step with a gradient for each asked id; the vectors before it."""
    route = table.route(ids_T)
    vectors_UD: Tensor = table.fetch(route)
    table.update(route, torch.zeros(len(vectors_UD), SIZE, dtype=torch.float64).index_add_(0, route.inverse_T, gradients_TD), RATE)
    return vectors_UD[route.inverse_T]


def on_one(num_rows: int, ranks: int, steps: int, optimiser: TableOptimiser) -> tuple[LocalTable, list[list[Tensor]]]:
    """The same steps on one table, and what each rank would have seen."""
    table, seen = whole(num_rows, optimiser), []
    for number in range(steps):
        ids, gradients = zip(*[asked(num_rows, rank, number) for rank in range(ranks)], strict=True)
        seen.append(list(step(table, torch.cat(ids), torch.cat(gradients)).split([len(part) for part in ids])))
    return table, seen


def on_rank(world: Any, num_rows: int, group_size: int, steps: int, optimiser: TableOptimiser, every: int = 0) -> tuple[ShardedTable, list[Tensor]]:
    table = hierarchical_table(num_rows, world, group_size, part(num_rows, optimiser), every=every)
    seen = [step(table, *asked(num_rows, world.rank, number)) for number in range(steps)]
    table.settle()
    return table, seen


@settings(max_examples=25, deadline=None)
@given(
    cut=st.sampled_from([(1, 1), (2, 1), (2, 2), (3, 1), (4, 2), (4, 4), (6, 2), (6, 3)]),
    num_rows=st.integers(6, 50),
    steps=st.integers(0, 6),
    optimiser=st.sampled_from(["adagrad", "row-adam", "adam"]),
)
def test_exact_copies_act_as_one_table(cut: tuple[int, int], num_rows: int, steps: int, optimiser: TableOptimiser) -> None:
    ranks, group = cut
    single, expected = on_one(num_rows, ranks, steps, optimiser)
    found = on_threads(ranks, lambda world: on_rank(world, num_rows, group, steps, optimiser))
    for rank, (table, seen) in enumerate(found):
        for number, vectors in enumerate(seen):
            torch.testing.assert_close(vectors, expected[number][rank], rtol=1e-11, atol=1e-12)
        for name, tensor in table.state().items():
            torch.testing.assert_close(tensor, single.state()[name][table.shards.rank :: table.shards.size], rtol=1e-11, atol=1e-12)
            assert torch.equal(tensor, found[rank % group][0].state()[name]), "copies differ after settling"


def test_rows_read_ahead_of_an_update_are_those_of_one_table() -> None:
    """Fetches of a later step before the update of an earlier one, as stale training does: owners change in between."""
    num_rows, ranks, steps = 30, 4, 8

    def ahead(table: Any, each: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        seen, before = [], None
        for ids_T, gradients_TD in each:
            route = table.route(ids_T)
            vectors = table.fetch(route)
            seen.append(vectors[route.inverse_T])
            if before is not None:
                table.update(*before, RATE)
            before = (route, torch.zeros(len(vectors), SIZE, dtype=torch.float64).index_add_(0, route.inverse_T, gradients_TD))
        return seen

    together = [[torch.cat(parts) for parts in zip(*[asked(num_rows, rank, number) for rank in range(ranks)], strict=True)] for number in range(steps)]
    expected = ahead(whole(num_rows, "adagrad"), together)  # type: ignore[arg-type]
    found = on_threads(
        ranks,
        lambda world: ahead(
            hierarchical_table(num_rows, world, 2, part(num_rows, "adagrad")), [asked(num_rows, world.rank, number) for number in range(steps)]
        ),
    )
    for number in range(steps):
        torch.testing.assert_close(torch.cat([seen[number] for seen in found]), expected[number], rtol=1e-11, atol=1e-12)


@settings(max_examples=15, deadline=None)
@given(
    cut=st.sampled_from([(2, 1), (4, 2), (6, 2)]), every=st.integers(1, 4), steps=st.integers(1, 6), optimiser=st.sampled_from(["adagrad", "row-adam", "adam"])
)
def test_periodic_copies_are_alike_after_they_met(cut: tuple[int, int], every: int, steps: int, optimiser: TableOptimiser) -> None:
    ranks, group = cut
    found = on_threads(ranks, lambda world: on_rank(world, 20, group, steps, optimiser, every))
    for rank, (table, _) in enumerate(found):
        assert all(torch.equal(tensor, found[rank % group][0].state()[name]) for name, tensor in table.state().items())


def test_a_row_that_one_group_touched_is_as_in_the_exact_mode() -> None:
    ids = [torch.tensor([0, 1, 1]), torch.tensor([2, 3]), torch.tensor([8, 9]), torch.tensor([10])]

    def work(world: Any, every: int) -> tuple[dict[str, Tensor], float]:
        table = hierarchical_table(12, world, 2, part(12, "adagrad"), every=every)
        for number in range(3):
            step(table, ids[world.rank], torch.randn(len(ids[world.rank]), SIZE, generator=torch.Generator().manual_seed(number), dtype=torch.float64))
        table.settle()
        return table.state(), table.share.drift if every else 0.0

    exact, periodic = on_threads(4, lambda world: work(world, 0)), on_threads(4, lambda world: work(world, 2))
    for (one, _), (other, drift) in zip(exact, periodic, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        assert drift == 0.0


@pytest.mark.parametrize("at", [1, 3, 4])
def test_periodic_copies_that_are_taken_up_again_are_those_of_a_run_left_alone(at: int) -> None:
    """A checkpoint settles; what comes after it is the same with the tables that made it and with new ones."""

    def work(world: Any, again: bool) -> dict[str, Tensor]:
        table = hierarchical_table(20, world, 1, part(20, "adam"), every=3)
        for number in range(8):
            if number == at:
                table.settle()
                if again:
                    saved = {name: tensor.clone() for name, tensor in table.state().items()}
                    table = hierarchical_table(20, world, 1, part(20, "adam"), every=3)
                    table.load(saved)
            step(table, *asked(20, world.rank, number))
        return {name: tensor.clone() for name, tensor in table.state().items()}

    alone, again = on_threads(2, lambda world: work(world, False)), on_threads(2, lambda world: work(world, True))
    for one, other in zip(alone, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_copies_drift_apart_less_when_they_meet_more_often() -> None:
    def drift(every: int) -> float:
        def work(world: Any) -> float:
            table = hierarchical_table(8, world, 1, part(8, "adagrad"), every=every)
            for number in range(every):
                step(table, torch.arange(8), torch.randn(8, SIZE, generator=torch.Generator().manual_seed(100 * world.rank + number), dtype=torch.float64))
            assert isinstance(table.share, PeriodicReplicas)
            return table.share.drift

        return sum(on_threads(2, work))

    assert 0 < drift(1) < drift(8)


def test_only_unique_rows_travel() -> None:
    """Rank 0 asks for one row of each rank a thousand times; 4 bytes an id and 8 a number."""
    ids_T = torch.arange(4).repeat(1000)

    def work(world: Any) -> dict[str, int]:
        table = hierarchical_table(40, world, 2, part(40, "adagrad"))
        own = ids_T if world.rank == 0 else ids_T[:0]
        step(table, own, torch.ones(len(own), SIZE, dtype=torch.float64))
        return {what: traffic.num_bytes for what, traffic in table.traffic().items()}

    sent = on_threads(4, work)
    assert sent[0]["ids"] == 2 * 4 and sent[1]["vectors"] == sent[0]["gradients"] == 2 * SIZE * 8
    # Of shard 0 rank 0's group touches rows 0 and 1 alone: they come once, with their one number of state, from the group that owned them.
    assert sum(rank["replica_vectors"] for rank in sent) == 2 * (SIZE + 1) * 8
    assert sum(rank["replica_gradients"] for rank in sent) == 0
    assert sum(rank["replica_ids"] for rank in sent) == 4 * 4


def test_a_row_stays_where_it_is_needed() -> None:
    """Steps of one group alone cost the links between groups nothing after the first but the telling of ids."""

    def work(world: Any) -> list[int]:
        table = hierarchical_table(40, world, 2, part(40, "adam"))
        own, bytes_after = torch.arange(40) if world.rank < 2 else torch.arange(0), []
        for _ in range(3):
            step(table, own, torch.ones(len(own), SIZE, dtype=torch.float64))
            bytes_after.append(sum(table.traffic()[what].num_bytes for what in ("replica_vectors", "replica_gradients")))
        return bytes_after

    first, second, third = (sum(column) for column in zip(*on_threads(4, work), strict=True))
    assert first > 0 and first == second == third


def test_wrong_arguments() -> None:
    def outside(world: Any) -> None:
        hierarchical_table(10, world, 2, part(10, "adagrad")).route(torch.tensor([3, 10]))

    with pytest.raises(ValueError, match="10"):
        on_threads(4, outside)
    with pytest.raises(ValueError, match="give at least 1"):
        PeriodicReplicas(whole(4, "adagrad"), World.single(), 0)
    with pytest.raises(ValueError, match="groups of 3"):
        hierarchical_table(10, World.single(), 3, part(10, "adagrad"))


def _process(rank: int, folder: str) -> None:
    import os

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=4)
    world = World(rank, 4, torch.device("cpu"), "gloo", (0, 1, 2, 3), group=dist.group.WORLD)
    for every in (0, 2):
        table, seen = on_rank(world, 30, 2, 6, "adam", every)
        torch.save({"state": table.state(), "seen": seen}, f"{folder}/{every}-{rank}.pt")
    world.close()


def test_four_processes_in_two_groups(tmp_path: Path) -> None:
    """Real ones, with gloo: the same bits as threads give, and so what one table gives."""
    torch.multiprocessing.spawn(_process, (str(tmp_path),), nprocs=4)
    for every in (0, 2):
        expected = on_threads(4, lambda world, every=every: on_rank(world, 30, 2, 6, "adam", every))  # type: ignore[misc]
        for rank, (table, seen) in enumerate(expected):
            got = torch.load(tmp_path / f"{every}-{rank}.pt", weights_only=True)
            assert all(torch.equal(one, other) for one, other in zip(got["seen"], seen, strict=True))
            assert all(torch.equal(got["state"][name], tensor) for name, tensor in table.state().items())
