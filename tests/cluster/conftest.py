"""A real control plane, and a namespace of it for each test."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .api import Api
from .binaries import BinariesMissing, binaries, kept, obstacle
from .control_plane import ControlPlane


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


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    """A namespace of the test's own, with the account that pods run as."""
    from .api import until

    name = api.create("namespaces", {"metadata": {"generateName": "test-"}})["metadata"]["name"]
    until(lambda: api.find("serviceaccounts", "default", name), f"the default service account of {name}")
    yield name
    api.delete("namespaces", name)
