"""Lists wait for a broker that is away, and those that find no room are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semantide.services.serving import shown
from semantide.services.serving.shown import ShownNotes
from semantide.shared.broker import RedisError
from semantide.shared.shown_lists import ShownList


class Lists:
    """Keeps lists, except while it is away; what happens meanwhile may be given."""

    def __init__(self) -> None:
        self.kept: list[str] = []
        self.away, self.meanwhile = False, lambda: None

    def keep(self, lists: Sequence[ShownList]) -> None:
        if self.away:
            self.meanwhile()
            raise RedisError("away")
        self.kept += [one.request_id for one in lists]


class Count:
    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Answer:
    """As much of an answer as is noted."""

    variant, share = "challenger", 0.5

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.items: list[Any] = [type("Item", (), {"item": "a", "propensity": 1.0})]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["note", "away", "back"]), st.integers(0, 7)), max_size=12))
def test_every_list_is_kept_waits_or_is_counted_as_lost(steps: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(shown, "_WAITING", 8)
        patched.setattr(shown, "_TOGETHER", 3)
        lists, lost = Lists(), Count()
        notes = ShownNotes(lists, True)  # type: ignore[arg-type]
        notes._lost = lost  # type: ignore[assignment]
        noted = 0

        def note(many: int) -> None:
            nonlocal noted
            for _ in range(many):
                notes.note(Answer(str(noted)))  # type: ignore[arg-type]
                noted += 1

        for kind, many in steps:
            if kind == "note":
                note(many)
                continue
            lists.away, lists.meanwhile = kind == "away", lambda many=many: note(many)  # type: ignore[misc]
            try:
                notes.flush()
            except RedisError:
                assert lists.away
            waiting = [one.request_id for one in notes._waiting]
            assert len(lists.kept) + len(waiting) + lost.value == noted
            assert [int(one) for one in waiting] == list(range(noted - len(waiting), noted)), "the newest wait, in their order"
