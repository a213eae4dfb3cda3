"""Files that were sent for an import: one folder, and names that cannot lead out of it."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from semantide.shared.artifacts import remove_abandoned
from semantide.shared.errors import BadData, NotFound
from semantide.shared.http import HTTPException, Request, run_in_threadpool

_BLOCK_BYTES = 4 * 1024 * 1024
_SPARE_BYTES = 256 * 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ -]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._ -]{0,199}){0,8}")


class Uploads:
    """The folder of one data folder's uploads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, name: str) -> Path:
        """Where a file of this name is.

        Raises: BadData for a name that could lead elsewhere.
        """
        if not _NAME.fullmatch(name):
            raise BadData(f"upload name {name!r}: use letters, digits, '.', '_', '-' and '/' between folders; no part begins with a dot")
        path = self._folder / name
        if not path.resolve().is_relative_to(self._folder.resolve()):
            raise BadData(f"upload name {name!r}: a link in {self._folder} leads out of it; choose another name")
        return path

    def remove(self, name: str) -> None:
        """Remove a file, and folders that it was the last one of.

        Raises: BadData, NotFound.
        """
        path = self.path(name)
        if not path.is_file():
            raise NotFound(f"no uploaded file {name!r}")
        path.unlink()
        with suppress(OSError):
            for folder in list(path.relative_to(self._folder).parents)[:-1]:
                (self._folder / folder).rmdir()

    async def receive(self, request: Request, name: str) -> dict[str, Any]:
        """Stream a body to disk; the file appears whole or not at all.

        Raises: BadData, HTTPException 507 where the disk has no room.
        """
        path, folder = self.path(name), self._folder
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise BadData(f"upload name {name!r}: a part of it before the last is a file already; choose another name") from error
        if path.is_dir():
            raise BadData(f"upload name {name!r} is a folder already; choose another name")
        announced = request.headers.get("content-length", "")
        self._need_room(int(announced) if announced.isdigit() else 0)
        await run_in_threadpool(remove_abandoned, folder)
        temporary = folder / f".incoming-{uuid.uuid4().hex}"
        size = 0
        try:
            with temporary.open("wb") as stream:
                held = bytearray()
                async for block in request.stream():
                    held += block
                    if len(held) >= _BLOCK_BYTES:
                        self._need_room(len(held))
                        await run_in_threadpool(stream.write, bytes(held))
                        size += len(held)
                        held.clear()
                size += len(held)
                stream.write(held)
                stream.flush()
                await run_in_threadpool(os.fsync, stream.fileno())
            if announced.isdigit() and int(announced) != size:
                raise BadData(f"upload {name!r} broke off after {size} of {announced} bytes: send it again")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        return {"path": str(path.resolve()), "bytes": size}

    def _need_room(self, size: int) -> None:
        free = shutil.disk_usage(self._folder).free
        if free - size < _SPARE_BYTES:
            raise HTTPException(
                507,
                f"{size} bytes do not fit: {free} bytes are free in {self._folder} and {_SPARE_BYTES} stay in reserve; remove old uploads with DELETE /v1/uploads/NAME",
            )
