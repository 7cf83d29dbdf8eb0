"""What is kept between runs, and under which keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planning_cases import INF, SPEC, plan_of

from edgespec.drafting.combined import RoundHistory
from edgespec.memory.bytes.config import Device, RunConfig
from edgespec.memory.store import cache
from edgespec.memory.times import DEFAULT_ROUNDS, CostCurve
from edgespec.models.spec import ModelSpec
from edgespec.setup.stored import (
    curve_key,
    learn_curve,
    rounds_key,
    settings_key,
    stored_curve,
    stored_rounds,
)

CONFIG = RunConfig(512, threads=2, drafter="suffix")


@pytest.mark.usefixtures("quiet")
def test_step_times_belong_to_a_file_and_its_settings() -> None:
    """Whatever changes a step's time changes the key; context, budget and drafter do not."""

    def key(spec: ModelSpec = SPEC, **changes: Any) -> str:
        return settings_key(spec, replace(CONFIG, **changes))

    keys = [
        key(),
        key(threads=3),
        key(kv_type_k="bf16"),
        key(kv_type_v="q8_0"),
        key(gpu_layers=5),
        key(gpu_layers=5, devices=(Device("gpu", 5, "GPU0", description="a GPU"),)),
        key(replace(SPEC, fingerprint="beef")),
    ]
    assert len(set(keys)) == len(keys)
    plans = [plan_of(), plan_of(context_size=999), plan_of(budget_bytes=1 << 30)]
    assert {settings_key(SPEC, plan) for plan in plans} == {keys[0]}
    assert rounds_key(SPEC, "suffix") != rounds_key(SPEC, "other")
    assert rounds_key(SPEC, "suffix") != rounds_key(replace(SPEC, fingerprint="b"), "suffix")


def test_a_stored_curve_is_found_again() -> None:
    assert stored_curve(SPEC, CONFIG) is None
    kept = CostCurve([INF, 4.0, 6.0, INF, 7.0], 0.01, 0.002, 0.5)
    cache.store("curves", settings_key(SPEC, CONFIG), kept.as_json())
    assert stored_curve(SPEC, CONFIG) == kept
    assert stored_curve(SPEC, replace(CONFIG, threads=3)) is None


def test_a_curve_that_stopped_fitting_is_measured_again() -> None:
    kept = CostCurve([INF, 4.0, 6.0])
    cache.store("curves", curve_key(SPEC, CONFIG), kept.as_json())
    learn_curve(SPEC, CONFIG, kept)
    assert stored_curve(SPEC, CONFIG) is not None
    kept.misfit = 1.0
    learn_curve(SPEC, CONFIG, kept)
    assert stored_curve(SPEC, CONFIG) is None


@pytest.mark.parametrize(
    "base",
    [[], [None, None], [None, "x"], None, [None, 10**400]],
    ids=lambda base: str(base)[:20],
)
def test_a_damaged_stored_curve_is_none(base: Any) -> None:
    document = {**CostCurve([INF, 4.0]).as_json(), "base_ms": base}
    cache.store("curves", settings_key(SPEC, CONFIG), document)
    assert stored_curve(SPEC, CONFIG) is None


def test_a_few_rounds_tell_little() -> None:
    """From 300 on those of this file count; before, what is usual."""
    key = rounds_key(SPEC, "suffix")
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 299.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
    cache.store("rounds", key, {"rounds": RoundHistory([(4, 4, 300.0)]).rounds()})
    assert stored_rounds(SPEC, "suffix") == ((4, 4, 300.0),)
    cache.store("rounds", key, {"rounds": "many"})
    assert stored_rounds(SPEC, "suffix") == DEFAULT_ROUNDS
