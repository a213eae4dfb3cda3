import pytest

from semantide.shared.contracts import Interaction
from semantide.shared.errors import Corrupt
from semantide.shared.history import Histories


def damage(broker, key: str, how: str) -> None:
    """Put something under a history's key that no history is."""
    if how == "another type":
        broker.delete(key)
        broker.set(key, b"1\tclick\ti1")
    else:
        broker.rpush(key, {"no UTF-8": b"1\tclick\t\xff", "too few fields": b"1\tclick", "no time": b"soon\tclick\ti1", "empty": b""}[how])


@pytest.mark.parametrize("how", ["another type", "no UTF-8", "too few fields", "no time", "empty"])
def test_an_unreadable_history_is_its_users_alone(broker, how):
    histories = Histories(broker, 10, 60)
    histories.append([Interaction(user=user, item=f"{user}1", time=5) for user in ("a", "b", "c")])
    damage(broker, Histories.key("b"), how)
    found = histories.get_many(["a", "b", "c", "nobody"])
    assert [event.item for event in found["a"]] == ["a1"] and [event.item for event in found["c"]] == ["c1"] and found["nobody"] == []
    assert isinstance(found["b"], Corrupt) and "semantide:history:b" in str(found["b"])
    with pytest.raises(Corrupt, match="semantide:history:b"):
        histories.get("b")
    histories.forget("b")
    assert histories.get("b") == []
