"""A device plugin with NPUs that do not exist: Kubernetes' v1beta1 protocol, spoken to a real kubelet.

    DevicePlugin("huawei.com/Ascend910", 8)    registers; a container that gets NPUs 2 and 3 sees ASCEND_VISIBLE_DEVICES=2,3, and DRIVER where there is a driver
    plugin.set_health(3, False)                        the kubelet takes NPU 3 from what it offers

The few messages are written by hand in protobuf's wire format; grpc carries bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from .api import Api

PLUGIN_FOLDER = Path("/var/lib/kubelet/device-plugins")
DRIVER = "/usr/local/Ascend/driver"
"""Where containers with NPUs find their driver."""
_SERVICE = "v1beta1.DevicePlugin"


class DevicePlugin:
    """NPUs 0 to ``number`` - 1 of one resource."""

    def __init__(self, resource: str, number: int, folder: Path = PLUGIN_FOLDER, driver: Path | None = None) -> None:
        self._resource, self._folder, self._driver = resource, folder, driver
        self._healthy, self._changed = [True] * number, threading.Condition()
        self._ended = False
        self._socket = folder / f"{resource.replace('/', '-')}.sock"

    def __enter__(self) -> DevicePlugin:
        self._socket.unlink(missing_ok=True)
        self._server = grpc.server(ThreadPoolExecutor(8))
        handlers = {
            "GetDevicePluginOptions": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._list_and_watch),
            "Allocate": grpc.unary_unary_rpc_method_handler(self._allocate),
            "PreStartContainer": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
        self._server.add_insecure_port(f"unix://{self._socket}")
        self._server.start()
        self.register()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._server.stop(1).wait()
        self._socket.unlink(missing_ok=True)

    def register(self) -> None:
        """Tell the kubelet that these NPUs are here; again after the kubelet has restarted."""
        request = _text(1, "v1beta1") + _text(2, self._socket.name) + _text(3, self._resource)
        with grpc.insecure_channel(f"unix://{self._folder / 'kubelet.sock'}") as channel:
            channel.unary_unary("/v1beta1.Registration/Register")(request, timeout=30, wait_for_ready=True)

    def set_health(self, npu: int, healthy: bool) -> None:
        """Break an NPU, or mend it."""
        with self._changed:
            self._healthy[npu] = healthy
            self._changed.notify_all()

    def _list_and_watch(self, request: bytes, context: Any) -> Iterator[bytes]:
        told: list[bool] = []
        while not self._ended and context.is_active():
            with self._changed:
                if told == self._healthy:
                    # Woken at a change, and now and then to see whether anybody still listens.
                    self._changed.wait(timeout=1)
                    continue
                told = list(self._healthy)
            yield b"".join(_part(1, _text(1, str(npu)) + _text(2, "Healthy" if good else "Unhealthy")) for npu, good in enumerate(told))

    def _allocate(self, request: bytes, context: Any) -> bytes:
        answers = []
        for container in _parts(request):
            seen = ",".join(sorted((one.decode() for one in _parts(container)), key=int))
            answers.append(_part(1, allotted(seen, self._driver)))
        return b"".join(answers)


def allotted(npus: str, driver: Path | None) -> bytes:
    """What a container with these NPUs gets: a variable, and a folder of the node."""
    mount = b"" if driver is None else _part(2, _text(1, DRIVER) + _text(2, str(driver)) + _yes(3))
    return _part(1, _text(1, "ASCEND_VISIBLE_DEVICES") + _text(2, npus)) + mount


def offered(api: Api, resource: str) -> int:
    """Devices of all nodes."""
    return sum(int(node["status"].get("allocatable", {}).get(resource, 0)) for node in api.list("nodes"))


def _number(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def _part(field: int, body: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _number(len(body)) + body


def _yes(field: int) -> bytes:
    return bytes([field << 3, 1])


def _text(field: int, text: str) -> bytes:
    return _part(field, text.encode())


def _parts(message: bytes) -> Iterator[bytes]:
    """The bodies of a message's parts, all of which are texts or messages."""
    place = 0
    while place < len(message):
        assert message[place] & 7 == 2, message
        place, length, shift = place + 1, 0, 0
        while True:
            byte = message[place]
            place, length, shift = place + 1, length | (byte & 127) << shift, shift + 7
            if byte < 128:
                break
        yield message[place : place + length]
        place += length
