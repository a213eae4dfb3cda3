"""``semantide jobs``: long work, and what the other commands need to run it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from semantide.services.commandline import display
from semantide.services.commandline.client import Client
from semantide.services.commandline.overrides import config_of, wish_of
from semantide.shared.config import Settings
from semantide.shared.contracts import JobRecord, JobSpec

app = typer.Typer(no_args_is_help=True, help="Long work: list, show, cancel, resume, read logs.")

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Follow the job until it ends")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the answer as JSON")]


def finish_job(client: Client, record: JobRecord, *, wait: bool = True, as_json: bool = False) -> JobRecord:
    """Follow a submitted job, report; one that did not succeed ends the command with status 1."""
    if not wait:
        display.as_json(record.model_dump(mode="json")) if as_json else display.console.print(
            f"job {record.id} is {record.state}: `semantide jobs show {record.id}`"
        )
        return record
    record = display.follow(client, record)
    if as_json:
        display.as_json(record.model_dump(mode="json"))
    if record.state != "succeeded":
        display.problems.print(f"[red]{record.id} {record.state}[/red]: {record.error}", highlight=False)
        raise typer.Exit(1)
    if not as_json:
        made = ", ".join(f"{name} {ref}" for name, ref in record.artifacts.items())
        display.console.print(f"{record.spec.kind} done in {display.seconds(record):.1f} s{': ' + made if made else ''}", highlight=False)
    return record


def run_kind(
    client: Client,
    kind: str,
    inputs: Mapping[str, str | None],
    *,
    recipe: str = "",
    overrides: list[str] | None = None,
    seed: int = 0,
    cluster: list[str] | None = None,
    wait: bool = True,
    as_json: bool = False,
    **said: Any,
) -> JobRecord:
    """Run a job as the options of a verb say; ``said`` are fields of its configuration that have options of their own. What is None was left out."""
    spec = {
        "kind": kind,
        "recipe": recipe,
        "config": config_of(overrides) | {name: value for name, value in said.items() if value is not None},
        "inputs": {name: ref for name, ref in inputs.items() if ref is not None},
        "seed": seed,
        "cluster": wish_of(cluster),
    }
    return finish_job(client, client.submit(JobSpec.model_validate(spec)), wait=wait, as_json=as_json)


def show_table(records: list[dict[str, Any]]) -> None:
    """Print job records, given as the API answers them."""
    rows = []
    for raw in records:
        record = JobRecord.model_validate(raw)
        share = f"{100 * record.done / record.total:.0f} %" if record.total else ""
        rows.append([record.id, record.spec.recipe, record.state, share, record.stage, (record.error or "")[:80]])
    display.table("Jobs, newest first", ["job", "recipe", "state", "done", "stage", "error"], rows)


@app.command("list")
def list_jobs(kind: str | None = None, state: str | None = None, limit: int = 20, as_json: AsJson = False) -> None:
    """List jobs, newest first."""
    records = Client(Settings()).get("/v1/jobs", kind=kind, state=state, limit=limit)
    display.as_json(records) if as_json else show_table(records)


@app.command("show")
def show_job(job_id: str, metrics: Annotated[bool, typer.Option("--metrics", help="Add all metric rows")] = False) -> None:
    """Show one job as JSON."""
    client = Client(Settings())
    record = client.get(f"/v1/jobs/{job_id}")
    if metrics:
        record["metrics"] = client.get(f"/v1/jobs/{job_id}/metrics")
    display.as_json(record)


@app.command("wait")
def wait_for_job(job_id: str) -> None:
    """Follow a job until it ends; status 1 when it did not succeed."""
    client = Client(Settings())
    record = display.follow(client, client.job(job_id))
    display.console.print(f"{record.id} {record.state}{': ' + record.error if record.error else ''}", highlight=False)
    if record.state != "succeeded":
        raise typer.Exit(1)


@app.command("cancel")
def cancel_job(job_id: str) -> None:
    """Ask a job to stop; its checkpoint stays."""
    display.console.print(f"{job_id}: {Client(Settings()).post(f'/v1/jobs/{job_id}/cancel')['state']}, stop requested", highlight=False)


@app.command("resume")
def resume_job(job_id: str, wait: Wait = True) -> None:
    """Go on with a failed or cancelled job from its last checkpoint."""
    client = Client(Settings())
    record = JobRecord.model_validate(client.post(f"/v1/jobs/{job_id}/resume"))
    if wait and (record := display.follow(client, record)).state != "succeeded":
        display.problems.print(f"{record.id} {record.state}: {record.error}", highlight=False)
        raise typer.Exit(1)


@app.command("log")
def job_log(job_id: str) -> None:
    """Print the end of a job's log."""
    sys.stdout.write(Client(Settings()).get(f"/v1/jobs/{job_id}/log")["log"])


def report(
    job_id: Annotated[str, typer.Argument(metavar="JOB", help="As `semantide jobs list` shows it")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; JOB.html by default, `-` for the standard output")] = None,
) -> None:
    """Write a job's report: one HTML page with its plots, that needs nothing but itself."""
    text = str(Client(Settings()).get(f"/v1/jobs/{job_id}/report"))
    if output == Path("-"):
        sys.stdout.write(text)
        return
    path = output or Path(f"{job_id}.html")
    path.write_text(text, encoding="utf-8")
    display.console.print(f"wrote {path}", highlight=False)
