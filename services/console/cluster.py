"""Cluster: nodes and NPUs with what runs on them, the line with its reasons, and services."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from semantide.services.console.answers import Stack
from semantide.services.console.frame import card, live, note, picture
from semantide.services.console.tables import Cell, Table
from semantide.services.console.words import figure, lasting
from semantide.shared.plots import COLOURS

EVERY_SECONDS = 5.0
_NODES_SHOWN = 200


def node_rows(nodes: Sequence[Mapping[str, Any]]) -> str:
    """Every node as a line of its NPUs, coloured by who holds them."""
    holders = sorted({npu["holder"] for node in nodes for npu in node["npus"] if npu["holder"]})
    colour = {holder: COLOURS[place % (len(COLOURS) - 1)] for place, holder in enumerate(holders)}
    rows = []
    for node in nodes[:_NODES_SHOWN]:
        boxes = []
        for npu in node["npus"]:
            fill = colour[npu["holder"]] if npu["holder"] else "none"
            said = f"NPU {npu['index']}: {npu['holder'] or 'free'}{'' if npu['healthy'] else ', unhealthy'}"
            mark = '<path d="M3 3L15 15M15 3L3 15" stroke="var(--bad)" stroke-width="2"/>' if not npu["healthy"] else ""
            boxes.append(
                f'<g transform="translate({npu["index"] * 22 + npu["ring"] * 8},0)"><rect width="18" height="18" rx="3" fill="{fill}" stroke="var(--soft)"/>{mark}<title>{escape(said)}</title></g>'
            )
        width = max((npu["index"] * 22 + npu["ring"] * 8 + 20 for npu in node["npus"]), default=1)
        free = sum(npu["healthy"] and not npu["holder"] for npu in node["npus"])
        facts = [f"{free} of {len(node['npus'])} NPUs free" if node["npus"] else "no NPUs", *node["work"]]
        facts += [
            text
            for text in (node["unusable"], "gone" if node["gone"] else "", f"{node['slow']:.2f} times the step time" if node["slow"] > 1.05 else "")
            if text
        ]
        svg = (
            f'<svg viewBox="0 0 {width} 20" style="width:{width}px;max-width:none" role="img" aria-label="{escape("NPUs of " + node["name"])}">{"".join(boxes)}</svg>'
            if node["npus"]
            else ""
        )
        rows.append(f'<tr><th scope="row">{escape(node["name"])}</th><td>{svg}</td><td>{escape("; ".join(facts))}</td></tr>')
    keys = "".join(f'<span class="key" style="background:{colour[holder]}"></span>{escape(holder)}' for holder in holders)
    more = f'<p class="note">and {len(nodes) - _NODES_SHOWN} nodes more</p>' if len(nodes) > _NODES_SHOWN else ""
    return f'<p class="note">{keys}</p><div class="scroll"><table><caption>Nodes</caption><tbody>{"".join(rows)}</tbody></table></div>{more}'


def job_rows(jobs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Cell]]]:
    """Who waits first, in the order of the line, then who runs."""
    return [
        (
            job["name"],
            [
                job["name"],
                job["phase"],
                str(job["priority"]),
                lasting(job["waits_seconds"]) if job["waits_seconds"] is not None else "-",
                ", ".join(job["nodes"]) or "-",
                job["message"] or "-",
            ],
        )
        for job in jobs
    ]


async def show(stack: Stack) -> None:
    """The cluster, or that there is none."""
    first = await stack.get("/v1/cluster")
    if not first["configured"]:
        with card():
            note("This stack runs on one machine: its jobs are processes here, under Jobs.")
            note("On Kubernetes this page shows nodes and NPUs as the operator sees them; SEMANTIDE_OPERATOR_URL says where its page is.")
        return
    with card("Nodes and NPUs"):
        silent = note("").props('role="status"')
        nodes = picture("")
    with card("Jobs"):
        jobs = Table(
            "Those that wait stand first, with the reason", ["job", "phase", "priority", "waits", "on", "why"], numbers=["priority"], empty="No NPUJobs."
        )
    with card("Services"):
        services = Table("Replicas", ["service", "phase", "ready", "asked for", "on", "what it says"], numbers=["ready", "asked for"], empty="No NPUServices.")

    async def refresh() -> None:
        seen = await stack.get("/v1/cluster")
        silent.set_text("" if seen["time"] else "The operator that answers does not lead, or has not looked yet.")
        nodes.set_content(node_rows(seen["nodes"]))
        jobs.show(job_rows(seen["jobs"]))
        services.show(
            [
                (one["name"], [one["name"], one["phase"], figure(one["ready"]), figure(one["replicas"]), ", ".join(one["nodes"]) or "-", one["message"] or "-"])
                for one in seen["services"]
            ]
        )

    await live(refresh, EVERY_SECONDS)
