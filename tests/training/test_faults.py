"""What may go wrong while several ranks train: each ends in a clear error or a correct run, and the last good checkpoint stays."""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from semantide.services.training.launch import Launch, launch
from semantide.shared.broker import free_port

SCRIPT = Path(__file__).with_name("fault_run.py")


class Ranks:
    """Runs cases of ``fault_run.py``."""

    def __init__(self, errors: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
        self._errors = errors.open("w")
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def __call__(self, case: str, size: int, folder: Path, argument: str = "") -> list[int]:
        folder.mkdir(exist_ok=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{case} {size} {folder} {argument}\n")
        self._process.stdin.flush()
        return [int(status) for status in self._process.stdout.readline().split()]

    def close(self) -> None:
        self._process.communicate()
        self._errors.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    started = Ranks(tmp_path_factory.mktemp("ranks") / "errors.txt")
    yield started
    started.close()


def consumed(folder: Path) -> dict[tuple[int, int], Counter[int]]:
    """The samples of each (epoch, batch), of the last attempt that came to it."""
    attempts: dict[str, dict[tuple[int, int], Counter[int]]] = {}
    for path in sorted(folder.glob("ledger-*.jsonl"), key=lambda path: path.stat().st_mtime_ns):
        for line in path.read_text().splitlines():
            epoch, batch, samples, _ = json.loads(line)
            attempts.setdefault((folder / f"attempt-of-{path.stem}").read_text(), {}).setdefault((epoch, batch), Counter()).update(samples)
    kept: dict[tuple[int, int], Counter[int]] = {}
    for _, steps in sorted(attempts.items()):
        kept |= steps
    return kept


def result(folder: Path, rank: int = 0) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / f"result-{rank}.json").read_text())
    return found


def run(ranks: Ranks, folder: Path, number: int, size: int, argument: str = "") -> list[int]:
    before = set(folder.glob("ledger-*.jsonl")) if folder.exists() else set()
    statuses = ranks("uneven", size, folder, argument)
    for path in set(folder.glob("ledger-*.jsonl")) - before:
        (folder / f"attempt-of-{path.stem}").write_text(f"{number:03d}")
    return statuses


def test_every_sample_is_consumed_once_an_epoch_across_kills_and_other_numbers_of_ranks(ranks: Ranks, tmp_path: Path) -> None:
    """158 samples; killed on 2 ranks, then on 3, then on 1, and ended on 2."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run(ranks, alone, 0, 1) == [0]
    for number, (size, argument) in enumerate([(2, "1:3"), (3, "0:9"), (1, "0:12"), (2, "")]):
        statuses = run(ranks, killed, number, size, argument)
        if argument:
            assert statuses[int(argument[0])] == -9 and 0 not in statuses, statuses
        else:
            assert statuses == [0, 0]
    whole, found = consumed(alone), consumed(killed)
    assert found == whole
    for epoch in (0, 1):
        assert sum((samples for (number, _), samples in found.items() if number == epoch), Counter()) == Counter(range(158))
    one = result(alone)
    for rank in range(2):
        other = result(killed, rank)
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-9)
        assert other["total"] == pytest.approx(one["total"], rel=1e-9)


def test_kill_9_of_a_rank_starts_all_of_the_job_again_and_nothing_of_the_run_is_other(ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, alone = tmp_path / "together", tmp_path / "alone"
    together.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lost: list[str] = []
    command = [sys.executable, str(SCRIPT), str(together), "1:5"]
    launch(command, Launch(2, 3), failed=lambda: None, lost=lambda attempt, how: lost.append(how))
    assert lost == ["rank 1 was killed by signal 9 (out of memory?)"]
    assert run(ranks, alone, 0, 1) == [0]
    for rank in range(2):
        assert result(together, rank)["losses"] == pytest.approx(result(alone)["losses"], rel=1e-9)


def test_a_rank_killed_while_it_writes_leaves_the_last_good_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("torn", 3, tmp_path) == [0, -9, 0]
    assert ranks("after", 3, tmp_path) == [0, 0, 0]
    for rank in range(3):
        found = json.loads((tmp_path / f"after-{rank}.json").read_text())
        assert (found["state"], found["x"][0], found["own"]) == ({"step": 2}, 2.0, {"mine": [rank]})


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_table_over_three_ranks_comes_back_to_any_number(ranks: Ranks, tmp_path: Path, size: int) -> None:
    assert ranks("dealt", 3, tmp_path) == [0, 0, 0]
    assert ranks("after", size, tmp_path) == [0] * size
    rows = [[2.0 * row, 2.0 * row + 1] for row in range(11)]
    for rank in range(size):
        found = json.loads((tmp_path / f"after-{rank}.json").read_text())
        assert (found["dense"], found["table.w"], found["own"]) == ([0, 1, 2, 3, 4], rows[rank::size], {})


def test_a_full_disk_of_one_rank_is_told_by_all_and_the_last_checkpoint_stays(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("full", 2, tmp_path) == [0, 0]


def test_a_loss_that_is_no_number_on_one_rank_ends_all(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("not_a_number", 2, tmp_path) == [0, 0]
    assert ranks("after", 1, tmp_path) == [0]
    assert json.loads((tmp_path / "after-0.json").read_text())["state"]["run"]["step"] == 3


def test_a_rank_without_memory_says_so_and_the_others_end(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks("memory", 3, tmp_path) == [4, 3, 4]


def test_an_id_outside_the_table_is_named_and_no_rank_waits(ranks: Ranks, tmp_path: Path) -> None:
    statuses = ranks("outside", 3, tmp_path)
    assert 3 in statuses and set(statuses) <= {3, 4}


@pytest.mark.parametrize("kind", ["long", "ones"])
def test_odd_lengths_train_as_on_one_rank(ranks: Ranks, tmp_path: Path, kind: str) -> None:
    assert ranks("lengths", 1, tmp_path / "1", kind) == [0]
    assert ranks("lengths", 3, tmp_path / "3", kind) == [0, 0, 0]
    one, other = result(tmp_path / "1"), result(tmp_path / "3", 2)
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-9)


def test_101_samples_on_one_rank_and_57_on_the_other_train_as_on_one(ranks: Ranks, tmp_path: Path) -> None:
    """One long history and 56 of one item cost what 101 of one item do."""
    assert ranks("lengths", 1, tmp_path / "1", "uneven") == [0]
    assert ranks("lengths", 2, tmp_path / "2", "uneven") == [0, 0]
    steps = [[json.loads(line) for line in path.read_text().splitlines()] for path in (tmp_path / "2").glob("ledger-*.jsonl")]
    for epoch in (0, 1):
        consumed = [[sample for number, _, samples, _ in rank if number == epoch for sample in samples] for rank in steps]
        assert sorted(map(len, consumed)) == [57, 101]
        assert sorted(sample for samples in consumed for sample in samples) == list(range(158))
    one = result(tmp_path / "1")
    for rank in range(2):
        other = result(tmp_path / "2", rank)
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-9) and other["total"] == pytest.approx(one["total"], rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ranks_each", [1, 2])
def test_a_lost_host_starts_the_ranks_of_all_hosts_again(ranks: Ranks, tmp_path: Path, ranks_each: int) -> None:
    """Two agents of torchrun, as on two hosts; one is killed with all that it started, and another one takes its place."""
    folder = tmp_path / "together"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "OMP_NUM_THREADS": "1"}
    # An agent that stays would otherwise not tell one that comes later where the ranks meet.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    port = free_port()

    def agent(leads: bool, argument: str) -> subprocess.Popen[bytes]:
        options = f"--nnodes=2 --nproc-per-node={ranks_each} --max-restarts=3 --rdzv-backend=c10d --rdzv-id=job --rdzv-endpoint=127.0.0.1:{port} --local-addr=127.0.0.1"
        patience = f"--rdzv-conf=is_host={int(leads)},keep_alive_interval=1,keep_alive_max_attempt=8"
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options.split(), patience, str(SCRIPT), str(folder), argument],
            env=environment,
            stdin=subprocess.DEVNULL,
        )

    hosts = [agent(True, ""), agent(False, "host:5")]
    try:
        assert hosts[1].wait() == -9
        hosts.append(agent(False, ""))
        assert [host.wait() for host in (hosts[0], hosts[2])] == [0, 0]
    finally:
        for host in hosts:
            host.terminate()
            host.wait()
    assert run(ranks, tmp_path / "alone", 0, 1) == [0]
    one = result(tmp_path / "alone")
    for rank in range(2 * ranks_each):
        other = result(folder, rank)
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-9) and other["total"] == pytest.approx(one["total"], rel=1e-9)
