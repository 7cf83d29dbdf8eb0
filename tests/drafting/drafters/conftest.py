"""A clock that only draft models move."""

from __future__ import annotations

import pytest
from draft_model_cases import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("edgespec.drafting.drafters.model.perf_counter", clock)
    return clock
