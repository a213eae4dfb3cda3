"""One process at a time works for a job, or for a rank of it: a lock on a file in the job's folder, which goes with its process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from semantide.shared.errors import PermanentError


def hold(path: Path, *, wait: bool = False) -> bool:
    """Hold an exclusive lock on a file until this process ends; whether it could be had, for which ``wait`` waits.

    Raises: PermanentError where the file system has no locks.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(handle)
        return False
    except OSError as error:
        os.close(handle)
        raise PermanentError(
            f"no file in {path.parent} can be locked ({error.strerror}), so nothing keeps two processes from one job: mount its file system with locks (NFS: version 4, or "
            f"without nolock and with lockd), or let SEMANTIDE_DATA_DIR be on one that has them"
        ) from error
    return True
