"""docker-compose.yml, Dockerfile and .dockerignore against the rooms, the settings and the packages."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from semantide.services import local
from semantide.services.commandline.main import app
from semantide.shared.config import Settings
from semantide.shared.contracts import ROOMS

REPOSITORY = Path(__file__).resolve().parents[2]
WATCHING = {"collector", "prometheus", "grafana"}
SPREAD = {"replica", "router"}
SHOWING = {"console"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    return loaded


@pytest.fixture(scope="module")
def rooms(compose: dict[str, Any]) -> dict[str, Any]:
    return {name: service for name, service in compose["services"].items() if name not in {"redis", *WATCHING, *SPREAD, *SHOWING}}


def test_one_api_and_a_worker_for_every_room(rooms: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(local, "serve", lambda names, settings, console=False: ran.append(["api", *names]))
    monkeypatch.setattr(local, "work", lambda name, settings: ran.append(["worker", name]))
    for service in rooms.values():
        assert local.main(service["command"]) == 0
    assert sorted(ran) == sorted([["api", *ROOMS], *(["worker", room] for room in ROOMS)])
    assert {name for name in rooms if name != "api"} == {f"{room}-worker" for room in ROOMS}


def test_the_command_line_has_the_same_verbs(compose: dict[str, Any], rooms: dict[str, Any]) -> None:
    commands = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert {service["command"][0] for service in rooms.values()} == {"api", "worker"} <= commands
    assert {compose["services"][name]["command"][0] for name in SPREAD} == {"replica", "route"} <= commands


def test_only_loopback_is_published(compose: dict[str, Any]) -> None:
    published = {name: service["ports"] for name, service in compose["services"].items() if "ports" in service}
    assert set(published) == {"api", "console", "router", "prometheus", "grafana"}
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)
    assert compose["networks"]["broker"]["internal"] is True
    assert compose["services"]["redis"]["networks"] == ["broker"]


def test_the_key_is_required_from_the_environment(compose: dict[str, Any]) -> None:
    for name in ("api", *SHOWING, *SPREAD):
        assert compose["services"][name]["environment"]["SEMANTIDE_API_KEYS"].startswith("${SEMANTIDE_API_KEYS:?"), name


def test_the_console_reaches_the_apis_and_nothing_else(compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    console, api = compose["services"]["console"], compose["services"]["api"]
    assert (console["volumes"], console["networks"], console["depends_on"]) == ([], ["default"], []) and "SEMANTIDE_REDIS_URL" not in console["environment"]
    assert "default" in api["networks"] and console["environment"]["SEMANTIDE_CONSOLE_STACK"] == f"http://api:{api['environment']['SEMANTIDE_PORT']}"
    same = ("read_only", "tmpfs", "cap_drop", "security_opt", "restart", "healthcheck", "image", "init")
    assert all(console[name] == api[name] for name in same)
    ran: list[str] = []
    monkeypatch.setattr(local, "show", lambda settings: ran.append("console"))
    assert local.main(console["command"]) == 0 and ran == ["console"]
    assert all(name.removeprefix("SEMANTIDE_").lower() in Settings.model_fields for name in console["environment"])


def test_environments_are_settings(rooms: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for service in rooms.values():
        for name, value in service["environment"].items():
            assert name.removeprefix("SEMANTIDE_").lower() in Settings.model_fields
            # Nothing leaves the machine unless a collector is named.
            value = value.removesuffix(":-}").removeprefix("${SEMANTIDE_OTLP_ENDPOINT")
            if not value.startswith("$"):
                monkeypatch.setenv(name, value)
        settings = Settings()
        assert str(settings.data_dir) == "/data" and settings.redis_url == "redis://redis:6379/0"
        assert service["volumes"] == ["data:/data"]


def test_containers_are_locked_down_and_restarted(rooms: dict[str, Any]) -> None:
    for name, service in rooms.items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"] and service["tmpfs"] == ["/tmp"], name
        assert service["security_opt"] == ["no-new-privileges:true"] and service["restart"] == "unless-stopped", name
        assert service["depends_on"] == {"redis": {"condition": "service_healthy"}}, name


def test_the_broker_is_watched_and_has_a_volume(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    assert redis["volumes"] == ["broker:/data"] and redis["healthcheck"]["test"]


def _has_compose() -> bool:
    return shutil.which("docker") is not None and subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _has_compose(), reason="docker compose is not installed: the file is only read as YAML")
def test_compose_itself_understands_it() -> None:
    command = ["docker", "compose", "--file", str(REPOSITORY / "docker-compose.yml"), "config", "--format", "json"]
    environment = {**os.environ, "SEMANTIDE_API_KEYS": "one,two", "SEMANTIDE_PORT": "8123"}
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert outcome.returncode == 0, outcome.stderr
    api = json.loads(outcome.stdout)["services"]["api"]
    assert api["environment"]["SEMANTIDE_API_KEYS"] == "one,two" and api["ports"][0]["published"] == "8123" and api["ports"][0]["host_ip"] == "127.0.0.1"
    environment.pop("SEMANTIDE_API_KEYS")
    outcome = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert outcome.returncode != 0 and "SEMANTIDE_API_KEYS" in outcome.stderr and "choose the API keys" in outcome.stderr


def test_watching_is_asked_for(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, service in services.items() if service.get("profiles") == ["observability"]} == WATCHING
    assert {name for name, service in services.items() if service.get("profiles") == ["replicas"]} == SPREAD
    assert not {name for name, service in services.items() if "profiles" in service} - WATCHING - SPREAD
    for name in WATCHING:
        for volume in services[name]["volumes"]:
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (REPOSITORY / source).exists(), volume
        assert ":" in services[name]["image"] and not services[name]["image"].endswith(":latest"), name


def test_prometheus_asks_every_process_and_the_collector(compose: dict[str, Any], rooms: dict[str, Any]) -> None:
    config = yaml.safe_load((REPOSITORY / "docker" / "prometheus.yaml").read_text())
    jobs = {job["job_name"]: [target for group in job["static_configs"] for target in group["targets"]] for job in config["scrape_configs"]}
    assert set(jobs["semantide"]) == {
        f"{name}:{service['environment']['SEMANTIDE_METRICS_PORT']}" for name, service in [*rooms.items(), ("console", compose["services"]["console"])]
    }
    (spread,) = (job["dns_sd_configs"] for job in config["scrape_configs"] if "dns_sd_configs" in job)
    port = int(compose["services"]["replica"]["environment"]["SEMANTIDE_METRICS_PORT"])
    assert {(name, each["port"]) for each in spread for name in each["names"]} == {(name, port) for name in SPREAD}
    exporter = yaml.safe_load((REPOSITORY / "docker" / "collector.yaml").read_text())["exporters"]["prometheus"]["endpoint"]
    assert jobs["spans"] == [f"collector:{exporter.rpartition(':')[2]}"]
    mounted = {volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]}
    assert {f"/etc/prometheus/{name}" for name in config["rule_files"]} <= mounted


def test_the_collector_s_pipelines_name_what_it_has() -> None:
    config = yaml.safe_load((REPOSITORY / "docker" / "collector.yaml").read_text())
    known = {name for kind in ("receivers", "processors", "exporters", "connectors") for name in config[kind]}
    for pipeline in config["service"]["pipelines"].values():
        assert {name for names in pipeline.values() for name in names} <= known


# Settings that the collector knows, of the components which are used here. Source: its release 0.140, each component's config.schema.yaml.
COLLECTOR: dict[str, Any] = {
    "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": str}, "http": {"endpoint": str}}}},
    "processors": {"batch": {"timeout": str, "send_batch_size": int}, "memory_limiter": {"check_interval": str, "limit_mib": int, "spike_limit_mib": int}},
    "connectors": {"spanmetrics": {"namespace": str, "dimensions": list, "histogram": {"unit": str, "explicit": {"buckets": list}}}},
    "exporters": {"prometheus": {"endpoint": str, "namespace": str}, "debug": {"verbosity": str}},
    "service": {"telemetry": {"metrics": {"level": str}}, "pipelines": dict},
}


def unknown(settings: Any, known: Any, path: str = "") -> list[str]:
    """Where settings say what is not known, or with the wrong type."""
    if not isinstance(known, dict):
        return [] if isinstance(settings, known) else [path]
    if not isinstance(settings, dict):
        return [path]
    return [each for name, value in settings.items() for each in (unknown(value, known[name], f"{path}/{name}") if name in known else [f"{path}/{name}"])]


def test_the_collector_knows_its_settings() -> None:
    config = yaml.safe_load((REPOSITORY / "docker" / "collector.yaml").read_text())
    assert unknown(config, COLLECTOR) == []
    config["exporters"]["prometheus"]["endpont"] = 1
    assert unknown(config, COLLECTOR) == ["/exporters/prometheus/endpont"]
    histogram = config["connectors"]["spanmetrics"]["histogram"]
    # Other units are refused, and a bucket is a duration.
    assert histogram["unit"] in ("ms", "s") and all(re.fullmatch(r"\d+(\.\d+)?(ms|s|m)", bucket) for bucket in histogram["explicit"]["buckets"])
    assert config["service"]["telemetry"]["metrics"]["level"] in ("none", "basic", "normal", "detailed")


def test_grafana_finds_prometheus_and_the_dashboard(compose: dict[str, Any]) -> None:
    provisioning = REPOSITORY / "docker" / "grafana"
    source = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"][0]
    assert source["url"].removeprefix("http://").partition(":")[0] in compose["services"]
    folder = yaml.safe_load((provisioning / "dashboards" / "semantide.yaml").read_text())["providers"][0]["options"]["path"]
    grafana = compose["services"]["grafana"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] in {volume.split(":")[1] for volume in grafana["volumes"]}
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"].startswith(folder)


def stages() -> dict[str, str]:
    """The Dockerfile's stages by name."""
    found = {}
    for text in re.split(r"^FROM ", (REPOSITORY / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]:
        first, _, rest = text.partition("\n")
        found[first.rpartition(" AS ")[2]] = f"{first}\n{rest}"
    return found


def test_the_image_is_built_from_every_package() -> None:
    let_in = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    assert set(project["tool"]["setuptools"]["package-dir"].values()) <= let_in
    assert {project["project"]["readme"], *project["project"]["license-files"], "pyproject.toml"} <= let_in
    copied = {name for names in re.findall(r"^COPY ([\w./ ]+) \./$", (REPOSITORY / "Dockerfile").read_text(), re.MULTILINE) for name in names.split()}
    assert {"constraints.txt", "pyproject.toml", "docker/requirements.py"} <= copied
    assert {name.partition("/")[0] for name in copied} <= let_in
    assert [name for name in copied if not (REPOSITORY / name).exists()] == []


def test_the_default_image_needs_no_root_and_no_fetched_frontend() -> None:
    assert "# syntax" not in (REPOSITORY / "Dockerfile").read_text()
    assert list(stages())[-1] == "semantide" and stages()["semantide"].startswith("whole AS")
    final = stages()["whole"]
    assert "USER 10001:10001" in final and "HEALTHCHECK" in final and 'ENTRYPOINT ["semantide"]' in final
    environment = dict(re.findall(r"(SEMANTIDE_\w+)=(\S+)", final))
    assert {name.removeprefix("SEMANTIDE_").lower() for name in environment} <= set(Settings.model_fields)


def test_the_operator_has_neither_torch_nor_a_shell() -> None:
    operator = stages()["operator"]
    assert operator.startswith("scratch AS") and "USER 10001:10001" in operator and "RUN" not in operator
    assert "torch" not in stages()["operator-environment"]
    assert '"-m", "semantide.operators"]' in operator


@pytest.fixture(scope="module")
def requirements() -> Any:
    spec = importlib.util.spec_from_file_location("requirements", REPOSITORY / "docker" / "requirements.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_images_are_installed_from_the_package_s_own_requirements(requirements: Any) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert requirements.requirements(project, ["s3"], only=False) == [*project["dependencies"], *project["optional-dependencies"]["s3"]]
    assert requirements.requirements(project, ["s3"], only=True) == project["optional-dependencies"]["s3"]
    with pytest.raises(SystemExit, match="no extra 'cuda'"):
        requirements.requirements(project, ["cuda"], only=False)
    named = set(re.findall(r"requirements.py --only (\w+)", (REPOSITORY / "Dockerfile").read_text()))
    assert named == {"operator"} <= set(project["optional-dependencies"])


def test_what_is_stopped_is_all_that_may_have_been_started(compose: dict[str, Any]) -> None:
    recipe = (REPOSITORY / "Makefile").read_text().split("\ncompose-down:")[1].split("\n\n")[0]
    assert set(re.findall(r"--profile (\w+)", recipe)) == {profile for service in compose["services"].values() for profile in service.get("profiles", ())}


def test_make_writes_a_key_without_an_installation(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    subprocess.run(["make", "--silent", ".env"], check=True, cwd=tmp_path)
    assert re.fullmatch(r"SEMANTIDE_API_KEYS=[0-9a-f]{48}\n", (tmp_path / ".env").read_text())
    assert (tmp_path / ".env").stat().st_mode & 0o077 == 0
