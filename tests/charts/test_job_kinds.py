"""What the jobs of each kind ask for under the profiles of accelerators."""

from __future__ import annotations

import json
from types import ModuleType

import pytest
import yaml

from semantide.operators.pod_template import check_template
from semantide.operators.resources import NPUJob, NPUJobSpec
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
    assert {kind: (each.get("profile"), each.get("resourceName")) for kind, each in said["kinds"].items()} == {
        "train": ("nvidia", None),
        "align": ("cpu", None),
        "reward": ("ascend", "example.com/other"),
    }
    assert not {"profile", "resourceName"} & set(said["default"])
