"""The A/B report: right whatever shares were, with what came back by request id."""

import json
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest
from fastapi.testclient import TestClient

from semantide.services.ingestion import api
from semantide.services.ingestion.eventlog import EventLog
from semantide.services.ingestion.experimentlog import read_experiment
from semantide.services.ingestion.experiments import COLUMNS, report
from semantide.services.ingestion.manifest import Manifest
from semantide.services.ingestion.rows import interaction_table
from semantide.services.ingestion.shown import joined
from semantide.services.ingestion.stream import Entry
from semantide.services.ingestion.tasks import Consumer
from semantide.shared.contracts import Interaction
from semantide.shared.http import build_app
from semantide.shared.shown_lists import ShownList, ShownLists

ACTIONS = {"exposure": 0.0, "click": 1.0, "order": 3.0, "hate": -1.0}
NOW = int(time.time() * 1000)
DAY = 86_400_000
PAST = pl.DataFrame(schema={"user": pl.String(), "action": pl.String()})


def world(seed: int, users: int, rates: dict[str, float], ramp: tuple[float, float] = (0.5, 0.5)) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Requests of people who differ much from each other; in the second half, when everybody clicks twice as much, the challenger has another share."""
    rng = np.random.default_rng(seed)
    eager, side = rng.gamma(2.0, 0.5, users), rng.random(users)
    rows: list[tuple[Any, ...]] = []
    for user in range(users):
        for number in range(4):
            share = ramp[number // 2]
            variant = "challenger" if side[user] < share else "live"
            request = f"r{user}-{number}"
            rows.append((f"u{user}", "shown", 1000 + number, "exposure", None, request, 1.0, variant, share if variant == "challenger" else 1 - share))
            for item in range(rng.poisson(eager[user] * rates[variant] * (1 + number // 2))):
                rows.append((f"u{user}", f"i{item}", 1000 + number, "click", ["order"] if item == 0 else None, request, None, *rows[-1][-2:]))
    past = [(f"u{user}", "click") for user in range(users) for _ in range(rng.poisson(8 * eager[user]))]
    schema = {"signals": pl.List(pl.String), "propensity": pl.Float64}
    return pl.DataFrame(rows, schema=list(COLUMNS), schema_overrides=schema, orient="row"), pl.DataFrame(past, schema=["user", "action"], orient="row")


def test_estimates_hold_the_truth_while_shares_change_and_the_plain_mean_does_not() -> None:
    rates, truth = {"live": 1.0, "challenger": 1.2}, {"live": 1.5, "challenger": 1.8}
    held, biased, widths = [], [], []
    for seed in range(30):
        found = {one.name: one.rewards["clicks"] for one in report(*world(seed, 250, rates, (0.2, 0.7)), ACTIONS).variants}
        for name, value in truth.items():
            held += [found[name][kind]["low"] <= value <= found[name][kind]["high"] for kind in ("ips", "snips", "doubly_robust")]
        biased.append(found["challenger"]["mean"]["low"] <= truth["challenger"] <= found["challenger"]["mean"]["high"])
        widths.append([found["live"][kind]["high"] - found["live"][kind]["low"] for kind in ("snips", "doubly_robust")])
    assert np.mean(held) > 0.88 and np.mean(biased) < 0.8
    snips_width, robust_width = np.mean(widths, 0)
    assert robust_width < 0.95 * snips_width, "what people did before says something"


def test_a_better_variant_is_found_and_an_equal_one_is_not() -> None:
    better = report(*world(1, 800, {"live": 1.0, "challenger": 1.4}), ACTIONS).variants
    assert [one.name for one in better] == ["live", "challenger"]
    assert better[1].rewards["clicks"]["snips"]["lift"]["beyond_noise"] and better[1].rewards["clicks"]["snips"]["lift"]["value"] == pytest.approx(0.4, abs=0.2)
    noise = [report(*world(seed, 150, {"live": 1.0, "challenger": 1.0}), ACTIONS).variants[1] for seed in range(40)]
    for kind in ("mean", "ips", "snips", "doubly_robust"):
        assert np.mean([one.rewards["clicks"][kind]["lift"]["beyond_noise"] for one in noise]) < 0.18


def test_orders_and_signals_count_once_an_item() -> None:
    rows = [
        ("u", "a", 1, "exposure", None, "r", 1.0, "live", 1.0),
        ("u", "a", 2, "click", None, "r", 1.0, "live", 1.0),
        ("u", "a", 3, "order", None, "r", 1.0, "live", 1.0),
        ("u", "b", 4, "click", ["order"], "r", 0.5, "live", 1.0),
        ("u", "c", 4, "hate", None, "r", 1.0, "live", 1.0),
        ("v", "c", 4, "exposure", None, "s", 1.0, "live", 1.0),
        ("v", "c", 4, "gone", None, "s", 1.0, "live", 1.0),
        ("w", "c", 4, "click", None, "t", 1.0, "challenger", None),
    ]
    events = pl.DataFrame(rows, schema=list(COLUMNS), schema_overrides={"signals": pl.List(pl.String)}, orient="row")
    found = report(events, pl.DataFrame(schema={"user": pl.String, "action": pl.String}), ACTIONS)
    (live,) = found.variants
    assert live.rewards["clicks"]["mean"]["value"] == 1.0 and live.rewards["orders"]["mean"]["value"] == 1.0
    assert (live.users, live.requests, live.exposures) == (2, 2, 2) and live.drawn == pytest.approx(1 / 7)
    assert any("named their variant" in warning for warning in found.warnings)
    json.dumps(found.as_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="answered nobody"):
        report(events, events.select("user", "action").clear(), ACTIONS, base="other")


def test_requests_of_no_share_are_left_out_and_counted() -> None:
    events, past = world(2, 200, {"live": 1.0, "challenger": 1.2})
    rows = [("z", "a", 1, "click", None, f"z{number}", 1.0, "live", share) for number, share in enumerate((0.0, -0.5, 1.5, float("nan")))]
    wrong = pl.DataFrame(rows, schema=events.schema, orient="row")
    found, clean = report(pl.concat([events, wrong]), past, ACTIONS), report(events, past, ACTIONS)
    assert found.variants == clean.variants and found.requests == clean.requests
    assert [warning for warning in found.warnings if warning.startswith("4 requests have a share that is not above 0")] and len(found.warnings) == len(
        clean.warnings
    ) + 1


def test_nothing_at_all_is_said_plainly() -> None:
    empty = pl.DataFrame(
        schema=dict.fromkeys(COLUMNS, pl.String) | {"signals": pl.List(pl.String), "time": pl.Int64, "propensity": pl.Float64, "variant_share": pl.Float64}
    )
    found = report(empty, empty.select("user", "action"), ACTIONS)
    assert not found.variants and "semantide variants set" in found.warnings[0]


SHOWN = ShownList("r1", ("a", "b"), (1.0, 0.05), "challenger", 0.25)


def _entry(*rows: Interaction) -> Entry:
    return Entry("1-0", "interactions", interaction_table(rows))


def test_rows_get_what_is_known_of_their_request_and_keep_what_was_said() -> None:
    entry = _entry(
        Interaction(user="u", item="b", time=NOW, request_id="r1"),
        Interaction(user="u", item="c", time=NOW, request_id="r1", position=7),
        Interaction(user="u", item="a", time=NOW, request_id="r1", position=3, page="mine"),
        Interaction(user="u", item="a", time=NOW, request_id="unknown"),
        Interaction(user="u", item="a", time=NOW),
    )
    (found,) = joined([entry], lambda ids: {"r1": SHOWN})
    columns = ("page", "position", "propensity", "variant", "variant_share")
    assert list(zip(*(found.table[name].to_pylist() for name in columns), strict=True)) == [
        ("r1", 1, 0.05, "challenger", 0.25),
        ("r1", 7, None, "challenger", 0.25),
        ("mine", 3, 1.0, "challenger", 0.25),
        ("unknown", None, None, None, None),
        (None, None, None, None, None),
    ]
    plain = _entry(Interaction(user="u", item="a", time=NOW))
    assert joined([plain], lambda ids: pytest.fail("nothing to look up")) == [plain]


def test_feedback_comes_back_by_request_id_and_is_reported(make_room: Any, broker: Any) -> None:
    room = make_room("ingestion")
    lists = ShownLists(broker, 100, 1 << 20)
    lists.keep([ShownList(f"r{user}", ("a", "b"), (1.0, 1.0), "live" if user % 2 else "challenger", 0.5) for user in range(40)])
    with TestClient(build_app([room], [api.build(room)]), headers={"X-API-Key": "test-key"}) as client:
        rows = [{"user": f"u{user}", "item": item, "time": NOW - 5000, "action": "exposure", "request_id": f"r{user}"} for user in range(40) for item in "ab"]
        rows += [{"user": f"u{user}", "item": "a", "time": NOW - 4000, "request_id": f"r{user}"} for user in range(0, 40, 4)]
        assert client.post("/v1/interactions", json={"interactions": rows}).status_code == 202
        folder = room.settings.data_dir / "events"
        folder.mkdir(parents=True, exist_ok=True)
        manifest = Manifest(folder)
        consumer = Consumer(room, manifest, min_free_bytes=0, block_ms=10)
        while consumer.step() or broker.xlen("semantide:ingestion:stream"):
            pass
        found = client.get("/v1/experiments").json()
        by_name = {one["name"]: one for one in found["variants"]}
        assert (
            found["requests"] == 40
            and by_name["challenger"]["rewards"]["clicks"]["mean"]["value"] == 0.5
            and by_name["live"]["rewards"]["clicks"]["mean"]["value"] == 0
        )
        assert by_name["live"]["exposures"] == 40 and not found["warnings"]
        for wrong in ({"since": NOW, "until": NOW - 1}, {"since": -1}, {"until": 10**30}, {"since": -(10**30)}, {"before_days": 10**12}, {"before_days": -1}):
            assert client.get("/v1/experiments", params=wrong).status_code == 422, wrong  # type: ignore[arg-type]
        assert client.get("/v1/experiments", params={"base": "nobody"}).status_code == 422
        manifest.close()


def test_what_people_did_before_their_first_request_is_told_apart(tmp_path: Any) -> None:
    manifest = Manifest(tmp_path)
    rows = [
        Interaction(user="u", item="a", time=NOW - 40 * DAY),
        Interaction(user="u", item="a", time=NOW - 5 * DAY),
        Interaction(user="u", item="a", time=NOW - DAY, request_id="r", variant="live", variant_share=1.0),
        Interaction(user="u", item="a", time=NOW - DAY // 2),
        Interaction(user="other", item="a", time=NOW - 5 * DAY),
    ]
    log = EventLog(manifest)
    with manifest.writing():
        log.append(interaction_table(rows))
    events, before = read_experiment(log.segments(), NOW - 14 * DAY, NOW, 28 * DAY)
    assert events.height == 1 and before.rows() == [("u", "click")]
    manifest.close()


def _read(folder: Any, rows: Sequence[Interaction], since: int) -> pl.DataFrame:
    """The rows of variants that a log of these interactions has from a moment until now, each row in a segment of its own."""
    manifest = Manifest(folder)
    log = EventLog(manifest)
    for row in rows:
        with manifest.writing():
            log.append(interaction_table([row]))
    events, _ = read_experiment(log.segments(), since, NOW, 28 * DAY)
    manifest.close()
    return events


@pytest.mark.parametrize("late_first", [False, True])
def test_what_comes_back_after_its_list_has_gone_counts_for_the_variant_of_its_request(tmp_path: Any, late_first: bool) -> None:
    rows = []
    for user in range(8):
        said: dict[str, Any] = {"user": f"u{user}", "item": "a", "request_id": f"r{user}"}
        rows.append(Interaction(**said, time=NOW - 5 * DAY, action="exposure", variant="live" if user % 2 else "challenger", variant_share=0.5))
        rows += [Interaction(**said, time=NOW - 2 * DAY, action="order")] * (user < 2)
    rows.append(Interaction(user="v", item="a", time=NOW - 2 * DAY, action="order", request_id="outside"))
    rows += [
        Interaction(user="w", item="a", time=NOW - 2 * DAY, action="exposure", request_id="named", variant="challenger"),
        Interaction(user="w", item="a", time=NOW - DAY, action="order", request_id="named"),
    ]
    events = _read(tmp_path, rows[::-1] if late_first else rows, NOW - 14 * DAY)
    found = report(events, PAST, ACTIONS)
    assert [(one.name, one.requests, one.rewards["orders"]["mean"]["value"]) for one in found.variants] == [("live", 4, 0.25), ("challenger", 4, 0.25)]
    assert [warning for warning in found.warnings if warning.startswith("1 requests named their variant")]


def test_answers_to_what_was_shown_before_the_time_looked_at_are_no_requests_of_it(tmp_path: Any) -> None:
    rows = []
    for user in range(10):
        said: dict[str, Any] = {"user": f"u{user}", "item": "a", "request_id": f"r{user}", "variant": "live", "variant_share": 1.0}
        rows.append(Interaction(**said, time=NOW - (8 - user % 2 * 4) * DAY, action="exposure"))
        rows += [Interaction(**said, time=NOW - 3 * DAY, action="order")] * (user in (0, 1, 2))
    found = report(_read(tmp_path, rows, NOW - 7 * DAY), PAST, ACTIONS)
    assert [(one.requests, one.rewards["orders"]["mean"]["value"]) for one in found.variants] == [(5, 0.2)]


def test_request_ids_of_several_answers_are_told() -> None:
    events, past = world(3, 50, {"live": 1.0, "challenger": 1.2})
    clean = report(events, past, ACTIONS)
    rows = [(f"z{user}", "a", 1, "click", None, "torn", 1.0, variant, 0.5) for user, variant in enumerate(("live", "challenger"))]
    torn = report(pl.concat([events, pl.DataFrame(rows, schema=events.schema, orient="row")]), past, ACTIONS)
    assert torn.variants == clean.variants and torn.requests == clean.requests
    assert [warning for warning in torn.warnings if warning.startswith("1 request ids are said to be of several variants")]
    again = events.with_columns(request_id=pl.when(pl.col("user").is_in(["u1", "u2"])).then(pl.lit("again")).otherwise("request_id"))
    again = again.with_columns(variant=pl.when(pl.col("request_id") == "again").then(pl.lit("live")).otherwise("variant"))
    assert [warning for warning in report(again, past, ACTIONS).warnings if warning.startswith("1 request ids are named by several users")]
    assert not [warning for warning in clean.warnings if "request ids" in warning]


def test_lists_are_kept_within_their_bytes_and_foreign_ones_are_none(broker: Any) -> None:
    lists = ShownLists(broker, 100, 1000)
    for number in range(30):
        lists.keep([ShownList(f"r{number}", ("item",) * 5, (1.0,) * 5)])
    kept = lists.get(f"r{number}" for number in range(30))
    assert 0 < len(kept) < 15 and "r29" in kept and "r0" not in kept
    assert kept["r29"] == ShownList("r29", ("item",) * 5, (1.0,) * 5)
    broker.set("semantide:shown:default:odd", b"{}")
    assert lists.get(["odd", "never"]) == {}
