"""How long work tells of its progress."""

from __future__ import annotations

import pytest

from edgespec.progress import time_text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (89.0, "89 s"), (90.0, "2 min")])
def test_time_that_is_left(seconds: float, text: str) -> None:
    assert time_text(seconds) == text
