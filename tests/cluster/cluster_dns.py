"""The cluster's names, answered from its endpoints: every service as if it were headless, since no proxy turns a cluster address into a pod's.

shop-redis.shop.svc.cluster.local          all ready addresses
rank-0.job.shop.svc.cluster.local          the pod with that hostname
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx

from .api import Api, Object, Refused

_SUFFIX = ".svc.cluster.local"
_A, _NAME_ERROR = 1, 3


class ClusterDns:
    """A server of A records on one address."""

    def __init__(self, kubeconfig: Path, address: str) -> None:
        self._api, self._socket = Api(kubeconfig), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 53))
        self._socket.settimeout(0.2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="cluster-dns")

    def __enter__(self) -> ClusterDns:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close()
        self._api.close()

    def _serve(self) -> None:
        while not self._stop.is_set():
            try:
                question, sender = self._socket.recvfrom(512)
                self._socket.sendto(answer(question, list(self.addresses(name_of(question)))), sender)
            except TimeoutError:
                continue
            except (OSError, httpx.TransportError, Refused):
                # The one who asked is gone, or the API server restarts: who asks asks again.
                continue

    def addresses(self, name: str) -> Iterator[str]:
        """Where a name of the cluster leads."""
        if not name.endswith(_SUFFIX):
            return
        host, _, rest = name.removesuffix(_SUFFIX).rpartition(".")[0].rpartition(".")
        namespace = name.removesuffix(_SUFFIX).rpartition(".")[2]
        endpoints = self._api.find("endpoints", rest, namespace)
        for subset in (endpoints or {}).get("subsets") or ():
            yield from (one["ip"] for one in _places(subset) if not host or one.get("hostname") == host)


def _places(subset: Object) -> list[Object]:
    # The endpoints controller lists those that are not ready among the ready ones where the service says so.
    found: list[Object] = subset.get("addresses") or []
    return found


def name_of(question: bytes) -> str:
    """The name that a query asks for."""
    labels, place = [], 12
    while length := question[place]:
        labels.append(question[place + 1 : place + 1 + length].decode("ascii", "replace"))
        place += 1 + length
    return ".".join(labels).lower()


def answer(question: bytes, addresses: list[str]) -> bytes:
    """The reply to a query: its A records, none for another type, and no such name where there is no address."""
    end = question.index(b"\0", 12) + 5
    (kind,) = struct.unpack("!H", question[end - 4 : end - 2])
    records = [b"\xc0\x0c" + struct.pack("!HHIH", _A, 1, 1, 4) + socket.inet_aton(one) for one in addresses] if kind == _A else []
    flags = 0x8580 | (0 if addresses else _NAME_ERROR)
    return question[:2] + struct.pack("!HHHHH", flags, 1, len(records), 0, 0) + question[12:end] + b"".join(records)
