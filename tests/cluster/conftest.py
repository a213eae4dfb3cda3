"""A real control plane, and a namespace of it for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from . import docker_engine
from .api import Api, until
from .binaries import BinariesMissing, binaries, kept, obstacle
from .cluster_dns import ClusterDns
from .control_plane import NODES, ControlPlane
from .device_plugin import DevicePlugin, offered
from .docker_engine import Engine, EngineMissing
from .job_play import RESOURCE, Fates
from .kubelet import KernelSettings, Kubelet, api_service, bridge_address
from .operator_process import OperatorProcess
from .release import apply, remove_definitions, served
from .simulated_nodes import SimulatedNodes


@pytest.fixture(scope="session")
def servers() -> Path:
    """The folder of the control plane's programs. Where they cannot be built: a failure in CI on Debian, a skip that says why elsewhere."""
    if kept() is None and (reason := obstacle()):
        pytest.skip(f"THE CLUSTER IS NOT TESTED: {reason}")
    try:
        return binaries()
    except BinariesMissing as error:
        if os.environ.get("CI", "").lower() == "true":
            raise
        pytest.skip(f"THE CLUSTER IS NOT TESTED: {error}")


@pytest.fixture(scope="session")
def plane(servers: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane whose nodes are played."""
    with ControlPlane(tmp_path_factory.mktemp("plane"), servers) as running:
        yield running


@pytest.fixture(scope="session")
def api(plane: ControlPlane) -> Iterator[Api]:
    """An administrator of that control plane."""
    client = Api(plane.kubeconfig)
    yield client
    client.close()


@contextmanager
def _namespace(api: Api) -> Iterator[str]:
    name = api.create("namespaces", {"metadata": {"generateName": "test-"}})["metadata"]["name"]
    until(lambda: (api.find("serviceaccounts", "default", name) or {}).get("secrets"), f"a token of the default service account of {name}")
    yield name
    api.delete("namespaces", name)


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """A namespace of the test's own, with the account that pods run as."""
    with _namespace(api) as name:
        yield name


@contextmanager
def _operated(plane: ControlPlane, api: Api, namespace: str, folder: Path, **settings: str) -> Iterator[OperatorProcess]:
    kinds = ("CustomResourceDefinition", "ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    apply(api, plane.kubeconfig, namespace, kinds)
    until(lambda: served(api), "the custom resources are served")
    account = next(one["metadata"]["name"] for one in api.list("serviceaccounts", namespace) if "operator" in one["metadata"]["name"])
    credentials = plane.account_kubeconfig(account, namespace)
    with OperatorProcess(credentials, folder, namespace=namespace, own_namespace=namespace, **settings) as running:
        yield running


@pytest.fixture
def operator(plane: ControlPlane, api: Api, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator with the chart's custom resources and no more rights than the chart gives it."""
    with _operated(plane, api, namespace, tmp_path / "operator") as running:
        yield running


@pytest.fixture
def played(plane: ControlPlane) -> Iterator[SimulatedNodes]:
    """Twelve nodes with 8 NPUs each, four to a super-pod, whose pods do what their job's name says."""
    with SimulatedNodes(plane.kubeconfig, Fates()) as nodes:
        for number in range(12):
            labels = {"accelerator": "huawei-Ascend910", "accelerator-type": "module-910b-8", "huawei.com/topotree.superpodid": str(number // 4)}
            nodes.add(f"played-{number:02}", {RESOURCE: "8"}, labels)
        yield nodes


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The tests' own Docker engine. Where none can run: a failure in CI on Debian as root, a skip that says why elsewhere."""
    with ExitStack() as stack:
        try:
            running = stack.enter_context(docker_engine.engine())
            docker_engine.base_image(running)
        except EngineMissing as error:
            if os.environ.get("CI", "").lower() == "true" and os.geteuid() == 0:
                raise
            pytest.skip(f"PODS ARE NOT RUN: {error}")
        yield running


@pytest.fixture(scope="session")
def real_plane(servers: Path, engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane whose nodes are real, and count as lost soon, but not because the machine is busy."""
    with ControlPlane(tmp_path_factory.mktemp("real"), servers, grace_seconds=20, host=bridge_address(engine)) as running:
        yield running


@pytest.fixture(scope="session")
def nodes(real_plane: ControlPlane, engine: Engine) -> Iterator[dict[str, Kubelet]]:
    """Two nodes that run pods, and the names of the cluster."""
    with ExitStack() as stack:
        stack.enter_context(KernelSettings())
        stack.enter_context(api_service(real_plane))
        stack.enter_context(ClusterDns(real_plane.kubeconfig, bridge_address(engine)))
        yield {name: stack.enter_context(Kubelet(name, real_plane, engine, {})) for name in NODES}


@pytest.fixture(scope="session")
def real_api(real_plane: ControlPlane) -> Iterator[Api]:
    """An administrator of the control plane with real nodes."""
    client = Api(real_plane.kubeconfig)
    yield client
    client.close()


@pytest.fixture
def npus(nodes: dict[str, Kubelet], real_api: Api, tmp_path: Path) -> Iterator[DevicePlugin]:
    """Eight NPUs of a device plugin, which serves the kubelet that was started last: their place for it is one."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("of the plugin")
    with DevicePlugin(RESOURCE, 8, driver=tmp_path / "driver") as plugin:
        until(lambda: offered(real_api, RESOURCE) == 8, "8 NPUs are offered")
        yield plugin
    until(lambda: offered(real_api, RESOURCE) == 0, "none are offered any more")


@pytest.fixture
def real_operator(real_plane: ControlPlane, real_api: Api, real_namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator of real nodes, whose plugin chooses the devices; its custom resources go with it, for a release shall bring its own."""
    settings = {"profile": "ascend", "resource_name": RESOURCE, "assign_devices": "false", "stop_seconds": "2", "lost_stop_seconds": "1"}
    try:
        with _operated(real_plane, real_api, real_namespace, tmp_path / "operator", **settings) as running:
            yield running
    finally:
        remove_definitions(real_api)


@pytest.fixture
def real_namespace(real_api: Api, nodes: dict[str, Kubelet]) -> Iterator[str]:
    """A namespace of the test's own, whose pods are gone when it ends."""
    with _namespace(real_api) as name:
        yield name
    until(lambda: not real_api.list("pods", name), f"the pods of {name} are gone")
