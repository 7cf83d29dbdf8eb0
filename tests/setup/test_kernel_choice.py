"""Whose matrix kernels a plan uses: as asked, by timed products, and by whole steps in the end."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from footprint_cases import tensor
from planning_cases import PLENTY, SPEC, curve, model, plan_of

from edgespec.memory.plan.options import KernelChoice
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.request import Request
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import SpeedModel
from edgespec.models.gguf.ggml_types import GGML_NUMBERS
from edgespec.models.spec import ModelSpec
from edgespec.setup import kernel_choice
from edgespec.setup.kernel_choice import best_kernels, prepare_kernels, product_gain
from edgespec.setup.stored import settings_key, stored_curve

WITH_KERNELS = replace(PLENTY, missing_kernels="")
REQUEST = Request(threads=2, is_plain_greedy=True)
Times = dict[str, tuple[float, float]]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that has kernels, for Q4_0 and Q4_1."""
    found = [GGML_NUMBERS[kind] for kind in ("Q4_0", "Q4_1")]
    monkeypatch.setattr(kernel_choice, "missing_kernels", lambda: "")
    monkeypatch.setattr(kernel_choice, "kernels_key", lambda: "kernels 1")
    monkeypatch.setattr("edgespec.setup.stored.kernels_key", lambda: "kernels 1")
    monkeypatch.setattr(
        kernel_choice,
        "packed_bytes",
        lambda kind, rows, columns: rows * columns * (kind in found),
    )


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Types whose products were timed; llama.cpp attached them without an obstacle."""
    seen: list[str] = []

    def times(kind: str, _shape: tuple[int, ...], _used: int) -> Times:
        seen.append(kind)
        return {"1": (3.0, 1.0), "4": (5.0, 3.0)}

    monkeypatch.setattr(kernel_choice, "_measured", times)
    monkeypatch.setattr("edgespec.backends.llama.kernels.attach", lambda: "")
    return seen


def products(times: Times, kind: str = "Q4_1") -> None:
    cache.store("products", kernel_choice._key(kind), {"ms": times})


def planner(spec: ModelSpec = SPEC) -> Callable[[Request], Plan]:
    """Plans with what is stored; llama.cpp's kernels take 10 ms a step where nothing is."""

    def speed(settings: Any) -> SpeedModel:
        found = stored_curve(spec, settings)
        return SpeedModel(found or curve(), is_measured=found is not None)

    def plan(request: Request) -> Plan:
        return plan_of(spec, WITH_KERNELS, speed, kernels=request.kernels)

    return plan


def reason_of(plan: Plan) -> str:
    return str(plan.as_json()["kernels"]["reason"])


def test_what_is_asked_for_is_not_measured_away() -> None:
    products({"1": (1.0, 9.0), "4": (1.0, 9.0)})
    asked: tuple[tuple[KernelChoice, bool], ...] = (("on", True), ("off", False))
    for kernels, used in asked:
        plan = best_kernels(SPEC, replace(REQUEST, kernels=kernels), planner())
        assert plan.kernels is used and reason_of(plan) == "as asked"


@pytest.mark.parametrize(
    ("times", "used", "said"),
    [
        ({"1": (3.0, 1.0), "4": (5.0, 3.0)}, True, "edgespec's own were faster"),
        ({"1": (1.0, 1.0), "4": (1.0, 1.0)}, False, "llama.cpp's own were as fast"),
        ({"1": (1.0, 1.5), "4": (2.0, 2.0)}, False, "llama.cpp's own were as fast"),
    ],
)
def test_timed_products_decide_before_the_first_load(times: Times, used: bool, said: str) -> None:
    assert product_gain(SPEC) is None
    products(times)
    plan = best_kernels(SPEC, REQUEST, planner())
    assert plan.kernels is used and said in reason_of(plan)
    assert not re.search(r"\d", reason_of(plan))  # a product's gain is no answer's


def test_whole_steps_count_more_than_products() -> None:
    products({"1": (3.0, 1.0), "4": (5.0, 3.0)})
    plan = planner()(REQUEST)
    for kernels, ms in ((True, 4.0), (False, 3.0)):
        settings = replace(plan, kernels=kernels)
        taken = CostCurve([float("inf"), ms, 1.2 * ms])
        cache.store("curves", settings_key(SPEC, settings), taken.as_json())
    best = best_kernels(SPEC, REQUEST, planner())
    assert not best.kernels and "with llama.cpp's" in reason_of(best)


def test_a_type_weighs_as_many_bytes_as_a_file_has_of_it() -> None:
    assert product_gain(SPEC) is None
    products({"1": (4.0, 2.0), "4": (4.0, 2.0)})
    assert product_gain(SPEC) == 2.0
    assert product_gain(model(kind="Q4_0")) is None  # its own type was not timed
    assert product_gain(model(kind="F16")) is None  # no kernel, nothing to decide by


@pytest.mark.parametrize("times", [None, {"1": 3}, {"1": ("x", 1.0)}, [1], "fast"])
def test_damaged_times_are_none(times: Any) -> None:
    cache.store("products", kernel_choice._key("Q4_1"), {"ms": times})
    assert product_gain(SPEC) is None


def test_prompts_and_experts_count() -> None:
    """Four tokens are read for each that is written; of experts those of one token."""
    products({"1": (1.0, 1.0), "4": (1.0, 1.0), "64": (32.0, 16.0)})
    assert product_gain(SPEC) == pytest.approx((2.0 + 2.0) / (2.0 + 1.0))
    mixed = model(kind="Q4_0")
    experts = tensor("blk.0.ffn_up_exps.weight", (256, 4000, 4), "Q4_0")
    mixed = replace(mixed, tensors={**mixed.tensors, experts.name: experts}, num_experts_used=1)
    products({"1": (2.0, 1.0)}, "Q4_0")
    assert product_gain(mixed) is None  # experts have times of their own
    products({"1": (6.0, 1.0)}, "Q4_0 experts")
    gain = product_gain(mixed)
    assert gain is not None and 2.0 < gain < 6.0


def test_products_are_timed_once(timed: list[str]) -> None:
    said: list[float] = []
    for _ in range(2):
        prepare_kernels(SPEC, REQUEST, lambda _what, part: said.append(part))
    assert timed == ["Q4_1"] and said == [0.0, 1.0]
    assert product_gain(SPEC) == 2.0


@pytest.mark.parametrize(
    "changes", [{"kernels": "off"}, {"kernels": "on"}, {"gpu_layers": -1}, {"backend": "onnx"}]
)
def test_nothing_is_timed_that_decides_nothing(timed: list[str], changes: dict[str, Any]) -> None:
    prepare_kernels(SPEC, replace(REQUEST, **changes), lambda *_: None)
    assert timed == []


def test_kernels_that_do_not_fit_this_library_are_not_timed(
    timed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgespec.backends.llama.kernels.attach", lambda: "another version")
    prepare_kernels(SPEC, REQUEST, lambda *_: None)
    assert timed == []
