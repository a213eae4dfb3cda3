"""Checkpoints: one folder each, written aside and renamed, so that a kill at any point leaves the last complete one.

checkpoints/step-000000120/state.safetensors   every tensor
                           state.json          everything else, and the digest of state.safetensors
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from semantide.shared.artifacts import digest_file
from semantide.shared.errors import Corrupt, TransientError

_KEPT = 2


class Checkpoints:
    """The checkpoints of one run, newest last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write one; older ones but the last two go.

        Raises: TransientError when the disk does not take it; what was there stays.
        """
        target = self.folder / f"step-{step:09d}"
        aside = self.folder / f".incoming-{step:09d}"
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            # Storage that two names share is written once per name: safetensors refuses it otherwise.
            save_file({name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, str(aside / "state.safetensors"))
            _sync(aside / "state.safetensors")
            (aside / "state.json").write_text(json.dumps({**state, "digest": digest_file(aside / "state.safetensors")}))
            _sync(aside / "state.json")
            if target.exists():
                shutil.rmtree(target)
            aside.rename(target)
            _sync(self.folder)
        except OSError as error:
            shutil.rmtree(aside, ignore_errors=True)
            raise TransientError(f"checkpoint of step {step} could not be written to {self.folder} ({error}): make room there, then resume the job") from error
        for old in self._complete()[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The newest checkpoint whose bytes are whole; None where there is none.

        Raises: Corrupt when there are checkpoints and none is whole.
        """
        found = self._complete()
        for folder in reversed(found):
            try:
                state: dict[str, Any] = json.loads((folder / "state.json").read_text())
                if digest_file(folder / "state.safetensors") == state["digest"]:
                    return load_file(str(folder / "state.safetensors")), state
            except (OSError, ValueError, KeyError):
                continue
        if found:
            raise Corrupt(f"no checkpoint in {self.folder} is whole: delete the folder to train from the beginning")
        return None

    def _complete(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
