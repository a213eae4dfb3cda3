"""A small client of an API server, apart from the one that the operator uses: what a test says must not pass through the code that it tests."""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

Object = dict[str, Any]

_STORE_SECONDS = 120

_GROUPS = {
    "pods": "api/v1",
    "nodes": "api/v1",
    "configmaps": "api/v1",
    "secrets": "api/v1",
    "services": "api/v1",
    "endpoints": "api/v1",
    "events": "api/v1",
    "namespaces": "api/v1",
    "serviceaccounts": "api/v1",
    "persistentvolumes": "api/v1",
    "persistentvolumeclaims": "api/v1",
    "deployments": "apis/apps/v1",
    "statefulsets": "apis/apps/v1",
    "replicasets": "apis/apps/v1",
    "jobs": "apis/batch/v1",
    "poddisruptionbudgets": "apis/policy/v1beta1",
    "leases": "apis/coordination.k8s.io/v1",
    "roles": "apis/rbac.authorization.k8s.io/v1",
    "rolebindings": "apis/rbac.authorization.k8s.io/v1",
    "clusterroles": "apis/rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "apis/rbac.authorization.k8s.io/v1",
    "customresourcedefinitions": "apis/apiextensions.k8s.io/v1",
    "npujobs": "apis/semantide.io/v1alpha1",
    "npuservices": "apis/semantide.io/v1alpha1",
}


class Refused(Exception):
    """The server's answer was no."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.message = status, message


class Api:
    """Reads and writes objects, given by plural names; ``namespace`` is empty for those of the whole cluster."""

    def __init__(self, kubeconfig: Path) -> None:
        said = yaml.safe_load(kubeconfig.read_text())
        self.server, self.kubeconfig = said["clusters"][0]["cluster"]["server"], kubeconfig
        self._client = httpx.Client(
            base_url=self.server,
            headers={"Authorization": f"Bearer {said['users'][0]['user']['token']}"},
            verify=ssl.create_default_context(cafile=said["clusters"][0]["cluster"]["certificate-authority"]),
            timeout=60,
            trust_env=False,
        )

    def close(self) -> None:
        """Let the connections go."""
        self._client.close()

    def get(self, plural: str, name: str, namespace: str = "") -> Object:
        """One object.

        Raises: Refused.
        """
        return self.call("GET", _path(plural, namespace, name))

    def find(self, plural: str, name: str, namespace: str = "") -> Object | None:
        """One object, where it is there."""
        try:
            return self.get(plural, name, namespace)
        except Refused as error:
            if error.status == 404:
                return None
            raise

    def list(self, plural: str, namespace: str = "", labels: str = "") -> list[Object]:
        """All objects of a kind, of all namespaces where none is given."""
        found: list[Object] = self.call("GET", _path(plural, namespace), params={"labelSelector": labels} if labels else None)["items"]
        return found

    def create(self, plural: str, body: Object, namespace: str = "") -> Object:
        """The object as the server keeps it.

        Raises: Refused.
        """
        return self.call("POST", _path(plural, namespace), json=body)

    def patch(self, plural: str, name: str, change: Object, namespace: str = "", *, status: bool = False) -> Object:
        """Merge ``change`` into an object or its status.

        Raises: Refused.
        """
        path = _path(plural, namespace, name) + ("/status" if status else "")
        return self.call("PATCH", path, json=change, headers={"Content-Type": "application/merge-patch+json"})

    def delete(self, plural: str, name: str, namespace: str = "", *, grace_seconds: int | None = None) -> None:
        """Ask for an object's end; one that is gone already is no error."""
        body = {"propagationPolicy": "Background"} | ({} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds})
        try:
            self.call("DELETE", _path(plural, namespace, name), json=body)
        except Refused as error:
            if error.status != 404:
                raise

    def call(self, method: str, path: str, **options: Any) -> Object:
        """One request.

        Raises: Refused.
        """
        try:
            answer = self._client.request(method, path, **options)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            if method != "GET":
                raise
            # The server has restarted since this connection was last used.
            answer = self._client.request(method, path, **options)
        end = time.monotonic() + _STORE_SECONDS
        while answer.status_code >= 500 and method in ("GET", "DELETE", "PATCH") and time.monotonic() < end:
            # A busy disk keeps its store waiting; these may be asked twice.
            time.sleep(1)
            answer = self._client.request(method, path, **options)
        if answer.is_error:
            try:
                message = str(answer.json().get("message", answer.text))
            except ValueError:
                message = answer.text
            raise Refused(answer.status_code, message)
        said: Object = answer.json()
        return said

    def text(self, path: str) -> str:
        """What the server answers to a plain GET."""
        return self._client.get(path).text


def _path(plural: str, namespace: str, name: str = "") -> str:
    return "/" + "/".join(part for part in (_GROUPS[plural], f"namespaces/{namespace}" if namespace else "", plural, name) if part)


def until(condition: Callable[[], Any], what: str, seconds: float = 900.0, pause: float = 0.1) -> Any:
    """What ``condition`` gives once it is true. The patience only bounds a failure: it must hold on a machine ten times slower."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > end:
            raise AssertionError(f"after {seconds:.0f} s not yet: {what}")
        time.sleep(pause)
    return found


def every(pause: float, seconds: float) -> Iterator[float]:
    """Moments ``pause`` apart for as long as ``seconds``; each is how much time has passed."""
    begin = time.monotonic()
    while (passed := time.monotonic() - begin) < seconds:
        yield passed
        time.sleep(pause)
