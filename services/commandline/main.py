"""``semantide``: the command line.

Exit status: 0 done, 1 something failed or some rows were rejected, 2 wrong use, 130 interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any

import pydantic
import typer

from semantide.services.commandline import display, jobs, processes, rewards, stack, users, variants
from semantide.services.commandline.alignment import align
from semantide.services.commandline.client import NO_GENERATORS, Client, StackError
from semantide.services.commandline.experiments import experiment
from semantide.services.commandline.jobs import AsJson, Wait, finish_job, run_kind
from semantide.services.commandline.overrides import OnCluster, Overrides, Processes, config_of
from semantide.services.commandline.oversight import audit, retention
from semantide.services.commandline.page_report import pages
from semantide.services.commandline.publishing import IfNotWorse, decisions, promote, promotion
from semantide.services.commandline.recommendations import recommend
from semantide.services.commandline.scores import score
from semantide.services.commandline.simulation import abtest, simulate
from semantide.shared.api_keys import own_key
from semantide.shared.config import Settings
from semantide.shared.errors import SemantideError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Generative recommendation: ingest, spell items as semantic ids, train, evaluate, serve.",
)
app.add_typer(jobs.app, name="jobs")
app.add_typer(variants.app, name="variants")
app.add_typer(users.app, name="users")
app.command()(recommend)
app.command()(score)
app.command()(promote)
app.command()(decisions)
app.command()(jobs.report)
app.command()(pages)
app.command()(experiment)
app.command()(simulate)
app.command()(abtest)
app.command()(rewards.reward)
app.command()(align)
app.command()(audit)
app.command()(retention)
for process in (processes.worker, processes.api, processes.pod, processes.replica, processes.route):
    app.command()(process)

_REJECTS_SHOWN = 5


@app.command()
def up(
    port: Annotated[int | None, typer.Option(help="TCP port of the APIs")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; beyond loopback SEMANTIDE_API_KEYS must be set")] = None,
) -> None:
    """Start everything on this machine: broker, workers, all APIs on one port. Ctrl-C ends it."""
    given: dict[str, Any] = {name: value for name, value in (("port", port), ("host", host)) if value is not None}
    settings = Settings(**given)
    running = stack.Stack(settings, lambda text: display.problems.print(text, highlight=False))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: running.end())
    try:
        running.start()
        display.table("Semantide is up", ["what", "where", "log"], running.places())
        display.console.print(
            f"\nconsole    {running.url}/console\nAPI docs   {running.url}/docs   (any user name, the key as password)\nAPI key    {'from SEMANTIDE_API_KEYS' if settings.api_keys else '`semantide key`'}\ndata       {running.folder}\nCtrl-C ends everything.",
            highlight=False,
        )
        running.watch()
    finally:
        running.stop()
    display.console.print("stopped; nothing is left running")


@app.command()
def down() -> None:
    """Stop the stack that runs in this data folder."""
    settings = Settings()
    stopped = stack.stop_running(settings.data_dir.absolute())
    display.console.print("stopped" if stopped else f"no stack runs in {settings.data_dir.absolute()}")


@app.command()
def status(as_json: AsJson = False) -> None:
    """Show what runs, what is live, what waits."""
    client = Client(Settings())
    try:
        live = client.get("/v1/serving/live")
    except StackError as error:
        live = {"model": None, "note": str(error)}
    state = {"url": client.url, "live": live, "queues": client.get("/v1/queues"), "jobs": client.get("/v1/jobs", limit=10)}
    if as_json:
        display.as_json(state)
        return
    display.console.print(f"stack      {client.url}\nlive model {state['live'].get('model') or 'none yet'}", highlight=False)
    waiting = {name: depth for name, depth in state["queues"]["depths"].items() if depth}
    display.console.print(f"queues     {waiting or 'empty'}; parked messages: {state['queues']['parked'] or 'none'}", highlight=False)
    jobs.show_table(state["jobs"])


@app.command()
def requeue(queue: Annotated[str, typer.Argument(help="Name of a queue, as `semantide status` shows it")]) -> None:
    """Put a queue's parked messages back on it, once their cause is gone."""
    answer = Client(Settings()).post(f"/v1/queues/{queue}/requeue")
    display.console.print(f"{answer['requeued']} messages put back on {queue}", highlight=False)


@app.command()
def key() -> None:
    """Print the API key of the stack in this data folder."""
    settings = Settings()
    found = own_key(settings)
    if not found:
        raise SemantideError(f"no key in {settings.data_dir.absolute()}: `semantide up` makes one, or set SEMANTIDE_API_KEYS")
    sys.stdout.write(found + "\n")


@app.command()
def ingest(
    path: Annotated[Path, typer.Argument(help="A file or folder: CSV, JSON Lines, Parquet, or a known data set's original files")],
    format: Annotated[str | None, typer.Option(help="Name of the reader; left out, it is recognised")] = None,
    overrides: Overrides = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Import items and interactions. Rejected rows are listed in a file, with reasons; then the exit status is 1."""
    if not path.exists():
        raise ValueError(f"{path} does not exist: name a file or a folder")
    client = Client(Settings())
    record, uploaded = client.begin_import(path, **{**config_of(overrides), **({"format": format} if format else {})})
    record = finish_job(client, record, wait=wait, as_json=as_json)
    if not wait:
        return
    client.forget_uploads(uploaded)
    counts = record.result
    if not as_json:
        figures = ", ".join(f"{name} {value:,}" for name, value in counts.items() if isinstance(value, int) and not isinstance(value, bool))
        display.console.print(figures, highlight=False)
    if counts.get("rejected"):
        display.rejections(counts.get("rejects", [])[:_REJECTS_SHOWN])
        display.problems.print(
            f"{counts['rejected']:,} rows were rejected; all with their reasons: {counts['reject_file']} (or GET /v1/imports/{record.id}/rejects)",
            highlight=False,
            markup=False,
        )
        raise typer.Exit(1)


@app.command()
def dataset(seed: int = 0, overrides: Overrides = None, wait: Wait = True, as_json: AsJson = False) -> None:
    """Clean the events, make pages and splits: one data set artifact."""
    record = run_kind(Client(Settings()), "dataset", {}, overrides=overrides, seed=seed, wait=wait, as_json=as_json)
    if wait and not as_json:
        display.console.print(f"{record.result['pages']['verdict']} (`semantide pages`)", highlight=False, markup=False)


@app.command()
def tokenize(
    recipe: str = "",
    dataset: str | None = None,
    vectors: Annotated[
        str | None, typer.Option(help="A trained retriever (models/...): its item vectors take the place of those computed from histories")
    ] = None,
    seed: int = 0,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Spell every item as a semantic id: one catalog artifact, and a report."""
    client = Client(Settings())
    inputs = {"dataset": dataset or client.latest("dataset", "dataset"), "vectors": vectors}
    record = run_kind(client, "tokenize", inputs, recipe=recipe, overrides=overrides, seed=seed, cluster=cluster, wait=wait, as_json=as_json)
    if wait and not as_json:
        _tokenizer_report(record.result)


def _tokenizer_report(result: dict[str, Any]) -> None:
    for line in result["report"]["summary"]:
        display.console.print(line, highlight=False, markup=False)


@app.command()
def negatives(
    model: Annotated[str | None, typer.Option(help="A generator or a retriever; left out, the newest generator of the catalog's tokenizer")] = None,
    dataset: str | None = None,
    catalog: str | None = None,
    seed: int = 0,
    epochs: Annotated[int | None, typer.Option(help="Draw the shards of so many epochs instead, by the mixture --set mix='{\"popularity\": 64}'")] = None,
    beams: Annotated[str | None, typer.Option(help="With --epochs: searched beams that the mixture takes some from")] = None,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Search a generator's beams, or a retriever's best items, over all training histories: hard negatives for `semantide train --beams`. With --epochs,
    draw all negatives of a run ahead of it."""
    client = Client(Settings())
    inputs = {"dataset": dataset or client.latest("dataset", "dataset"), "catalog": catalog, "model": model, "beams": beams}
    record = run_kind(client, "negatives", inputs, overrides=overrides, seed=seed, cluster=cluster, wait=wait, as_json=as_json, epochs=epochs)
    if wait and not as_json:
        display.console.print(json.dumps(record.result), highlight=False)


@app.command()
def train(
    recipe: str = "tiny",
    dataset: str | None = None,
    catalog: str | None = None,
    seed: int = 0,
    beams: Annotated[str | None, typer.Option(help="What `semantide negatives` has searched, for a retriever's hard negatives")] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Make it live when it is done")] = False,
    if_not_worse: IfNotWorse = False,
    processes: Processes = None,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Train a model: recipe tiny, small, base (generator), pagewise and pointwise (generator by pages), pretrained (goes on from a Qwen checkpoint: --set checkpoint=FOLDER), sasrec (baseline),
    retriever-SIZE or fuxi-SIZE (HSTU or FuXi-alpha over item ids; SIZE is tiny, small, medium, large or long)."""
    client = Client(Settings())
    inputs = {"dataset": dataset or client.latest("dataset", "dataset"), "catalog": catalog, "beams": beams}
    if not recipe.startswith(NO_GENERATORS):
        inputs["catalog"] = catalog or client.current_catalog()
    record = run_kind(
        client,
        "train",
        inputs,
        recipe=recipe,
        overrides=overrides,
        seed=seed,
        cluster=cluster,
        wait=wait,
        as_json=as_json,
        promote=promotion(promote, if_not_worse),
        processes=processes,
    )
    if wait and not as_json:
        display.console.print(json.dumps(record.result), highlight=False)


@app.command()
def evaluate(
    model: str | None = None,
    baseline: Annotated[str | None, typer.Option(help="A second model beside it, such as SASRec")] = None,
    retriever: Annotated[str | None, typer.Option(help="A retriever beside it")] = None,
    against: Annotated[
        str | None, typer.Option(help="Judge the model against this one instead, user by user: whether it loses no more than --set bounds='{\"hr@50\": 0.02}'")
    ] = None,
    logged: Annotated[
        str | None,
        typer.Option(
            help="Ask the log instead what the models would have earned: `places`, at each place behind what was shown, or `pages` of their own. For data sets with split=temporal"
        ),
    ] = None,
    weights: Annotated[str, typer.Option(help="bfloat16 or int8: measure the generator in that form too, to see what it costs")] = "float32",
    dataset: str | None = None,
    catalog: str | None = None,
    seed: int = 0,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    wait: Wait = True,
    as_json: AsJson = False,
) -> None:
    """Rank the whole catalog for every test user: Recall, NDCG, MRR at k and coverage, beside popularity and a baseline."""
    client = Client(Settings())
    model = model or client.latest_generator()
    made_from = client.get(f"/v1/artifacts/{model}")["inputs"]
    inputs = {
        "model": model,
        "dataset": dataset or made_from.get("dataset") or client.latest("dataset", "dataset"),
        "catalog": catalog or made_from.get("catalog") or client.current_catalog(),
        "baseline": baseline,
        "retriever": retriever,
        "live": against,
    }
    record = run_kind(
        client,
        "evaluate",
        inputs,
        overrides=overrides,
        seed=seed,
        cluster=cluster,
        wait=wait,
        as_json=as_json,
        bounds=Settings().promotion_bounds if against and not logged and "bounds" not in config_of(overrides) else None,
        weights=weights if weights != "float32" else None,
        logged=logged,
    )
    if wait and not as_json:
        display.evaluation(record.result)


@app.command()
def rollback(as_json: AsJson = False) -> None:
    """Make the previously live model live again."""
    answer = Client(Settings()).post("/v1/serving/rollback")
    display.as_json(answer) if as_json else display.console.print(f"live: {answer.get('model')} with {answer.get('catalog')}", highlight=False)


@app.command()
def artifacts(kind: Annotated[str | None, typer.Argument(help="datasets, catalogs, models, items")] = None) -> None:
    """List what was made."""
    for ref in Client(Settings()).get("/v1/artifacts", kind=kind):
        sys.stdout.write(f"{ref}\n")


@app.command()
def demo(
    dataset: Annotated[str, typer.Option(help="kuairand (carried by the repository) or ml-100k (fetched)")] = "kuairand",
    seed: int = 0,
    running: Annotated[
        bool, typer.Option("--running", help="On the stack that runs (SEMANTIDE_URL, or this data folder's) instead of one of the demo's own")
    ] = False,
) -> None:
    """Run the whole loop on real data and show what comes out."""
    from semantide.services.commandline.demo import run_demo

    run_demo(dataset, seed, running=running)


@app.command()
def version() -> None:
    """Print the version."""
    sys.stdout.write(package_version("semantide") + "\n")


def run() -> None:
    """The console script: errors of ours become one line and a status."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        if error.title == "Settings":
            name = f"SEMANTIDE_{name.upper().removeprefix('SEMANTIDE_')}"
        problems = f"{name}: {first['msg']} (got {str(first.get('input'))[:80]!r})"
        display.problems.print(f"[red]error[/red] {problems}", highlight=False)
        sys.exit(2)
    except (SemantideError, ValueError) as error:
        display.problems.print("[red]error[/red] ", end="")
        display.problems.print(str(error), highlight=False, markup=False)
        sys.exit(2 if isinstance(error, ValueError) else 1)


if __name__ == "__main__":
    run()
