"""The stack that is shaken: ``semantide up`` as a user runs it, on a disk, with a clock and perhaps brokers of its own, and a model live in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psutil
from brokers import Brokers
from clock import Clock
from disk import Disk

from semantide.client import Client, Retries, StackError
from semantide.shared.broker import free_port
from semantide.shared.contracts import ROOMS, JobRecord, JobSpec
from semantide.shared.errors import TransientError

KEY = "chaos"
NUM_ITEMS, NUM_USERS = 60, 90
START_MS = 1_766_000_000_000
PATIENCE_SECONDS = 320.0
WORKERS = tuple(f"{room} worker" for room in ROOMS)
_COMMAND = [sys.executable, "-m", "semantide.services.commandline.main"]
T = TypeVar("T")


def wait(until: Callable[[], T], what: str, seconds: float = PATIENCE_SECONDS) -> T:
    """The first true answer.

    Raises: TimeoutError.
    """
    deadline = time.monotonic() + seconds
    while not (found := until()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {seconds:.0f} s")
        time.sleep(0.1)
    return found


@dataclass
class Ground:
    """``root`` is a folder that does not exist; with ``failover`` the broker has replicas and sentinels. Use as a context manager: a stack that has a model live."""

    root: Path
    failover: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # on top of this process's own
    inputs: dict[str, str] = field(default_factory=dict, init=False)  # artifacts that jobs can be given
    expected: dict[str, dict[str, str]] = field(default_factory=dict, init=False)  # what a kind of job makes when nobody disturbs it
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)
        self.disk = Disk(self.root / "disk")
        self.data_dir = self.disk.folder / "data"
        self.clock = Clock(self.root)
        self.brokers = Brokers(self.root / "brokers") if self.failover else None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = self.root / "up.log"
        self.tree = ""  # of another version; empty: this one
        self._probe = httpx.Client(base_url=self.url, timeout=5.0)
        self._looker = self.client(3.0)

    def client(self, timeout_seconds: float = 20.0) -> Client:
        """A client that asks once."""
        return Client(self.url, key=KEY, timeout_seconds=timeout_seconds, retries=Retries(attempts=1))

    def variables(self, **changes: str) -> dict[str, str]:
        """What ``semantide`` is started with."""
        kept = {name: value for name, value in os.environ.items() if name != "REDIS_URL" and not name.startswith("SEMANTIDE_")}
        own = {
            "SEMANTIDE_DATA_DIR": str(self.data_dir),
            "SEMANTIDE_PORT": str(self.port),
            "SEMANTIDE_API_KEYS": KEY,
            "SEMANTIDE_TRAINING_PROCESSES": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if self.brokers is not None:
            own |= {"SEMANTIDE_REDIS_URL": self.brokers.url, "SEMANTIDE_BROKER_REPLICAS": "1"}
        if self.tree:
            own["PYTHONPATH"] = self.tree
        return kept | own | self.clock.environment | self.environment | changes

    def up(self) -> None:
        """Start the stack and wait until it is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([*_COMMAND, "up"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.variables(), cwd=self.root)
        wait(self.ready, f"a stack (see {self.log})")

    def revive(self) -> None:
        """Start the stack again if it has ended."""
        if self.process is None or self.process.poll() is not None:
            self.up()

    def down(self) -> None:
        """Ask the stack to end and wait."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE_SECONDS)
        self.process = None

    def said(self, *arguments: str, **changes: str) -> tuple[int, str]:
        """Status and words of one ``semantide ARGUMENTS``."""
        found = subprocess.run([*_COMMAND, *arguments], capture_output=True, text=True, check=False, env=self.variables(**changes), cwd=self.root, timeout=120)
        return found.returncode, found.stdout + found.stderr

    def state(self) -> dict[str, Any]:
        """What the stack says of itself; empty while it says nothing."""
        try:
            found: dict[str, Any] = json.loads((self.data_dir / "stack.json").read_text())
        except (OSError, ValueError):
            return {}
        return found

    def pid(self, name: str) -> int | None:
        """Process of a name, such as ``api``, ``broker`` or ``training worker``; None where it does not live."""
        number = self.state().get("processes", {}).get(name)
        return number if number and _lives(number) else None

    def processes(self) -> dict[str, int]:
        """Those of the stack that live, ``up`` itself aside."""
        return {name: number for name, number in self.state().get("processes", {}).items() if _lives(number)}

    def job_process(self, room: str) -> int | None:
        """The process of a job that this room's worker runs now."""
        worker = self.pid(f"{room} worker")
        try:
            found = psutil.Process(worker).children() if worker else []
            return next((child.pid for child in found if "job" in child.cmdline()), None)
        except psutil.Error:
            return None

    def broker_port(self) -> int:
        """Port of the server that is the broker now."""
        return self.brokers.primary() if self.brokers is not None else int(self.state()["redis_url"].rpartition(":")[2].partition("/")[0])

    def ready(self) -> bool:
        """Whether every process lives and all rooms answer."""
        if self.process is not None and self.process.poll() is not None:
            raise RuntimeError(f"semantide up ended with status {self.process.returncode}; the end of its words: {self.log.read_text()[-1500:]}")
        expected = {"api", *WORKERS} | (set() if self.failover else {"broker"})
        if not expected <= set(self.processes()):
            return False
        try:
            answer = self._probe.get("/readyz")
            return answer.status_code == 200 and answer.json()["status"] == "ok"
        except (httpx.HTTPError, ValueError):
            return False

    def look(self, path: str) -> Any:
        """GET, as long as somebody answers; None where nobody does."""
        try:
            return self._looker.get(path)
        except (TransientError, StackError):
            return None

    def stored(self) -> tuple[int, int] | None:
        """Events in the log, and accepted batches that wait for it."""
        found = self.look("/v1/interactions/stats")
        return None if found is None else (int(found["interactions"]), int(found["waiting_batches"]))

    def submit(self, spec: JobSpec) -> JobRecord:
        """A job, once the stack takes it."""

        def ask() -> JobRecord | None:
            try:
                return self._looker.submit(spec)
            except (TransientError, StackError):
                return None

        return wait(ask, f"a job {spec.kind}")

    def job(self, job_id: str) -> JobRecord | None:
        """Its record, as long as somebody answers."""
        found = self.look(f"/v1/jobs/{job_id}")
        return None if found is None else JobRecord.model_validate(found)

    def ended(self, job_id: str) -> JobRecord:
        """Its record once it has ended."""
        return wait(lambda: found if (found := self.job(job_id)) and found.finished else None, f"the end of {job_id}")

    def succeeded(self, spec: JobSpec) -> JobRecord:
        """Its record once it has succeeded.

        Raises: RuntimeError where it does not.
        """
        record = self.ended(self.submit(spec).id)
        if record.state != "succeeded":
            raise RuntimeError(f"{record.id} {record.state}: {record.error}")
        return record

    def __enter__(self) -> Ground:
        try:
            if self.brokers is not None:
                self.brokers.start()
            self.up()
            _fill(self)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.down()
        finally:
            self._probe.close()
            self._looker.close()
            if self.process is not None:
                self.process.kill()
            if self.brokers is not None:
                self.brokers.remove()
            self.disk.remove()


def _lives(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def specs(inputs: dict[str, str]) -> dict[str, JobSpec]:
    """The job of each room that has one which ends the same way every time, as far as its inputs are there; and what a room without such answers to nonsense."""
    dataset, both = ({name: inputs[name] for name in names if name in inputs} for names in (("dataset",), ("dataset", "catalog")))
    return {
        "tokenization": JobSpec(kind="tokenize", config={"level_sizes": [8, 8, 8]}, inputs=dataset, seed=1),
        "training": JobSpec(kind="train", recipe="tiny", config={"epochs": 1, "patience": 100, "log_every": 1}, inputs=both, seed=1),
        "negatives": JobSpec(kind="negatives", inputs={name: inputs[name] for name in ("dataset", "catalog", "model") if name in inputs}, seed=1),
        "reward": JobSpec(kind="reward"),
    }


def _fill(ground: Ground) -> None:
    """Everybody walks along a ring of items; the data set, catalog and model made of that, the last one live."""
    with ground.client(60.0) as client:
        words = ("red", "blue", "green", "small", "large", "old", "new", "soft", "hard", "round")
        titles = {f"item-{n}": f"{words[n % 10]} {words[n // 6 % 10]} thing {n}" for n in range(NUM_ITEMS)}
        client.post("/v1/items", {"items": [{"id": item, "title": title, "categories": [title.split()[0]]} for item, title in titles.items()]})
        rows = [
            {
                "user": f"user-{user}",
                "item": f"item-{(user * 7 + step + step * user % 3) % NUM_ITEMS}",
                "time": START_MS + user * 1000 + step,
                "action": "click",
            }
            for user in range(NUM_USERS)
            for step in range(6 + user % 6)
        ]
        client.post("/v1/interactions", {"interactions": rows})
        wait(lambda: (ground.stored() or (0, 1))[0] == len(rows), "an event log")
        wait(lambda: (ground.look("/v1/items/item-1") or {}).get("item"), "items")
        inputs = ground.inputs = {"dataset": ground.succeeded(JobSpec(kind="dataset", seed=1)).artifacts["dataset"]}
        for room, made in (("tokenization", "catalog"), ("training", "model"), ("negatives", "beams")):
            spec = specs(inputs)[room]
            ground.expected[spec.kind] = dict(ground.succeeded(spec).artifacts)
            inputs[made] = ground.expected[spec.kind][made]
        wait(lambda: _promoted(client, inputs["model"]), "a live model")
        wait(lambda: (ground.look("/v1/serving/live") or {}).get("loaded_model") == inputs["model"], "a loaded model")


def _promoted(client: Client, model: str) -> bool:
    try:
        client.post("/v1/serving/promote", {"model": model})
    except StackError as error:
        if error.status != 404:
            raise
        return False
    return True
