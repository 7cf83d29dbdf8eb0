"""Which models fit together, and that a set is planned within its budget."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_gguf import F32, write_model

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import RUNTIME_BYTES
from edgespec.memory.bytes.requests import guests_bytes, requests_bytes
from edgespec.memory.plan.machine import Machine
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.setup.planning import (
    Capacity,
    beside,
    largest_sets,
    own_bytes,
    plan_set,
    shared_bytes,
)

MIB = 1 << 20
MACHINE = Machine(8 << 30, process_bytes=RUNTIME_BYTES)


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> list[ModelSpec]:
    folder = tmp_path_factory.mktemp("models")
    return [
        read_model_spec(write_model(folder / f"{name}.gguf", "llama", F32, seed))
        for seed, name in enumerate("abc")
    ]


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(1, 120),
)
def test_the_largest_sets_are_those_that_no_other_model_fits_into(
    sizes: list[int], shared: int, limit: int
) -> None:
    """Against all subsets."""
    capacity = Capacity({"host": limit}, 1 << 62, shared)
    numbers = range(len(sizes))
    fitting = {
        frozenset(one)
        for count in range(1, len(sizes) + 1)
        for one in combinations(numbers, count)
        if shared + sum(sizes[i] for i in one) <= limit
    }
    largest = {one for one in fitting if not any(one < other for other in fitting)}
    found = list(largest_sets([{"host": size} for size in sizes], capacity))
    assert {frozenset(one) for one in found} == largest
    assert [len(one) for one in found] == sorted(map(len, found), reverse=True)


def test_a_budget_covers_all_devices_and_each_has_its_own_limit() -> None:
    capacity = Capacity({"host": 100, "gpu": 50}, 120, shared_bytes=20)
    assert capacity.fits([{"host": 40, "gpu": 30}, {"host": 30}])
    assert not capacity.fits([{"host": 40, "gpu": 30}, {"host": 31}]), "121 of the budget"
    assert not capacity.fits([{"gpu": 51}])
    assert not capacity.fits([{"host": 81}])
    assert capacity.fits([{"worker1": 0}]) and not capacity.fits([{"worker1": 1}])


def test_what_a_process_has_once_is_counted_once(specs: list[ModelSpec]) -> None:
    """Two models take less than two processes; beside each other their plans add up."""
    request = Request(interface_bytes=32 * MIB)
    (one, two, _), capacity = plan_set(specs, request, MACHINE)
    assert one.plan is not None and two.plan is not None
    assert capacity.shared_bytes == shared_bytes(one.spec, one.plan) == RUNTIME_BYTES + 32 * MIB
    alone = one.plan.predicted_peak_bytes
    assert alone == capacity.shared_bytes + own_bytes(one.spec, one.plan)["host"]
    both = beside(two.plan, [one.sizes])
    assert both.predicted_peak_bytes == alone + two.sizes["host"]
    assert beside(two.plan, []) == two.plan


def test_guests_are_there_once(specs: list[ModelSpec]) -> None:
    """All models of a process have the same ones."""
    request = Request(context_size=256, threads=2, keeps_to_form=True)
    (alone, *_), without = plan_set(specs, request, MACHINE)
    (served, *_), capacity = plan_set(specs, replace(request, serves=True), MACHINE)
    once = requests_bytes(256) + guests_bytes(specs[0].vocab_size, 256)
    assert capacity.shared_bytes == without.shared_bytes + once
    assert served.sizes == alone.sizes


def test_a_model_is_planned_beside_others_where_that_costs_no_context(
    specs: list[ModelSpec],
) -> None:
    """Else it takes turns with them, and has what it would have alone."""
    full, _ = plan_set(specs, Request(), MACHINE)
    sizes = [one.sizes["host"] for one in full]
    for fitting in (3, 2, 1):
        budget = RUNTIME_BYTES + sum(sizes[:fitting]) + sizes[0] // 4
        planned, capacity = plan_set(specs, Request(budget_bytes=budget), MACHINE)
        contexts = {one.plan.context_size for one in planned if one.plan is not None}
        assert contexts == {4096}
        assert capacity.host_bytes == budget
        largest = next(largest_sets([one.sizes for one in planned], capacity))
        assert len(largest) == fitting


def test_pinned_models_are_planned_first_and_the_others_in_what_they_leave(
    specs: list[ModelSpec],
) -> None:
    full, _ = plan_set(specs, Request(), MACHINE)
    size = full[0].sizes["host"]
    budget = RUNTIME_BYTES + size + size // 2
    planned, capacity = plan_set(specs, Request(budget_bytes=budget), MACHINE, pinned=[1])
    assert planned[1].plan is not None and planned[1].plan.context_size == 4096
    for other in (0, 2):
        plan = planned[other].plan
        assert plan is not None and plan.context_size < 4096
        assert capacity.fits([planned[1].sizes, planned[other].sizes])
        assert plan.limit_bytes == budget


def test_what_fits_nowhere_has_its_error_and_keeps_nobody_out(specs: list[ModelSpec]) -> None:
    tight = Request(budget_bytes=RUNTIME_BYTES + MIB // 2)
    planned, _ = plan_set(specs[:2], tight, MACHINE)
    assert [type(one.problem) for one in planned] == [DoesNotFitError] * 2
    assert all("budget" in str(one.problem) for one in planned)


def test_the_real_process_is_where_the_plan_begins(tmp_path: Path) -> None:
    """A program around it counts once, whichever models are loaded."""
    spec = read_model_spec(write_model(tmp_path / "m.gguf", "llama", F32))
    held = Machine(8 << 30, process_bytes=RUNTIME_BYTES + 100 * MIB)
    planned, capacity = plan_set([spec, spec], Request(), held)
    assert capacity.shared_bytes == RUNTIME_BYTES + 100 * MIB
    assert planned[0].sizes == planned[1].sizes
