"""Which policies have a meaning."""

from __future__ import annotations

import math

import pytest

from edgespec.errors import UnsupportedError
from edgespec.switching.planning import SwitchPolicy


@pytest.mark.parametrize(
    "values",
    [
        {"window": 0},
        {"min_stay": -1},
        {"window": 1.5},
        {"up_nats": math.nan},
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UnsupportedError):
        SwitchPolicy(**values)  # type: ignore[arg-type]
