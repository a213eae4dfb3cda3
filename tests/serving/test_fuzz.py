"""Requests that nobody thought of, to every route of every room, valid ones and others: none may end in an error of ours, and each answer is one that the API's description announces.

``make fuzz`` sends SEMANTIDE_FUZZ_REQUESTS of them (12,000); `make test` a few of each kind, always the same.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks as openapi_checks

from semantide.services.ingestion import api as ingestion
from semantide.services.negatives import api as negatives
from semantide.services.reward import api as reward
from semantide.services.serving import api as serving
from semantide.services.tokenization import api as tokenization
from semantide.services.training import api as training
from semantide.shared import operations_api
from semantide.shared.contracts import ROOMS
from semantide.shared.http import build_app

from .world import World

DOORS = {"ingestion": ingestion, "tokenization": tokenization, "negatives": negatives, "training": training, "reward": reward, "serving": serving}
CHECKS = [
    not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.response_headers_conformance,
]
KEY = {"X-API-Key": "test-key"}
PATIENT = hypothesis.settings(
    derandomize=True, database=None, deadline=None, phases=[hypothesis.Phase.generate], suppress_health_check=list(hypothesis.HealthCheck)
)
REQUESTS = int(os.environ.get("SEMANTIDE_FUZZ_REQUESTS", "0"))


@pytest.fixture
def schema(world: World, make_room: Callable[[str], Any]) -> Iterator[Any]:
    """The description of all rooms' API, with a live model behind it."""
    world.live()
    rooms = [world.room if name == "serving" else make_room(name) for name in ROOMS]
    app = build_app(rooms, [operations_api.build(rooms[0]), *(DOORS[room.name].build(room) for room in rooms)])
    stop = serving.start(world.room)
    yield schemathesis.openapi.from_asgi("/openapi.json", app, headers=KEY)
    stop()


def test_no_request_breaks_a_route_and_every_answer_is_announced(schema: Any, record_property: Callable[[str, object], None]) -> None:
    operations = [found.ok() for found in schema.get_all_operations()]
    statuses: Counter[int] = Counter()
    violations: dict[str, str] = {}

    def fuzz(operation: Any, mode: GenerationMode, most: int, seed: int) -> int:
        """Send up to so many requests; how many there were."""
        before = statuses.total()

        @hypothesis.seed(seed)
        @hypothesis.settings(PATIENT, max_examples=most)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            answer = case.call(headers=KEY, timeout=600)
            statuses[answer.status_code] += 1
            try:
                case.validate_response(answer, checks=CHECKS, headers=KEY)
            except BaseExceptionGroup as failures:
                texts = (f"{type(failure).__name__}: {failure}"[:600] for failure in failures.exceptions)
                violations.setdefault(f"{operation.method.upper()} {operation.path} {mode.value}", "; ".join(texts))

        with suppress(hypothesis.errors.Unsatisfiable):  # nothing can be wrong with a request that has no parts
            send()
        return statuses.total() - before

    # Routes whose requests have few parts run out of new ones: what they leave is divided among the others, from other seeds.
    left, seed = [(operation, mode) for operation in operations for mode in GenerationMode], 0
    while left and (seed == 0 or statuses.total() < REQUESTS):
        most = max(2, -(-(REQUESTS - statuses.total()) // len(left)))
        rich = []
        for number, (operation, mode) in enumerate(left, 1):
            if fuzz(operation, mode, most, seed) >= most:
                rich.append((operation, mode))
            if REQUESTS:  # a long run that somebody ends has told how far it came
                print(
                    f"{number}/{len(left)} {operation.method.upper()} {operation.path}: {statuses.total()} requests, {len(violations)} violations", flush=True
                )
        left, seed = rich, seed + 1
    record_property("requests", statuses.total())
    print(f"{statuses.total()} requests of {len(operations)} operations: {dict(sorted(statuses.items()))}; {len(violations)} violations")
    assert not violations, "\n\n".join(f"{name}: {text}" for name, text in violations.items())
    assert not [status for status in statuses if status >= 500]
    assert statuses.total() >= REQUESTS
