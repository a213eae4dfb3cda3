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
    path = settings.data_dir / "api_key"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as stream:
                stream.write(secrets.token_urlsafe(24))
        except FileExistsError:
            pass
    return [path.read_text().strip()]


def local_key(data_dir: Path) -> str | None:
    """The key that a stack in this folder made for itself, if any."""
    path = data_dir / "api_key"
    return path.read_text().strip() if path.exists() else None
