"""What a client raises: the stack said no, or nobody answered."""

from __future__ import annotations

from typing import Any

from semantide.shared.errors import PermanentError, TransientError


class StackError(PermanentError):
    """The stack answered with an error, after all repetitions that were allowed.

    ``status`` is HTTP's, ``kind`` the stack's own name of the error (``NotFound``, ``RateLimited``), ``details`` what it says of single fields or rows.
    """

    def __init__(self, message: str, status: int, details: Any = None, kind: str = "") -> None:
        super().__init__(message)
        self.status, self.details, self.kind = status, details, kind


class Unreachable(TransientError):
    """Nobody answered, after all repetitions that were allowed: whether the stack has done what was asked is not known, unless it may be repeated."""
