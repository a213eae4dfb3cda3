"""Which files an import reads: inside the allowed folders only, items before interactions, always in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from semantide.services.ingestion.readers.formats import Format, ReadOptions, detect, is_data
from semantide.shared.errors import BadData, NotFound


class OutsideRoots(BadData):
    """A path leads out of the folders that imports may read."""


@dataclass(frozen=True)
class Source:
    """One file of an import, as it was when the import was planned."""

    path: str
    num_bytes: int
    modified_ns: int
    format: str
    kind: str

    def as_dict(self) -> dict[str, Any]:
        """For the plan's JSON."""
        return asdict(self)


def _allowed(real: Path, folders: Sequence[Path], private: Path | None) -> bool:
    """Whether one of the folders opens this path: hidden files (``.env``) and our own state (keys, passwords) stay closed unless a folder names their place."""
    for folder in folders:
        if real == folder:
            return True
        if folder not in real.parents or any(part.startswith(".") for part in real.relative_to(folder).parts):
            continue
        if private is None or private not in (real, *real.parents) or private in folder.parents:
            return True
    return False


def confined(path: str, folders: Sequence[Path], private: Path | None = None) -> Path:
    """The real path, links resolved, where it lies in one of the folders; a relative one is looked for in each of them.

    ``private`` is a folder that stays closed even where it lies in an open one.

    Raises: OutsideRoots outside the folders, NotFound where nothing is there.
    """
    if "\x00" in path:
        raise BadData("the path has a zero byte: send a plain path")
    wanted = Path(path)
    candidates = [wanted] if wanted.is_absolute() else [folder / wanted for folder in folders]
    real = next((candidate for candidate in candidates if candidate.exists()), candidates[0]).resolve()
    if not _allowed(real, folders, private):
        allowed = ", ".join(str(folder) for folder in folders)
        raise OutsideRoots(
            f"path {path!r} leads to {real}, outside the folders that imports may read ({allowed}), or hidden in one: move the file there, upload it with PUT /v1/uploads/NAME, or add its folder to SEMANTIDE_IMPORT_ROOTS"
        )
    if not real.exists():
        raise NotFound(f"path {path!r}: there is no file or folder {real} on the server; upload it with PUT /v1/uploads/NAME")
    return real


def files_below(path: Path, folders: Sequence[Path], private: Path | None = None) -> list[Path]:
    """The data files of a folder in order, or the one file; links that leave the allowed folders are not followed.

    Raises: BadData where a folder has none.
    """
    if path.is_file():
        return [path]
    found = sorted(
        file for file in path.rglob("*") if file.is_file() and is_data(file) and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    found = [file for file in found if _allowed(file.resolve(), folders, private)]
    if not found:
        raise BadData(f"{path} holds no data files: imports read .csv, .tsv, .jsonl, .parquet, .seq, .dat files, and .gz of the text ones")
    return found


def plan(path: Path, folders: Sequence[Path], options: ReadOptions, private: Path | None = None) -> tuple[list[Source], dict[str, str]]:
    """The sources, items first, and the files that were passed over with the reason. Every file is looked at before any is read.

    Raises: BadData where a file is damaged, or none can be used.
    """
    sources: list[Source] = []
    skipped: dict[str, str] = {}
    for file in files_below(path, folders, private):
        try:
            found = detect(file, options)
        except BadData as error:
            # Beside others, a table of something else (users, say) is passed over; a damaged file is not.
            if path.is_dir() and ("neither a user" in str(error) or "no column for" in str(error)):
                skipped[file.relative_to(path).as_posix()] = str(error)
                continue
            raise
        state = file.stat()
        sources.append(Source(str(file), state.st_size, state.st_mtime_ns, found.name, found.kind))
    if not sources:
        raise BadData(f"no file in {path} could be used. " + "; ".join(skipped.values()))
    return sorted(sources, key=lambda source: (source.kind != "items", source.path)), skipped


def reopened(source: Source, options: ReadOptions) -> Format:
    """The format of a planned source.

    Raises: BadData where the file is no longer the one that was planned.
    """
    path = Path(source.path)
    state = path.stat() if path.exists() else None
    if state is None or (state.st_size, state.st_mtime_ns) != (source.num_bytes, source.modified_ns):
        raise BadData(f"{path.name} was changed or removed while its import was under way: start a new import; rows that are already stored are recognised")
    return detect(path, options)
