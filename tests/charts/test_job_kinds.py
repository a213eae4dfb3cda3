"""What the jobs of each kind ask for under the profiles of accelerators."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import yaml

from semantide.operators.job_pods import gang_manifests
from semantide.operators.pod_template import check_template
from semantide.operators.quantities import whole
from semantide.operators.resources import NPUJob, NPUJobSpec, PodPlacement
from semantide.operators.settings import OperatorSettings
from semantide.shared.config import Settings
from semantide.shared.contracts import JOB_ROOMS, JobRecord, JobSpec
from semantide.shared.npujob import Deployment, body

from .test_chart import Render, environment, of_kind

COMPUTED = ("train", "align", "reward")


@pytest.mark.parametrize("profile", ["nvidia", "ascend"])
def test_what_computes_with_models_asks_the_operator_for_the_accelerator(render: Render, profile: str) -> None:
    manifests = render(profile, "--set", "imageRepository=registry.example/shop,imageTag=v7,operatorResourceName=example.com/chip")
    settings = Settings(cluster_jobs=json.loads(of_kind(manifests, "ConfigMap")["shop-semantide-settings"]["data"]["SEMANTIDE_CLUSTER_JOBS"]))
    deployment = Deployment.model_validate(settings.cluster_jobs)
    operator = environment(of_kind(manifests, "Deployment")["shop-semantide-operator"]["spec"]["template"])
    assert operator["SEMANTIDE_OPERATOR_PROFILE"] == profile
    for kind in JOB_ROOMS:
        record = JobRecord(id=f"{kind}-1", spec=JobSpec(kind=kind), created=1)
        job = NPUJob.parse({**body(record, deployment, 5), "metadata": {"name": "job", "namespace": "shop", "labels": {}}})
        asked = (1, profile, "example.com/chip") if kind in COMPUTED else (0, NPUJobSpec(kind=kind).profile, "")
        assert (job.spec.npus_per_pod, job.spec.profile, job.spec.resource_name) == asked
        assert job.spec.image == f"registry.example/shop:v7{f'-{profile}' if kind in COMPUTED else ''}"
        check_template(job.spec.template)


def test_every_value_of_a_profile_is_in_one_place(lint: ModuleType) -> None:
    for profile in ("nvidia", "ascend"):
        text = (lint.CHART / f"values-{profile}.yaml").read_text()
        assert "image:" not in text, "a repository of its own would be passed over by `--set imageRepository=...`"
        kinds = yaml.safe_load(text)["jobKinds"]
        assert set(kinds) == set(COMPUTED) <= set(JOB_ROOMS) and len({json.dumps(each) for each in kinds.values()}) == 1


def test_another_profile_has_its_own_resources_name(render: Render) -> None:
    kinds = {"train": {"npusPerPod": 1, "profile": "nvidia"}, "align": {"profile": "cpu"}, "reward": {"npusPerPod": 2, "resourceName": "example.com/other"}}
    options = (
        "--set",
        "settings.jobRunner=cluster,operatorProfile=ascend,operatorResourceName=example.com/chip",
        "--set-json",
        f"jobKinds={json.dumps(kinds)}",
    )
    said = json.loads(of_kind(render("", *options), "ConfigMap")["shop-semantide-settings"]["data"]["SEMANTIDE_CLUSTER_JOBS"])
    assert {kind: (each.get("profile"), each.get("resourceName")) for kind, each in said["kinds"].items() if kind in kinds} == {
        "train": ("nvidia", None),
        "align": ("cpu", None),
        "reward": ("ascend", "example.com/other"),
    }
    assert not {"profile", "resourceName"} & set(said["default"])


@pytest.mark.parametrize("profile", ["", "nvidia", "ascend"])
def test_pods_of_every_kind_ask_for_processors_and_memory(render: Render, profile: str) -> None:
    """A pod that asks for nothing is put beside all others, and is the first to be killed there."""
    own = {
        "tokenize": {
            "template": {"resources": {"requests": {"cpu": "2500m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}}, "env": [{"name": "A", "value": "b"}]}
        },
        "import": {"priority": 3},
    }
    sets = [option for kind, spec in own.items() for option in ("--set-json", f"jobKinds.{kind}={json.dumps(spec)}")]
    manifests = render(profile, "--set", "settings.jobRunner=cluster,jobResources.forget=null", *sets)
    deployment = Deployment.model_validate(json.loads(of_kind(manifests, "ConfigMap")["shop-semantide-settings"]["data"]["SEMANTIDE_CLUSTER_JOBS"]))
    threads = {}
    for kind in JOB_ROOMS:
        made = body(JobRecord(id=f"{kind}-1", spec=JobSpec(kind=kind), created=1), deployment, 5)
        job = NPUJob.parse({**made, "metadata": {"name": "job", "namespace": "shop", "uid": "u", "labels": {}}})
        (container,) = gang_manifests(job, [PodPlacement(pod="p", node="n")], 1, OperatorSettings(), 0.0)[-1]["spec"]["containers"]
        requests, limits = (container.get("resources", {}).get(side, {}) for side in ("requests", "limits"))
        threads[kind] = {entry["name"]: entry.get("value") for entry in container["env"]}.get("OMP_NUM_THREADS")
        if kind == "forget":
            assert not requests and threads[kind] is None, "it was taken out"
            continue
        assert {"cpu", "memory"} <= set(requests), kind
        if kind not in COMPUTED:
            assert "memory" in limits, kind
        processors = whole(requests["cpu"], 1000) / 1000
        # Less than one processor is for being placed: on small nodes too.
        assert (threads[kind] is None) == (processors < 1) and (processors < 1 or int(threads[kind] or 0) >= processors > int(threads[kind] or 0) - 1), kind
        assert processors < 1 or kind in own or profile, kind
    assert threads["tokenize"] == "3" and deployment.kinds["import"]["priority"] == 3
    assert threads["train"] == ("4" if profile else None), "a profile's own lie over them"
    own["tokenize"]["template"]["env"] = [{"name": "OMP_NUM_THREADS", "value": "7"}]
    job = NPUJob.parse({"kind": "NPUJob", "metadata": {"name": "j", "uid": "u"}, "spec": {"kind": "tokenize", **own["tokenize"]}})
    (container,) = gang_manifests(job, [PodPlacement(pod="p", node="n")], 1, OperatorSettings(), 0.0)[-1]["spec"]["containers"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "OMP_NUM_THREADS"] == ["7"], "what a template says stands"
