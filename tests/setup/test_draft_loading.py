"""Loading a draft model that fails at any of its steps leaves nothing open."""

from __future__ import annotations

from typing import Any

import pytest
from loading_cases import (
    CURVE,
    SPEC,
    VOCAB,
    Opened,
    assert_nothing_stays_open,
    quiet,
)

from edgespec.backends.fake import FakeBackend
from edgespec.memory.plan.plan import Plan
from edgespec.setup import draft_loading


def test_a_draft_model(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(draft_loading, "open_draft_model", lambda *_, **__: Opened(opened))
    monkeypatch.setattr(draft_loading, "measure_curve", lambda *_, **__: CURVE)
    monkeypatch.setattr(draft_loading, "read_exit", lambda _spec: None)
    target = FakeBackend(lambda _context: [0.0] * VOCAB, VOCAB)
    load = draft_loading.load_draft_model
    functions = [value for value in vars(draft_loading).values() if hasattr(value, "__code__")]
    steps = assert_nothing_stays_open(
        lambda: load(target, SPEC, plan, quiet), [load, *functions], opened
    )
    assert steps > 10
