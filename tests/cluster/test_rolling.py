"""A release on real nodes that changes under load: the chart before this one, this one, back, and to and fro between models; no visitor notices, nothing is lost.

The tests are one story, told in the order of the file; each begins by bringing the release to where it needs it.
"""

from __future__ import annotations

import base64
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from .api import Api, Object, until
from .docker_engine import Engine
from .installed_shop import API, IMAGE_TAG, NEXT_IMAGE_TAG, ROUTER, Shop, build_images, operator_values, values, write_ring
from .kubelet import Kubelet
from .release import BY_CLIENT, CHART, PREVIOUS_CHART, unbound, unpacked
from .visitors import Answers, Visitors, ask, items_of

pytestmark = [pytest.mark.cluster_nodes, pytest.mark.timeout(3600)]

_PATIENCE = 1200.0
_ROOMS = ("ingestion", "tokenization", "training", "serving")
_QUESTIONS: list[Object] = [{"history": [f"item-{(place + step) % 40}" for step in range(5)], "n": 5} for place in range(0, 40, 5)]
# A machine that is busy with other things must neither narrow a search, which changes its answer, nor give one up.
_PATIENT = {"SEMANTIDE_SERVING_NARROWING_SECONDS": "0", "SEMANTIDE_SERVING_DEADLINE_SECONDS": "600"}


@dataclass
class Story:
    """A release with two models, the first of which is live; ``event`` was sent before anything changed."""

    shop: Shop
    previous: Path
    chart: Path
    models: tuple[str, ...] = ()
    answers: Answers = field(default_factory=dict)
    event: Object = field(default_factory=dict)

    def values(self, tag: str = IMAGE_TAG, replicas: int = 0, broker: str = "3Gi") -> Object:
        """Those of this tree's chart; with ``replicas`` behind routers, and a ``broker`` that may take so much memory."""
        common = values(_ROOMS)
        more: Object = {"imageTag": tag, "environmentSecret": "patient", "workers": common["workers"] | {"reward": None}}
        more["redisResources"] = common["redisResources"] | {"limits": {"memory": broker}}
        if replicas:
            # The profile of nodes without NPUs; a resource name would ask for one.
            more["servingReplicas"] = {"main": {"profile": "cpu", "replicas": {"min": replicas, "max": replicas}}}
            more["router"] = common["apis"]["all"] | {"replicas": 2}
        return common | operator_values() | more

    def visitors(self, service: str) -> Visitors:
        """Visitors of a Service."""
        return Visitors(self.shop.api, self.shop.namespace, service, self.shop.key, _QUESTIONS, self.answers)

    def promote(self, place: int) -> str:
        """Make one of the models live in the process that is asked to; it."""
        self.shop.run("promote", "--model", model := self.models[place])
        until(lambda: self.shop.ask("/v1/serving/live")["loaded_model"] == model, f"{model} is loaded", _PATIENCE)
        return model


@pytest.fixture(scope="module")
def story(engine: Engine, nodes: dict[str, Kubelet], real_api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The chart before this one, installed, with a data set and two models made through it."""
    build_images(engine, tmp_path_factory.mktemp("wheels"))
    folder = tmp_path_factory.mktemp("rolling")
    namespace = real_api.create("namespaces", {"metadata": {"generateName": "rolling-"}})["metadata"]["name"]
    secret = {"metadata": {"name": "patient"}, "data": {name: base64.b64encode(value.encode()).decode() for name, value in _PATIENT.items()}}
    real_api.create("secrets", secret, namespace)
    shop = Shop(real_api, namespace, folder, nodes)
    told = Story(shop, unbound(unpacked(PREVIOUS_CHART, folder / "previous"), folder), unbound(CHART, folder))
    try:
        shop.install(told.previous, values(_ROOMS) | {"environmentSecret": "patient"}, BY_CLIENT)
        write_ring(folder / "in")
        shop.run("ingest", str(folder / "in"))
        shop.run("dataset")
        shop.run("tokenize")
        told.models = tuple(_trained(shop, seed) for seed in (1, 2))
        told.promote(1)
        told.event = _send(shop, "first")
        for place in (1, 0):
            model, draw = told.promote(place), random.Random(0)
            for number, question in enumerate(_QUESTIONS):
                said = ask(real_api, namespace, API, shop.key, question, draw)
                told.answers[model, str(said["catalog"]), number] = items_of(said)
        yield told
    finally:
        shop.remove()
        real_api.delete("namespaces", namespace)
        until(lambda: not real_api.list("pods", namespace), "its pods are gone", _PATIENCE)


def _trained(shop: Shop, seed: int) -> str:
    sets = [part for one in ("epochs=3", "patience=1000") for part in ("--set", one)]
    return str(json.loads(shop.run("train", "--recipe", "tiny", "--seed", str(seed), *sets, "--json"))["artifacts"]["model"])


def _send(shop: Shop, name: str) -> Object:
    """A client sends an event, and an item that is in the live catalog from then on; the event, which may be sent again and counts once."""
    before = shop.ask("/v1/serving/live")["catalog"]
    event = {"user": "keeper", "item": f"item-{name}", "time": int(time.time() * 1000), "action": "click", "event_id": f"kept-{name}"}
    _post(shop, "/v1/items", {"items": [{"id": f"item-{name}", "title": f"kept {name}"}]})
    _post(shop, "/v1/interactions", {"interactions": [event]})
    _stored(shop)
    until(lambda: (live := shop.ask("/v1/serving/live"))["catalog"] != before and live["catalog"] == live["loaded_catalog"], "it is in the catalog", _PATIENCE)
    return event


def _post(shop: Shop, path: str, body: Object) -> None:
    answer = httpx.post(f"{shop.url}{path}", json=body, headers={"X-API-Key": shop.key}, timeout=600, trust_env=False)
    assert answer.is_success, f"{answer.status_code}: {answer.text}"


def _stored(shop: Shop) -> None:
    until(lambda: shop.ask("/v1/interactions/stats")["waiting_batches"] == 0, "all is in the log", _PATIENCE)


def _kept(shop: Shop, *names: str) -> Object:
    """What must be the same after any change of the release."""
    live, events = shop.ask("/v1/serving/live"), shop.ask("/v1/interactions/stats")
    return {
        "live": (live["model"], live["catalog"], live["previous"]),
        "history": [(event["item"], event["time"]) for event in shop.ask("/v1/users/keeper/history")["events"]],
        "items": {name: shop.ask(f"/v1/items/item-{name}")["title"] for name in names},
        "events": events["interactions"],
        "artifacts": sorted(shop.ask("/v1/artifacts")),
        "manifests": [shop.ask(f"/v1/artifacts/{ref}") for ref in sorted(shop.ask("/v1/artifacts?kind=model"))],
        "jobs": sorted((job["id"], job["state"], job["finished"]) for job in shop.ask("/v1/jobs?limit=1000")),
    }


def _rolled(shop: Shop, tag: str) -> None:
    """Every pod of an API is one of this image: none of the old ones answers any more."""

    def images() -> set[str]:
        pods = shop.api.list("pods", shop.namespace, "app.kubernetes.io/component=api-all")
        return {container["image"] for pod in pods for container in pod["spec"]["containers"]}

    until(lambda: images() == {f"semantide:{tag}"}, f"only pods of {tag}", _PATIENCE)


def _tell(capsys: pytest.CaptureFixture[str], what: str, *visitors: Visitors) -> None:
    with capsys.disabled():
        print("", what, *map(str, visitors), sep="\n")


def test_an_upgrade_and_a_roll_back_of_the_chart_keep_all_data_and_no_visitor_notices(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    shop, model, event = story.shop, story.models[0], story.event
    before = _kept(shop, "first")
    assert before["live"][0] == model and before["history"] == [(event["item"], event["time"])]
    with story.visitors(API) as visitors:
        until(lambda: visitors.all_of(model), "visitors are served", _PATIENCE)
        shop.upgrade(story.chart, story.values(NEXT_IMAGE_TAG))
        _rolled(shop, NEXT_IMAGE_TAG)
        visitors.forget()
        until(lambda: visitors.all_of(model), "visitors are served by the new chart", _PATIENCE)
        assert _kept(shop, "first") == before
        # What was stored before is known: it is not stored again.
        _post(shop, "/v1/interactions", {"interactions": [event]})
        second = _send(shop, "second")
        between = _kept(shop, "first", "second")
        assert between["events"] == before["events"] + 1
        assert between["history"] == [*before["history"], (second["item"], second["time"])]
        assert set(between["artifacts"]) >= set(before["artifacts"])

        shop.release.roll_back(1)
        _rolled(shop, IMAGE_TAG)
        visitors.forget()
        until(lambda: visitors.all_of(model), "visitors are served by the old chart", _PATIENCE)
        after = _kept(shop, "first", "second")
        assert {**after, "artifacts": [ref for ref in after["artifacts"] if ref in between["artifacts"]]} == between
        _post(shop, "/v1/interactions", {"interactions": [event, second]})
        _stored(shop)
        assert shop.ask("/v1/interactions/stats")["interactions"] == between["events"]
    _tell(capsys, "the chart before this one, this one, and back, while visitors ask:", visitors)
    assert visitors.wrong == []


def test_models_are_promoted_and_images_replaced_behind_the_router_and_no_visitor_notices(story: Story, capsys: pytest.CaptureFixture[str]) -> None:
    shop = story.shop
    shop.upgrade(story.chart, story.values())
    # The cluster knows NPUServices only from then on.
    shop.upgrade(story.chart, story.values(replicas=2))
    name = "shop-semantide-replicas-main"

    def replaced(revision: str) -> bool:
        status = shop.api.get("npuservices", name, shop.namespace).get("status", {})
        pods = shop.api.list("pods", shop.namespace, f"semantide.io/service={name}")
        there = status.get("readyReplicas") == status.get("updatedReplicas") == status.get("replicas") == 2 == len(pods)
        return there and {container["image"] for pod in pods for container in pod["spec"]["containers"]} == {f"semantide:{revision}"}

    until(lambda: replaced(IMAGE_TAG), "two replicas are ready", _PATIENCE)
    with ExitStack() as stack:
        groups = [stack.enter_context(story.visitors(service)) for service in (ROUTER, API)]

        def settled(model: str) -> None:
            until(lambda: all(one.all_of(model) for one in groups), f"everybody is answered by {model}", _PATIENCE)

        settled(story.models[0])
        settled(story.promote(1))
        shop.run("rollback")
        settled(story.models[0])
        # Routers, replicas, API and operator, all replaced by those of another image, while the broker is away for another one too.
        shop.upgrade(story.chart, story.values(NEXT_IMAGE_TAG, replicas=2, broker="2Gi"))
        _rolled(shop, NEXT_IMAGE_TAG)
        until(lambda: replaced(NEXT_IMAGE_TAG), "two replicas of the new image", _PATIENCE)
        for group in groups:
            group.forget()
        settled(story.models[0])
        settled(story.promote(1))
    _tell(capsys, "models promoted, rolled back and images replaced, while visitors ask:", *groups)
    assert [group.wrong for group in groups] == [[], []]


def test_helm_s_own_test_asks_for_a_recommendation(story: Story) -> None:
    story.shop.upgrade(story.chart, story.values(NEXT_IMAGE_TAG, broker="2Gi"))
    said = story.shop.release.test("--logs", "--timeout", "20m")
    live = story.shop.ask("/v1/serving/live")["model"]
    found = re.search(rf"{re.escape(live)} recommends ((?:item-\w+(?:, )?)+)", said)
    assert found is not None and len(set(found[1].split(", "))) == 3, said
