"""Slopes over depth by a model's shapes, against what was measured of two models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgespec.measure.timing import expect_slopes
from edgespec.memory.times import CostCurve
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import ModelSpec, read_model_spec

INF = float("inf")


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    """SmolLM2 135M: 30 blocks, 9 heads of 64, 3 of them cached."""
    return read_model_spec(embedded_model())


def expected(spec: ModelSpec, *ms: float) -> CostCurve:
    curve = CostCurve([INF, *ms])
    expect_slopes(curve, spec)
    return curve


@pytest.mark.model
def test_it_is_near_what_was_measured_of_a_small_model(spec: ModelSpec) -> None:
    """Q4_0 on 2 cores: 0.0012 a token and 0.00076 a token and node; within a factor of 2.5."""
    curve = expected(spec, 3.26, 3.67, 3.85, 3.99, 4.5, 5.0, 5.25, 5.44)
    assert 0.0012 / 2.5 < curve.depth_ms < 0.0012 * 2.5
    assert 0.00076 / 2.5 < curve.depth_node_ms < 0.00076 * 2.5


@pytest.mark.model
def test_it_is_near_what_was_measured_of_a_larger_one(spec: ModelSpec) -> None:
    """Qwen2.5 1.5B Q4_0: 0.0025 and 0.0009, and 28 blocks of 12 heads of 128, 2 of them cached."""
    large = replace(
        spec,
        num_layers=28,
        embedding_size=1536,
        vocab_size=151936,
        feed_forward_size=(8960,) * 28,
        num_heads=(12,) * 28,
        num_kv_heads=(2,) * 28,
        key_length=(128,) * 28,
        value_length=(128,) * 28,
        is_sliding=(False,) * 28,
        weight_bytes=1_060_000_000,
    )
    curve = expected(large, 36.5, 40.8, 43.0, 45.0, INF, INF, INF, 58.1)
    assert 0.0025 / 2.5 < curve.depth_ms < 0.0025 * 2.5
    assert 0.0009 / 2.5 < curve.depth_node_ms < 0.0009 * 2.5


@pytest.mark.model
def test_windows_read_no_more_than_they_hold(spec: ModelSpec) -> None:
    whole = expected(spec, 4.0, 5.0)
    half = expected(replace(spec, is_sliding=(True, False) * 15), 4.0, 5.0)
    assert half.depth_ms == pytest.approx(whole.depth_ms / 2)
    none = expected(replace(spec, is_sliding=(True,) * 30), 4.0, 5.0)
    assert (none.depth_ms, none.depth_node_ms) == (0.0, 0.0)


@pytest.mark.model
def test_single_tokens_alone_expect_something(spec: ModelSpec) -> None:
    curve = expected(spec, 4.0)
    assert curve.depth_ms > 0.0 and curve.depth_node_ms > 0.0
