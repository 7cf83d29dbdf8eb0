"""A clock that only drafters move."""

from __future__ import annotations

import pytest
from draft_model_cases import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in ("model", "combined"):
        monkeypatch.setattr(f"edgespec.drafting.drafters.{module}.perf_counter", clock)
    return clock
