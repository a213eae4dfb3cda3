"""Values that make no sense are refused by name, with what to give instead."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Refuse = Callable[..., str]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--set", "replicaCount=2"], ["replicaCount", "not allowed"]),
        (["--set", "workers.trainng.replicas=2"], ["/workers", "trainng", "not allowed"]),
        (["--set", "workers.training.replica=2"], ["/workers/training", "replica", "not allowed"]),
        (["--set", "settings.historyLenght=3"], ["/settings", "historyLenght"]),
        (["--set", "settings.historyLength=0"], ["/settings/historyLength", "minimum"]),
        (["--set-json", 'workers.training.accelerators={"nvidia.com/gpu": 1}'], ["nvidia.com~1gpu", "want string"]),
        (["--set", "workers.training.resources.limits.memory=4GB"], ["/workers/training/resources/limits/memory"]),
        (["--set", "dataAccessMode=ReadWriteOncePod"], ["/dataAccessMode", "ReadWriteMany"]),
        (["--set", "redisEnabled=false"], ["redisUrlSecret is empty", "redis://"]),
        (["--set", "redisUrlSecret=mine"], ['redisUrlSecret is "mine"', "redisEnabled=false"]),
        (["--set", "ingressEnabled=true,ingressPaths./x=serving"], ["/x", '"serving"', "not in apis (all, console)"]),
        (["--set", "ingressEnabled=true,ingressTlsSecret=x"], ["ingressHost is empty"]),
        (["--set", "httpRouteEnabled=true"], ["httpRouteGateways is empty", "{public: {namespace: gateways}}"]),
        (["--set", "serviceMonitorEnabled=true"], ["metricsEnabled is false", "metricsEnabled=true"]),
        (["--set", "autoscaler=keda,apis.all.maxReplicas=3"], ["kedaPrometheusAddress is empty", "http://prometheus"]),
        (["--set", "apis.all.maxReplicas=3,apis.all.minReplicas=4"], ["api-all", "minReplicas is 4", "above maxReplicas 3"]),
        (["--set", "ingressEnabled=true,ingressPaths./x=router"], ["/x", '"router"', "not in apis (all, console)"]),
        (["--set", "servingReplicas.main.replicas.max=2,operatorEnabled=false"], ["operatorEnabled is false", "operatorEnabled=true"]),
        (["--set", "servingReplicas.main.rollout.stratgy=InPlace"], ["/servingReplicas/main/rollout", "stratgy", "not allowed"]),
        (["--set", "servingReplicas.main.rollout.strategy=Inplace"], ["/servingReplicas/main/rollout/strategy", "'Surge', 'InPlace'"]),
        (["--set", "servingReplicas.main.rollout.maxUnavailable=25%"], ["/servingReplicas/main/rollout/maxUnavailable", "want integer"]),
        (["--set", "servingReplicas.main.target.queueDepth=0"], ["/servingReplicas/main/target/queueDepth", "minimum"]),
        (["--set", "servingReplicas.main.target.p99=50"], ["/servingReplicas/main/target", "p99"]),
        (["--set", "servingReplicas.main.template.nodeselector.a=b"], ["/servingReplicas/main/template", "nodeselector", "not allowed"]),
        (["--set", "servingReplicas.main.template.env=x"], ["/servingReplicas/main/template/env", "want array"]),
        (["--set", "operatorPodTemplate.nodeSelecter.a=b"], ["/operatorPodTemplate", "nodeSelecter"]),
        (["--set", "operatorSettings.roundSeconds=120"], ["/operatorSettings/roundSeconds", "maximum"]),
        (["--set", "jobKinds.train.npus=8"], ["/jobKinds/train", "npus"]),
        (["--set", "jobKinds.tokenize.worldSize=2"], ["/jobKinds/tokenize/worldSize", "maximum"]),
        (["--set", "jobKinds.evaluate.elastic.min=1,jobKinds.evaluate.elastic.max=2"], ["/jobKinds/evaluate/elastic"]),
        (["--set", "jobKinds.train.worldSize=10001"], ["/jobKinds/train/worldSize", "maximum"]),
        (["--set", "servingReplicas.main.replicas.min=10001"], ["/servingReplicas/main/replicas/min", "maximum"]),
        (["--set", "jobResources.tokenise.requests.cpu=1"], ["must be one of", "'tokenize'"]),
        (["--set", "jobResources.tokenize.requests.gpu=1"], ["/jobResources/tokenize/requests", "gpu"]),
        (["--set", "operatorProfile=gpu"], ["/operatorProfile", "nvidia"]),
        (["--set", "operatorResourceName=Ascend910"], ["/operatorResourceName"]),
        (["--set", "deviceImageSuffix=ascend"], ["/deviceImageSuffix"]),
        (["--set", "serviceIpFamilyPolicy=DualStack"], ["/serviceIpFamilyPolicy", "PreferDualStack"]),
        (["--set", "sharedMemorySize=64MB"], ["/sharedMemorySize"]),
        (["--set", "listenAddress=everywhere"], ["/listenAddress"]),
        (["--set", "serviceAccountCreate=false"], ["serviceAccountName is empty", "serviceAccountCreate=true"]),
    ],
)
def test_wrong_values_are_named(refuse: Refuse, options: list[str], words: list[str]) -> None:
    error = refuse(*options)
    for word in words:
        assert word in error
