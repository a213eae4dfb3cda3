"""A real control plane on free ports of loopback: etcd, API server, controller manager, scheduler.

    with ControlPlane(folder, binaries) as plane:
        Api(plane.kubeconfig)                          # an administrator
        plane.kubeconfig_of(token, "operator")         # anybody else

TLS is verified, RBAC decides, service accounts have tokens: what an operator may do here it may do in production. Every process ends with this one.
"""

from __future__ import annotations

import base64
import ctypes
import json
import secrets
import signal
import socket
import ssl
import subprocess
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from .api import Api, until

_START_SECONDS = 900.0
_NOT_RUN = ("horizontalpodautoscaling", "nodeipam", "route", "service", "attachdetach", "ttl", "bootstrapsigner", "tokencleaner", "csrsigning", "csrapproving")
API_SERVICE_ADDRESS = "10.0.0.1"
"""Where pods are told that the API server is."""
NODES = ("node-a", "node-b")
"""The nodes that may join with a kubelet."""


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Server:
    """One process with its log; it ends with this one."""

    def __init__(self, name: str, command: list[str], folder: Path, environment: dict[str, str] | None = None) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=_end_with_parent
            )

    def check(self) -> None:
        """Raises: AssertionError with the end of its log, where the process has ended."""
        if self.process.poll() is not None:
            raise AssertionError(f"{self.name} ended with {self.process.returncode}:\n{self.log.read_text(errors='replace')[-3000:]}")

    def stop(self, number: int = signal.SIGTERM) -> None:
        """End the process; one that does not end in time is killed."""
        self.process.send_signal(number)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class ControlPlane:
    """``grace_seconds`` is how long a node may be silent before it counts as lost, long where nodes are played; ``host`` is where the API server listens."""

    folder: Path
    binaries: Path
    grace_seconds: int = 3600
    host: str = "127.0.0.1"
    servers: list[Server] = field(default_factory=list)

    def __enter__(self) -> ControlPlane:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._etcd, peer, self.port, manager, scheduler = free_ports(5)
        self._authority()
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", "controller-manager", "scheduler", *NODES)}
        groups = {"admin": "system:masters", **{name: "system:nodes" for name in NODES}}
        users = {
            "controller-manager": "system:kube-controller-manager",
            "scheduler": "system:kube-scheduler",
            **{name: f"system:node:{name}" for name in NODES},
        }
        (self.folder / "tokens.csv").write_text(
            "".join(f"{token},{users.get(name, name)},{name},{groups.get(name, 'system:authenticated')}\n" for name, token in self._tokens.items())
        )
        self.kubeconfig = self.kubeconfig_of(self._tokens["admin"], "admin")
        try:
            self._start(peer, manager, scheduler)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where the API server listens."""
        return f"https://{self.host}:{self.port}"

    def stop(self) -> None:
        """End every process, the last one first."""
        while self.servers:
            self.servers.pop().stop()

    def node_kubeconfig(self, name: str) -> Path:
        """What the kubelet of one of NODES identifies itself with."""
        return self.kubeconfig_of(self._tokens[name], name)

    def account_kubeconfig(self, name: str, namespace: str) -> Path:
        """Credentials of a service account: what its pods would be let do."""
        api = Api(self.kubeconfig)
        try:
            account = until(lambda: (api.find("serviceaccounts", name, namespace) or {}).get("secrets"), f"a token of service account {namespace}/{name}")
            token = until(lambda: (api.find("secrets", account[0]["name"], namespace) or {}).get("data", {}).get("token"), "its secret")
        finally:
            api.close()
        return self.kubeconfig_of(base64.b64decode(token).decode(), f"{namespace}-{name}", namespace)

    def kubeconfig_of(self, token: str, name: str, namespace: str = "default") -> Path:
        """A kubeconfig with this token."""
        said = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": {"server": self.address, "certificate-authority": str(self.folder / "ca.crt")}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name, "namespace": namespace}}],
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(json.dumps(said))
        path.chmod(0o600)
        return path

    def restart_api_server(self) -> None:
        """End the API server at once and start it again on the same port, as a rolling control plane does."""
        place = next(place for place, server in enumerate(self.servers) if server.name == "kube-apiserver")
        self.servers[place].stop(signal.SIGKILL)
        self.servers[place] = self._serve("kube-apiserver", self._api_server_options())
        self._until_ready()

    def _start(self, peer: int, manager: int, scheduler: int) -> None:
        etcd = [f"--data-dir={self.folder / 'etcd'}", f"--listen-client-urls=http://127.0.0.1:{self._etcd}"]
        etcd += [f"--advertise-client-urls=http://127.0.0.1:{self._etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}", "--quota-backend-bytes=2147483648"]
        self.servers.append(self._serve("etcd", etcd))
        self.servers.append(self._serve("kube-apiserver", self._api_server_options()))
        self._until_ready()
        common = ["--leader-elect=false", "--port=0", "--bind-address=127.0.0.1", "--kube-api-qps=200", "--kube-api-burst=400"]
        for name, port, more in (("controller-manager", manager, self._manager_options()), ("scheduler", scheduler, [])):
            config = self.kubeconfig_of(self._tokens[name], name)
            own = [f"--kubeconfig={config}", f"--authentication-kubeconfig={config}", f"--authorization-kubeconfig={config}", f"--secure-port={port}"]
            self.servers.append(self._serve(f"kube-{name}", [*common, *own, f"--cert-dir={self.folder / name}", *more]))
        api = Api(self.kubeconfig)
        try:
            until(lambda: self._checked(api.find("serviceaccounts", "default", "default")), "the default service account", _START_SECONDS)
        finally:
            api.close()

    def _serve(self, name: str, options: list[str]) -> Server:
        return Server(name, [str(self.binaries / name), *options], self.folder)

    def _checked(self, value: Any) -> Any:
        for server in self.servers:
            server.check()
        return value

    def _until_ready(self) -> None:
        end = time.monotonic() + _START_SECONDS
        with httpx.Client(verify=ssl.create_default_context(cafile=str(self.folder / "ca.crt")), trust_env=False) as client:
            while True:
                try:
                    if client.get(f"{self.address}/readyz", headers={"Authorization": f"Bearer {self._tokens['admin']}"}).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                self._checked(None)
                assert time.monotonic() < end, "the API server is not ready"
                time.sleep(0.05)

    def _api_server_options(self) -> list[str]:
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            f"--bind-address={self.host}",
            f"--advertise-address={self.host}",
            "--endpoint-reconciler-type=none",
            # Nobody but this cluster knows its nodes' names.
            "--kubelet-preferred-address-types=InternalIP",
            f"--secure-port={self.port}",
            "--insecure-port=0",
            f"--tls-cert-file={self.folder / 'server.crt'}",
            f"--tls-private-key-file={self.folder / 'server.key'}",
            f"--client-ca-file={self.folder / 'ca.crt'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=Node,RBAC",
            f"--service-cluster-ip-range={API_SERVICE_ADDRESS}/20",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.folder / 'account.key'}",
            f"--service-account-signing-key-file={self.folder / 'account.key'}",
            "--allow-privileged=true",
            "--default-not-ready-toleration-seconds=2",
            "--default-unreachable-toleration-seconds=2",
            "--profiling=false",
        ]

    def _manager_options(self) -> list[str]:
        return [
            f"--controllers=*,{','.join(f'-{name}' for name in _NOT_RUN)}",
            f"--service-account-private-key-file={self.folder / 'account.key'}",
            f"--root-ca-file={self.folder / 'ca.crt'}",
            # Each controller with the rights of its own account, as everywhere.
            "--use-service-account-credentials=true",
            f"--node-monitor-grace-period={self.grace_seconds}s",
            "--node-monitor-period=1s",
            "--node-startup-grace-period=60s",
        ]

    def _authority(self) -> None:
        """A certificate authority, the server's certificate, and the key that signs accounts' tokens."""
        make = ["openssl", "req", "-newkey", "rsa:2048", "-nodes"]
        _openssl(self.folder, [*make, "-x509", "-days", "3650", "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test-authority"])
        _openssl(self.folder, [*make, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=kube-apiserver"])
        (self.folder / "names").write_text(f"subjectAltName=IP:{self.host},IP:{API_SERVICE_ADDRESS},DNS:kubernetes.default.svc\nextendedKeyUsage=serverAuth\n")
        sign = ["openssl", "x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days", "3650"]
        _openssl(self.folder, [*sign, "-extfile", "names", "-out", "server.crt"])
        _openssl(self.folder, ["openssl", "genrsa", "-out", "account.key", "2048"])


def _openssl(folder: Path, command: list[str]) -> None:
    outcome = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
