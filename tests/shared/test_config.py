"""Settings are read whole or refused."""

import math

import pytest
from pydantic import ValidationError

from semantide.shared.config import Settings

NUMBERS = {name: str(field.annotation) for name, field in Settings.model_fields.items() if "float" in str(field.annotation)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_setting_is_a_number_that_is_none(value: float) -> None:
    assert len(NUMBERS) > 20
    for name, kind in NUMBERS.items():
        with pytest.raises(ValidationError, match=name):
            Settings(**{name: {"hr@50": value} if kind.startswith("dict") else value})
