"""What may be recommended: the newest word counts, whoever says it."""

from typing import Any

from semantide.shared.availability import Availability


def test_a_state_read_earlier_does_not_undo_a_newer_one(broker: Any) -> None:
    teller, other = Availability(broker), Availability(broker)
    version = teller.version()
    assert teller.update_as_of(version, {"a": False, "b": False})
    assert teller.version() == version + 1
    read_at = teller.version()
    other.update({"c": False})
    assert not teller.update_as_of(read_at, {"a": True, "c": True})
    assert teller.unavailable() == {"a", "b", "c"}
    assert teller.update_as_of(teller.version(), {"a": True})
    assert teller.unavailable() == {"b", "c"}
