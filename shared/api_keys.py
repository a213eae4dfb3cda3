"""Which API keys are accepted and what each may do, without loading a web framework.

    SEMANTIDE_API_KEYS=KEY,read:KEY,shop-web@write:KEY
A key without a role is an admin's. The name before the ``@`` is what the audit log calls its holder; without one that is a digest of the key.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from semantide.shared.config import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")

Role = Literal["read", "write", "admin"]
ROLES: tuple[Role, ...] = ("read", "write", "admin")
"""Each may do what those before it may."""

_ENTRY = re.compile(r"(?:(?P<name>[A-Za-z0-9._-]{1,64})@)?(?P<role>read|write|admin):(?P<secret>.+)")


@dataclass(frozen=True)
class ApiKey:
    """A key, what its holder may do, and what they are called."""

    secret: str = field(repr=False)
    role: Role = "admin"
    name: str = ""

    @classmethod
    def parse(cls, entry: str) -> ApiKey:
        """One entry of the setting."""
        found = _ENTRY.fullmatch(entry)
        secret = found["secret"] if found else entry
        name = (found["name"] if found else None) or f"key-{hashlib.sha256(secret.encode()).hexdigest()[:8]}"
        return cls(secret, found["role"] if found else "admin", name)  # type: ignore[arg-type]

    def may(self, role: Role) -> bool:
        """Whether it opens what wants that role."""
        return ROLES.index(self.role) >= ROLES.index(role)


def configured_keys(entries: str) -> list[ApiKey]:
    """The keys of the setting.

    Raises: ValueError where one key is given twice with different roles.
    """
    found: dict[str, ApiKey] = {}
    for entry in filter(None, (part.strip() for part in entries.split(","))):
        key = ApiKey.parse(entry)
        if (other := found.setdefault(key.secret, key)) != key:
            raise ValueError(f"SEMANTIDE_API_KEYS gives one key to {other.name} as {other.role} and to {key.name} as {key.role}: make a key for each")
    return list(found.values())


def strongest(keys: list[ApiKey]) -> str | None:
    """The first key that may do most; None where there is none."""
    return max(keys, key=lambda key: ROLES.index(key.role)).secret if keys else None


def own_key(settings: Settings) -> str | None:
    """The key that a client with these settings shows: the strongest configured one, or what a stack in this folder made for itself."""
    return strongest(configured_keys(settings.api_keys)) or local_key(settings.data_dir.absolute())


def api_keys(settings: Settings) -> list[ApiKey]:
    """The accepted keys; on loopback one is made and kept when none is configured.

    Raises: ValueError beyond loopback without a configured key.
    """
    if keys := configured_keys(settings.api_keys):
        return keys
    if settings.host not in LOOPBACK:
        raise ValueError(f"refusing to listen on {settings.host} without an API key: set SEMANTIDE_API_KEYS, or listen on 127.0.0.1")
    if (found := local_key(settings.data_dir)) is not None:
        return [ApiKey.parse(found)]
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
    return [ApiKey.parse(made)]


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
