"""Real nodes: kubelets on the tests' own Docker engine, whose pods run.

Several kubelets share the engine (``node_engine``) and the machine; their pods meet on the engine's bridge and know the cluster's names (``cluster_dns``).
A machine has one place for device plugins: they serve the kubelet that was started last.
"""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .api import Api, Object, until
from .control_plane import API_SERVICE_ADDRESS, NODES, ControlPlane, Server, free_ports
from .device_plugin import PLUGIN_FOLDER
from .docker_engine import Engine, base_image
from .node_engine import NODE_LABEL, NodeEngine

PAUSE_IMAGE = "semantide-test/pause:1"
_SYSTEM = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
# Kubelets remove what they do not know below these two folders, which would be one for all of them: /var/log/pods, and the list of sandboxes.
_OWN_LOGS = ("unshare", "--mount", "--propagation", "unchanged", "sh", "-c", 'mount --make-private / && mount --bind "$0" /var/log && exec "$@"')
_KERNEL = ("vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes")


def bridge_address(engine: Engine) -> str:
    """This machine's address on the engine's bridge."""
    said = json.loads(engine.docker("network", "inspect", "bridge").stdout)[0]["IPAM"]["Config"][0]
    return str(said.get("Gateway") or said["Subnet"].replace(".0.0/16", ".0.1"))


def pause_image(engine: Engine) -> None:
    """The image whose container holds a pod's addresses."""
    if not engine.has_image(PAUSE_IMAGE):
        command = ["docker", "build", "--quiet", "--tag", PAUSE_IMAGE, "-"]
        text = f'FROM {base_image(engine)}\nSTOPSIGNAL SIGKILL\nENTRYPOINT ["sleep", "infinity"]\n'
        subprocess.run(command, input=text, text=True, check=True, capture_output=True, env=engine.environment)


@contextmanager
def api_service(plane: ControlPlane) -> Iterator[None]:
    """Pods reach the API server at its service's address: the one service address that this cluster, which has no proxy, translates."""
    rule = ["PREROUTING", "--destination", API_SERVICE_ADDRESS, "--protocol", "tcp", "--dport", "443", "--jump", "DNAT"]
    rule += ["--to-destination", f"{plane.host}:{plane.port}"]
    subprocess.run(["iptables", "--table", "nat", "--append", *rule], check=True, env=_SYSTEM)
    try:
        yield
    finally:
        subprocess.run(["iptables", "--table", "nat", "--delete", *rule], check=False, env=_SYSTEM)


class KernelSettings:
    """Gives back what kubelets change in the machine's kernel; what a run that was killed has left changed, too."""

    def __init__(self, system: Path = Path("/proc/sys"), kept: Path = Path("/run/semantide-kernel.json")) -> None:
        self._system, self._kept = system, kept

    def __enter__(self) -> KernelSettings:
        if not self._kept.exists():
            found = {name: path.read_text() for name in _KERNEL if (path := self._system / name).exists()}
            unfinished = self._kept.with_suffix(".new")
            unfinished.write_text(json.dumps(found))
            unfinished.replace(self._kept)
        return self

    def __exit__(self, *_: object) -> None:
        for name, value in json.loads(self._kept.read_text()).items():
            (self._system / name).write_text(value)
        self._kept.unlink()


@dataclass
class Kubelet:
    """The node ``name`` of NODES."""

    name: str
    plane: ControlPlane
    engine: Engine
    labels: dict[str, str]

    def __enter__(self) -> Kubelet:
        if self.name == NODES[0] and (PLUGIN_FOLDER / "kubelet.sock").is_socket() and _in_use(PLUGIN_FOLDER / "kubelet.sock"):
            raise AssertionError(f"a kubelet runs on this machine already: {PLUGIN_FOLDER}/kubelet.sock answers")
        pause_image(self.engine)
        self.folder = self.plane.folder / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._api, self._stack = Api(self.plane.kubeconfig), ExitStack()
        self._stack.callback(self._api.close)
        self._stack.callback(self._unmount)
        # What the kubelet mounts here is seen by the engine, although the kubelet sees a /var/log of its own.
        for options in (["--bind", str(self.folder)], ["--make-shared"]):
            subprocess.run(["mount", *options, str(self.folder)], check=True, env=_SYSTEM)
        self._socket = self._stack.enter_context(NodeEngine(self.name, self.engine.socket, self.folder)).socket
        self.server = self._start()
        self._stack.callback(self._clear)
        try:
            until(self.is_ready, f"{self.name} is ready")
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_ready(self) -> bool:
        """Whether the control plane counts on this node."""
        self.server.check()
        node = self._api.find("nodes", self.name)
        return node is not None and any(one["type"] == "Ready" and one["status"] == "True" for one in node["status"].get("conditions") or ())

    def containers(self) -> list[str]:
        """Identities of this node's running containers."""
        return self._containers()

    def _containers(self, *options: str) -> list[str]:
        return self.engine.docker("ps", "--quiet", *options, "--filter", f"label={NODE_LABEL}={self.name}").stdout.split()

    def lose(self) -> None:
        """End the kubelet and everything that it runs at once, as when the machine's power goes."""
        self.server.process.kill()
        self.server.process.wait()
        # What is left of them would keep the kubelet of this version from starting again.
        if found := self._containers("--all"):
            self.engine.docker("rm", "--force", "--volumes", *found, check=False)

    def come_back(self) -> None:
        """Start the kubelet again."""
        self.server = self._start()
        until(self.is_ready, f"{self.name} is ready again")

    def offer(self, resources: dict[str, str]) -> None:
        """Say by hand that this node has these extended resources, where it has no device plugin."""
        self._api.patch("nodes", self.name, {"status": {"capacity": resources}}, status=True)
        until(lambda: set(resources) <= set(self._api.get("nodes", self.name)["status"]["allocatable"]), f"{self.name} offers {resources}")

    def _start(self) -> Server:
        port, health = free_ports(2)
        address = bridge_address(self.engine)
        said: Object = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "port": port,
            "healthzPort": health,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failSwapOn": False,
            "makeIPTablesUtilChains": False,
            "oomScoreAdj": 0,
            "clusterDNS": [address],
            "clusterDomain": "cluster.local",
            "nodeStatusUpdateFrequency": "1s",
            "nodeStatusReportFrequency": "5s",
            "nodeLeaseDurationSeconds": 4,
            "volumeStatsAggPeriod": "0s",
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "1Mi"},
            "registryPullQPS": 0,
            "kubeAPIQPS": 100,
            "kubeAPIBurst": 200,
            "containerLogMaxSize": "50Mi",
        }
        (self.folder / "kubelet.json").write_text(json.dumps(said))
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        command = [str(self.plane.binaries / "kubelet"), f"--config={self.folder / 'kubelet.json'}", f"--root-dir={self.folder / 'root'}"]
        command += [f"--kubeconfig={self.plane.node_kubeconfig(self.name)}", f"--hostname-override={self.name}", f"--cert-dir={self.folder / 'pki'}"]
        command += [
            f"--docker-endpoint=unix://{self._socket}",
            f"--experimental-dockershim-root-directory={self.folder / 'sandboxes'}",
            f"--pod-infra-container-image={PAUSE_IMAGE}",
            "--container-runtime=docker",
        ]
        command += [f"--volume-plugin-dir={self.folder / 'plugins'}", f"--node-ip={address}"]
        command += [f"--node-labels={','.join(f'{name}={value}' for name, value in self.labels.items())}"] if self.labels else []
        return Server("kubelet", [*_OWN_LOGS, str(logs), *command], self.folder)

    def _clear(self) -> None:
        if self.server.process.poll() is None:
            self.server.stop()
        if found := self._containers("--all"):
            self.engine.docker("rm", "--force", "--volumes", *found, check=False)
        self._api.delete("nodes", self.name)

    def _unmount(self) -> None:
        # Again, where a pod was being started meanwhile.
        for _ in range(3):
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
            for mount in reversed([mount for mount in mounts if mount.startswith(str(self.folder))]):
                subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)


def _in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True
