"""``make demo``: the whole loop on real data, as a user would drive it: over REST, against a stack of its own, or one that runs."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from semantide.services.commandline import demo_data, display
from semantide.services.commandline.client import Client
from semantide.services.commandline.stack import Stack
from semantide.shared.broker import free_port
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec

_RECIPE = "tiny"
_RETRIEVER = "retriever-tiny"
# Few items and few events: a softmax over all items costs little and learns more from each event than drawn negatives do.
_RETRIEVER_CHANGES = {"num_negatives": 0, "items_per_batch": 512, "learning_rate": 5e-3}
_BASELINE = "sasrec"


class Walk:
    """The stages of the loop, each timed."""

    def __init__(self, client: Client, seed: int) -> None:
        self.client, self.seed = client, seed
        self.times: list[tuple[str, float]] = []

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Announce and time one stage."""
        display.console.print(f"[bold]{name}[/bold]")
        begin = time.monotonic()
        yield
        self.times.append((name, time.monotonic() - begin))

    def submit(self, spec: JobSpec, path: str = "/v1/jobs", body: Any = None) -> JobRecord:
        """Submit one job."""
        return JobRecord.model_validate(self.client.post(path, spec.model_dump(mode="json") if body is None else body))

    def finish(self, record: JobRecord) -> JobRecord:
        """Follow a job to its end.

        Raises: typer.Exit when it does not succeed.
        """
        record = display.follow(self.client, record)
        if record.state != "succeeded":
            display.problems.print(
                f"{record.id} {record.state}: {record.error}\nits log: {self.client.get(f'/v1/jobs/{record.id}/log')['log'][-3000:]}",
                highlight=False,
                markup=False,
            )
            raise typer.Exit(1)
        return record

    def job(self, spec: JobSpec) -> JobRecord:
        """Run one job to its end."""
        return self.finish(self.submit(spec))


def run_demo(dataset: str, seed: int, *, running: bool = False) -> None:
    """Ingest, tokenize, train, evaluate, promote, recommend from both sources, on a stack of its own or on the running one; print what came out.

    Raises: ValueError for an unknown data set, typer.Exit when a stage fails.
    """
    given = Settings()
    source = demo_data.prepare(dataset, Path(given.data_dir).absolute() / "downloads")
    if running:
        client = Client(given)
        _walk(Walk(client, seed), source, time.monotonic(), f"SEMANTIDE_URL={client.url} .venv/bin/semantide status", uploads=True)
        return
    # Small trainings side by side are faster than one after the other on two threads.
    settings = Settings(port=free_port(), import_roots=str(source.folder), redis_url="", host="127.0.0.1", job_slots=2)
    stack = Stack(settings, lambda text: display.problems.print(text, highlight=False))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt(stack))
    begin = time.monotonic()
    try:
        stack.start()
        threading.Thread(target=stack.watch, name="watch", daemon=True).start()
        walk = Walk(Client(Settings(url=stack.url, data_dir=settings.data_dir)), seed)
        walk.times.append(("start the stack", time.monotonic() - begin))
        _walk(walk, source, begin, f"SEMANTIDE_DATA_DIR={settings.data_dir} .venv/bin/semantide up")
    finally:
        stack.stop()


def _walk(walk: Walk, source: demo_data.Source, begin: float, go_on: str, *, uploads: bool = False) -> None:
    with walk.stage(f"import {source.title}"):
        _import(walk, source, uploads)
    result = _loop(walk, source)
    asked = _ask(walk, source)
    _report(walk, source, result, asked, time.monotonic() - begin, go_on)


def _import(walk: Walk, source: demo_data.Source, uploads: bool) -> None:
    counts: dict[str, Any] = {}
    paths = [str(path) for path in source.paths]
    sent: list[str] = []
    if uploads:
        # A stack in containers or elsewhere sees no folder of this machine.
        folder = uuid.uuid4().hex[:12]
        places = [walk.client.upload(path, folder) for path in source.files]
        sent, paths = [name for name, _ in places], [str(Path(places[0][1]).parent)]
    for path in paths:
        counts |= walk.finish(walk.submit(JobSpec(kind="import"), "/v1/imports", {"path": path})).result
    for name in sent:
        walk.client.call("DELETE", f"/v1/uploads/{name}")
    display.console.print(
        ", ".join(f"{name} {value:,}" for name, value in counts.items() if isinstance(value, int) and name in ("items", "interactions", "rejected")),
        highlight=False,
    )


def _interrupt(stack: Stack) -> Callable[[int, Any], None]:
    def handle(*_: Any) -> None:
        stack.end()
        raise KeyboardInterrupt

    return handle


def _loop(walk: Walk, source: demo_data.Source) -> dict[str, Any]:
    with walk.stage("clean, page, split"):
        dataset = walk.job(JobSpec(kind="dataset", config=source.dataset_config, seed=walk.seed))
        inputs = {"dataset": dataset.artifacts["dataset"]}
    with walk.stage("spell items as semantic ids"):
        catalog = walk.job(JobSpec(kind="tokenize", inputs=inputs, seed=walk.seed))
        inputs["catalog"] = catalog.artifacts["catalog"]
    with walk.stage(f"train the generator ({_RECIPE}), the retriever ({_RETRIEVER}) and the baseline ({_BASELINE})"):
        # The longest first, the others take turns beside it.
        recipes: dict[str, dict[str, Any]] = {_RECIPE: {}, _RETRIEVER: _RETRIEVER_CHANGES, _BASELINE: {}}
        training = [walk.submit(JobSpec(kind="train", recipe=recipe, config=config, inputs=inputs, seed=walk.seed)) for recipe, config in recipes.items()]
        model, retriever, baseline = [walk.finish(record).artifacts["model"] for record in training]
    with walk.stage("evaluate"):
        models = {"model": model, "retriever": retriever, "baseline": baseline}
        result = walk.job(JobSpec(kind="evaluate", inputs=inputs | models, seed=walk.seed)).result
    with walk.stage("promote"):
        walk.client.promote(model, patience_seconds=60)
        walk.client.promote(retriever)
        deadline = time.monotonic() + 60
        while ((live := walk.client.get("/v1/serving/live")).get("loaded_model"), live.get("loaded_retriever")) != (model, retriever):
            if time.monotonic() > deadline:
                display.problems.print(f"the models were not loaded within 60 s: {live}", highlight=False)
                raise typer.Exit(1)
            time.sleep(0.1)
    return result


def _ask(walk: Walk, source: demo_data.Source) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    asked = []
    with walk.stage("recommend for three users"):
        for user in source.users:
            answer = walk.client.post("/v1/recommendations", {"user": user, "n": 5, "exclude_seen": True, "source": "both"})
            recent = [event["item"] for event in walk.client.get(f"/v1/users/{user}/history")["events"] if source.counts(event["action"])][-3:]
            if answer["short_reason"]:
                display.problems.print(f"user {user}: {answer['short_reason']}", highlight=False, markup=False)
            asked.append((user, [source.titles.get(item, item) for item in recent], answer["items"]))
    return asked


def _report(
    walk: Walk, source: demo_data.Source, result: dict[str, Any], asked: list[tuple[str, list[str], list[dict[str, Any]]]], total: float, go_on: str
) -> None:
    display.console.print()
    display.evaluation(result)
    display.console.print()
    for user, recent, items in asked:
        display.console.print(f"[bold]user {user}[/bold], lately: {'; '.join(recent)}", highlight=False)
        rows = [
            [place + 1, item["item"], item.get("title") or source.titles.get(item["item"], ""), item["score"], item["source"]]
            for place, item in enumerate(items)
        ]
        display.table("", ["#", "item", "what it is", "log probability", "ranked by"], rows)
        display.console.print()
    display.table("where the time went", ["stage", "seconds"], [[name, f"{seconds:.1f}"] for name, seconds in [*walk.times, ("all", total)]])
    display.console.print(
        f"\nGo on with this data:   {go_on}\n"
        "Your own data:          .venv/bin/semantide up, then .venv/bin/semantide ingest PATH\n"
        "How it works:           docs/architecture.md",
        highlight=False,
    )
