"""A real API server keeps the contract that the one in memory is held to, through the operator's own client."""

from __future__ import annotations

import pytest
from kubernetes import client, config

from semantide.operators.cluster import KubernetesApi
from tests.operators.api_contract import ApiContract

from .api import Api, until
from .control_plane import ControlPlane
from .release import apply, served

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


class TestKubernetes(ApiContract):
    @pytest.fixture
    def api(self, plane: ControlPlane, api: Api, namespace: str) -> KubernetesApi:
        apply(api, plane.kubeconfig, namespace, ("CustomResourceDefinition",))
        until(lambda: served(api), "the custom resources are served")
        configuration = client.Configuration()
        config.load_kube_config(str(plane.kubeconfig), client_configuration=configuration)
        return KubernetesApi(configuration)
