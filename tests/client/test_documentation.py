"""Every block of docs/client.md runs against the real routes."""

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from semantide.services.ingestion import api as ingestion
from semantide.shared import operations_api
from semantide.shared.broker import free_port
from semantide.shared.http import APIRouter, build_app
from semantide.shared.jobs import JobOutcome, Jobs
from semantide.shared.recommendation import RecommendationAnswer, RecommendationRequest, RecommendedItem, Timing
from semantide.shared.server import Server

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def stack(make_room: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    room, recommending, ended = make_room("ingestion"), APIRouter(), threading.Event()

    @recommending.post("/v1/recommendations")
    def recommend(body: RecommendationRequest) -> RecommendationAnswer:
        item = RecommendedItem(item="b-2", score=-1.0, codes=[1])
        figures = {"beam_width": 50, "requested_beam_width": 50, "narrowed": False, "history_items": 1, "unknown_history_items": 0, "exact": True}
        timing = Timing(queue_ms=0, search_ms=0, total_ms=0)
        ref = f"models/sha256-{'0' * 64}"
        return RecommendationAnswer(items=[item], model=ref, catalog=None, request_id="r", based_on="history", timing=timing, **figures)  # type: ignore[arg-type]

    def work() -> None:
        jobs = Jobs(room.broker)
        while not ended.wait(0.02):
            for record in jobs.recent(state="queued"):
                jobs.end(record, "succeeded", outcome=JobOutcome(result={"rows": 1}))

    server = Server(build_app([room], [recommending, operations_api.build(room), ingestion.build(room)]), "127.0.0.1", port := free_port())
    threads = [threading.Thread(target=server.run), threading.Thread(target=work)]
    for thread in threads:
        thread.start()
    while not server.started:
        time.sleep(0.01)
    monkeypatch.setenv("SEMANTIDE_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("SEMANTIDE_API_KEY", "test-key")
    yield room
    server.should_exit = True
    ended.set()
    for thread in threads:
        thread.join(60)


def test_every_block_runs_as_it_stands(stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(BLOCKS) == PAGE.count("```python")
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(BLOCKS):
        exec(compile(block, f"docs/client.md, block {number}", "exec"), {"__name__": "block"})
    said = capsys.readouterr().out
    for part in ("[('b-2', -1.0)] r", "send interactions 5000 None rows", "5000 0 ()", "succeeded 1", "[1, 1, 1]", "404 NotFound"):
        assert part in said, (part, said)
