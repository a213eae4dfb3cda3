"""The chart, rendered by real Helm and checked against Kubernetes' own schemas."""

from __future__ import annotations

import base64
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import kubernetes_validate
import pytest
import yaml

from semantide.operators.resources import NPUService
from semantide.services import local
from semantide.shared.cluster_jobs import NPUJobs
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS

PROFILES = ("", "cpu", "nvidia", "ascend")
VERSIONS = [f"1.{minor}" for minor in range(28, 38)]
# Kinds of add-ons, which Kubernetes' own schemas do not have.
ADDED_GROUPS = ("monitoring.coreos.com", "keda.sh", "gateway.networking.k8s.io")
CONSOLE = "shop-semantide-api-console"
Manifest = dict[str, Any]
Render = Callable[..., list[Manifest]]

KEDA = ("--set", "autoscaler=keda,kedaPrometheusAddress=http://prometheus.monitoring:9090,workers.training.maxReplicas=4")

# Everything that is off by default is on.
FULL = """
imagePullSecrets: {registry: true}
apis:
  all: {replicas: 2}
  serving: {minReplicas: 2, maxReplicas: 8, targetCpuPercent: 60, environment: {MALLOC_ARENA_MAX: "2"}}
httpRouteEnabled: true
httpRouteGateways: {public: {namespace: gateways}, unused: null}
httpRouteHosts: {shop.example: true, old.example: false}
metricsEnabled: true
metricsNamespaces: {monitoring: true}
serviceMonitorEnabled: true
serviceMonitorLabels: {release: prometheus}
prometheusRuleEnabled: true
grafanaDashboardEnabled: true
ingressEnabled: true
ingressClassName: nginx
ingressHost: shop.example
ingressTlsSecret: shop-tls
ingressAnnotations: {example.com/timeout: "60"}
ingressPaths: {/v1/recommendations: serving}
networkPolicyApiNamespaces: {ingress: true, unused: false}
environmentSecret: object-store
apiKeysSecret: keys
redisEnabled: false
redisUrlSecret: broker
dataExistingClaim: big-share
dataAccessMode: ReadWriteMany
serviceAccountCreate: false
serviceAccountName: semantide
settings: {maxBodyBytes: 33554432, historyTtlSeconds: 7776000, logLevel: DEBUG, actions: {click: 1.5, order: 3}}
workers:
  serving: {podAnnotations: {a: b}, priorityClassName: high, runtimeClassName: other, tolerations: {dedicated: {operator: Equal, value: shop, effect: NoSchedule}}}
"""


def of_kind(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {manifest["metadata"]["name"]: manifest for manifest in manifests if manifest["kind"] == kind}


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest]]:
    for manifest in manifests:
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            yield name, manifest["spec"]["template"]
        elif manifest["kind"] == "Pod":
            yield name, manifest


def rooms_of(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The Deployments of rooms that have the broker and the data; operator and console have tests of their own."""
    return {name: each for name, each in of_kind(manifests, "Deployment").items() if not name.endswith(("-operator", "-console"))}


def environment(pod: Manifest) -> dict[str, Any]:
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in pod["spec"]["containers"][0]["env"]}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("values") / "full.yaml"
    path.write_text(FULL)
    return str(path)


@pytest.mark.parametrize("profile", PROFILES)
def test_lint_is_strict_and_clean(lint: ModuleType, profile: str) -> None:
    outcome = lint.helm("lint", "--strict", str(lint.CHART), *lint.profile_options(profile))
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "WARNING" not in outcome.stdout


def test_every_profile_is_a_file(lint: ModuleType) -> None:
    files = {path.stem.removeprefix("values").removeprefix("-") for path in lint.CHART.glob("values*.yaml")}
    assert files == set(PROFILES) == set(lint.PROFILES)


@pytest.fixture(scope="module")
def different(render: Render, full: str) -> list[Manifest]:
    """Whatever the chart makes under any profile, each once; no template asks which version of Kubernetes it is."""
    options = [(profile, *more) for profile in PROFILES for more in ((), ("--values", full), ("--values", full, *KEDA))]
    manifests = [manifest for each in options for manifest in render(*each)]
    texts = {json.dumps(manifest, sort_keys=True) for manifest in manifests if manifest["kind"] != "Secret"}
    return [*map(json.loads, sorted(texts)), next(manifest for manifest in manifests if manifest["kind"] == "Secret")]


def paths(value: Any, under: str = "") -> set[str]:
    """Every place in a manifest, those in lists as one."""
    inner = value.items() if isinstance(value, dict) else (("", each) for each in value) if isinstance(value, list) else ()
    return {f"{under} {type(value).__name__}", *(found for name, each in inner for found in paths(each, f"{under}/{name}"))}


@pytest.fixture(scope="module")
def telling(different: list[Manifest]) -> list[Manifest]:
    """As few manifests as have every field that any has."""
    seen: set[str] = set()
    kept = []
    for manifest in sorted(different, key=lambda each: -len(paths(each))):
        own = paths(manifest, manifest["kind"])
        kept += [manifest] if own - seen else []
        seen |= own
    return kept


@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_are_valid(different: list[Manifest], telling: list[Manifest], version: str) -> None:
    for manifest in different if version == VERSIONS[-1] else telling:
        if not manifest["apiVersion"].startswith(ADDED_GROUPS):
            kubernetes_validate.validate(manifest, version, strict=True)


def test_every_version_that_can_be_checked_is(lint: ModuleType) -> None:
    """Of 1.28 and later; templates that asked for the version would have to be rendered for each."""
    schemas = (Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema").glob("v1.*-strict")
    known = {path.name.removeprefix("v").partition(".0-")[0] for path in schemas}
    assert {version for version in known if tuple(map(int, version.split("."))) >= (1, 28)} == set(VERSIONS)
    assert not [path for path in (lint.CHART / "templates").rglob("*") if path.is_file() and "KubeVersion" in path.read_text()]


def test_older_clusters_are_refused(refuse: Callable[..., str]) -> None:
    assert "1.28.0" in refuse("--kube-version", "1.27.9")


@pytest.mark.parametrize("profile", PROFILES)
def test_a_deployment_for_every_room_and_its_command_exists(render: Render, profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(local, "serve", lambda names, settings, console=False: ran.append(["api", *names]))
    monkeypatch.setattr(local, "work", lambda name, settings: ran.append(["worker", name]))
    monkeypatch.setattr(local, "show", lambda settings: ran.append(["console"]))
    deployments = rooms_of(render(profile)) | {CONSOLE: of_kind(render(profile), "Deployment")[CONSOLE]}
    assert set(deployments) == {"shop-semantide-api", CONSOLE, *(f"shop-semantide-worker-{room}" for room in ROOMS)}
    for deployment in deployments.values():
        program, *arguments = deployment["spec"]["template"]["spec"]["containers"][0]["command"]
        assert program == "semantide"
        assert local.main(arguments) == 0
    assert sorted(ran) == sorted([["api", *ROOMS], ["console"], *(["worker", room] for room in ROOMS)])


@pytest.mark.parametrize("options", [(profile,) for profile in PROFILES] + [("", "FULL")])
def test_every_pod_is_locked_down(render: Render, full: str, options: tuple[str, ...]) -> None:
    manifests = render(options[0], "--values", full) if "FULL" in options else render(*options)
    found = list(pods(manifests))
    assert len(found) >= 6
    for name, pod in found:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["runAsUser"] >= 1, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        # Who else talks to the API server has a test of its own.
        assert spec["automountServiceAccountToken"] is False or name.endswith("-operator") or "-worker-" in name, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert container["resources"]["requests"], name
            assert container["resources"]["limits"]["memory"], name
    for name, pod in found:
        if "Pod " not in name:
            assert {"name": "tmp", "emptyDir": {}} in pod["spec"]["volumes"], name
            assert pod["spec"]["containers"][0]["livenessProbe"], name


def test_selectors_find_their_pods_alone(render: Render, full: str) -> None:
    for manifests in (render(), render("", "--values", full)):
        labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests)}
        services = of_kind(manifests, "Service")
        metrics = services.pop("shop-semantide-metrics", None)
        if metrics is not None:
            shown = {name for name, have in labels.items() if metrics["spec"]["selector"].items() <= have.items()}
            assert {name for name, pod in pods(manifests) if any(port["name"] == "metrics" for port in pod["spec"]["containers"][0].get("ports", []))} == shown
        selectors = [m["spec"]["selector"] for m in services.values()]
        selectors += [m["spec"]["selector"]["matchLabels"] for m in of_kind(manifests, "Deployment").values()]
        # Pods of jobs and replicas are the operator's, and have a test of their own.
        policies = {name: m["spec"]["podSelector"] for name, m in of_kind(manifests, "NetworkPolicy").items()}
        selectors += [policy["matchLabels"] for policy in policies.values() if "matchExpressions" not in policy]
        assert {name for name, policy in policies.items() if "matchExpressions" in policy} == {"shop-semantide-jobs", "shop-semantide-replicas"}
        for selector in selectors:
            assert sum(selector.items() <= have.items() for have in labels.values()) == 1, selector


def test_only_the_rooms_reach_the_broker(render: Render) -> None:
    manifests = render()
    allowed = of_kind(manifests, "NetworkPolicy")["shop-semantide-redis"]["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    reaching = {name for name, pod in pods(manifests) if allowed.items() <= pod["metadata"]["labels"].items()}
    assert reaching == {f"Deployment {name}" for name in rooms_of(manifests)}


def test_the_api_is_asked_for_health_and_readiness_by_name(render: Render) -> None:
    container = of_kind(render(), "Deployment")["shop-semantide-api"]["spec"]["template"]["spec"]["containers"][0]
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_generated_keys_agree(render: Render) -> None:
    manifests = render()
    secret = {name: base64.b64decode(value).decode() for name, value in of_kind(manifests, "Secret")["shop-semantide-keys"]["data"].items()}
    assert len(secret["api-keys"]) >= 32 and len(secret["redis-password"]) >= 32
    assert secret["redis-url"] == f"redis://:{secret['redis-password']}@shop-semantide-redis:6379/0"
    assert "shop-semantide-redis" in of_kind(manifests, "Service")


def test_secrets_of_ones_own_are_referred_to(render: Render, full: str) -> None:
    manifests = render("", "--values", full)
    assert not of_kind(manifests, "Secret") and not of_kind(manifests, "StatefulSet") and not of_kind(manifests, "PersistentVolumeClaim")
    for name, deployment in rooms_of(manifests).items():
        pod = deployment["spec"]["template"]
        assert environment(pod)["SEMANTIDE_REDIS_URL"] == {"secretKeyRef": {"name": "broker", "key": "redis-url"}}
        assert environment(pod).get("SEMANTIDE_API_KEYS") == ({"secretKeyRef": {"name": "keys", "key": "api-keys"}} if "-api" in name else None)
        assert {"secretRef": {"name": "object-store"}} in pod["spec"]["containers"][0]["envFrom"]
        assert pod["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "big-share"
        assert "affinity" not in pod["spec"]


def test_settings_arrive_as_they_were_written(render: Render, full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = of_kind(render("", "--values", full), "ConfigMap")["shop-semantide-settings"]["data"]
    for name, value in data.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert (settings.max_body_bytes, settings.history_ttl_seconds, settings.log_level) == (33554432, 7776000, "DEBUG")
    assert settings.actions == {"click": 1.5, "order": 3.0}
    assert settings.data_dir == Path("/data") and settings.host == "::"
    assert settings.import_folders == [Path("/data/uploads"), Path("/data/uploads")]


def test_the_schema_knows_every_setting(lint: ModuleType, environment_table: ModuleType) -> None:
    shown = json.loads((lint.CHART / "values.schema.json").read_text())["properties"]["settings"]["properties"]
    assert shown == environment_table.schema(Settings), "run `python tests/charts/environment_table.py`"


def test_the_readme_is_current(values_table: ModuleType) -> None:
    assert values_table.PAGE.read_text() == values_table.page(), "run `python tests/charts/values_table.py`"


def test_every_value_is_explained(values_table: ModuleType) -> None:
    for line in values_table.page().splitlines():
        if line.startswith("| `"):
            assert len(line.split("|")[-2].strip()) > 3 and "|  One of" not in line, line


def test_the_schema_knows_the_rooms_and_every_value(lint: ModuleType) -> None:
    schema = json.loads((lint.CHART / "values.schema.json").read_text())["properties"]
    assert set(schema["workers"]["properties"]) == set(ROOMS)
    assert set(schema["apis"]["properties"]) == {"all", "console", *ROOMS}
    assert set(schema) - {"global"} == set(yaml.safe_load((lint.CHART / "values.yaml").read_text()))


def test_pods_of_jobs_stand_where_the_rooms_do(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster")
    room = of_kind(manifests, "Deployment")["shop-semantide-worker-training"]["spec"]["template"]
    template = json.loads(environment(of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"])["SEMANTIDE_OPERATOR_POD_TEMPLATE"])
    container = room["spec"]["containers"][0]
    assert template["labels"].items() <= room["metadata"]["labels"].items(), "the broker's policy lets pods in by this label"
    for name in ("volumes", "securityContext", "serviceAccountName", "affinity", "enableServiceLinks"):
        assert template[name] == room["spec"][name], name
    assert (template["volumeMounts"], template["envFrom"], template["containerSecurityContext"]) == (
        container["volumeMounts"],
        container["envFrom"],
        container["securityContext"],
    )
    assert next(entry for entry in template["env"] if entry["name"] == "SEMANTIDE_REDIS_URL") in container["env"]


def test_only_workers_that_make_npujobs_talk_to_the_api_server(render: Render) -> None:
    manifests = render("", "--set", "settings.jobRunner=cluster")
    tokens = {name: each["spec"]["template"]["spec"]["automountServiceAccountToken"] for name, each in of_kind(manifests, "Deployment").items()}
    assert {name for name, given in tokens.items() if given} == {"shop-semantide-operator", *(name for name in tokens if "-worker-" in name)}
    role = of_kind(manifests, "Role")["shop-semantide-jobs"]
    (rule,) = role["rules"]
    called = re.findall(r'_call\("([a-z]+)_namespaced_custom_object"', inspect.getsource(NPUJobs))
    assert (rule["apiGroups"], rule["resources"]) == (["semantide.io"], ["npujobs"]) and set(rule["verbs"]) == set(called) and len(called) > 3
    assert "shop-semantide-jobs" not in of_kind(render(), "Role")


def test_the_namespaces_default_account_never_gets_the_rooms_rights(render: Render, refuse: Callable[..., str]) -> None:
    for more in ("", ",settings.jobRunner=cluster"):
        assert "serviceAccountName is empty" in refuse("--set", f"serviceAccountCreate=false{more}")
    manifests = render("", "--set", "serviceAccountCreate=false,serviceAccountName=mine,settings.jobRunner=cluster")
    bound = {subject["name"] for kind in ("RoleBinding", "ClusterRoleBinding") for each in of_kind(manifests, kind).values() for subject in each["subjects"]}
    assert bound == {"mine", "shop-semantide-operator"}


def test_services_have_the_addresses_that_values_say(render: Render) -> None:
    for manifests in (render("", "--set", "metricsEnabled=true,serviceIpFamilyPolicy=PreferDualStack"), render("", "--set", "metricsEnabled=true")):
        found = {each["spec"].get("ipFamilyPolicy") for each in of_kind(manifests, "Service").values()}
        assert len(of_kind(manifests, "Service")) == 5 and len(found) == 1
    assert found == {None}


def test_ranks_of_one_pod_have_memory_to_share(render: Render) -> None:
    manifests = render("", "--set", "sharedMemorySize=8Gi")
    for name, deployment in rooms_of(manifests).items():
        pod = deployment["spec"]["template"]["spec"]
        sizes = {volume["name"]: volume["emptyDir"] for volume in pod["volumes"] if "emptyDir" in volume}
        mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert sizes.get(mounts.get("/dev/shm", "")) == ({"medium": "Memory", "sizeLimit": "8Gi"} if "-worker-" in name else None)


REPLICAS = (
    "--set",
    "servingReplicas.main.replicas.max=4,servingReplicas.small.npusPerReplica=1,ingressEnabled=true,ingressPaths./v1/recommendations=router",
)
KNOWS = ("--api-versions", "semantide.io/v1alpha1/NPUService")


def test_replicas_are_npuservices_with_routers_in_front(render: Render) -> None:
    manifests = render("", *REPLICAS, *KNOWS)
    services = of_kind(manifests, "NPUService")
    parsed = {name: NPUService.parse({**each, "metadata": {**each["metadata"], "namespace": "shop"}}).spec for name, each in services.items()}
    assert parsed["shop-semantide-replicas-main"].replicas.max == 4 and parsed["shop-semantide-replicas-small"].npus_per_replica == 1
    router = of_kind(manifests, "Deployment")["shop-semantide-router"]["spec"]
    assert router["template"]["spec"]["containers"][0]["command"] == ["semantide", "route"] and router["replicas"] == 2
    assert environment(router["template"])["SEMANTIDE_ROUTE_TO"] == ",".join(f"http://{name}:8000" for name in sorted(services))
    paths = of_kind(manifests, "Ingress")["shop-semantide"]["spec"]["rules"][0]["http"]["paths"]
    assert {path["path"]: path["backend"]["service"]["name"] for path in paths} == {
        "/": "shop-semantide-api",
        "/console": CONSOLE,
        "/v1/recommendations": "shop-semantide-router",
    }
    assert {"shop-semantide-router"} <= set(of_kind(manifests, "PodDisruptionBudget")) & set(of_kind(manifests, "NetworkPolicy"))


def test_a_cluster_that_does_not_know_replicas_yet_gets_the_rest(render: Render, lint: ModuleType) -> None:
    manifests = render("", *REPLICAS)
    assert not of_kind(manifests, "NPUService") and not [name for manifest in manifests if "router" in (name := manifest["metadata"]["name"])]
    paths = of_kind(manifests, "Ingress")["shop-semantide"]["spec"]["rules"][0]["http"]["paths"]
    assert {path["backend"]["service"]["name"] for path in paths if path["path"] != "/console"} == {"shop-semantide-api"}, (
        "until then the API answers what routers will"
    )
    notes = lint.helm("install", "shop", str(lint.CHART), "--dry-run=client", *REPLICAS).stdout.partition("NOTES:")[2]
    assert "servingReplicas and their routers were left out" in notes and "helm upgrade shop" in notes


def test_without_replicas_there_is_no_router(render: Render) -> None:
    assert not [name for manifest in render() if (name := manifest["metadata"]["name"]).endswith("-router")]


def test_a_worker_may_have_an_accelerator_of_its_own(render: Render) -> None:
    found = render("", "--set-json", 'workers.training.accelerators={"huawei.com/Ascend310P": "4", "nvidia.com/gpu": null}')
    resources = of_kind(found, "Deployment")["shop-semantide-worker-training"]["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert resources["limits"]["huawei.com/Ascend310P"] == resources["requests"]["huawei.com/Ascend310P"] == "4" and "nvidia.com/gpu" not in resources["limits"]


def test_one_node_volumes_keep_pods_together(render: Render) -> None:
    for deployment in rooms_of(render()).values():
        template = deployment["spec"]["template"]
        term = template["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][0]
        # The first pod of all is only let through where it matches its own term.
        assert term["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_a_null_leaves_a_room_out(render: Render) -> None:
    deployments = rooms_of(render("", "--set", "workers.training=null,workers.serving.replicas=0,workers.ingestion.replicas=null"))
    replicas = {name.removeprefix("shop-semantide-"): deployment["spec"]["replicas"] for name, deployment in deployments.items()}
    assert replicas == {"api": 1, "worker-ingestion": 1, "worker-tokenization": 1, "worker-negatives": 1, "worker-reward": 1, "worker-serving": 0}


def test_the_ingress_leads_where_it_says(render: Render, full: str) -> None:
    manifests = render("", "--values", full)
    rule = of_kind(manifests, "Ingress")["shop-semantide"]["spec"]["rules"][0]
    targets = {path["path"]: path["backend"]["service"]["name"] for path in rule["http"]["paths"]}
    assert targets == {"/": "shop-semantide-api", "/console": CONSOLE, "/v1/recommendations": "shop-semantide-api-serving"}
    assert set(targets.values()) == set(of_kind(manifests, "Service")) - {"shop-semantide-metrics", "shop-semantide-operator"}
    route = of_kind(manifests, "HTTPRoute")["shop-semantide"]["spec"]
    assert route["parentRefs"] == [{"name": "public", "namespace": "gateways"}] and route["hostnames"] == ["shop.example"]
    assert {rule["matches"][0]["path"]["value"]: rule["backendRefs"][0]["name"] for rule in route["rules"]} == targets


def test_notes_have_three_commands(lint: ModuleType) -> None:
    outcome = lint.helm("install", "shop", str(lint.CHART), "--namespace", "shop", "--dry-run=client")
    assert outcome.returncode == 0, outcome.stderr
    notes = outcome.stdout.partition("NOTES:")[2]
    assert "port-forward service/shop-semantide-api 8000:8000" in notes
    assert "get secret shop-semantide-keys" in notes and '{{index .data "api-keys" | base64decode}}' in notes
    assert "semantide status" in notes and f"port-forward service/{CONSOLE} 8002:8000" in notes
