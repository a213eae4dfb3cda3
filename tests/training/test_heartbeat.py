import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from semantide.services.training.heartbeat import Heartbeat, Watch
from semantide.services.training.launch import Launch, launch

BLAMELESS = 'Thread 0x01 (most recent call first):\n  File "/x/load.py", line 3 in read\n\nCurrent thread 0x02 (most recent call first):\n'


class Look:
    """A watch at a moment of its own, and whom it signalled."""

    def __init__(self, folder: Path, now: float, limit: float = 10.0) -> None:
        self.signalled: list[tuple[int, int]] = []
        self.watch = Watch(folder, limit, lambda: now, kill=lambda process, number: self.signalled.append((process, number)))
        self.watch._ending.set()  # asked ranks have answered already
        self.watch.look()

    @property
    def killed(self) -> list[int]:
        return [process for process, number in self.signalled if number == signal.SIGKILL]


def rank(folder: Path, number: int, beaten: float, stack: str = "") -> None:
    folder.mkdir(exist_ok=True)
    (folder / str(number)).write_text(str(1000 + number))
    os.utime(folder / str(number), (beaten, beaten))
    (folder / f"stack-{number}").write_text(stack)


def test_ranks_that_beat_are_left_alone(tmp_path: Path) -> None:
    for number in range(3):
        rank(tmp_path, number, 100.0 + number)
    look = Look(tmp_path, 110.0)
    assert (look.signalled, look.watch.said) == ([], "")
    assert Look(tmp_path / "nobody", 1e9).signalled == []


def test_of_silent_ranks_the_one_that_waits_for_nobody_is_ended_and_its_place_is_told(tmp_path: Path) -> None:
    rank(tmp_path, 0, 100.0, BLAMELESS + '  File "/x/gloo.py", line 9 in poll\n  File "/x/services/training/world.py", line 60 in wait\n')
    rank(tmp_path, 1, 100.0, BLAMELESS + '  File "/x/services/training/batches.py", line 130 in gather\n  File "/x/trainer.py", line 7 in run\n')
    look = Look(tmp_path, 115.0)
    assert look.killed == [1001]
    assert "rank 1 has given no sign of life for 15 seconds" in look.watch.said and 'batches.py", line 130 in gather' in look.watch.said
    assert [process for process, number in look.signalled if number == signal.SIGUSR1] == [1000, 1001]


def test_a_rank_that_cannot_even_say_where_it_is_hangs(tmp_path: Path) -> None:
    rank(tmp_path, 0, 100.0, BLAMELESS + '  File "/x/services/training/world.py", line 60 in wait\n')
    rank(tmp_path, 1, 100.0)
    look = Look(tmp_path, 115.0)
    assert look.killed == [1001] and "stopped or in the kernel" in look.watch.said


def test_where_all_wait_the_one_that_is_silent_longest_goes(tmp_path: Path) -> None:
    stack = BLAMELESS + '  File "/x/services/training/world.py", line 60 in wait\n'
    rank(tmp_path, 0, 101.0, stack)
    rank(tmp_path, 1, 100.0, stack)
    assert Look(tmp_path, 115.0).killed == [1001]


def test_a_rank_says_where_it_is_without_being_able_to_run(tmp_path: Path) -> None:
    script = (
        "import pathlib, sys, time\nfrom semantide.services.training.heartbeat import Heartbeat\n"
        "def stuck():\n    print('here', flush=True)\n    time.sleep(1000)\n"
        "heartbeat = Heartbeat(pathlib.Path(sys.argv[1]), 0)\nheartbeat.beat()\nstuck()\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    watch = Watch(tmp_path, 10.0, lambda: (tmp_path / "0").stat().st_mtime + 11)
    while not watch.said or "in stuck" not in watch.said:
        # A loaded machine may need more than the watch's second.
        watch.kill = lambda pid, number: os.kill(pid, number) if number == signal.SIGUSR1 else None
        watch.look()
    watch.kill = os.kill
    watch.look()
    assert process.wait() == -signal.SIGKILL
    assert "rank 0 has given no sign of life for 11 seconds" in watch.said
    process.stdout.close()


def test_a_closed_heartbeat_is_watched_no_more(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path, 4)
    assert (tmp_path / "4").read_text() == str(os.getpid())
    heartbeat.close()
    heartbeat.close()
    assert Look(tmp_path, 1e12).signalled == []


def test_a_hung_rank_starts_all_again(tmp_path: Path) -> None:
    """Rank 1 stops answering in the first attempt; rank 0 waits for it."""
    beats, lost = tmp_path / "beats", []
    script = tmp_path / "rank.sh"
    script.write_text(
        f"echo x >> {tmp_path}/starts-$RANK; test -e {tmp_path}/hung && exit 0; test $RANK = 0 && {{ while :; do sleep 0.1; done; }}; "
        f"touch {tmp_path}/hung; echo $$ > {beats}/.new; touch -d @0 {beats}/.new; mv {beats}/.new {beats}/1; kill -STOP $$"
    )
    beats.mkdir()
    watch = Watch(beats, 1.0, lambda: 100.0)
    launch(["/bin/sh", str(script)], Launch(2, 3), failed=lambda: None, lost=lambda attempt, how: lost.append(how), watch=watch)
    assert len(lost) == 1 and "rank 1 has given no sign of life for 100 seconds and was ended" in lost[0]
    assert (tmp_path / "starts-1").read_text() == "x\nx\n"


@pytest.mark.parametrize("limit", [0.0, -1.0])
def test_a_watch_needs_a_limit(tmp_path: Path, limit: float) -> None:
    with pytest.raises(ValueError, match="give a number above 0"):
        Watch(tmp_path, limit, lambda: 0.0)
