"""When a request is sent again."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.client.retries import REFUSED, Retries, said_seconds


@given(
    status=st.integers(400, 599),
    attempt=st.integers(0, 9),
    repeatable=st.booleans(),
    told=st.none() | st.integers(0, 300),
    attempts=st.integers(1, 8),
    seed=st.integers(0, 99),
)
def test_only_what_may_be_repeated_is_and_the_stacks_word_is_kept(
    status: int, attempt: int, repeatable: bool, told: int | None, attempts: int, seed: int
) -> None:
    retries = Retries(attempts=attempts)
    headers = {} if told is None else {"retry-after": str(told)}
    pause = retries.after_answer(status, headers, attempt, repeatable=repeatable, chance=random.Random(seed))
    if pause is None:
        return
    assert attempt + 1 < attempts and status in retries.statuses and (repeatable or status == REFUSED)
    assert pause >= (told or 0) and pause <= max(retries.most_seconds, retries.obey_seconds)
    if told is None:
        assert pause >= 0.5 * min(retries.most_seconds, retries.first_seconds * 2.0**attempt)


@given(attempt=st.integers(0, 9), repeatable=st.booleans(), sent=st.booleans())
def test_silence_is_met_with_patience_unless_the_request_may_have_been_carried_out(attempt: int, repeatable: bool, sent: bool) -> None:
    pause = Retries(attempts=5).after_silence(attempt, repeatable=repeatable, sent=sent, chance=random.Random(0))
    assert (pause is None) == (attempt >= 4 or (sent and not repeatable))


@given(st.text(max_size=40))
def test_any_header_is_read_or_passed_over(text: str) -> None:
    found = said_seconds(text, 0.0)
    assert found is None or found >= 0


def test_a_date_counts_from_now() -> None:
    assert said_seconds("Thu, 01 Jan 1970 00:01:40 GMT", 40.0) == 60
    assert said_seconds("Thu, 01 Jan 1970 00:01:40 GMT", 400.0) == 0
    assert said_seconds(None, 0.0) is None
    with pytest.raises(ValueError, match="attempts"):
        Retries(attempts=0)
