"""Checkpoints: one folder each, written aside and renamed, so that a kill at any point leaves the last complete one.

    checkpoints/step-000000120/shard-00001-model-00001-of-00001.safetensors ...   tensors, written by rank 0; every rank writes some
                               state.json                                         everything else, and the digest of every file

A checkpoint is written by all ranks together (torch.distributed.checkpoint) in the background: a run only waits while its tensors are copied. What all ranks
have alike is written once, by one of them. Rows of tables that are dealt out to ranks are written where they lie and may come back to another number of
ranks. The folder must be the same one for all ranks.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_together

from semantide.services.training.world import World
from semantide.shared.artifacts import digest_file
from semantide.shared.errors import Conflict, Corrupt, RankLost, SemantideError, TransientError

_KEPT = 2
_FILE_BYTES = 256 * 1024**2  # of tensors in one file: what is being written is in memory once more


@dataclass(frozen=True)
class Deal:
    """Rows dealt out like cards: row i lies with rank i mod ``size``, as its row i div ``size``."""

    rank: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} of {self.size}: give a rank from 0 to {self.size - 1}")


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was read.

    ``tensors`` are the common ones and this rank's rows of dealt ones; ``own`` what this rank alone had, empty where the number of ranks is another now.
    """

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    own: dict[str, Tensor] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one run, newest last. Its methods are collectives: all ranks call them, in the same order."""

    def __init__(self, folder: Path, world: World | None = None, *, background: bool = True) -> None:
        self.folder = folder
        # The thread talks over a process group of its own.
        self._world = (world or World.single()).channel()
        self._background = background
        self._writing: Thread | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        *,
        own: Mapping[str, Tensor] | None = None,
        deals: Mapping[str, Deal] | None = None,
    ) -> None:
        """Begin to write one; it is the latest once ``wait`` or the next ``save`` has returned. Older ones but the last two go then.

        ``own`` are tensors of this rank alone; ``deals`` says which names (by how they begin) are this rank's rows of tables that are dealt out.

        Raises: TransientError when the disk did not take it or the one before; what was there stays.
        """
        self.wait()
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            deal = _deal_of(name, deals)
            staged[name if deal is None else _share_name(name, deal)] = _copied(tensor)
        for name, tensor in (own or {}).items():
            staged[_own_name(name, self._world.rank)] = _copied(tensor)
        text = json.dumps({**state, "ranks": self._world.size})
        # A daemon: one that waits for a rank that is gone must not keep this process from ending.
        self._writing = Thread(target=self._guard, args=(step, staged, text), name="checkpoint", daemon=True)
        self._writing.start()
        if not self._background:
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is on disk.

        Raises: TransientError when the disk did not take it; what was there stays.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def latest(self, deals: Mapping[str, Deal] | None = None) -> Saved | None:
        """The newest checkpoint whose bytes are whole; None where there is none. ``deals`` as they are to be now, see ``save``.

        Raises: Corrupt when there are checkpoints and none is whole.
        """
        self.wait()
        found: list[str] = self._world.gather_json([path.name for path in self._complete()])[0]
        for name in reversed(found):
            if all(self._world.gather_json(self._whole(self.folder / name))):
                return self._read(self.folder / name, deals)
        if found:
            raise Corrupt(f"no checkpoint in {self.folder} is whole: delete the folder to train from the beginning")
        return None

    def _guard(self, step: int, staged: dict[str, Tensor], text: str) -> None:
        try:
            self._write(step, staged, text)
        except BaseException as error:  # told by ``wait``
            self._error = error

    def _write(self, step: int, staged: dict[str, Tensor], text: str) -> None:
        target, aside = self.folder / f"step-{step:09d}", self.folder / f".incoming-{step:09d}"
        try:
            with _Shared(self._world, step, self.folder) as ours:
                if self._world.leads:
                    for left in self.folder.glob(".incoming-*"):
                        shutil.rmtree(left, ignore_errors=True)
                    aside.mkdir(parents=True)
                ours.value = {name: tensor.nbytes for name, tensor in staged.items()}
            file_of = _files({name: num_bytes for sizes in ours.gathered for name, num_bytes in sizes.items()})
            with _Shared(self._world, step, self.folder) as ours:
                # Otherwise a rank on another host writes into a folder that nobody reads.
                if not aside.is_dir():
                    raise OSError(f"{aside} is not there: all ranks need the same folder, give one that all hosts share")
            self._write_tensors(step, aside, staged, file_of)
            with _Shared(self._world, step, self.folder) as ours:
                ours.value = {path.name: digest_file(path) for path in sorted(aside.glob(f"shard-{self._world.rank + 1:05d}-*"))}
            digests = {name: digest for part in ours.gathered for name, digest in part.items()}
            with _Shared(self._world, step, self.folder) as ours:
                if self._world.leads:
                    (aside / "state.json").write_text(json.dumps({**json.loads(text), "digests": digests}))
                    _sync(aside / "state.json")
                    _sync(aside)
                    if target.exists():
                        shutil.rmtree(target)
                    aside.rename(target)
                    _sync(self.folder)
                    for old in self._complete()[:-_KEPT]:
                        shutil.rmtree(old, ignore_errors=True)
        except TransientError:
            # What cannot be removed now goes with the next one.
            if self._world.leads:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    def _write_tensors(self, step: int, aside: Path, staged: dict[str, Tensor], file_of: dict[str, int]) -> None:
        writer = HuggingFaceStorageWriter(str(aside), fqn_to_index_mapping=file_of, save_distributed=True)
        try:
            if self._world.size == 1:
                _write_alone(writer, staged)
            else:
                save_together(staged, storage_writer=writer, process_group=self._world.group)
        except CheckpointException as error:
            failed = next(((rank, cause) for rank, (cause, _) in error.failures.items() if isinstance(cause, OSError)), None)
            if failed is None:
                raise RankLost(
                    f"checkpoint of step {step}: the ranks could not write it together ({error.failures}): all start again from the last one"
                ) from error
            raise _not_written(step, self.folder, f"rank {failed[0]}: {failed[1]}") from failed[1]
        except OSError as error:
            raise _not_written(step, self.folder, f"rank {self._world.rank}: {error}") from error
        except RuntimeError as error:
            raise RankLost(f"checkpoint of step {step}: a rank ended or hangs while it was written ({error}): all start again from the last one") from error

    def _whole(self, folder: Path) -> bool:
        """Whether this rank's part of the files have their digests."""
        try:
            digests: dict[str, str] = json.loads((folder / "state.json").read_text())["digests"]
            mine = sorted(digests.items())[self._world.rank :: self._world.size]
            return all(digest_file(folder / name) == digest for name, digest in mine)
        except (OSError, ValueError, KeyError, AttributeError):
            return False

    def _read(self, folder: Path, deals: Mapping[str, Deal] | None) -> Saved:
        state: dict[str, Any] = json.loads((folder / "state.json").read_text())
        del state["digests"]
        reader = _Reader(folder)
        tensors, own = reader.read([name for name in reader.names if "@" not in name and "#" not in name]), {}
        if state.pop("ranks") == self._world.size:
            ending = _own_name("", self._world.rank)
            own = {name.removesuffix(ending): tensor for name, tensor in reader.read([n for n in reader.names if n.endswith(ending)]).items()}
        for name in sorted({name.split("@")[0] for name in reader.names if "@" in name}):
            deal = _deal_of(name, deals)
            if deal is None:
                raise Conflict(f"{folder} holds rows of {name} that are dealt out, and this run has no such table: resume with the configuration it began with")
            tensors[name] = reader.rows(name, deal)
        return Saved(tensors, state, own)

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


class _Reader:
    """Tensors of one checkpoint by name: every file of it is a safetensors file with whole tensors."""

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(str(path), "pt") as stored:
                self._file_of |= dict.fromkeys(stored.keys(), path)
        self.names: Sequence[str] = sorted(self._file_of)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._file_of[name], []).append(name)
        tensors: dict[str, Tensor] = {}
        for path, inside in by_file.items():
            with safe_open(str(path), "pt") as stored:
                tensors |= {name: stored.get_tensor(name) for name in inside}
        return tensors

    def _length(self, name: str) -> int:
        with safe_open(str(self._file_of[name]), "pt") as stored:
            return int(stored.get_slice(name).get_shape()[0])

    def rows(self, name: str, deal: Deal) -> Tensor:
        """The rows of ``deal``, whatever they were dealt out to before; one old share is in memory at a time."""
        old = int(next(known for known in self.names if known.startswith(f"{name}@")).rsplit("/", 1)[1])
        shares = [_share_name(name, Deal(rank, old)) for rank in range(old)]
        total = sum(self._length(share) for share in shares)
        rows: Tensor | None = None
        for rank, share in enumerate(shares):
            # Row numbers of both deals can only meet where they agree modulo what the two sizes share.
            if (rank - deal.rank) % gcd(old, deal.size) == 0:
                values = self.read([share])[share]
                if rows is None:
                    rows = values.new_empty(len(range(deal.rank, total, deal.size)), *values.shape[1:])
                places = torch.arange(len(values)) * old + rank
                kept = places % deal.size == deal.rank
                rows[places[kept] // deal.size] = values[kept]
        assert rows is not None
        return rows


class _Shared:
    """A part of the work that each rank does for itself: all go on together with every rank's ``value``, or all fail with the cause of one."""

    def __init__(self, world: World, step: int, folder: Path) -> None:
        self._world, self._step, self._folder = world, step, folder
        self.value: Any = None
        self.gathered: list[Any] = []

    def __enter__(self) -> _Shared:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and not isinstance(error, (OSError, SemantideError)):
            return
        answers = self._world.gather_json([None if error is None else f"rank {self._world.rank}: {error}", self.value])
        failed = next((answer[0] for answer in answers if answer[0] is not None), None)
        if failed is not None:
            raise _not_written(self._step, self._folder, failed) from error
        self.gathered = [answer[1] for answer in answers]


def _write_alone(writer: HuggingFaceStorageWriter, staged: dict[str, Tensor]) -> None:
    """What torch.distributed.checkpoint does, without process groups."""
    planner = DefaultSavePlanner()
    planner.set_up_planner(staged, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(True)
    plans, about = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(about, [writer.write_data(plan, planner).wait()])


def _not_written(step: int, folder: Path, cause: str) -> TransientError:
    return TransientError(f"checkpoint of step {step} could not be written to {folder} ({cause}): make room there, then resume the job; the last one stays")


def _copied(tensor: Tensor) -> Tensor:
    # A copy always: training goes on with the original, and two names may share storage.
    return tensor.detach().to("cpu", copy=True).contiguous()


def _deal_of(name: str, deals: Mapping[str, Deal] | None) -> Deal | None:
    return next((deal for begin, deal in (deals or {}).items() if name.startswith(begin)), None)


def _share_name(name: str, deal: Deal) -> str:
    return f"{name}@{deal.rank}/{deal.size}"


def _own_name(name: str, rank: int) -> str:
    return f"{name}#{rank}"


def _files(num_bytes: Mapping[str, int]) -> dict[str, int]:
    """Which file, from 1, each tensor goes to: some names in order until a file is full."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name in sorted(num_bytes):
        if filled and filled + num_bytes[name] > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += num_bytes[name]
    return files


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
