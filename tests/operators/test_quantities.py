"""Kubernetes quantities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from semantide.operators.quantities import quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("100m", 0.1),
        ("16Gi", 16 * 2**30),
        ("1e3", 1000),
        ("1.5k", 1500),
        (".5", 0.5),
        ("2E", 2e18),
        ("1Ei", 2**60),
        ("3e-3", 0.003),
        (4, 4),
        ("5u", 5e-6),
    ],
)
def test_quantities(text: str | float, value: float) -> None:
    assert quantity(text) == pytest.approx(value, rel=1e-12)


@given(st.integers(0, 10**9))
def test_thousandths(value: int) -> None:
    assert quantity(f"{value}m") == pytest.approx(value / 1000)


@pytest.mark.parametrize("text", ["", "two", "1 Gi", "5mi", "3X", "--1", "i"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity: write it like"):
        quantity(text)
