"""A clock that only drafters move."""

from __future__ import annotations

import pytest
from draft_model_cases import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for name in ("model.perf_counter", "combined.perf_counter", "combined.thread_time"):
        monkeypatch.setattr(f"edgespec.drafting.{name}", clock)
    return clock
