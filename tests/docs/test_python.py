"""Every Python block of the documentation runs, in order, page by page, against the real routes."""

from __future__ import annotations

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

from .blocks import PAGES, blocks_of

PYTHON = {page: found for page in PAGES if (found := [block for block in blocks_of(page) if block.language == "python"])}
# What a page's blocks must have said, where they say something.
SAID = {
    "client.md": ("[('b-2', -1.0)] r", "send interactions 5000 None rows", "5000 0 ()", "succeeded 1", "[1, 1, 1]", "404 NotFound"),
    "start.md": ("b-2 -1.0 [1]",),
}


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


@pytest.mark.parametrize("page", PYTHON, ids=lambda page: page.stem)
def test_every_block_runs_as_it_stands(page: Path, stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "block"}
    for block in PYTHON[page]:
        exec(compile(block.text, str(block), "exec"), names)
    said = capsys.readouterr().out
    for part in SAID.get(page.name, ()):
        assert part in said, (part, said)
