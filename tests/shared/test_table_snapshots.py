"""A model and the links behind it are the full table bit for bit, and nothing else is taken."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.models.retriever import ItemVectors, Retriever, RetrieverConfig
from semantide.shared.table_snapshots import SNAPSHOTS, RowsFile, TableSnapshot, row_digests, told, total, write_card

SIZE = 4
NAMES = st.sets(st.sampled_from([f"item {number}" for number in range(20)]), max_size=10)
CHANGES = st.lists(st.tuples(NAMES, NAMES), max_size=4)
Table = dict[str, torch.Tensor]


def digest(table: Mapping[str, torch.Tensor]) -> str:
    vectors = torch.stack([*table.values()]) if table else torch.zeros(0, SIZE)
    return told(total(row_digests([*table], vectors)))


@dataclass
class Chain:
    """A store with a model and links behind it, and the table that they should lead to."""

    folder: Path
    table: Table
    refs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = ArtifactStore(str(self.folder / "store"))
        torch.manual_seed(0)
        shape = RetrieverConfig(hidden_size=SIZE, num_layers=1, num_heads=1, max_items=4, time_buckets=4)
        Retriever(shape).save_pretrained(self.folder / "model", torch.stack([*self.table.values()]), [*self.table])
        self.refs.append(self.store.put("models", self.folder / "model"))

    def append(self, changed: set[str], deleted: set[str], *, ranks: int = 1, before: str | None = None, number: int | None = None) -> str:
        fresh = {name: torch.randn(SIZE) for name in sorted(changed)}
        self.table = {name: vector for name, vector in (self.table | fresh).items() if name not in deleted}
        folder = self.folder / f"link-{len(self.refs)}"
        folder.mkdir()
        for rank in range(ranks):
            names = sorted(changed)[rank::ranks]
            if names:
                file = RowsFile(folder / f"rows-{rank:05d}.parquet", SIZE)
                file.add(names, torch.stack([fresh[name] for name in names]))
                file.close()
        write_card(folder, before or self.refs[-1], len(self.refs) if number is None else number, digest(self.table), deleted)
        self.refs.append(self.store.put(SNAPSHOTS, folder))
        return self.refs[-1]


def begun(folder: Path, names: set[str] | None = None) -> Chain:
    torch.manual_seed(1)
    return Chain(folder, {name: torch.randn(SIZE) for name in sorted(names or {f"item {number}" for number in range(8)})})


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(NAMES, CHANGES)
def test_a_model_and_its_links_are_the_full_table_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, first: set[str], changes: list[tuple[set[str], set[str]]]
) -> None:
    chain = begun(tmp_path_factory.mktemp("c"), first)
    followed = TableSnapshot.load(chain.store.get, chain.refs[0])
    for changed, deleted in changes:
        chain.append(changed, (deleted - changed) & chain.table.keys(), ranks=2)
        followed = TableSnapshot.load(chain.store.get, chain.refs[-1], followed)
    late = TableSnapshot.load(chain.store.get, chain.refs[-1])
    for read in (followed, late):
        assert set(read.item_ids) == chain.table.keys() and len(read.item_ids) == len(chain.table)
        assert all(torch.equal(read.vectors_ND[read.row_of[name]], vector) for name, vector in chain.table.items())
        assert (read.ref, read.number) == (chain.refs[-1], len(changes))
    assert followed.item_ids == late.item_ids and torch.equal(followed.vectors_ND, late.vectors_ND)


def test_what_was_there_stays_as_it_was(tmp_path: Path) -> None:
    chain = begun(tmp_path)
    base = TableSnapshot.load(chain.store.get, chain.refs[0])
    kept = base.vectors_ND.clone()
    TableSnapshot.load(chain.store.get, chain.append({"item 3", "new"}, {"item 5"}), base)
    assert torch.equal(base.vectors_ND, kept) and "new" not in base.row_of and "item 5" in base.row_of
    assert TableSnapshot.load(chain.store.get, chain.refs[0], base) is base


def test_a_missing_link_is_refused_and_the_table_before_it_goes_on(tmp_path: Path) -> None:
    chain = begun(tmp_path)
    first = TableSnapshot.load(chain.store.get, chain.append({"item 1"}, set()))
    missing = chain.append({"item 2"}, set())
    last = chain.append({"item 3"}, set())
    chain.store.remove(missing)
    with pytest.raises(NotFound, match=missing):
        TableSnapshot.load(chain.store.get, last, first)
    with pytest.raises(Conflict, match="give the links in order, each once"):
        first.followed_by(chain.store.get(last), last)


def test_a_doubled_or_foreign_link_is_refused(tmp_path: Path) -> None:
    chain = begun(tmp_path / "one")
    second = chain.append({"item 1"}, {"item 2"})
    at = TableSnapshot.load(chain.store.get, second)
    with pytest.raises(Conflict, match="each once"):
        at.followed_by(chain.store.get(second), second)
    other = begun(tmp_path / "other", {"somebody else"})
    with pytest.raises(Conflict, match="from their own base"):
        at.followed_by(other.store.get(other.append({"x"}, set())), other.refs[-1])
    with pytest.raises(Conflict, match="is link 7 from its base"):
        at.followed_by(chain.store.get(chain.append({"item 1"}, set(), number=7)), chain.refs[-1])


def test_torn_links_are_refused(tmp_path: Path) -> None:
    chain = begun(tmp_path)
    base = TableSnapshot.load(chain.store.get, chain.refs[0])
    link = chain.append({"item 1", "item 2"}, set(), ranks=2)
    copied = tmp_path / "copied"

    def refused(said: str) -> None:
        with pytest.raises(Corrupt, match=said):
            base.followed_by(copied, link)
        shutil.rmtree(copied)

    shutil.copytree(chain.store.get(link), copied)
    (copied / "rows-00001.parquet").unlink()
    refused("does not lead to the table")
    shutil.copytree(chain.store.get(link), copied)
    (copied / "rows-00001.parquet").write_bytes((copied / "rows-00001.parquet").read_bytes()[:-9])
    refused("cannot be read")
    shutil.copytree(chain.store.get(link), copied)
    (copied / "snapshot.json").write_text('{"before": ""}')
    refused("lacks fields")
    shutil.copytree(chain.store.get(link), copied)
    (copied / "snapshot.json").unlink()
    refused("no table snapshot")
    shutil.copytree(chain.store.get(link), copied)
    write_card(copied, base.ref, 1, digest(chain.table), ["nowhere"])
    refused("'nowhere' as deleted, which is not there")


def test_the_digest_of_a_table_is_that_of_its_rows_in_any_order_and_any_parts(tmp_path: Path) -> None:
    chain = begun(tmp_path)
    names, table = [*chain.table], ItemVectors.load(chain.store.get(chain.refs[0]))
    whole = TableSnapshot.load(chain.store.get, chain.refs[0]).digest
    digests = row_digests(names, table.vectors_ND)
    assert (
        told(total(digests[::-1]))
        == told((sum(total(digests[rank::3])[0] for rank in range(3)), sum(total(digests[rank::3])[1] for rank in range(3))))
        == whole
    )
    changed = table.vectors_ND.clone()
    changed[2, 1] = -changed[2, 1]
    swapped = table.vectors_ND[[1, 0, *range(2, len(names))]]
    assert len({whole, told(total(row_digests(names, changed))), told(total(row_digests(names, swapped)))}) == 3
