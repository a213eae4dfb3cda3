"""A client of a Semantide stack, for programs: ``from semantide.client import Client, AsyncClient``. It loads httpx and pydantic, and nothing of the stack itself."""

from semantide.client.answers import Deletion, History, Live, Rejected, Sent
from semantide.client.asynchronous import AsyncClient
from semantide.client.progress import Progress
from semantide.client.refusal import StackError, Unreachable
from semantide.client.retries import Retries
from semantide.client.synchronous import Client

__all__ = ["AsyncClient", "Client", "Deletion", "History", "Live", "Progress", "Rejected", "Retries", "Sent", "StackError", "Unreachable"]
