"""Where a checkpoint lies that training goes on from."""

from __future__ import annotations

from pathlib import Path

from semantide.shared.errors import BadData
from semantide.shared.jobs import JobContext
from semantide.shared.table_snapshots import SNAPSHOTS


def checkpoint_folder(job: JobContext, said: str) -> Path:
    """The folder of a stored model, or one that imports may read.

    Raises: BadData for any other, NotFound.
    """
    if said.startswith("models/"):
        return job.store.get(said)
    if said.startswith(f"{SNAPSHOTS}/"):
        raise BadData(f"checkpoint {said[:30]}... is what changed in a table since another artifact, and no whole model: give a stored model (models/...)")
    folders, private = job.settings.import_folders, job.settings.data_dir.resolve()
    wanted = Path(said)
    candidates = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
    real = next((candidate for candidate in candidates if candidate.is_dir()), candidates[0]).resolve()
    roots = [folder for folder in folders if real.is_relative_to(folder)]
    hidden = any(part.startswith(".") for folder in roots[:1] for part in real.relative_to(folder).parts)
    if not roots or hidden or real.is_relative_to(private):
        allowed = ", ".join(str(folder) for folder in folders)
        raise BadData(
            f"checkpoint {said!r} leads to {real}, outside the folders that imports may read ({allowed}), or hidden in one: move it there, or add its "
            "folder to SEMANTIDE_IMPORT_ROOTS"
        )
    return real
