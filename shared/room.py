"""What a room's doors get handed: settings, broker, artifact store, and a way to send messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from semantide.shared.artifacts import ArtifactStore
from semantide.shared.config import Settings
from semantide.shared.contracts import Message
from semantide.shared.queues import Queues


@dataclass(frozen=True)
class Room:
    """One service in one process. ``broker`` is a redis client that returns bytes."""

    name: str
    settings: Settings
    broker: Any
    store: ArtifactStore
    queues: Queues

    def send(self, message: Message) -> None:
        """Put a message on its queue."""
        self.queues.send(message)
