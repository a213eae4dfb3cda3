import xml.etree.ElementTree as ElementTree
from math import nan

from hypothesis import given
from hypothesis import strategies as st

from semantide.shared.contracts import JobRecord, JobSpec
from semantide.shared.job_report import Origin, page


def record(**values):
    return JobRecord(id="train-1", spec=JobSpec(kind="train", recipe="tiny", config={"epochs": 2}), **values)


def parsed(text: str) -> ElementTree.Element:
    """As XML, which it is but for the declaration and the two tags that HTML leaves open."""
    return ElementTree.fromstring(text.removeprefix("<!doctype html>").replace('"utf-8">', '"utf-8"/>').replace('scale=1">', 'scale=1"/>'))


def test_page_needs_nothing_but_itself() -> None:
    text = page(record(state="running"), [{"step": step, "loss": 3 - step / 9, "mfu": 0.4, "compute_share": 0.9, "idle_share": 0.1} for step in range(9)])
    assert not any(word in text for word in ("http", "src=", "@import", "<script"))
    found = parsed(text)
    assert len(found.findall(".//svg")) == 3 and len(found.findall(".//polygon")) == 2 and "0.4" in text


def test_what_was_written_by_others_is_text() -> None:
    evil = "<script>alert(1)</script>"
    text = page(record(state="failed", error=evil, stage=evil, result={evil: 1}), [{"step": 0, evil: 1.0}])
    assert "<script" not in text
    parsed(text)


def test_no_metrics_yet_and_values_that_are_no_numbers() -> None:
    assert "No metrics yet" in page(record(), [])
    assert "No metrics yet" in page(record(), [{"step": 1, "loss": nan}])


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["loss", "compute_share", "idle_share", "valid_hr@10", "tokens_per_second", "else"]),
            st.floats(-1e12, 1e12, allow_nan=False) | st.just(0.0),
            max_size=4,
        ),
        max_size=20,
    )
)
def test_any_rows_make_a_page(rows) -> None:
    found = parsed(page(record(), [{"step": float(step), **row} for step, row in enumerate(rows)]))
    for mark in [*found.findall(".//polyline"), *found.findall(".//polygon")]:
        for point in mark.attrib["points"].split():
            x, _ = map(float, point.split(","))
            assert -1 <= x <= 641


def test_long_runs_are_thinned_to_the_last_step() -> None:
    text = page(record(), [{"step": step, "loss": 1.0} for step in range(10_001)])
    assert len(text) < 40_000 and "10000</text>" in text


def test_the_whole_configuration_is_shown_and_what_was_changed_of_it() -> None:
    text = page(record(), [], Origin(config={"epochs": 2, "optimiser": {"lr": 0.1}}, code="0.2+src.1"))
    cells = [[cell.text for cell in row.findall("td")] for row in parsed(text).findall(".//tr")]
    assert ["epochs", "2", "changed"] in cells and ["optimiser.lr", "0.1", None] in cells and ["0.2+src.1"] in cells


def test_data_is_named_by_its_digest_with_the_code_and_seed_that_made_it() -> None:
    ref = "datasets/sha256-" + "a" * 64
    made = JobRecord(id="train-1", spec=JobSpec(kind="train", inputs={"dataset": ref}), artifacts={"model": ref.replace("datasets", "models")})
    text = page(made, [], Origin(manifests={ref: {"code": "0.2+src.7", "seed": 3, "files": {"a": {"bytes": 20000}}}}))
    cells = [[cell.text for cell in row.findall("td")] for row in parsed(text).findall(".//tr")]
    assert ["input dataset", ref, "0.2+src.7", "3", "20 kB"] in cells and any(row[:1] == ["made model"] for row in cells)


def test_the_log_is_shown_of_a_run_that_failed() -> None:
    assert "line &lt;7&gt;" in page(record(state="failed", error="no"), [], Origin(log="line <7>"))
    assert "line 7" not in page(record(state="succeeded"), [], Origin(log="line 7"))
