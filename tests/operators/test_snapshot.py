"""Of two states of an object the newer one is kept, in whatever order they are heard of."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.cluster import Body, Listing
from semantide.operators.settings import OperatorSettings
from semantide.operators.snapshot import ObjectCache, with_defaults


def pod(name: str, version: int, uid: str = "u") -> Body:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "lab", "uid": f"{uid}-{name}", "resourceVersion": str(version)}}


@given(seed=st.integers(0, 10_000))
def test_any_order_of_news_ends_in_the_same_knowledge(seed: int) -> None:
    draw = random.Random(seed)
    truth: dict[str, Body] = {}
    news: list[tuple[str, Body]] = []
    for version in range(1, 30):
        name = draw.choice("abc")
        if name in truth and draw.random() < 0.3:
            news.append(("DELETED", {**truth.pop(name), "kind": "Pod"}))
        else:
            uid = truth[name]["metadata"]["uid"][: -len(name) - 1] if name in truth else f"u{version}"
            truth[name] = pod(name, version, uid)
            news.append(("MODIFIED", truth[name]))
    draw.shuffle(news)
    cache = ObjectCache(lambda: 0.0)
    for event, body in news:
        if event == "DELETED":
            cache.drop(body)
        else:
            cache.put(body)
    cache.settle("Pod", Listing(list(truth.values()), "30"))
    assert {body["metadata"]["name"]: body for body in cache.bodies("Pod")} == truth


def test_a_listing_does_not_take_away_what_is_newer_than_it() -> None:
    cache = ObjectCache(lambda: 0.0)
    cache.put(pod("old", 1))
    cache.put(pod("new", 9))
    cache.settle("Pod", Listing([], "5"))
    assert [body["metadata"]["name"] for body in cache.bodies("Pod")] == ["new"]


def test_what_was_deleted_does_not_come_back_with_late_news() -> None:
    cache = ObjectCache(lambda: 0.0)
    cache.put(pod("a", 2))
    cache.drop(pod("a", 3))
    assert not cache.put(pod("a", 2))
    assert cache.put(pod("a", 4, "another"))


def test_silent_specs_take_the_operators_defaults() -> None:
    settings = OperatorSettings(profile="ascend", resource_name="huawei.com/npu", scheduler="volcano")
    spec = with_defaults({"kind": "NPUJob", "spec": {"kind": "train"}}, settings)["spec"]
    assert (spec["profile"], spec["resourceName"], spec["scheduler"]) == ("ascend", "huawei.com/npu", "volcano")
    spec = with_defaults({"kind": "NPUJob", "spec": {"profile": "nvidia", "scheduler": "own"}}, settings)["spec"]
    assert spec == {"profile": "nvidia", "scheduler": "own"}
    assert "scheduler" not in with_defaults({"kind": "NPUService", "spec": {}}, settings)["spec"]
