"""What readers of stored files raise, as one error that says what to do."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from safetensors import SafetensorError

from semantide.shared.errors import Corrupt

DATASET_AGAIN = "make the data set anew (`semantide dataset`), or copy the artifact again"
CATALOG_AGAIN = "tokenize the data set anew (`semantide tokenize`), or copy the artifact again"

_TORN = (ValueError, LookupError, TypeError, AttributeError, EOFError, SafetensorError, pa.ArrowException)
_NOT_THERE = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # without a number: what a reader itself found wrong


@contextmanager
def whole(folder: Path, what: str, remedy: str) -> Iterator[None]:
    """Read files of a folder, which are there and as they were written.

    Raises: Corrupt where a file is cut off, missing, or holds something else. A disk that does not answer raises what it raises: that may pass.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        raise _corrupt(folder, what, remedy, error) from error
    except _TORN as error:
        raise _corrupt(folder, what, remedy, error) from error


def _corrupt(folder: Path, what: str, remedy: str, error: Exception) -> Corrupt:
    said = (str(error).splitlines() or [""])[0]
    return Corrupt(f"{folder} holds no whole {what} ({type(error).__name__}: {said}): {remedy}")
