"""What a profile measures of a backend: which steps at which depths, and that nothing is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_backend import FakeBackend
from planning_cases import PLENTY, SPEC

from edgespec.bench import profiling
from edgespec.memory.bytes.config import Device
from edgespec.memory.plan.plan import Request
from edgespec.setup.planning import make_run_plan


def backend_of(**options: int) -> FakeBackend:
    return FakeBackend(lambda _: [0.0] * 64, 64, **options)  # type: ignore[arg-type]


def test_steps_are_measured_as_large_and_as_deep_as_there_is_room() -> None:
    """Four of each size, the first of which builds its graph; 2048 tokens do not fit."""
    backend = backend_of(max_nodes=6, context_size=600)
    found = profiling._measure_steps(backend, lambda _what, _part: None)
    assert [one["depth"] for one in found] == [0, 512]
    assert all(list(one["ms"]) == ["1", "2", "3", "4", "5", "6"] for one in found)
    assert backend.steps == [size for _ in found for size in range(1, 7) for _ in range(4)]
    assert sum(backend.reads) == 512 and max(backend.reads) <= backend.batch_size
    assert backend.length == 0


def test_steps_never_read_more_than_memory_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory was measured beside other programs. On a GPU its speed says nothing."""
    curves = [{"depth": 0, "ms": {"1": 1e3 * SPEC.bytes_per_token / 20e9}}]
    plan = make_run_plan(SPEC, Request(threads=1), PLENTY)
    for measured, ceiling in ((8e9, 20e9), (25e9, 25e9)):
        monkeypatch.setattr(profiling, "measured_bandwidth", lambda found=measured: found)
        found = profiling._bandwidth(SPEC, plan, curves)
        assert found["used_bytes_per_s"] == pytest.approx(20e9)
        assert found["memory_bytes_per_s"] == pytest.approx(ceiling)
        assert found["ceiling_tokens_per_s"] == pytest.approx(ceiling / SPEC.bytes_per_token)
    there = replace(plan, devices=(Device("gpu", 5, "GPU0"),))
    assert set(profiling._bandwidth(SPEC, there, curves)) == {"used_bytes_per_s"}
