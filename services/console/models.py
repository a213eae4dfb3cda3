"""Models: what they are worth and when, promotion and rollback, splits with their confidence intervals, and what alignment runs did."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from nicegui import ui

from semantide.services.console.answers import Refused, Stack, all_of, known
from semantide.services.console.frame import card, note, permitted, picture, refusal, told
from semantide.services.console.intervals import Interval, intervals_picture, scatter_picture
from semantide.services.console.tables import Cell, Table, table
from semantide.services.console.words import ago, count, figure, share, short

_ALIGNMENTS = 4
_SHOWN = 40


def quality(card_of: Mapping[str, Any]) -> dict[str, float]:
    """A model's own figures on held-out users, by name, whatever its kind calls them."""
    found: dict[str, float] = {}

    def walk(values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, Mapping):
                walk(value)
            elif "@" in name and isinstance(value, int | float) and not isinstance(value, bool):
                found.setdefault(name, float(value))

    walk(card_of.get("metrics") or {})
    return found


def evaluations(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rankings of all evaluations, newest first, a row each."""
    return [
        {
            "job": job["id"],
            "finished": job["finished"],
            "part": job["result"].get("part", ""),
            **row,
            "ref": row.get("ref"),
        }
        for job in jobs
        for row in job["result"].get("rows", [])
    ]


def alignment_points(rows: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """(hit rate, reward) of the held-out users, test after test."""
    return [(row["held_out_hr@50"], row["held_out_reward"]) for row in rows if "held_out_hr@50" in row and "held_out_reward" in row]


def lifts(report: Mapping[str, Any], reward: str) -> list[Interval]:
    """What each variant earns a request, by the estimate that corrects for draws."""
    found = []
    for variant in report["variants"]:
        estimates = variant["rewards"][reward]
        best = estimates["mean"]
        if all(best[name] is not None for name in ("value", "low", "high")):
            found.append(Interval(variant["name"], best["value"], best["low"], best["high"]))
    return found


async def show(stack: Stack) -> None:
    """Everything about models."""
    with card("Live"):
        now_live = Table(
            "What answers now",
            ["side", "model", "catalog", "share of users", "loaded"],
            numbers=["share of users"],
            empty="No model is live: promote one below.",
        )
        with ui.element("div").classes("line"):
            why = ui.input("Reason").props("outlined dense")
            back = ui.button("Roll back").props("no-caps outline color=negative")
        may_roll = permitted(stack, "POST", "/v1/serving/rollback", why, back)
        beside = note("")
    with card("Models"):
        may_promote = permitted(stack, "POST", "/v1/serving/promote")
        models = ui.element("div")
    with ui.element("div").classes("grid"):
        with card("Split users"):
            offer = _splits(stack, lambda: fill())
        with card("A/B"):
            trials = ui.element("div")
    with card("Evaluations"):
        judged = Table(
            "Rankings of held-out users, newest first",
            ["evaluation", "when", "ranking", "seen left out", "part", "recall@10", "ndcg@10", "recall@50", "ndcg@50"],
            numbers=["recall@10", "ndcg@10", "recall@50", "ndcg@50"],
        )
    with card("Alignment runs"):
        aligned = ui.element("div")
    with card("Decisions"):
        decided = Table("Promotions, rollbacks, splits, candidates held back, newest first", ["when", "what", "model", "reason"])

    async def fill() -> None:
        live, split, cards, candidates, decisions, jobs = await asyncio.gather(
            *(known(stack, path) for path in ("/v1/serving/live", "/v1/serving/variants", "/v1/models", "/v1/serving/candidates", "/v1/serving/decisions")),
            stack.get("/v1/jobs", state="succeeded", limit=200),
        )
        now, variants = time.time(), (split or {}).get("variants", [])
        now_live.show(
            [
                (
                    side["name"],
                    [side["name"], short(side["model"]), short(side["catalog"]), share(side["share"]), "yes" if side["loaded"] else side["error"] or "not yet"],
                )
                for side in variants
            ]
        )
        back.set_enabled(may_roll and bool(live and live["previous"]))
        second = f"Second source: {short(live['retriever'])}." if live and live["retriever"] else "There is no retriever as second source."
        beside.set_text(second)
        made = {ref: job for job in reversed(jobs) for ref in job["artifacts"].values()}
        models.clear()
        with models:
            _models(
                cards or [],
                made,
                {side["model"] for side in variants} | {(live or {}).get("retriever")},
                (candidates or {}).get("candidates", []),
                now,
                partial(_promotion, promote=promote, may=may_promote),
            )
        offer(cards or [], variants)
        rows = evaluations([job for job in jobs if job["spec"]["kind"] == "evaluate"])
        judged.show([(f"{place}", _evaluation(row, now)) for place, row in enumerate(rows[:_SHOWN])])
        decided.show([(f"{decision['time']}", _decision(decision, now)) for decision in reversed((decisions or {}).get("decisions", [])[-_SHOWN:])])

    async def promote(model: str, if_not_worse: bool) -> None:
        async def act() -> str:
            answer = await stack.send(
                "POST",
                "/v1/serving/promote",
                {"model": model, "if_not_worse": if_not_worse, "reason": why.value or "", "force": True}
                if not if_not_worse
                else {"model": model, "if_not_worse": True, "reason": why.value or ""},
            )
            await fill()
            return f"Job {answer['judging']} judges it first." if answer["judging"] else f"{short(model)} is live."

        await told(act)

    async def roll() -> None:
        async def act() -> str:
            answer = await stack.send("POST", "/v1/serving/rollback", {"reason": why.value or ""})
            await fill()
            return f"{short(answer['model'])} is live again."

        await told(act)

    back.on_click(roll)
    await fill()
    with trials:
        await _trials(stack)
    with aligned:
        await _alignments(stack)


def _models(cards: list[Any], made: Mapping[str, Any], live: set[Any], candidates: Sequence[Mapping[str, Any]], now: float, offer: Any) -> None:
    waiting = {candidate["model"] for candidate in candidates if not candidate["promoted"]}
    names = sorted({name for each in cards for name in quality(each)}, key=lambda name: (name.partition("@")[0], int(name.partition("@")[2] or 0)))[:4]
    newest = sorted(cards, key=lambda each: -((made.get(each["model"]) or {}).get("finished") or 0))[:_SHOWN]
    rows: list[list[Cell]] = []
    for each in newest:
        figures, ref = quality(each), each["model"]
        state = "live" if ref in live else "candidate" if ref in waiting else ""
        act: Cell = "" if ref in live or each.get("model_type") == "sasrec" else partial(offer, ref)
        when = ago((made.get(ref) or {}).get("finished"), now)
        rows.append([short(ref), each.get("model_type", "-"), each.get("recipe", "-"), state, when, *(figure(figures.get(name)) for name in names), act])
    table("Trained models, newest first; figures on held-out users", ["model", "type", "recipe", "state", "made", *names, "promote"], rows, numbers=names)


def _promotion(model: str, promote: Any, may: bool) -> None:
    with ui.element("div").classes("line"):
        for name, look, label, if_not_worse in (("Promote", "outline", "", False), ("If not worse", "flat", " if it is not worse", True)):
            button = ui.button(name, on_click=partial(promote, model, if_not_worse)).props(f'no-caps dense {look} aria-label="Promote {short(model)}{label}"')
            button.set_enabled(may)


def _splits(stack: Stack, fill: Callable[[], Awaitable[None]]) -> Callable[[list[Any], Sequence[Mapping[str, Any]]], None]:
    """The form; what is returned tells it which models and variants there are, and leaves what was filled in."""
    others: list[dict[str, Any]] = []
    note("Some of the users are answered by another model; the live one keeps the rest.")
    with ui.element("div").classes("line"):
        name = ui.input("Name of the variant", value="challenger").props("outlined dense")
        model = ui.select({}, label="Model").props("outlined dense")
        part = ui.number("Share of users, %", value=10, min=0, max=100).props("outlined dense")

    async def put(wanted: list[dict[str, Any]], said: str) -> None:
        async def act() -> str:
            await stack.send("PUT", "/v1/serving/variants", {"variants": wanted, "force": True})
            await fill()
            return said

        await told(act)

    async def begin() -> None:
        if not model.value or not name.value:
            ui.notify("Choose a model, and a name for the variant.", type="warning")
            return
        kept = [side for side in others if side["name"] != name.value]
        await put(
            [*kept, {"name": name.value, "model": model.value, "share": float(part.value or 0) / 100}], f"{name.value} answers {part.value:g} % of the users."
        )

    with ui.element("div").classes("line"):
        start = ui.button("Begin or change", on_click=begin).props("no-caps outline")
        end = ui.button("End the split", on_click=lambda: put([], "The live model answers everybody.")).props("no-caps flat")

    may = permitted(stack, "PUT", "/v1/serving/variants", name, model, part, start)

    def update(cards: list[Any], variants: Sequence[Mapping[str, Any]]) -> None:
        options = {each["model"]: f"{short(each['model'])} ({each.get('recipe', '-')})" for each in cards if each.get("model_type") == "generator"}
        if model.options != options:
            model.set_options(options, value=model.value if model.value in options else None)
        others[:] = [{key: side[key] for key in ("name", "model", "catalog", "share")} for side in variants if side["name"] != "live"]
        end.set_enabled(may and bool(others))

    return update


def _evaluation(row: Mapping[str, Any], now: float) -> list[Cell]:
    metrics = row["metrics"]
    name = row["model"] + (f" {short(row['ref'])}" if row["ref"] else "")
    figures = [figure(metrics.get(metric)) for metric in ("recall@10", "ndcg@10", "recall@50", "ndcg@50")]
    return [row["job"], ago(row["finished"], now), name, "yes" if row["exclude_seen"] else "no", row["part"], *figures]


def _decision(decision: Mapping[str, Any], now: float) -> list[Cell]:
    shares = ", ".join(f"{name} {share(part)}" for name, part in decision["shares"].items())
    return [
        ago(decision["time"], now),
        decision["action"] + (", forced" if decision["forced"] else ""),
        shares or short(decision["model"]),
        decision["reason"] or "-",
    ]


async def _trials(stack: Stack) -> None:
    try:
        report = await known(stack, "/v1/experiments")
    except Refused as error:
        note("There is nothing to compare yet.")
        refusal(error)
        return
    if not report or not report["variants"]:
        note("No answers of variants were told of as shown in the last two weeks: begin a split, and send what people did with the request id of the answer.")
        return
    note(f"{count(report['users'])} users, {count(report['requests'])} requests, against {report['base']}; intervals hold in 95 of 100 experiments.")
    for warning in report["warnings"]:
        note(warning, "warn")
    for reward in report["variants"][0]["rewards"]:
        if rows := lifts(report, reward):
            picture(intervals_picture(f"{reward} a request", rows))
    head = ["variant", "users", "requests", "reward", "against the base", "beyond noise"]
    table("Estimates", head, _estimates(report), numbers=["users", "requests"])


def _estimates(report: Mapping[str, Any]) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    for variant in report["variants"]:
        for reward, estimates in variant["rewards"].items():
            lift = estimates["mean"].get("lift")
            against = f"{figure(lift['value'])} ({figure(lift['low'])} to {figure(lift['high'])})" if lift else "the base"
            rows.append([variant["name"], count(variant["users"]), count(variant["requests"]), reward, against, figure(lift["beyond_noise"]) if lift else "-"])
    return rows


async def _alignments(stack: Stack) -> None:
    runs = await stack.get("/v1/jobs", kind="align", limit=_ALIGNMENTS)
    metrics = await all_of(stack, "/v1/jobs/{}/metrics", [run["id"] for run in runs])
    points = {name: found for name, rows in metrics.items() if (found := alignment_points(rows))}
    if not points:
        note("No alignment run has been tested yet: semantide align begins one.")
        return
    picture(scatter_picture("Reward against hit rate of held-out users", "hit rate at 50", "reward", points))
