"""The original files of public data sets, in small, become the right interactions and items."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semantide.services.ingestion.batches import check_interaction_table
from semantide.services.ingestion.itemrows import check_item_records
from semantide.services.ingestion.readers.formats import ReadOptions, detect
from semantide.services.ingestion.schema import Rejection, Rules
from semantide.services.ingestion.sources import plan
from semantide.shared.config import Settings

RULES = Rules(Settings.model_fields["actions"].default, now=1_800_000_000_000)


def events(path: Path, **options: Any) -> tuple[list[tuple[Any, ...]], list[Rejection]]:
    found = detect(path, ReadOptions(**options))
    assert found.kind == "interactions"
    rows: list[tuple[Any, ...]] = []
    bad: list[Rejection] = []
    for chunk in found.read(path, ""):
        assert isinstance(chunk.records, pa.Table)
        rules = Rules(RULES.actions, RULES.now, ordinal_time=found.ordinal_time)
        checked = check_interaction_table(chunk.records, rules, chunk.rows, time_unit=found.time_unit)
        rows += [(row["user"], row["item"], row["time"], row["action"], row["value"], row["page"]) for row in checked.table.to_pylist()]
        bad += [*chunk.rejections, *checked.rejections]
    return rows, bad


def whole(path: Path) -> pa.Table:
    found = detect(path, ReadOptions())
    return pa.concat_tables(check_interaction_table(chunk.records, RULES, chunk.rows, time_unit=found.time_unit).table for chunk in found.read(path, ""))


def test_what_an_exposure_says_of_itself(tmp_path: Path) -> None:
    rows = [
        {"user": "a", "item": "b", "time": 1649350000000, "tab": "home", "position": 3, "propensity": 0.5, "signals": ["click", "like"]},
        {"user": "a", "item": "c", "time": 1649350000000, "position": -1},
        {"user": "a", "item": "d", "time": 1649350000000, "propensity": 0},
        {"user": "a", "item": "e", "time": 1649350000000, "signals": ["click", "unheard"]},
        {"user": "a", "item": "f", "time": 1649350000000, "signals": []},
        {"user": "a", "item": "g", "time": 1649350000000, "position": 1.5},
    ]
    lines, texts_, loose = tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    # An odd row makes a block be read record by record.
    loose.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"user": True, "item": "h", "time": 1649350000000}]))
    names = ("user", "item", "time", "tab", "position", "propensity", "signals")

    def cell(value: Any) -> str:
        return "|".join(value) if isinstance(value, list) else str("" if value is None else value)

    texts_.write_text(",".join(names) + "\n" + "".join(",".join(cell(row.get(name)) for name in names) + "\n" for row in rows))
    for path in (lines, texts_, loose):
        table, bad = whole(path), events(path)[1]
        assert table.select(["item", "tab", "position", "propensity", "signals"]).to_pylist() == [
            {"item": "b", "tab": "home", "position": 3, "propensity": 0.5, "signals": ["click", "like"]},
            {"item": "f", "tab": None, "position": None, "propensity": None, "signals": None},
        ], path
        assert [rejection.field for rejection in bad] == [*(["user"] if path == loose else []), "position", "propensity", "signals", "position"]


def items(path: Path) -> tuple[dict[str, Any], list[Rejection]]:
    found = detect(path, ReadOptions())
    assert found.kind == "items"
    good, bad = {}, []
    for chunk in found.read(path, ""):
        records = chunk.records.to_pylist() if isinstance(chunk.records, pa.Table) else chunk.records
        taken, _, refused = check_item_records(records, RULES, chunk.rows)
        good |= {item.id: item for item in taken}
        bad += [*chunk.rejections, *refused]
    return good, bad


def test_movielens_1m(tmp_path: Path) -> None:
    (tmp_path / "ratings.dat").write_text("1::1193::5::978300760\n1::broken\n2::661::3::978302109\n")
    (tmp_path / "movies.dat").write_bytes("1::Toy Story (1995)::Animation|Comedy\n2::Misérables, Les (1995)::Drama\nodd line\n".encode("latin-1"))
    rows, bad = events(tmp_path / "ratings.dat")
    assert rows == [("1", "1193", 978300760000, "rate", 5.0, None), ("2", "661", 978302109000, "rate", 3.0, None)]
    assert [(entry.row, entry.field) for entry in bad] == [(1, "row")]
    movies, bad = items(tmp_path / "movies.dat")
    assert (movies["2"].title, movies["1"].categories, len(bad)) == ("Misérables, Les (1995)", ("Animation", "Comedy"), 1)


def test_movielens_100k(tmp_path: Path) -> None:
    (tmp_path / "u.data").write_text("196\t242\t3\t881250949\n")
    flags = "|".join("1" if index in (3, 5) else "0" for index in range(19))
    (tmp_path / "u.item").write_bytes(f"1|Toy Story (1995)|01-Jan-1995||http://x|{flags}\n".encode("latin-1"))
    assert events(tmp_path / "u.data") == ([("196", "242", 881250949000, "rate", 3.0, "196@881250949")], [])
    assert items(tmp_path / "u.item")[0]["1"].categories == ("Animation", "Comedy")


def test_amazon_reviews_of_three_years(tmp_path: Path) -> None:
    old = {"reviewerID": "A1", "asin": "0001", "overall": 5.0, "unixReviewTime": 1400000000, "reviewText": "x", "helpful": [0, 0]}
    (tmp_path / "old.json").write_text(json.dumps(old) + "\n")
    (tmp_path / "new.jsonl").write_text(
        json.dumps({"rating": 4.0, "asin": "B1", "parent_asin": "P1", "user_id": "U", "timestamp": 1588687728923, "title": "fine", "images": []}) + "\n"
    )
    assert events(tmp_path / "old.json")[0] == [("A1", "0001", 1400000000000, "review", 5.0, None)]
    assert events(tmp_path / "new.jsonl")[0] == [("U", "P1", 1588687728923, "review", 4.0, None)]


def test_amazon_products_of_three_years(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        "{'asin': '0001', 'title': 'It\\'s soap', 'categories': [['Beauty', 'Bath'], ['Beauty', 'Soap']], 'price': 3.5, 'imUrl': 'x'}\n"
    )
    (tmp_path / "b.json").write_text(
        json.dumps({"asin": "2", "title": "Soap", "category": ["Beauty", "Soap"], "description": ["a", "b"], "feature": ["c"], "brand": "B", "rank": []}) + "\n"
    )
    new = {
        "parent_asin": "3",
        "title": None,
        "main_category": "All Beauty",
        "categories": [],
        "features": ["soft"],
        "description": [],
        "store": "S",
        "details": {},
    }
    (tmp_path / "c.jsonl").write_text(json.dumps(new) + "\n")
    first, second, third = items(tmp_path / "a.json")[0]["0001"], items(tmp_path / "b.json")[0]["2"], items(tmp_path / "c.jsonl")[0]["3"]
    assert (first.title, first.categories, first.attributes) == ("It's soap", ("Beauty", "Bath", "Soap"), {"price": "3.5"})
    assert (second.text, second.attributes) == ("a\nb\nc", {"brand": "B"})
    assert (third.title, third.text, third.categories) == ("", "soft", ("All Beauty",))


KUAIRAND = {
    "user_id": [0, 0, 1], "video_id": [7, 8, 7], "date": [20220408] * 3, "hourmin": [0] * 3, "time_ms": [1649350000000, 1649350000001, 1649350000002],
    "is_click": [1, 0, 1], "is_like": [0, 0, 1], "is_follow": [0] * 3, "is_comment": [0] * 3, "is_forward": [0] * 3, "is_hate": [0, 0, 1], "long_view": [1, 0, 0],
    "play_time_ms": [500, 0, 10], "duration_ms": [1000, 1000, 0], "tab": [1, 1, 0], "is_rand": [0, 1, 0],
}  # fmt: skip


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_kuairand(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"log_standard_4_08.{suffix}"
    if suffix == "csv":
        path.write_text(",".join(KUAIRAND) + "\n" + "".join(",".join(map(str, row)) + "\n" for row in zip(*KUAIRAND.values(), strict=True)))
    else:
        pq.write_table(pa.table(KUAIRAND), path)
    assert events(path)[0] == [
        ("0", "7", 1649350000000, "long_view", 0.5, "0/20220408/1"),
        ("0", "8", 1649350000001, "exposure", 0.0, "0/20220408/1"),
        ("1", "7", 1649350000002, "hate", None, "1/20220408/0"),
    ]
    table = whole(path)
    assert table["signals"].to_pylist() == [["click", "long_view"], None, ["click", "like", "hate"]] and table["tab"].to_pylist() == ["1", "1", "0"]
    assert table["propensity"].to_pylist() == [None, 1 / 7583, None]
    videos = tmp_path / "video_features_basic_pure.csv"
    videos.write_text(
        'video_id,author_id,video_type,upload_dt,upload_type,visible_status,video_duration,music_id,tag\n7,12,NORMAL,2022-04-10,ShortImport,0.0,9233.0,5,"12,65"\n'
    )
    video = items(videos)[0]["7"]
    assert video.title == "9 s imported short video on topic 12, 65 by creator 12"
    assert "topic 65" in video.categories


def test_sequences_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.seq").write_text("u1 9 8 9\n\nlonely\nu2 7\n")
    rows, bad = events(tmp_path / "a.seq")
    assert [(user, item, time // 86_400_000) for user, item, time, *_ in rows] == [("u1", "9", 1), ("u1", "8", 2), ("u1", "9", 3), ("u2", "7", 1)]
    assert [(entry.row, entry.value) for entry in bad] == [(2, "lonely")]


def test_files_with_typed_headers(tmp_path: Path) -> None:
    (tmp_path / "ml.inter").write_text("user_id:token\titem_id:token\trating:float\ttimestamp:float\n196\t242\t3\t881250949\n")
    (tmp_path / "ml.item").write_text("item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n1\tToy Story\t1995\tAnimation Comedy\n")
    assert events(tmp_path / "ml.inter")[0] == [("196", "242", 881250949000, "click", 3.0, None)]
    item = items(tmp_path / "ml.item")[0]["1"]
    assert (item.title, item.categories, item.attributes) == ("Toy Story", ("Animation", "Comedy"), {"release_year": "1995"})


def test_a_folder_is_planned_items_first_and_strangers_are_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "README.md").write_text("x")
    (folder / "a_ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3,978300760\n")
    (folder / "b_items.csv").write_text("movieId,title,genres\n2,Heat,Crime|Drama\n")
    (folder / "colours.csv").write_text("colour\nred\n")
    sources, skipped = plan(folder, [tmp_path], ReadOptions())
    assert [(Path(source.path).name, source.kind) for source in sources] == [("b_items.csv", "items"), ("a_ratings.csv", "interactions")]
    assert list(skipped) == ["colours.csv"]


def test_real_files_are_recognised(real_data: Path) -> None:
    names = {
        "amazon/beauty.seq": "sequences",
        "amazon/beauty.items.jsonl": "jsonl",
        "movielens/movies.dat": "movielens-1m-items",
        "movielens/ml-1m.seq": "sequences",
        "kuairand/processed_splits_val.parquet": "kuairand-log",
        "kuairand/processed_item_features.parquet": "kuairand-items",
        "kuairand/KuaiRand-Pure_data_video_features_basic_pure.csv": "kuairand-items",
    }
    assert {name: detect(real_data / name, ReadOptions()).name for name in names} == names
    rows, bad = events(real_data / "amazon/beauty.seq")
    assert (len(rows), bad, len({row[0] for row in rows})) == (198_502, [], 22_363)
    good, bad = items(real_data / "amazon/beauty.items.jsonl")
    assert (len(good), bad, good["1"].title) == (12_101, [], "OPI Nail Lacquer, Simmer and Shimmer, 0.5-Fluid Ounce")
