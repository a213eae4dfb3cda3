"""Kubernetes quantities."""

from __future__ import annotations

from decimal import Decimal

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


@given(st.integers(0, 10**12), st.integers(1, 6))
def test_memory_in_every_binary_unit(value: int, power: int) -> None:
    # A kubelet reports its node's memory in Ki.
    assert quantity(f"{value}{' KMGTPE'[power]}i") == pytest.approx(value * 1024**power)


@given(st.decimals(0, 10**6, places=3), st.sampled_from(["n", "u", "m", "", "k", "M", "G", "T", "P", "E"]))
def test_every_decimal_unit(value: Decimal, unit: str) -> None:
    powers = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
    assert quantity(f"{value:f}{unit}") == pytest.approx(float(value.scaleb(powers[unit])))


@pytest.mark.parametrize("text", ["", "two", "1K", "1ki", "1 Gi", "5mi", "3X", "--1", "i"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is no quantity: write it like"):
        quantity(text)
