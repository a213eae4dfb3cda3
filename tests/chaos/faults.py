"""What may go wrong, one class a kind. A fault strikes, lasts a while or no time at all, is lifted, and says what the stack's answer to it was."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import network
import psutil
import versions
from ground import PATIENCE_SECONDS, WORKERS, Ground, wait

from semantide.shared.broker import free_port

_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


class Fault:
    """One that has struck nothing yet. ``room``: whose job runs, in some of the runs, when it strikes; ``lasts``: between how many seconds; ``failover``: on a broker with replicas."""

    room = ""
    meets = 0.3  # share of the runs in which that job runs
    lasts = (0.0, 0.0)
    failover = False
    planned = False  # lifting it is part of it: recovery counts from before that
    fails = "never"  # the job; where it ``may`` or ``must``, ``words`` are in its error, and the same job then succeeds
    words = ""
    gone = 0.0  # when all that was killed had ended, where that takes a while: what is answered before does not count

    def missing(self, ground: Ground) -> str:
        """Why it cannot be had on this machine; empty where it can."""
        return ""

    def prepare(self, ground: Ground, chance: random.Random) -> None:
        """What comes before the job that runs when it strikes."""

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Begin it."""

    def lift(self, ground: Ground) -> None:
        """End it."""

    def relieve(self, ground: Ground) -> None:
        """Once a job has failed as it should: let the next one succeed."""

    def problems(self, ground: Ground) -> list[str]:
        """What the stack should have said, and did not."""
        return []


class Killed(Fault):
    """A process of the stack is killed (SIGKILL), or the broker is asked to end (SIGTERM)."""

    meets = 0.5

    def __init__(self, name: str, number: int = signal.SIGKILL) -> None:
        self.name, self._number = name, number
        self.room = name.removesuffix(" worker") if name in WORKERS else ""

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Kill it; one that is just being started again is waited for."""
        os.kill(wait(lambda: ground.pid(self.name), self.name), self._number)


class SeveralKilled(Fault):
    """Two to four processes at once."""

    room = "training"

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Kill them."""
        there = ground.processes()
        for name in chance.sample(sorted(there), min(len(there), chance.randint(2, 4))):
            with suppress(ProcessLookupError):
                os.kill(there[name], signal.SIGKILL)


class UpKilled(Fault):
    """``semantide up`` itself is killed; whoever watches over it starts it again."""

    room = "training"

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Kill it; its processes must end by themselves."""
        assert ground.process is not None
        left = list(ground.processes().values())
        ground.process.kill()
        ground.process.wait()
        ground.process = None
        wait(lambda: not [number for number in left if _runs(number)], "the end of what semantide up had started")
        self.gone = time.monotonic()
        ground.up()


class JobKilled(Fault):
    """The process of a job is killed while it works."""

    meets = 1.0

    def __init__(self, room: str) -> None:
        self.room = room

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Kill it, if it has not just ended."""
        if found := ground.job_process(self.room):
            with suppress(ProcessLookupError):
                os.kill(found, signal.SIGKILL)


class MemoryBounded(Fault):
    """A job gets no more memory from the system (RLIMIT_AS): it fails, says so, and succeeds once there is some."""

    room, meets, fails, words = "training", 1.0, "may", "memory"

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Bound its address space at what it has."""
        found = wait(lambda: ground.job_process(self.room), "a job's process")
        size = psutil.Process(found).memory_info().vms
        resource.prlimit(found, resource.RLIMIT_AS, (size, size))


class MemoryTaken(Fault):
    """The kernel ends a job's process that takes more than its group may have (cgroup): it is started again."""

    room, meets = "training", 1.0

    def __init__(self) -> None:
        self._group = _MEMORY_GROUPS / f"semantide-chaos-{os.getpid()}"

    def missing(self, ground: Ground) -> str:
        """It takes a group of one's own."""
        return "" if os.geteuid() == 0 and (_MEMORY_GROUPS / "memory.limit_in_bytes").exists() else f"no group of memory can be made below {_MEMORY_GROUPS}"

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Whatever it asks for from now on is counted, up to two MB."""
        found = wait(lambda: ground.job_process(self.room), "a job's process")
        self._group.mkdir(exist_ok=True)
        (self._group / "memory.limit_in_bytes").write_text(str(2 << 20))
        with suppress(ProcessLookupError):
            (self._group / "cgroup.procs").write_text(str(found))

    def problems(self, ground: Ground) -> list[str]:
        """None; the group goes."""
        with suppress(OSError):
            self._group.rmdir()
        return []


class DiskFull(Fault):
    """No byte is left on the stack's disk for some seconds."""

    room, fails, words, lasts = "training", "may", "no space left", (2.0, 6.0)

    def missing(self, ground: Ground) -> str:
        """It takes a disk of one's own."""
        return ground.disk.missing

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Fill it."""
        ground.disk.fill()

    def lift(self, ground: Ground) -> None:
        """Give the room back."""
        ground.disk.empty()


class DiskSlow(Fault):
    """The stack's disk takes a few writes a second."""

    lasts = (4.0, 8.0)

    def missing(self, ground: Ground) -> str:
        """It takes a disk of one's own and a kernel that bounds its writes."""
        return ground.disk.cannot_be_slow

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Slow it down."""
        ground.disk.slow(chance.choice((5, 10, 20)))

    def lift(self, ground: Ground) -> None:
        """Let it be as it was."""
        ground.disk.slow(0)


class ClockSet(Fault):
    """The time of day jumps, by seconds up to two days, forward or back, and some seconds later it is right again."""

    room, lasts = "training", (2.0, 5.0)

    def missing(self, ground: Ground) -> str:
        """It takes a compiler."""
        return ground.clock.missing

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Set it."""
        ground.clock.set(chance.choice((-1, 1)) * chance.choice((5, 90, 3600, 2 * 86400)))

    def lift(self, ground: Ground) -> None:
        """Set it right."""
        ground.clock.set(0)


class NetworkCut(Fault):
    """Nothing that is sent to the broker or by it arrives, and nobody is told."""

    room, lasts = "training", (1.0, 6.0)

    def __init__(self) -> None:
        self._cut: network.Cut | None = None

    def missing(self, ground: Ground) -> str:
        """It takes the kernel's filter."""
        return network.missing()

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Cut it."""
        self._cut = network.Cut(ground.broker_port())

    def lift(self, ground: Ground) -> None:
        """Mend it."""
        assert self._cut is not None
        self._cut.mend()


class PrimaryKilled(Fault):
    """The broker's primary is killed: the sentinels put another in its place, and it comes back as a replica."""

    room, failover = "training", True

    def __init__(self) -> None:
        self._before = 0

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Kill it."""
        assert ground.brokers is not None
        ground.brokers.wait_whole()
        self._before = ground.brokers.primary()
        self._again = ground.brokers.kill_primary()
        self.gone = time.monotonic()

    def problems(self, ground: Ground) -> list[str]:
        """The sentinels must have chosen another one, and what was killed must follow it."""
        assert ground.brokers is not None
        now = ground.brokers.primary()
        self._again()
        ground.brokers.wait_whole(PATIENCE_SECONDS)
        return ["no other server took the primary's place"] if now == self._before else []


class TwoStacks(Fault):
    """A second stack is started in the first one's folder, or on its port: it must say so and leave the first alone."""

    lasts = (0.1, 0.1)

    def __init__(self) -> None:
        self._found = (0, "")
        self._words = ""

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Start it."""
        if chance.random() < 0.5:
            self._words, changes = "already runs", {"SEMANTIDE_PORT": str(free_port())}
        else:
            self._words, changes = "is taken", {"SEMANTIDE_DATA_DIR": str(ground.root / "other")}
        self._found = ground.said("up", **changes)

    def problems(self, ground: Ground) -> list[str]:
        """It must have ended with status 1, and these words."""
        status, said = self._found
        return (
            [] if status == 1 and self._words in said and "Traceback" not in said else [f"a second stack ended with status {status} and said {said[-500:]!r}"]
        )


class ModelDamaged(Fault):
    """Bytes of the live model's file change, and the process that serves it is killed: it must say which file is wrong, and serve the model once the file is right."""

    lasts = (12.0, 15.0)

    def __init__(self) -> None:
        self._damage: Damage | None = None
        self._said = ""

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Damage it, kill the API."""
        folder = ground.data_dir / "artifacts" / ground.inputs["model"]
        self._damage = Damage(max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size), chance)
        os.kill(wait(lambda: ground.pid("api"), "an API"), signal.SIGKILL)

    def lift(self, ground: Ground) -> None:
        """See what is said, and mend it."""
        assert self._damage is not None
        self._said = wait(lambda: (ground.look("/v1/serving/live") or {}).get("error") or "", "an error that names the file", 60.0)
        self._damage.mend()

    def problems(self, ground: Ground) -> list[str]:
        """The error must name the artifact and what to do."""
        return [] if "digest" in self._said and ".safetensors" in self._said else [f"a damaged model was said to be {self._said!r}"]


class DatasetDamaged(Fault):
    """Bytes of a data set change before a job reads it: the job must fail and name the file; with the file right, it succeeds."""

    room, meets, fails, words = "tokenization", 1.0, "must", "digest"

    def __init__(self) -> None:
        self._damage: Damage | None = None

    def prepare(self, ground: Ground, chance: random.Random) -> None:
        """Damage it."""
        folder = ground.data_dir / "artifacts" / ground.inputs["dataset"]
        self._damage = Damage(chance.choice(sorted(folder.glob("*.parquet"))), chance)

    def relieve(self, ground: Ground) -> None:
        """Mend it."""
        assert self._damage is not None
        self._damage.mend()


class VersionChanged(Fault):
    """The stack is stopped, the version before it runs on the same data for a while, and then this one again."""

    lasts, planned = (3.0, 5.0), True

    def missing(self, ground: Ground) -> str:
        """It takes the repository's history."""
        return versions.missing()

    def strike(self, ground: Ground, chance: random.Random) -> None:
        """Downgrade."""
        ground.down()
        ground.tree = str(versions.older_version(ground.root))
        ground.up()

    def lift(self, ground: Ground) -> None:
        """Upgrade."""
        ground.down()
        ground.tree = ""
        ground.up()


class Damage:
    """Some bytes of a file that are not what they were."""

    def __init__(self, path: Path, chance: random.Random) -> None:
        self._path, self._kept = path, path.read_bytes()
        data = bytearray(self._kept)
        for _ in range(4):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if bytes(data) == self._kept:
            data[len(data) // 2] ^= 1
        self._write(bytes(data))

    def mend(self) -> None:
        """Make them what they were."""
        self._write(self._kept)

    def _write(self, data: bytes) -> None:
        # In place, as a disk would do it: the file may be linked to by other artifacts, which then are damaged as well.
        os.chmod(self._path, 0o644)
        with self._path.open("r+b") as stream:
            stream.write(data)


def _runs(number: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    return False


KINDS: dict[str, tuple[int, Callable[[], Fault]]] = {
    "API killed": (9, lambda: Killed("api")),
    **{f"{name} killed": (4, lambda name=name: Killed(name)) for name in WORKERS},  # type: ignore[misc]
    "job killed": (7, lambda: JobKilled("training")),
    "tokenizing killed": (3, lambda: JobKilled("tokenization")),
    "several killed": (5, SeveralKilled),
    "semantide up killed": (4, UpKilled),
    "broker killed": (8, lambda: Killed("broker")),
    "broker restarted": (4, lambda: Killed("broker", signal.SIGTERM)),
    "broker's primary killed": (8, PrimaryKilled),
    "network to the broker cut": (6, NetworkCut),
    "disk full": (6, DiskFull),
    "disk slow": (4, DiskSlow),
    "clock set": (5, ClockSet),
    "no memory for a job": (3, MemoryBounded),
    "job out of its memory": (3, MemoryTaken),
    "model damaged": (4, ModelDamaged),
    "data set damaged": (3, DatasetDamaged),
    "second stack": (4, TwoStacks),
    "downgrade and upgrade": (2, VersionChanged),
}
"""Every kind of fault: how many of 112 runs it has, and what makes one."""


def deck(seed: int) -> list[str]:
    """The kinds in the order in which runs have them; after the last one it begins anew."""
    cards = [name for name, (weight, _) in KINDS.items() for _ in range(weight)]
    random.Random(seed).shuffle(cards)
    return cards
