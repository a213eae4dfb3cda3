"""One Docker engine as several nodes see it: each has a socket of its own that shows the containers it made and hides the others'.

A kubelet takes every container with Kubernetes' labels for its own and removes those of pods that it does not know. So what it makes gets one more label
here, and what it lists is asked for by that label.
"""

from __future__ import annotations

import json
import re
import socket
import socketserver
import threading
from io import BufferedIOBase
from pathlib import Path
from urllib.parse import parse_qs, quote

NODE_LABEL = "semantide.test/node"
_CREATE = re.compile(rb"POST (?:/v[\d.]+)?/containers/create\b")
_LIST = re.compile(rb"GET ((?:/v[\d.]+)?/containers/json)(?:\?(\S*))? HTTP")


class NodeEngine:
    """The engine at ``engine_socket`` for the node ``name``, at ``socket``."""

    def __init__(self, name: str, engine_socket: Path, folder: Path) -> None:
        self.socket = folder / f"{name}.sock"

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                _relay(self.request, self.rfile, str(engine_socket), name)

        class Listener(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            request_queue_size = 64

        self.socket.unlink(missing_ok=True)
        self._listener = Listener(str(self.socket), Handler)
        self._thread = threading.Thread(target=self._listener.serve_forever, kwargs={"poll_interval": 0.1}, name=f"engine-{name}")

    def __enter__(self) -> NodeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown()
        self._thread.join()
        self._listener.server_close()


def _relay(client: socket.socket, reader: BufferedIOBase, engine_socket: str, node: str) -> None:
    """One request and its answer; the connection then closes, so that the next one is seen too."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = reader.readline()
        if not line:
            return
        head += line
    body = b""
    if _CREATE.match(head):
        body = labelled(reader.read(_length(head)), node)
        head = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % len(body), head)
    head = filtered(head, node)
    upgrade = b"\r\nupgrade:" in head.lower()
    if not upgrade:
        head = re.sub(rb"(?i)\r\nconnection: *[^\r]*", b"", head).replace(b"\r\n", b"\r\nConnection: close\r\n", 1)
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(engine_socket)
        engine.sendall(head + body)
        forward = threading.Thread(target=_pump, args=(reader, engine), daemon=True)
        forward.start()
        try:
            while part := engine.recv(65536):
                client.sendall(part)
        except OSError:
            return
        finally:
            # The client closes once it has read the answer; its half of an upgraded stream may last longer.
            for end in (client, engine):
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass
            forward.join()


def _pump(reader: BufferedIOBase, engine: socket.socket) -> None:
    try:
        while part := reader.read1(65536):
            engine.sendall(part)
    except (OSError, ValueError):
        return


def _length(head: bytes) -> int:
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    assert found is not None, head
    return int(found[1])


def labelled(body: bytes, node: str) -> bytes:
    """What to create, with the node's label."""
    said = json.loads(body)
    said["Labels"] = {**(said.get("Labels") or {}), NODE_LABEL: node}
    return json.dumps(said).encode()


def filtered(head: bytes, node: str) -> bytes:
    """A request for the list of containers, narrowed to the node's; any other as it is."""
    found = _LIST.match(head)
    if found is None:
        return head
    options = {name: values[-1] for name, values in parse_qs((found[2] or b"").decode()).items()}
    filters = json.loads(options.get("filters", "{}"))
    # Two forms are in use: a list, or a map whose keys count.
    labels = filters.get("label") or {}
    wanted = f"{NODE_LABEL}={node}"
    filters["label"] = [*labels, wanted] if isinstance(labels, list) else {**labels, wanted: True}
    if isinstance(filters["label"], dict):
        filters = {name: value if isinstance(value, dict) else dict.fromkeys(value, True) for name, value in filters.items()}
    options["filters"] = json.dumps(filters)
    query = "&".join(f"{name}={quote(value)}" for name, value in options.items())
    return b"GET " + found[1] + b"?" + query.encode() + head[head.index(b" HTTP") :]
