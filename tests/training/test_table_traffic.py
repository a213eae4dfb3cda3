from types import SimpleNamespace

from semantide.services.training.table_traffic import TableTraffic
from semantide.services.training.world import Traffic
from semantide.shared.models.item_table import LocalTable


def test_bytes_are_told_a_step_and_of_all_tables_together() -> None:
    ids, vectors, more = Traffic(), Traffic(), Traffic()
    first = SimpleNamespace(traffic=lambda: {"ids": ids, "vectors": vectors}, drift=0.25)
    second = SimpleNamespace(traffic=lambda: {"ids": more}, drift=None)
    ids.add(1000, 0.0)
    wire = TableTraffic({"items": first, "features": second, "here": LocalTable(2, 2)})
    ids.add(60, 0.0)
    more.add(20, 0.0)
    vectors.add(400, 0.0)
    assert wire.report(4) == {"wire_ids": 20.0, "wire_vectors": 100.0, "drift": 0.25}
    ids.add(10, 0.0)
    first.drift = None
    assert wire.report(6) == {"wire_ids": 5.0, "wire_vectors": 0.0}
    assert TableTraffic({"here": LocalTable(2, 2)}).report(1) == {}
