"""Training with a table that several ranks change together, as a case for ``world_run``: each rank is a process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from world_run import CASES, LENGTHS, main  # type: ignore[import-not-found]

from semantide.services.training.batches import Sampler
from semantide.services.training.recipes import recipe
from semantide.services.training.retrieval_objective import NextItemSampled
from semantide.services.training.trainer import Listener, Trainer
from semantide.services.training.world import World
from semantide.shared.errors import JobCancelled
from semantide.shared.models.retriever import Retriever, RetrieverConfig

NUM_ITEMS = 24


@dataclass(frozen=True)
class GatheredRoute:
    ids_U: Tensor
    inverse_T: Tensor
    asked: list[Tensor]


class GatheredTable:
    """Every rank has all rows, and applies every rank's gradients in the order of ranks; each door talks."""

    def __init__(self, world: World) -> None:
        self.weight_ND = torch.randn(NUM_ITEMS, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 0.1
        self._ids, self._vectors, self._gradients = world.channel(), world.channel(), world.channel()

    def route(self, ids_T: Tensor) -> GatheredRoute:
        ids_U, inverse_T = ids_T.unique(return_inverse=True)
        return GatheredRoute(ids_U, inverse_T, self._ids.all_gather(ids_U))

    def fetch(self, route: GatheredRoute) -> Tensor:
        self._vectors.barrier()
        return self.weight_ND[route.ids_U]

    def update(self, route: GatheredRoute, gradients_UD: Tensor, rate: float) -> None:
        for ids_U, got_UD in zip(route.asked, self._gradients.all_gather(gradients_UD), strict=True):
            self.weight_ND.index_add_(0, ids_U, got_UD, alpha=-10 * rate)

    def state(self) -> dict[str, Tensor]:
        return {"weight": self.weight_ND}

    def settle(self) -> None:
        """Every rank has the whole table."""

    def load(self, state: Mapping[str, Tensor]) -> None:
        self.weight_ND.copy_(state["weight"])


def tables(world: World, folder: Path, argument: str) -> None:
    """``STALENESS:IN_FLIGHT[:stop|:break]``: stopped by the last rank, or ended there by an error."""
    staleness, in_flight, *how = argument.split(":")
    shape = RetrieverConfig(hidden_size=8, num_layers=1, num_heads=1, max_items=30, time_buckets=8, dropout=0.0, embedding_dropout=0.0)
    config = replace(
        recipe("retriever-tiny"), retriever=shape, epochs=2, items_per_batch=90, max_items=30, num_negatives=6, warmup_steps=2, sync_steps=2, log_every=1,
        staleness=int(staleness), batches_in_flight=int(in_flight), attention_cost=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    table = GatheredTable(world)
    objective = NextItemSampled(Retriever(shape).double(), table, torch.ones(NUM_ITEMS), config)
    sampler = Sampler([(user + np.arange(length)) % NUM_ITEMS for user, length in enumerate(LENGTHS)], config, 5)
    calls, last = 0, world.rank == world.size - 1

    def check() -> None:
        nonlocal calls
        calls += 1
        if how and last and calls == 3:
            raise JobCancelled("stop") if how[0] == "stop" else OSError("broken")

    trainer = Trainer(config, objective, sampler, None, Listener(lambda: 0.0, check_cancelled=check), folder / "checkpoints", seed=5, world=world)
    try:
        state = trainer.run()
    except Exception as error:
        (folder / f"ended-{world.rank}").write_text(type(error).__name__)
        return
    save_file(
        {"table": table.weight_ND, **{name: p.detach().clone() for name, p in objective.model.named_parameters()}}, folder / f"rank-{world.rank}.safetensors"
    )
    (folder / f"rank-{world.rank}.json").write_text(json.dumps({"losses": state.losses}))


CASES["tables"] = tables

if __name__ == "__main__":
    main()
