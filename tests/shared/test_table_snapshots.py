import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.shared.errors import Conflict, Corrupt, NotFound
from semantide.shared.table_snapshots import TableChain, TableSnapshot, joined, write_base, write_delta

IDS = st.sets(st.integers(0, 30), max_size=12)
CHANGES = st.lists(st.tuples(IDS, IDS), max_size=5)


def vectors(ids: set[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(ids), generator=generator)
    return torch.tensor(sorted(ids), dtype=torch.int64)[order], torch.randn(len(ids), 3, generator=generator)


@settings(deadline=None, max_examples=60)
@given(IDS, CHANGES)
def test_a_base_and_its_deltas_are_the_full_table_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, first: set[int], changes: list[tuple[set[int], set[int]]]
) -> None:
    folder = tmp_path_factory.mktemp("s")
    ids, values = vectors(first, 0)
    table = dict(zip(ids.tolist(), values, strict=True))
    written = write_base(folder / "0", ids, values)
    for number, (changed, deleted) in enumerate(changes, 1):
        deleted -= changed
        ids, values = vectors(changed, number)
        table |= dict(zip(ids.tolist(), values, strict=True))
        for gone in deleted:
            table.pop(gone, None)
        written = write_delta(folder / str(number), written, ids, values, torch.tensor(sorted(deleted), dtype=torch.int64))
    read = TableSnapshot.read(folder / "0", [folder / str(number) for number in range(1, len(changes) + 1)])
    assert read.ids_N.tolist() == sorted(table)
    assert torch.equal(read.vectors_ND, torch.stack([table[i] for i in sorted(table)]) if table else torch.zeros(0, 3))
    # The full table, written anew, has the same bytes.
    full = write_base(folder / "full", torch.tensor(list(table), dtype=torch.int64), torch.stack([*table.values()]) if table else torch.zeros(0, 3))
    assert torch.equal(full.ids_N, read.ids_N) and torch.equal(full.vectors_ND, read.vectors_ND)
    assert (
        json.loads((folder / "full" / "snapshot.json").read_text())["table"] == json.loads((folder / str(len(changes)) / "snapshot.json").read_text())["table"]
    )
    assert (read.number, read.link) == (written.number, written.link)


@pytest.fixture
def chain(tmp_path: Path) -> list[Path]:
    ids, values = vectors(set(range(10)), 1)
    snapshot = write_base(tmp_path / "0", ids, values)
    for number in (1, 2, 3):
        ids, values = vectors({number, 10 + number}, number)
        snapshot = write_delta(tmp_path / str(number), snapshot, ids, values, torch.tensor([number + 5]))
    return [tmp_path / str(number) for number in range(4)]


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    ids, values = vectors(set(range(10)), 1)
    base = write_base(tmp_path / "0", ids, values)
    touched = values.clone()
    touched[3] += 1
    write_delta(tmp_path / "1", base, ids, touched, torch.tensor([77]))
    after = TableSnapshot.read(tmp_path / "0", [tmp_path / "1"])
    assert int((after.vectors_ND != base.vectors_ND).any(1).sum()) == 1
    assert (tmp_path / "1" / "rows.safetensors").stat().st_size < (tmp_path / "0" / "rows.safetensors").stat().st_size


def test_a_missing_doubled_or_swapped_delta_is_refused(chain: list[Path]) -> None:
    base, one, two, three = chain
    for deltas, said in (
        ([two], "is delta 2 and the table stands at 0, so it does not follow: give delta 1 next"),
        ([one, three], "give delta 2 next"),
        ([one, one], "is there already: give delta 2 next"),
        ([one, two, one], "is there already"),
        ([two, one], "does not follow"),
    ):
        with pytest.raises(Conflict, match=said):
            TableSnapshot.read(base, deltas)
    with pytest.raises(Conflict, match="no base"):
        TableSnapshot.read(one, [two])
    assert TableSnapshot.read(base, [one, two, three]).number == 3


def test_a_delta_of_another_table_is_refused(chain: list[Path], tmp_path: Path) -> None:
    other = write_base(tmp_path / "other", *vectors(set(range(10)), 9))
    write_delta(tmp_path / "other-1", other, *vectors({1}, 1), torch.tensor([2]))
    with pytest.raises(Conflict, match="follows another table"):
        TableSnapshot.read(chain[0], [tmp_path / "other-1"])


def test_torn_and_half_written_snapshots_are_refused(chain: list[Path], tmp_path: Path) -> None:
    base, one, *_ = chain
    rows = one / "rows.safetensors"
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(Corrupt, match="does not have the digest"):
        TableSnapshot.read(base, [one])
    rows.write_bytes(whole)
    shutil.copytree(one, tmp_path / "half")
    (tmp_path / "half" / "snapshot.json").unlink()
    with pytest.raises(Corrupt, match="no table snapshot"):
        TableSnapshot.read(base, [tmp_path / "half"])
    card = json.loads((base / "snapshot.json").read_text())
    (base / "snapshot.json").write_text(json.dumps({**card, "table": "0" * 64}))
    with pytest.raises(Corrupt, match="does not lead to the table"):
        TableSnapshot.read(base)


def test_rows_of_several_ranks_make_one_table(tmp_path: Path) -> None:
    ids, values = vectors(set(range(11)), 1)
    whole = write_base(tmp_path / "whole", ids, values)
    dealt = write_base(tmp_path / "dealt", *joined([(whole.ids_N[rank::3], whole.vectors_ND[rank::3]) for rank in (2, 0, 1)]))
    assert torch.equal(dealt.vectors_ND, whole.vectors_ND) and dealt.link == whole.link


def test_a_reader_follows_a_chain_that_grows(tmp_path: Path) -> None:
    chain, gone = TableChain(tmp_path / "chain"), torch.tensor([2])
    with pytest.raises(NotFound, match="no table snapshot"):
        chain.read()
    begun = chain.begin(*vectors(set(range(5)), 1))
    seen = chain.read()
    first = chain.append(begun, *vectors({1, 9}, 2), gone)
    (tmp_path / "chain" / ".incoming-000002").mkdir()  # a kill left it
    second = chain.append(first, *vectors({2}, 3), torch.tensor([9]))
    for read in (chain.read(seen), chain.read()):
        assert (read.number, read.ids_N.tolist()) == (2, [0, 1, 2, 3, 4])
        assert torch.equal(read.vectors_ND, second.vectors_ND)
    assert chain.read(second) is second
    with pytest.raises(Conflict, match="stands at 2 and this delta follows 1"):
        chain.append(first, *vectors({2}, 3), gone)
    with pytest.raises(Conflict, match="has a base already"):
        chain.begin(*vectors({1}, 1))
    shutil.rmtree(tmp_path / "chain" / "000001")
    with pytest.raises(Conflict, match="give delta 1 next"):
        chain.read(seen)


def test_wrong_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="id 4 comes twice"):
        write_base(tmp_path / "a", torch.tensor([4, 1, 4]), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"give \[N\] and \[N, D\]"):
        write_base(tmp_path / "a", torch.tensor([4]), torch.zeros(3, 2))
    base = write_base(tmp_path / "b", torch.tensor([4]), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="id 4 is changed and deleted"):
        write_delta(tmp_path / "c", base, torch.tensor([4]), torch.ones(1, 2), torch.tensor([4]))
    with pytest.raises(ValueError, match="for a table"):
        write_delta(tmp_path / "c", base, torch.tensor([4]), torch.ones(1, 3), torch.tensor([], dtype=torch.int64))
