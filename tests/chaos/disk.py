"""A disk of one stack's own, which can be full or slow without harm to anybody else's: a file with a file system in it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_THROTTLE = Path("/sys/fs/cgroup/blkio/blkio.throttle.write_iops_device")


class Disk:
    """Mounted at ``folder`` where that can be; elsewhere ``folder`` is a plain folder and ``missing`` says why."""

    def __init__(self, folder: Path, num_bytes: int = 4 << 30) -> None:
        self.folder, self._image, self._filler = folder, folder.with_suffix(".image"), folder / "filler"
        folder.mkdir(parents=True)
        self._device = ""
        self.missing = "a disk of one's own takes root, mkfs.ext4 and mount"
        if os.geteuid() == 0 and shutil.which("mkfs.ext4") and shutil.which("losetup"):
            with self._image.open("wb") as stream:
                stream.truncate(num_bytes)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(self._image)], check=True)
            found = subprocess.run(["mount", "-o", "loop", str(self._image), str(folder)], check=False, capture_output=True, text=True)
            self.missing = found.stderr.strip()
            if not self.missing:
                self._device = subprocess.run(["findmnt", "-n", "-o", "MAJ:MIN", str(folder)], check=True, capture_output=True, text=True).stdout.strip()
        self.cannot_be_slow = self.missing or ("" if _THROTTLE.exists() else f"this kernel bounds no device's writes ({_THROTTLE})")

    def fill(self) -> None:
        """Leave no byte free."""
        handle = os.open(self._filler, os.O_RDWR | os.O_CREAT)
        try:
            size, step = 0, 1 << 30
            while step >= 4096:
                try:
                    os.posix_fallocate(handle, size, step)
                    size += step
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    step //= 2
        finally:
            os.close(handle)

    def empty(self) -> None:
        """Give the room back."""
        self._filler.unlink(missing_ok=True)

    def slow(self, writes_a_second: int) -> None:
        """Let the kernel pass no more than so many writes a second on to the device; 0: as many as it takes."""
        _THROTTLE.write_text(f"{self._device} {writes_a_second}")

    def remove(self) -> None:
        """Give everything back."""
        if self._device:
            with suppress(OSError):
                self.slow(0)
            for _ in range(50):
                if subprocess.run(["umount", str(self.folder)], check=False, capture_output=True).returncode == 0:
                    break
                time.sleep(0.2)
            else:
                subprocess.run(["umount", "--lazy", str(self.folder)], check=False)
        self._image.unlink(missing_ok=True)
