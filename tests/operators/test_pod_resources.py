"""What a pod takes of its node, held to the most that ever runs of it at once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.pod_resources import asked, names_of
from semantide.operators.request import shape_of

SHARES = st.integers(0, 4000)


def part(share: int, **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": f"{share}m"}}, **more}


@given(
    running=st.lists(SHARES, min_size=1, max_size=3),
    first=st.lists(st.tuples(SHARES, st.booleans()), max_size=4),
    overhead=st.integers(0, 500),
    whole_pod=st.none() | SHARES,
)
def test_a_pod_takes_the_most_that_runs_of_it_at_once(running: list[int], first: list[tuple[int, bool]], overhead: int, whole_pod: int | None) -> None:
    sidecars, most = 0, 0
    for share, stays in first:  # as the kubelet starts them, one after the other
        most = max(most, sidecars + share)
        sidecars += share if stays else 0
    most = max(most, sidecars + sum(running)) if whole_pod is None else whole_pod
    spec: dict[str, Any] = {"containers": [part(share) for share in running], "overhead": {"cpu": f"{overhead}m"}}
    spec["initContainers"] = [part(share, **({"restartPolicy": "Always"} if stays else {})) for share, stays in first]
    if whole_pod is not None:
        spec |= part(whole_pod)
    assert asked(spec, "cpu", 1000) == most + overhead
    assert names_of(spec) == ["cpu"]


def test_a_limit_is_a_request_where_there_is_no_other() -> None:
    spec = {"containers": [{"resources": {"limits": {"cpu": "2", "memory": "1Gi"}, "requests": {"cpu": "1"}}}, {}]}
    assert asked(spec, "cpu", 1000) == 1000 and asked(spec, "memory") == 2**30 and asked(spec, "huawei.com/Ascend910") == 0


def test_what_a_template_starts_first_or_beside_counts_for_its_place() -> None:
    template = {"resources": {"requests": {"cpu": "1"}}, "initContainers": [part(500, restartPolicy="Always"), part(3000)]}
    assert shape_of("cpu", "", 0, template).millicores == 3500
    assert shape_of("cpu", "", 0, {**template, "initContainers": template["initContainers"][:1]}).millicores == 1500
