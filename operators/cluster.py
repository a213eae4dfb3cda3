"""The one user of the Kubernetes client: objects in and out as plain dictionaries, and actions carried out.

Api               the verbs that the operator needs of an API server; tests have one in memory with the same contract
KubernetesApi     them over HTTP
carry_out         actions over an Api
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Protocol
from urllib.parse import urlencode

import urllib3
from kubernetes import client, config

from semantide.operators.actions import Action, AnnotatePod, Create, DeletePod, Event, PatchStatus, Remove
from semantide.operators.resources import API_VERSION
from semantide.shared.errors import Conflict, NotFound, PermanentError, SemantideError, TransientError

Body = dict[str, Any]

_PAGE = 500
_CONNECT_SECONDS, _READ_SECONDS = 5, 30
_EVENT_BYTES = 1024
_SEEN = ("Pod", "Service")  # kinds whose state later rounds go by


@dataclass(frozen=True)
class Kind:
    """Where objects of a kind are found."""

    api_version: str
    plural: str
    namespaced: bool = True


KINDS = {
    "Pod": Kind("v1", "pods"),
    "Node": Kind("v1", "nodes", namespaced=False),
    "ConfigMap": Kind("v1", "configmaps"),
    "Service": Kind("v1", "services"),
    "Event": Kind("v1", "events"),
    "Lease": Kind("coordination.k8s.io/v1", "leases"),
    "NPUJob": Kind(API_VERSION, "npujobs"),
    "NPUService": Kind(API_VERSION, "npuservices"),
    "PodGroup": Kind("", "podgroups"),  # Volcano's or Kubernetes' own, as the manifest says
    "ResourceClaimTemplate": Kind("resource.k8s.io/v1", "resourceclaimtemplates"),
    "ResourceClaim": Kind("resource.k8s.io/v1", "resourceclaims"),
    "ResourceSlice": Kind("resource.k8s.io/v1", "resourceslices", namespaced=False),
}


@dataclass(frozen=True)
class Listing:
    """All objects of a kind at one moment, which ``version`` names."""

    items: list[Body]
    version: str


class Api(Protocol):
    """The verbs. ``kind`` is one of ``KINDS``; objects are dictionaries as the API server writes them.

    Raises: NotFound, Conflict (the name is taken, or somebody has written since), PermanentError (refused, invalid), TransientError (not reached, overloaded).
    """

    def list(self, kind: str, namespace: str = "", labels: str = "", keep: Callable[[Body], Body | None] = dict) -> Listing:
        """All objects of a kind, in one namespace or (empty) everywhere; of each what ``keep`` makes of it, None for one that nobody wants."""

    def get(self, kind: str, namespace: str, name: str, api_version: str = "") -> Body:
        """One object; ``api_version`` where the kind alone does not say it."""

    def create(self, body: Mapping[str, Any]) -> Body:
        """A new object."""

    def replace(self, body: Mapping[str, Any]) -> Body:
        """Write an object whose ``resourceVersion`` is still the one in ``body``."""

    def replace_status(self, body: Mapping[str, Any]) -> Body:
        """Write an object's status if its ``resourceVersion`` is still the one in ``body``."""

    def annotate(self, kind: str, namespace: str, name: str, annotations: Mapping[str, str | None], uid: str = "") -> Body:
        """Write some annotations of an object (None removes one), of this ``uid`` alone where one is given."""

    def delete(self, kind: str, namespace: str, name: str, *, uid: str = "", grace_seconds: int | None = None, api_version: str = "") -> None:
        """Ask for an object's deletion, of this ``uid`` alone where one is given."""


class KubernetesApi:
    """An API server over HTTP, as the process's service account, or else the kubeconfig, says.

    Raises: PermanentError where neither is there.
    """

    def __init__(self, configuration: client.Configuration | None = None) -> None:
        if configuration is None:
            try:
                config.load_incluster_config()
            except config.ConfigException:
                try:
                    config.load_kube_config()
                except config.ConfigException as error:
                    raise PermanentError(f"there is no way to a cluster ({error}): run in a pod with a service account, or set KUBECONFIG") from error
        self._client = client.ApiClient(configuration)

    def list(self, kind: str, namespace: str = "", labels: str = "", keep: Callable[[Body], Body | None] = dict) -> Listing:
        """All objects of a kind, in one namespace or (empty) everywhere; of each what ``keep`` makes of it, None for one that nobody wants."""
        items: list[Body] = []
        query = {"limit": str(_PAGE), **({"labelSelector": labels} if labels else {})}
        while True:
            page = self._call("GET", self._path(kind, namespace), query=query)
            # Items of a list do not say what they are.
            found = (keep({"apiVersion": KINDS[kind].api_version, "kind": kind, **item}) for item in page.get("items") or ())
            items += [item for item in found if item is not None]
            more = page["metadata"].get("continue")
            if not more:
                return Listing(items, page["metadata"]["resourceVersion"])
            query["continue"] = more

    def get(self, kind: str, namespace: str, name: str, api_version: str = "") -> Body:
        """One object; ``api_version`` where the kind alone does not say it."""
        return self._call("GET", f"{self._path(kind, namespace, api_version)}/{name}")

    def create(self, body: Mapping[str, Any]) -> Body:
        """A new object."""
        return self._call("POST", self._path(body["kind"], body["metadata"].get("namespace", ""), body["apiVersion"]), body)

    def replace(self, body: Mapping[str, Any]) -> Body:
        """Write an object whose ``resourceVersion`` is still the one in ``body``."""
        return self._call("PUT", self._own_path(body), body)

    def replace_status(self, body: Mapping[str, Any]) -> Body:
        """Write an object's status if its ``resourceVersion`` is still the one in ``body``."""
        return self._call("PUT", f"{self._own_path(body)}/status", body)

    def annotate(self, kind: str, namespace: str, name: str, annotations: Mapping[str, str | None], uid: str = "") -> Body:
        """Write some annotations of an object (None removes one), of this ``uid`` alone where one is given."""
        metadata = {"annotations": dict(annotations), **({"uid": uid} if uid else {})}
        try:
            return self._call("PATCH", f"{self._path(kind, namespace)}/{name}", {"metadata": metadata}, "application/merge-patch+json")
        except PermanentError as error:
            if uid and "metadata.uid" in str(error):
                raise Conflict(str(error)) from error  # a patch that would change the uid is called invalid
            raise

    def delete(self, kind: str, namespace: str, name: str, *, uid: str = "", grace_seconds: int | None = None, api_version: str = "") -> None:
        """Ask for an object's deletion, of this ``uid`` alone where one is given."""
        options: Body = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        self._call("DELETE", f"{self._path(kind, namespace, api_version)}/{name}", options)

    @staticmethod
    def _path(kind: str, namespace: str, api_version: str = "") -> str:
        known = KINDS[kind]
        version = known.api_version or api_version
        root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
        return f"{root}/namespaces/{namespace}/{known.plural}" if namespace and known.namespaced else f"{root}/{known.plural}"

    def _own_path(self, body: Mapping[str, Any]) -> str:
        return f"{self._path(body['kind'], body['metadata'].get('namespace', ''), body['apiVersion'])}/{body['metadata']['name']}"

    def _call(self, verb: str, path: str, body: Any = None, content: str = "application/json", query: Mapping[str, str] | None = None) -> Body:
        headers = {"Accept": "application/json", **({"Content-Type": content} if body is not None else {})}
        address = f"{path}?{urlencode(query)}" if query else path
        try:
            verb, url, headers, sent, _ = self._client.param_serialize(verb, address, header_params=headers, body=body, auth_settings=["BearerToken"])
            answer = self._client.call_api(verb, url, headers, sent, _request_timeout=(_CONNECT_SECONDS, _READ_SECONDS))
            data = answer.read()
        except client.ApiException as error:
            raise TransientError(f"{verb} {path}: {error.reason}") from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise TransientError(f"{verb} {path}: the API server does not answer ({error})") from error
        if answer.status < 300:
            try:
                return json.loads(data) if data else {}
            except ValueError as error:
                raise TransientError(f"{verb} {path}: {answer.status}, but what came is no JSON ({error}): is there a proxy before the API server?") from error
        raise _refusal(answer.status, data, f"{verb} {path}")


def _refusal(status: int, data: bytes | None, what: str) -> Exception:
    try:
        answer = json.loads(data or b"{}")
        said, reason = answer.get("message", ""), answer.get("reason", "")
    except (ValueError, AttributeError):
        said, reason = (data or b"").decode(errors="replace")[:200], ""
    text = f"{what}: {status} {said}".rstrip()
    if status == 404:
        return NotFound(text)
    if status == 409:
        # Two creations at once under one quota: the second is turned away although nothing of its name is there.
        return TransientError(text) if what.startswith("POST ") and reason == "Conflict" else Conflict(text)
    if status == 401 or (status == 403 and " cannot " in said):  # a quota or an admission policy forbids too
        return PermanentError(f"{text}; give the operator's service account this right (the chart's Role does)")
    return TransientError(text) if status in (408, 410, 429) or status >= 500 else PermanentError(text)


def carry_out(actions: Iterable[Action], api: Api, seen: Callable[[Body], object], now: Callable[[], str]) -> None:
    """Do one resource's actions in order; ``seen`` hears of every object that the API server answered, ``now`` is the time as it writes it.

    Raises: what the first failing verb raises; the rest is not done.
    """
    for action in actions:
        match action:
            case Create(manifest):
                try:
                    made = api.create(manifest)
                except Conflict:
                    made = _found(manifest, api)
                except NotFound as error:
                    raise _absent(manifest, error) from error
                if manifest["kind"] in _SEEN:
                    seen(made)
            case DeletePod(namespace, name, uid, grace_seconds):
                try:
                    api.delete("Pod", namespace, name, uid=uid, grace_seconds=grace_seconds)
                except (NotFound, Conflict):
                    continue  # gone, or another pod by now
            case Remove():
                with suppress(PermanentError):
                    _remove(action, api)
            case PatchStatus():
                metadata = {"name": action.name, "namespace": action.namespace, "uid": action.uid, "resourceVersion": action.resource_version}
                seen(api.replace_status({"apiVersion": API_VERSION, "kind": action.kind, "metadata": metadata, "status": dict(action.status)}))
            case AnnotatePod():
                try:
                    seen(api.annotate("Pod", action.namespace, action.name, action.annotations, action.uid))
                except (NotFound, Conflict):
                    continue
            case Event():
                try:
                    api.create(event_body(action, now()))
                except (Conflict, PermanentError):
                    continue  # told before; and what cannot be told must not stop the work


def _absent(manifest: Mapping[str, Any], error: NotFound) -> SemantideError:
    """What a creation that found nothing means: the server knows nothing of the kind, or the namespace has just gone."""
    metadata = manifest["metadata"]
    if "namespaces " in str(error):
        return error
    return PermanentError(
        f"{manifest['kind']} {metadata.get('namespace', '')}/{metadata['name']} cannot be made: this cluster does not serve {manifest['kind']} of "
        f"{manifest['apiVersion']} ({error}); install what serves it, or choose another scheduler or way to ask for devices"
    )


def _found(manifest: Mapping[str, Any], api: Api) -> Body:
    """What has the name already: made by an earlier round that did not live to see it. One of ours that says something else by now is made anew.

    Raises: PermanentError where it is somebody else's, TransientError where one of ours has yet to go.
    """
    kind, metadata = manifest["kind"], manifest["metadata"]
    where = kind, metadata["namespace"], metadata["name"], manifest["apiVersion"]
    there = api.get(*where)
    (owner,) = metadata["ownerReferences"]
    if not _owned(there, owner["uid"]):
        raise PermanentError(
            f"there is a {kind} {metadata['namespace']}/{metadata['name']} that does not belong to {owner['kind']} {owner['name']}, and it is left as it is: "
            f"delete it, or rename one of the two"
        )
    if "deletionTimestamp" in there["metadata"] and kind != "Pod":
        raise TransientError(f"{kind} {metadata['namespace']}/{metadata['name']} is being deleted: it is made anew then")
    if "data" not in manifest or there.get("data") == manifest["data"]:
        return there
    # A table of ranks with the address of a pod that was since made anew. Not replaced: that would want one right more.
    api.delete(*where[:3], uid=there["metadata"]["uid"], api_version=where[3])
    return api.create(manifest)


def _owned(body: Body, uid: str) -> bool:
    return any(owner.get("uid") == uid for owner in body["metadata"].get("ownerReferences") or ())


def _remove(action: Remove, api: Api) -> None:
    there = api.get(action.kind, action.namespace, action.name, action.api_version)
    # Somebody else's object may have the name that ours would have.
    if _owned(there, action.owner):
        api.delete(action.kind, action.namespace, action.name, uid=there["metadata"]["uid"], api_version=action.api_version)


def event_body(event: Event, time: str) -> Body:
    """The Event object; the same words about the same resource have the same name, so they are said once an hour that the server keeps them."""
    key = sha256(f"{event.uid} {event.reason} {event.message}".encode()).hexdigest()[:12]
    seconds = f"{time.split('.')[0].rstrip('Z')}Z"
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{event.name[:200]}.{key}", "namespace": event.namespace},
        "involvedObject": {"apiVersion": API_VERSION, "kind": event.kind, "namespace": event.namespace, "name": event.name, "uid": event.uid},
        "reason": event.reason,
        "message": event.message.encode()[:_EVENT_BYTES].decode(errors="ignore"),
        "type": event.type,
        "source": {"component": "semantide-operator"},
        "firstTimestamp": seconds,
        "lastTimestamp": seconds,
        "count": 1,
    }
