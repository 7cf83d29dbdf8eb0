"""What tests of planning share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from loading_cases import CURVE, SPEC
from planning_cases import PLENTY

from edgespec.memory.plan.plan import Plan, Request
from edgespec.setup import loading
from edgespec.setup.planning import make_run_plan


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody measures this machine's bandwidth: 20 GB/s."""
    monkeypatch.setattr("edgespec.setup.planning.memory_bandwidth", lambda _: 20e9)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """With a draft model; models are read and step times measured without files and time."""
    for module in (loading, loading):
        monkeypatch.setattr(module, "read_model_spec", lambda _path, **_: SPEC)
    monkeypatch.setattr(loading, "_curve", lambda *_: CURVE)
    monkeypatch.setattr("edgespec.setup.stored.learned_key", lambda *_: "key")
    monkeypatch.setattr("edgespec.setup.loading.read_model_spec", lambda _path, **_: SPEC)
    made = make_run_plan(SPEC, Request(context_size=256, threads=1), PLENTY)
    return replace(made, draft_model=Path("draft.gguf"), drafter="suffix,model", draft_max=4)
