"""The API server in memory keeps the contract."""

from __future__ import annotations

import pytest

from tests.operators.api_contract import ApiContract
from tests.operators.fake_cluster import FakeCluster


class TestFakeCluster(ApiContract):
    @pytest.fixture
    def api(self) -> FakeCluster:
        return FakeCluster(lambda: 1_800_000_000.0)

    @pytest.fixture
    def namespace(self) -> str:
        return "lab"
