"""What it costs to tell serving of a table: a link with the rows that changed against the whole retriever, for training to write and for serving to read.

Each run changes ``--changed`` of the rows, drawn like popular items; then a link and the whole model are stored in turn, and both are read as serving reads them: the
link behind the table that is in memory, the model from its folder. The tables must be the same bit for bit.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from stopwatch import arguments_parser, finish  # type: ignore[import-not-found]

from semantide.services.training.change_log import ChangeLog
from semantide.services.training.item_tables import pieces
from semantide.services.training.publication import Link, Publication, Store
from semantide.services.training.recipes import TrainConfig, recipe
from semantide.services.training.retrieval_objective import ITEMS, NextItemSampled
from semantide.services.training.world import World
from semantide.shared.artifacts import ArtifactStore
from semantide.shared.models.item_table import LocalTable
from semantide.shared.models.retriever import Retriever
from semantide.shared.table_snapshots import SNAPSHOTS, TableSnapshot


def main() -> int:
    parser = arguments_parser(__doc__ or "")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changed", type=float, default=0.02, help="share of the rows that change between two links")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, runs = (100_000, 3) if options.quick else (options.rows, 5)
    config: TrainConfig = recipe("retriever-small")
    size, names = config.retriever.hidden_size, [f"item-{row}" for row in range(rows)]
    table = LocalTable(rows, size, optimiser="adagrad")
    objective = NextItemSampled(Retriever(config.retriever), table, torch.ones(rows), config)
    log, generator = ChangeLog(table), torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {name: [] for name in ("link", "model", "follow", "load", "link_bytes", "model_bytes")}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, store = Path(scratch), ArtifactStore(f"{scratch}/store")

        def whole(step: int) -> str:
            objective.model.save_pretrained(folder / f"model-{step}", pieces(rows, objective.read, True), names)
            return store.put("models", folder / f"model-{step}")

        keep = Store(lambda made, step: store.put(SNAPSHOTS, made), store.remove, lambda ref, step: None, lambda step, why: wrong.append(why))
        publication = Publication(World.single(), objective, names, folder / "link", whole, keep)
        link = publication.publish(0, Link(), {})
        assert link is not None
        held = TableSnapshot.load(store.get, link.ref)
        for run in range(runs + 1):
            drawn = (torch.rand(int(rows * options.changed), generator=generator) ** 3 * rows).long()
            route = table.route(drawn)
            table.update(route, torch.randn(len(route.ids_U), size, generator=generator), 0.01)
            log.touch(route.ids_U)
            marks = [time.perf_counter()]
            link = publication.publish(run + 1, link, {ITEMS: log.rows()})
            assert link is not None
            marks.append(time.perf_counter())
            ref = whole(run + 1)
            marks.append(time.perf_counter())
            held = TableSnapshot.load(store.get, link.ref, held)
            marks.append(time.perf_counter())
            loaded = TableSnapshot.load(store.get, ref)
            marks.append(time.perf_counter())
            log.clear()
            if held.item_ids != loaded.item_ids or not torch.equal(held.vectors_ND, loaded.vectors_ND) or not torch.equal(held.vectors_ND, table.weight_ND):
                wrong.append(f"run {run}: the chain does not lead to the table")
            if run:  # the first one notes what all rows are like
                for name, begin, end in zip(("link", "model", "follow", "load"), marks, marks[1:], strict=False):
                    found[name].append(end - begin)
                for name, stored in (("link_bytes", link.ref), ("model_bytes", ref)):
                    found[name].append(sum(path.stat().st_size for path in store.get(stored, files=()).iterdir()))
    middle = {name: statistics.median(values) for name, values in found.items()}
    measures = {
        f"{name}_of_{rows}_rows": {
            "value": middle[base] / middle[ours], "unit": "ratio", "better": "higher", "baseline": f"whole retriever: {middle[base]:.3g}, link {middle[ours]:.3g}",
            "at_least": at_least, "aim": aim, "runs": runs,
        }
        for name, base, ours, at_least, aim in (
            ("write_speedup", "model", "link", 3, 10), ("read_speedup", "load", "follow", 2, 5), ("bytes_saved", "model_bytes", "link_bytes", 10, 20),
        )
    }  # fmt: skip
    return finish("table_snapshots", options, measures, wrong)


if __name__ == "__main__":
    sys.exit(main())
