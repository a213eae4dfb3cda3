"""Content-addressed artifacts on a local folder or an object store (fsspec).

An artifact is a folder ``<kind>/sha256-<digest>/`` with its files and a ``manifest.json``. The digest is that of the
files' names and contents, so the same input, seed and device give the same reference; the manifest says what made it.
The manifest is written last: an artifact without one does not exist.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from semantide.shared.errors import Corrupt, NotFound, SemantideError, StoreUnavailable
from semantide.shared.telemetry import logger
from semantide.shared.version import code_version

T = TypeVar("T")

_CHUNK_BYTES = 1 << 20
_ABANDONED_SECONDS = 86400  # without a change, after which what was being written belongs to a killed process
_HIDDEN = "manifest.hidden.json"  # of an artifact in an object store that does not exist for now
_REFERENCE = re.compile(r"[a-z]+/sha256-[0-9a-f]{64}")


def digest_bytes(data: bytes) -> str:
    """Hex sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Hex sha256 of a file."""
    sha = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_CHUNK_BYTES):
            sha.update(block)
    return sha.hexdigest()


def remove_abandoned(root: Path) -> None:
    """Remove what killed writers left in a folder: ``.incoming-...``, files or folders, unchanged for a day."""
    for path in root.glob(".incoming-*"):
        with suppress(OSError):
            # Not the time of modification: a copied folder has that of its source.
            if time.time() - path.stat().st_ctime > _ABANDONED_SECONDS:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _link_or_copy(stored: Path | None, source: Path, target: Path, digest: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if stored is not None:
        with suppress(OSError):  # gone meanwhile, or a file system without links
            if digest_file(stored) == digest:
                os.link(stored, target)
                return
    shutil.copy2(source, target)


class ArtifactStore:
    """Puts folders in and hands folders out; the same files give the same reference."""

    def __init__(self, root: str, cache: Path | None = None) -> None:
        # Other processes store and remove artifacts too: a listing that is kept would not know of it.
        self.fs, self.root = fsspec.core.url_to_fs(root, use_listings_cache=False)
        self._local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))
        self._cache = cache or Path(tempfile.gettempdir()) / f"semantide-artifacts-{os.getuid() if hasattr(os, 'getuid') else 0}"

    def put(self, kind: str, folder: Path, *, config: Mapping[str, Any] | None = None, inputs: Mapping[str, str] | None = None, seed: int | None = None) -> str:
        """Store every file below ``folder`` and return the reference ``<kind>/sha256-...``.

        In a local store a file that one of the ``inputs`` has too takes no room a second time: both artifacts name the same bytes.
        """
        files: dict[str, dict[str, Any]] = {}
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            if name == "manifest.json":
                raise ValueError("manifest.json is the store's own name: give the file another one")
            files[name] = {"sha256": digest_file(path), "bytes": path.stat().st_size}
        if not files:
            raise ValueError(f"no files below {folder}: an artifact holds at least one")
        digest = digest_bytes(json.dumps({n: f["sha256"] for n, f in files.items()}, sort_keys=True).encode())
        ref = f"{kind}/sha256-{digest}"
        target = f"{self.root}/{ref}"
        if self._renewed(ref):
            return ref
        manifest = {"ref": ref, "files": files, "code": code_version(), "config": dict(config or {}), "inputs": dict(inputs or {}), "seed": seed}
        text = json.dumps(manifest, indent=1, sort_keys=True)
        if self._local:
            remove_abandoned(Path(self.root))
            temporary = Path(self.root) / f".incoming-{uuid.uuid4().hex}"
            try:
                there = self._files_of((inputs or {}).values())
                for name, entry in files.items():
                    _link_or_copy(there.get(entry["sha256"]), folder / name, temporary / name, entry["sha256"])
                (temporary / "manifest.json").write_text(text)
                Path(target).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.rename(temporary, target)
                except OSError:
                    if not self.exists(ref):
                        self._take_away(Path(target))  # what a removal that was killed has left
                        os.rename(temporary, target)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        else:
            with self._reaching():
                for name in files:
                    self.fs.put_file(str(folder / name), f"{target}/{name}")
                self.fs.pipe_file(f"{target}/manifest.json", text.encode())
        return ref

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        """Turn what the client of an object store raises into ours; what it found or did not find stays what it is.

        Raises: StoreUnavailable.
        """
        try:
            yield
        except (SemantideError, ValueError, FileNotFoundError):
            raise
        except Exception as error:
            if self._local:
                raise
            raise StoreUnavailable(
                f"the artifact store {self.root} cannot be used ({type(error).__name__}: {error}): start it, or correct SEMANTIDE_ARTIFACTS_URL and its credentials"
            ) from error

    def _files_of(self, refs: Iterable[str]) -> dict[str, Path]:
        """Files of some local artifacts by their digest; what is not an artifact here has none."""
        return {entry["sha256"]: Path(self.root) / ref / name for ref in refs if self.exists(ref) for name, entry in self.manifest(ref)["files"].items()}

    def exists(self, ref: str) -> bool:
        """Whether the artifact is complete in the store."""
        # Anything else, such as a way out of the store, names no artifact.
        with self._reaching():
            return _REFERENCE.fullmatch(ref) is not None and bool(self.fs.exists(f"{self.root}/{ref}/manifest.json"))

    def manifest(self, ref: str) -> dict[str, Any]:
        """The manifest: files, code version, config, inputs, seed.

        Raises: NotFound.
        """
        if not self.exists(ref):
            raise NotFound(f"artifact {ref} is not in {self.root}: list what is there with `semantide artifacts`, or run the job that makes it again")
        with self._reaching():
            manifest: dict[str, Any] = json.loads(self.fs.cat_file(f"{self.root}/{ref}/manifest.json"))
        return manifest

    def text(self, ref: str, name: str) -> str:
        """One of an artifact's files, read from the store.

        Raises: NotFound, Corrupt where it is not what was stored.
        """
        files = self.manifest(ref)["files"]
        try:
            with self._reaching():
                content: bytes = self.fs.cat_file(f"{self.root}/{ref}/{name}")
        except FileNotFoundError:
            content = b""
        if digest_bytes(content) != files.get(name, {}).get("sha256"):
            raise Corrupt(f"{ref}: file {name} does not have the digest of its manifest: delete the artifact and run its job again")
        return content.decode(errors="replace")

    def get(self, ref: str, *, files: Collection[str] | None = None) -> Path:
        """A local, read-only folder with the artifact's files; the digests are checked, of all of them or of the ``files`` that are going to be read.

        Raises: NotFound, Corrupt.
        """
        manifest = self.manifest(ref)
        folder = Path(self.root) / ref if self._local else self._fetch(ref, manifest)
        for name in manifest["files"] if files is None else files:
            path, digest = folder / name, manifest["files"].get(name, {}).get("sha256", "")
            if not path.is_file() or digest_file(path) != digest:
                if not self._local:
                    # The next attempt fetches it anew.
                    shutil.rmtree(folder, ignore_errors=True)
                raise Corrupt(f"{ref}: file {name} does not have the digest of its manifest ({digest[:12]}...): delete the artifact and run its job again")
        return folder

    def _renewed(self, ref: str) -> bool:
        """Make an artifact that is there as young as one that is stored now; whether it is there."""
        path = f"{self.root}/{ref}/manifest.json"
        try:
            if not self.exists(ref):
                return False
            if self._local:
                with suppress(PermissionError):  # somebody else's file
                    os.utime(path)
            else:
                with self._reaching():
                    self.fs.pipe_file(path, self.fs.cat_file(path))
        except FileNotFoundError:
            return False
        return True

    def stored_at(self, ref: str) -> float:
        """When an artifact, hidden or not, was stored for the last time, seconds since 1970.

        Raises: NotFound.
        """
        for path in (f"{self.root}/{ref}/manifest.json", self._hidden(ref)):
            with suppress(FileNotFoundError), self._reaching():
                moment: datetime = self.fs.modified(path)
                return moment.timestamp() if moment.tzinfo else moment.replace(tzinfo=UTC).timestamp()
        raise NotFound(f"artifact {ref} is not in {self.root}")

    def remove(self, ref: str) -> None:
        """Take an artifact away that can be made again; one that is not there is no matter."""
        if self.exists(ref):
            self.hide(ref)
            self.remove_hidden(ref)

    # An artifact that may be needed after all is taken away in two steps: hidden it does not exist for anybody else, and can still come back.

    def hide(self, ref: str) -> None:
        """Let an artifact not exist, until it is shown again or removed.

        Raises: NotFound.
        """
        if not self.exists(ref):
            raise NotFound(f"artifact {ref} is not in {self.root}")
        with self._reaching():
            if self._local:
                aside = Path(self._hidden(ref)).parent
                aside.parent.mkdir(parents=True, exist_ok=True)
                self._take_away(aside)
                os.rename(f"{self.root}/{ref}", aside)
            else:
                self.fs.mv(f"{self.root}/{ref}/manifest.json", self._hidden(ref))

    def hidden(self) -> list[str]:
        """References of all hidden artifacts: those of a removal that was killed."""
        pattern = f"{self.root}/.hidden/*/sha256-*/manifest.json" if self._local else f"{self.root}/*/sha256-*/{_HIDDEN}"
        with self._reaching():
            return sorted("/".join(str(path).rsplit("/", 3)[1:3]) for path in self.fs.glob(pattern))

    def show(self, ref: str) -> None:
        """Let a hidden artifact exist again, unless it was stored anew meanwhile."""
        if self.exists(ref):
            self.remove_hidden(ref)
            return
        with self._reaching():
            if self._local:
                try:
                    os.rename(Path(self._hidden(ref)).parent, f"{self.root}/{ref}")
                except OSError:
                    if not self.exists(ref):  # else somebody has stored it anew
                        raise
                    self.remove_hidden(ref)
            else:
                self.fs.mv(self._hidden(ref), f"{self.root}/{ref}/manifest.json")

    def remove_hidden(self, ref: str) -> None:
        """Take a hidden artifact away for good; one that was stored anew meanwhile stays."""
        if self._local:
            self._take_away(Path(self._hidden(ref)).parent)
            return
        with self._reaching():
            if not self.exists(ref):
                hidden = self._hidden(ref)
                for path in self.fs.find(f"{self.root}/{ref}"):
                    if path != hidden and not hidden.endswith(f"/{path}"):
                        self.fs.rm_file(path)
            # Last: a removal that is killed is found by it.
            with suppress(FileNotFoundError):
                self.fs.rm_file(self._hidden(ref))
        shutil.rmtree(self._cache / ref, ignore_errors=True)

    def _hidden(self, ref: str) -> str:
        return f"{self.root}/.hidden/{ref}/manifest.json" if self._local else f"{self.root}/{ref}/{_HIDDEN}"

    def _take_away(self, folder: Path) -> None:
        """Remove a folder of a local store so that it is there whole or not at all."""
        aside = Path(self.root) / f".incoming-{uuid.uuid4().hex}"
        with suppress(FileNotFoundError):
            os.rename(folder, aside)
        shutil.rmtree(aside, ignore_errors=True)

    def forget_fetched(self) -> int:
        """Remove the copies of artifacts that an object store has no longer; how many."""
        if self._local or not self._cache.is_dir():
            return 0
        there, gone = set(self.list()), 0
        for folder in self._cache.glob("*/sha256-*"):
            if folder.relative_to(self._cache).as_posix() not in there:
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
        return gone

    def _fetch(self, ref: str, manifest: Mapping[str, Any]) -> Path:
        folder = self._cache / ref
        if not (folder / "manifest.json").is_file():
            remove_abandoned(self._cache)
            temporary = self._cache / f".incoming-{uuid.uuid4().hex}"
            try:
                with self._reaching():
                    for name in [*manifest["files"], "manifest.json"]:
                        (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                        self.fs.get_file(f"{self.root}/{ref}/{name}", str(temporary / name))
                folder.parent.mkdir(parents=True, exist_ok=True)
                with suppress(OSError):  # another process was faster
                    os.rename(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def list(self, kind: str | None = None) -> list[str]:
        """References of all complete artifacts, of one kind or of all."""
        pattern = f"{self.root}/{kind or '*'}/sha256-*/manifest.json"
        with self._reaching():
            return sorted("/".join(str(path).rsplit("/", 3)[1:3]) for path in self.fs.glob(pattern))


def readable(refs: Iterable[str], read: Callable[[str], T]) -> list[T]:
    """What ``read`` finds of each artifact; one that is damaged or gone takes nothing from a list of the others, and is logged."""
    found = []
    for ref in refs:
        try:
            found.append(read(ref))
        except (Corrupt, NotFound) as error:
            logger("artifacts").error("an artifact cannot be listed", artifact=ref, error=str(error))
    return found
