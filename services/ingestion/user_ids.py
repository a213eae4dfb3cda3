"""Under which ids this log keeps users: their own, or pseudonyms of one key, for as long as it exists."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.stream import STREAM
from semantide.shared.config import Settings
from semantide.shared.pseudonyms import Pseudonyms

_NAME = "user ids"


def settled(settings: Settings, broker: Any) -> Pseudonyms:
    """The pseudonyms of a deployment, which its log and its broker know from now on.

    Raises: ValueError where the key is missing or another one, and where events are stored under users' own ids.
    """
    pseudonyms, folder = Pseudonyms.of(settings), settings.data_dir / "events"
    pseudonyms.agree(broker)  # before anything is written
    if pseudonyms or (folder / "manifest.sqlite").exists():
        _settle(pseudonyms, folder, broker)
    pseudonyms.settle(broker)
    return pseudonyms


def _settle(pseudonyms: Pseudonyms, folder: Path, broker: Any) -> None:
    with closing(Manifest(folder)) as manifest, manifest.writing() as connection:
        row = connection.execute("SELECT value FROM keys WHERE name = ?", (_NAME,)).fetchone()
        pseudonyms.check(row[0].decode() if row else "")
        if row is None and pseudonyms:
            stored = sum(segment.num_rows for segment in EventLog(manifest).segments())
            if stored or broker.xlen(STREAM):
                raise ValueError(
                    f"SEMANTIDE_USER_ID_KEY is set, and {stored} events are stored here under users' own ids, which would be somebody else from now on: "
                    "begin with an empty data folder and broker and import the events again, or leave the key out"
                )
            connection.execute("INSERT INTO keys VALUES (?, ?)", (_NAME, pseudonyms.fingerprint.encode()))
