"""The console as a room of the chart: one process that reaches the APIs and nothing else, and is reached as they are."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest

from semantide.services.commandline.main import app
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS

from .test_chart import CONSOLE, KEDA, PROFILES, VERSIONS, Manifest, Render, environment, of_kind

OPERATOR = "shop-semantide-operator"
WIDE = ("--set", "metricsEnabled=true,dataAccessMode=ReadWriteMany,environmentSecret=store,networkPolicyApiNamespaces.ingress=true,ingressEnabled=true")


def console(manifests: list[Manifest]) -> Manifest:
    pod: Manifest = of_kind(manifests, "Deployment")[CONSOLE]["spec"]["template"]
    return pod


def lets_in(policy: Manifest, labels: dict[str, str], port: str, namespace: str = "shop") -> bool:
    """Whether a pod with these labels may come to that port, as Kubernetes reads a policy of namespace shop."""

    def peer(each: dict[str, Any]) -> bool:
        wanted = each.get("podSelector", {})
        there = each.get("namespaceSelector")
        own = namespace == "shop" if there is None else there.get("matchLabels", {}).get("kubernetes.io/metadata.name", namespace) == namespace
        has = wanted.get("matchLabels", {}).items() <= labels.items()
        return own and has and all(labels.get(term["key"]) in term["values"] for term in wanted.get("matchExpressions", []))

    rules = policy["spec"].get("ingress", [])
    return any(port in [each["port"] for each in rule["ports"]] and ("from" not in rule or any(map(peer, rule["from"]))) for rule in rules)


@pytest.mark.parametrize("version", ["1.28", "1.33", "1.37"])
@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_has_it_on_every_version(render: Render, profile: str, version: str) -> None:
    assert version in VERSIONS
    manifests = render(profile, "--kube-version", f"{version}.0")
    mine = [each for each in manifests if each["metadata"]["name"] == CONSOLE]
    assert {each["kind"] for each in mine} == {"Deployment", "Service", "NetworkPolicy"}
    for manifest in mine:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("options", [(), WIDE], ids=["plain", "wide"])
def test_it_has_keys_and_the_apis_address_and_nothing_else(render: Render, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    manifests = render("", *options)
    pod = console(manifests)
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["semantide", "api", "console"]
    assert "api" in {command.name or (command.callback and command.callback.__name__) for command in app.registered_commands}
    given = environment(pod)
    assert "SEMANTIDE_REDIS_URL" not in given and given["SEMANTIDE_API_KEYS"] == environment(api(manifests))["SEMANTIDE_API_KEYS"]
    assert [list(each) for each in container["envFrom"]] == [["configMapRef"]], "what opens an object store is no business of its"
    assert [volume["name"] for volume in pod["spec"]["volumes"]] == ["tmp"] == [mount["name"] for mount in container["volumeMounts"]]
    assert "semantide.io/data" not in pod["metadata"]["labels"] and "affinity" not in pod["spec"] and pod["spec"]["automountServiceAccountToken"] is False
    for name, value in (of_kind(manifests, "ConfigMap")["shop-semantide-settings"]["data"] | given).items():
        if isinstance(value, str):
            monkeypatch.setenv(name, value)
    settings = Settings()
    address = of_kind(manifests, "Service")["shop-semantide-api"]
    assert settings.console_stack == f"http://{address['metadata']['name']}:{address['spec']['ports'][0]['port']}"


def api(manifests: list[Manifest]) -> Manifest:
    pod: Manifest = of_kind(manifests, "Deployment")["shop-semantide-api"]["spec"]["template"]
    return pod


def test_it_is_guarded_like_the_api(render: Render) -> None:
    manifests = render()
    ours, its = console(manifests)["spec"], api(manifests)["spec"]
    assert ours["securityContext"] == its["securityContext"]
    (mine,), (other,) = ours["containers"], its["containers"]
    for name in ("securityContext", "startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "ports", "image"):
        assert mine[name] == other[name], name


@pytest.mark.parametrize("options", [(), WIDE], ids=["plain", "wide"])
def test_policies_let_through_what_it_takes(render: Render, options: tuple[str, ...]) -> None:
    manifests = render("", *options)
    policies = of_kind(manifests, "NetworkPolicy")
    ours, its = console(manifests)["metadata"]["labels"], api(manifests)["metadata"]["labels"]
    worker = of_kind(manifests, "Deployment")["shop-semantide-worker-training"]["spec"]["template"]["metadata"]["labels"]
    assert lets_in(policies["shop-semantide-api"], ours, "http") and lets_in(policies[CONSOLE], {}, "http", "ingress")
    assert lets_in(policies[CONSOLE], {}, "http", "elsewhere") == (not options)
    assert not lets_in(policies["shop-semantide-redis"], ours, "redis") and lets_in(policies["shop-semantide-redis"], its, "redis")
    # The APIs ask the operator for what the console shows of the cluster; it asks nobody but them.
    plain = render()
    assert lets_in(of_kind(plain, "NetworkPolicy")[OPERATOR], its, "metrics")
    for others in (ours, worker, {}):
        assert not lets_in(of_kind(plain, "NetworkPolicy")[OPERATOR], others, "metrics")
    assert not lets_in(of_kind(plain, "NetworkPolicy")[OPERATOR], its, "metrics", "elsewhere")
    wide = of_kind(render("", "--set", "operatorClusterWide=true"), "NetworkPolicy")[OPERATOR]
    assert lets_in(wide, its, "metrics", "elsewhere") and not lets_in(wide, ours, "metrics", "elsewhere")
    named = {value for rule in wide["spec"]["ingress"][0]["from"] for term in rule["podSelector"]["matchExpressions"] for value in term["values"]}
    assert named == {f"api-{room}" for room in ("all", *ROOMS)}


def test_the_apis_know_where_the_operators_page_is(render: Render) -> None:
    manifests = render()
    told = of_kind(manifests, "ConfigMap")["shop-semantide-settings"]["data"]["SEMANTIDE_OPERATOR_URL"]
    service = of_kind(manifests, "Service")[OPERATOR]["spec"]
    (port,) = service["ports"]
    assert told == f"http://{OPERATOR}:{port['port']}" and service["clusterIP"] == "None", "every operator has an address there: one of them leads"
    pod = of_kind(manifests, "Deployment")[OPERATOR]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert {"name": port["targetPort"], "containerPort": port["port"], "protocol": "TCP"} in pod["spec"]["containers"][0]["ports"]
    elsewhere = render("", "--set", "operatorEnabled=false,settings.operatorUrl=http://operator.kube:8080")
    assert of_kind(elsewhere, "ConfigMap")["shop-semantide-settings"]["data"]["SEMANTIDE_OPERATOR_URL"] == "http://operator.kube:8080"
    assert OPERATOR not in of_kind(elsewhere, "Service")
    assert "SEMANTIDE_OPERATOR_URL" not in of_kind(render("", "--set", "operatorEnabled=false"), "ConfigMap")["shop-semantide-settings"]["data"]


@pytest.mark.parametrize("value", ["replicas=2", "maxReplicas=3"])
def test_a_second_process_is_refused(refuse: Callable[..., str], value: str) -> None:
    error = refuse("--set", f"apis.console.{value}")
    assert f"apis.console.{value.replace('=', ' is ')}" in error and "websocket" in error and "1 replica" in error
    assert "apis.console.maxReplicas is 3" in refuse(*KEDA, "--set", "apis.console.maxReplicas=3")


def test_rooms_apart_have_to_be_named(render: Render, refuse: Callable[..., str]) -> None:
    apart = "apis.all=null,apis.serving.replicas=1"
    error = refuse("--set", apart)
    assert "settings.consoleStack" in error and "apis.console=null" in error
    for more in ("settings.consoleStack=http://gateway", "apis.console.environment.SEMANTIDE_CONSOLE_STACK=http://gateway"):
        manifests = render("", "--set", f"{apart},{more}")
        data = of_kind(manifests, "ConfigMap")["shop-semantide-settings"]["data"] | environment(console(manifests))
        assert data["SEMANTIDE_CONSOLE_STACK"] == "http://gateway"


def test_it_may_be_left_out(render: Render, refuse: Callable[..., str], lint: ModuleType) -> None:
    assert "/console leads to" in refuse("--set", "apis.console=null,ingressEnabled=true")
    manifests = render("", "--set", "apis.console=null,ingressEnabled=true,ingressPaths./console=null")
    assert not [each for each in manifests if "console" in each["metadata"]["name"]]
    paths = of_kind(manifests, "Ingress")["shop-semantide"]["spec"]["rules"][0]["http"]["paths"]
    assert [path["path"] for path in paths] == ["/"]
    for options in ("apis.console=null", "apis.all=null,settings.consoleStack=http://gateway"):
        notes = lint.helm("install", "shop", str(lint.CHART), "--namespace", "shop", "--dry-run=client", "--set", options)
        assert notes.returncode == 0, notes.stderr
        assert ("api-console" in notes.stdout.partition("NOTES:")[2]) == ("console=null" not in options)
