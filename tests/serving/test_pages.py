import string
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.services.serving.pages import Pages, Ranking, read_cursor, turn, write_cursor
from semantide.shared.availability import Availability
from semantide.shared.contracts import Interaction
from semantide.shared.errors import NotFound
from semantide.shared.history import Histories
from semantide.shared.recommendation import RecommendationAnswer, RecommendedItem

from .world import Server, wait_until

ITEMS = [RecommendedItem(item=f"i{number}", score=-float(number), codes=[number]) for number in range(30)]


def ask(server: Server, **body) -> dict:
    response = server.recommend(**body)
    assert response.status_code == 200, response.text
    return response.json()


def names(answer: dict) -> list[str]:
    return [hit["item"] for hit in answer["items"]]


def walk(server: Server, answer: dict, **body) -> list[dict]:
    """All pages from the first one on."""
    answers = [answer]
    while answers[-1]["cursor"]:
        answers.append(ask(server, cursor=answers[-1]["cursor"], **body))
    return answers


@given(st.lists(st.tuples(st.integers(1, 12), st.frozensets(st.integers(0, 29), max_size=8)), min_size=12, max_size=12))
def test_pages_go_through_the_ranking_in_order_and_never_twice(turns):
    place, seen = 0, []
    for n, hidden in turns:
        hidden = {f"i{number}" for number in hidden}
        page = turn(ITEMS, place, n, hidden)
        shown = [item.item for item in page.items]
        assert not hidden & set(shown) and len(shown) <= n
        assert len(shown) == n or page.following is None
        seen += shown
        if page.following is None:
            break
        place = page.following
    assert len(set(seen)) == len(seen) and seen == sorted(seen, key=lambda item: int(item[1:]))


@given(st.binary(min_size=12, max_size=12), st.integers(0, 1000))
def test_a_cursor_is_one_word_and_comes_back(token, place):
    cursor = write_cursor(token, place)
    assert set(cursor) <= set(string.ascii_letters + string.digits + "-_") and read_cursor(cursor) == (token, place)


@pytest.mark.parametrize("wrong", ["x", "é" * 20, "A" * 21, "A" * 24, "A B=", " ", "\0"])
def test_what_is_no_cursor_is_refused(wrong):
    with pytest.raises(ValueError, match="none of ours"):
        read_cursor(wrong)


def test_pages_together_are_the_ranking_whatever_happens_meanwhile(server, world):
    histories = Histories(world.room.broker, 200, 3600)
    histories.append([Interaction(user="ann", item=f"i{number}", time=number) for number in range(4)])
    whole = ask(server, user="ann", n=35, beam_width=200)
    first = ask(server, user="ann", n=10, depth=35, beam_width=200)
    assert names(first) == names(whole)[:10] and first["short_reason"] is None
    assert ask(server, user="ann", n=10, beam_width=200)["cursor"] is None
    # Another model, more history: the pages stay what they were.
    second = ask(server, cursor=first["cursor"])
    assert names(second) == names(whole)[10:20]
    histories.append([Interaction(user="ann", item="i9", time=100)])
    other = world.candidate(1)
    server.client.post("/v1/serving/promote", json={"model": other})
    assert names(ask(server, user="ann", n=10, beam_width=200)) != names(first)
    pages = walk(server, first)
    assert [item for page in pages for item in names(page)] == names(whole)
    assert [len(page["items"]) for page in pages] == [10, 10, 10, 5]
    assert all((page["model"], page["catalog"], page["history_items"]) == (first["model"], first["catalog"], 4) for page in pages)
    assert "ends here" in pages[-1]["short_reason"] and [page["short_reason"] for page in pages[:-1]] == [None] * 3
    assert len({page["request_id"] for page in pages}) == 4
    # The same cursor gives the same page, and a page may be of another size.
    assert names(ask(server, cursor=first["cursor"])) == names(second)
    assert names(ask(server, cursor=first["cursor"], n=3)) == names(second)[:3]
    scores = [hit["score"] for page in pages for hit in page["items"]]
    assert scores == sorted(scores, reverse=True) and all(hit["title"] for page in pages for hit in page["items"])


def test_what_may_not_be_shown_any_more_is_left_out_and_the_page_filled(server, world):
    first = ask(server, user="bob", n=10, depth=40)
    second = ask(server, cursor=first["cursor"])
    gone, disliked = names(second)[0], names(second)[3]
    following = names(ask(server, cursor=second["cursor"]))
    Availability(world.room.broker).update({gone: False})
    Histories(world.room.broker, 200, 3600).append([Interaction(user="bob", item=disliked, time=5, action="hate")])
    wait_until(lambda: gone not in names(ask(server, cursor=first["cursor"])))
    again = ask(server, cursor=first["cursor"])
    assert names(again) == [item for item in names(second) if item not in (gone, disliked)] + following[:2]
    assert names(ask(server, cursor=again["cursor"]))[0] == following[2]
    every = [item for page in walk(server, first) for item in names(page)]
    assert len(set(every)) == len(every) == 38


def test_explanations_stay_with_their_items(server):
    first = ask(server, history=["i1", "i2"], n=2, depth=4, explain=True)
    for hit in ask(server, cursor=first["cursor"])["items"]:
        assert sum(hit["explanation"]["level_log_probabilities"]) == pytest.approx(hit["score"])
        assert {near["item"] for near in hit["explanation"]["nearest_history"]} == {"i1", "i2"}


def test_the_end_is_the_end(server):
    assert ask(server, history=["i1"], n=200, depth=300)["cursor"] is None
    short = ask(server, history=["i1"], n=150, depth=300)
    last = ask(server, cursor=short["cursor"])
    assert len(last["items"]) == 50 and last["cursor"] is None and "200 items" in last["short_reason"]


def test_bad_cursors_are_refused_by_name(server, world):
    first = ask(server, user="a", n=2, depth=4)
    for body, status, word in (
        ({"cursor": "nonsense"}, 422, "send the `cursor` of an answer unchanged"),
        ({"cursor": ""}, 422, "cursor"),
        ({"cursor": "A" * 65}, 422, "cursor"),
        ({"cursor": first["cursor"], "user": "a"}, 422, "`user` given together with `cursor`"),
        ({"cursor": first["cursor"], "explain": True}, 422, "`explain`"),
        ({"cursor": first["cursor"], "n": 0}, 422, "n"),
        ({"cursor": write_cursor(b"x" * 12, 2)}, 404, "no longer kept"),
        ({"user": "a", "n": 10, "depth": 5}, 422, "`depth` is 5"),
        ({"user": "a", "depth": 1001}, 422, "depth"),
        ({"user": "a", "depth": 0}, 422, "depth"),
    ):
        response = server.recommend(**body)
        assert response.status_code == status and word in response.text, (body, response.text)
    past = write_cursor(read_cursor(first["cursor"])[0], 5000)
    assert names(ask(server, cursor=past)) == []


def test_a_ranking_goes_when_no_page_was_asked_for(server, world, monkeypatch):
    broker = world.room.broker
    monkeypatch.setattr(server.service, "pages", Pages(broker, 5000, 1 << 20))
    cursor = ask(server, user="a", n=2, depth=20)["cursor"]
    (kept,) = broker.scan_iter("semantide:serving:*:page:*")
    assert 4000 < broker.ttl(kept) <= 5000
    broker.expire(kept, 3000)
    cursor = ask(server, cursor=cursor, n=1)["cursor"]
    assert 4000 < broker.ttl(kept) <= 5000  # each page keeps it a little longer
    broker.pexpire(kept, 1)
    wait_until(lambda: not broker.exists(kept))
    assert server.recommend(cursor=cursor).status_code == 404


def test_rankings_never_need_more_of_the_broker_than_they_may(broker):
    """Whatever their sizes, and whether or not some expired: the newest are kept, in less than the bound, and the count of bytes is right."""
    rng = np.random.default_rng(0)
    pages = Pages(broker, 60, 20_000)
    answer = RecommendationAnswer.model_validate(
        {"items": [], "model": "models/sha256-" + "0" * 64, "catalog": "catalogs/sha256-" + "0" * 64, "request_id": "r", "based_on": "history", "beam_width": 1}
        | {"requested_beam_width": 1, "narrowed": False, "history_items": 1, "unknown_history_items": 0, "exact": True}
        | {"timing": {"queue_ms": 0.0, "search_ms": 0.0, "total_ms": 0.0}}
    )
    tokens = []
    for number in range(200):
        items = [RecommendedItem(item=f"i{row}", score=-float(row), codes=[row]) for row in rng.integers(0, 10**6, int(rng.integers(1, 100))).tolist()]
        tokens.append(pages.keep(Ranking(answer=answer.model_copy(update={"items": items}), n=number + 1)))
        if number % 20 == 0:
            broker.delete(f"semantide:serving:default:page:{tokens[-1].hex()}")  # as if it had expired
        kept = list(broker.scan_iter("semantide:serving:default:page:*"))
        assert sum(map(broker.strlen, kept)) <= int(broker.get("semantide:serving:default:pages:bytes")) <= 20_000
    assert 5 < len(kept) < 100 and pages.read(tokens[-1]).n == 200
    with pytest.raises(NotFound, match="where many are kept"):
        pages.read(tokens[1])
    huge = Pages(broker, 60, 10)
    with pytest.raises(NotFound):
        huge.read(huge.keep(Ranking(answer=answer, n=1)))
    assert not list(broker.scan_iter("semantide:serving:default:page:*")) and int(broker.get("semantide:serving:default:pages:bytes")) == 0


@pytest.mark.parametrize("kept", [b"damaged", zlib.compress(b"{}"), zlib.compress(b'{"unknown": 1}'), b""])
def test_a_ranking_that_this_version_cannot_read_is_gone(server, world, kept):
    cursor = ask(server, user="a", n=2, depth=20)["cursor"]
    world.room.broker.set(f"semantide:serving:default:page:{read_cursor(cursor)[0].hex()}", kept)
    response = server.recommend(cursor=cursor)
    assert response.status_code == 404 and "ask for a first page again" in response.text
