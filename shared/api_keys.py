"""Which API keys are accepted, without loading a web framework."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from semantide.shared.config import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def api_keys(settings: Settings) -> list[str]:
    """The accepted keys; on loopback one is made and kept when none is configured.

    Raises: ValueError beyond loopback without a configured key.
    """
    if settings.key_list:
        return settings.key_list
    if settings.host not in LOOPBACK:
        raise ValueError(f"refusing to listen on {settings.host} without an API key: set SEMANTIDE_API_KEYS, or listen on 127.0.0.1")
    if (found := local_key(settings.data_dir)) is not None:
        return [found]
    path = settings.data_dir / "api_key"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written aside and linked whole: a reader that met an empty file would accept the empty key.
    aside = path.with_name(f".api_key-{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(24))
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():  # empty, else it had been found above
            aside.replace(path)
        else:
            _publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    made = local_key(settings.data_dir)
    assert made is not None, path
    return [made]


def _publish(aside: Path, path: Path) -> None:
    try:
        os.link(aside, path)
    except FileExistsError:
        pass  # another process was faster: its key counts
    except OSError:  # a file system without links
        aside.replace(path)


def local_key(data_dir: Path) -> str | None:
    """The key that a stack in this folder made for itself, if any."""
    try:
        return (data_dir / "api_key").read_text().strip() or None
    except FileNotFoundError:
        return None
