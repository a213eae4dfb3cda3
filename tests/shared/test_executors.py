"""Steps over parts: each part once, all of it or nothing, and the same on every executor."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from semantide.shared.errors import PermanentError
from semantide.shared.executors import LocalExecutor, Output, Piece, RayExecutor, Step, executor, perform, read


def double(numbers: pa.Table, log: str = "", dies: str = "") -> dict[str, Output]:
    """Twice the numbers, and their sum; where ``dies`` names a file that is not there, it is made and the process ends at once."""
    values = numbers["n"].to_pylist()
    if log:
        with Path(log).open("a") as file:
            file.write(f"{values[0]}\n")
    if dies and values[0] == 2 and not Path(dies).exists():
        Path(dies).touch()
        os._exit(1)
    doubled = pa.table({"n": pa.array([2 * value for value in values], pa.int64())})
    return {"doubled": doubled, "sums": pa.table({"sum": [sum(values)]})}


def halves(numbers: pa.Table) -> dict[str, Output]:
    """Even and odd numbers in batches of their own."""
    values = numbers["n"].to_pylist()
    return {"by_parity": [pa.record_batch({"n": pa.array([v for v in values if v % 2 == parity], pa.int64())}) for parity in (0, 1)]}


def step(folder: Path, function: Any = double, count: int = 5, **arguments: Any) -> Step:
    first = Step("numbers", _numbers, [{} for _ in range(1)], {"count": count})
    made = LocalExecutor().run(first, folder)
    return Step("work", function, [{"numbers": [Piece(made.path(0, "n"), part)]} for part in range(count)], arguments)


def _numbers(count: int) -> dict[str, Output]:
    return {"n": [pa.record_batch({"n": pa.array([n, 10 * n], pa.int64())}) for n in range(count)]}


def test_every_part_is_worked_on_once_and_comes_back_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    work = step(tmp_path, log=str(log))
    seen = []
    for _ in range(2):
        outcome = LocalExecutor().run(work, tmp_path, lambda done, total, name: seen.append((done, total, name)))
    assert log.read_text().split() == ["0", "1", "2", "3", "4"]
    assert seen[:5] == [(part, 5, "work") for part in range(5)]
    assert [table["sum"].to_pylist() for table in outcome.tables("sums")] == [[0], [11], [22], [33], [44]]
    assert [row for table in outcome.tables("doubled") for row in table["n"].to_pylist()] == [0, 0, 2, 20, 4, 40, 6, 60, 8, 80]


def test_a_part_that_fails_leaves_nothing_and_the_others_stay(tmp_path: Path) -> None:
    def failing(numbers: pa.Table) -> dict[str, Output]:
        if numbers["n"][0].as_py() == 3:
            raise ValueError("three")
        return double(numbers)

    with pytest.raises(ValueError, match="three"):
        LocalExecutor().run(step(tmp_path, failing), tmp_path)
    assert sorted(path.name for path in (tmp_path / "work").iterdir()) == ["part-000000", "part-000001", "part-000002"]


def test_a_full_disk_leaves_no_half_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from semantide.shared import executors

    work, write = step(tmp_path), executors._write

    def full(path: Path, output: Output) -> None:
        if path.name == "sums.arrow":
            raise OSError(28, "No space left on device")
        write(path, output)

    monkeypatch.setattr(executors, "_write", full)
    with pytest.raises(OSError, match="No space"):
        perform(work, 0, tmp_path)
    assert not list((tmp_path / "work").iterdir())


def test_two_workers_on_one_part_give_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = step(tmp_path)

    def twice(numbers: pa.Table) -> dict[str, Output]:
        monkeypatch.undo()
        perform(work, 0, tmp_path)  # the other is faster
        return double(numbers)

    slow = Step("work", twice, work.parts)
    perform(slow, 0, tmp_path)
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["part-000000"]


def test_a_piece_is_one_batch_or_the_whole_file(tmp_path: Path) -> None:
    outcome = LocalExecutor().run(step(tmp_path, halves), tmp_path)
    path = outcome.path(3, "by_parity")
    assert read([Piece(path, 1), Piece(path, 0), Piece(path)])["n"].to_pylist() == [3, 30, 30, 3]


def test_the_executor_is_chosen_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(executor("local"), LocalExecutor) and isinstance(executor("ray"), RayExecutor)
    with pytest.raises(ValueError, match="'spark'"):
        executor("spark")
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    from semantide.shared import executors

    executors._ray.cache_clear()
    with pytest.raises(PermanentError, match=r"semantide\[ray\]"):
        RayExecutor("nowhere").run(Step("x", double, [{}]), Path())


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'semantide[ray]' to test the Ray executor")
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_same_also_when_a_worker_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")) if path))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    (tmp_path / "local").mkdir()
    (tmp_path / "ray").mkdir()
    try:
        local = LocalExecutor().run(step(tmp_path / "local"), tmp_path / "local")
        spread = RayExecutor().run(step(tmp_path / "ray", dies=str(tmp_path / "died")), tmp_path / "ray")
        assert (tmp_path / "died").exists()
    finally:
        ray.shutdown()
    for part in range(local.num_parts):
        for name in ("doubled", "sums"):
            assert local.path(part, name).read_bytes() == spread.path(part, name).read_bytes()
