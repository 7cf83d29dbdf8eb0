"""The process around a model: what it holds at load counts, what it held once does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from laid_out import machine_with
from planning_cases import MIB, SPEC, held, outcome, plan_of

from edgespec.errors import DoesNotFitError
from edgespec.memory.bytes.footprint import RUNTIME_BYTES, Component
from edgespec.memory.bytes.requests import guests_bytes, requests_bytes
from edgespec.memory.device import host
from edgespec.memory.device.track import peak_resident_bytes, private_bytes, resident_bytes
from edgespec.memory.plan.machine import reachable_bytes, this_machine
from edgespec.memory.plan.plan import Request
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec
from edgespec.setup.loading import load_plan
from edgespec.setup.planning import make_run_plan

HELD = RUNTIME_BYTES + 300 * MIB


def test_what_a_host_program_holds_is_a_component() -> None:
    """It counts against the budget, as everything in the process does."""
    alone = plan_of(SPEC, machine_with(64 << 30))
    hosted = plan_of(SPEC, machine_with(64 << 30, process_bytes=HELD))
    assert hosted.component_bytes == {**alone.component_bytes, "process": 300 * MIB}
    budget = alone.predicted_peak_bytes
    assert (
        plan_of(SPEC, machine_with(64 << 30), budget_bytes=budget).context_size
        == alone.context_size
    )
    refused = outcome(SPEC, machine_with(64 << 30, process_bytes=HELD), budget_bytes=budget)
    assert isinstance(refused, DoesNotFitError) and "process 300" in str(refused)


def test_a_command_line_and_its_line_editor_are_counted_once() -> None:
    machine = machine_with(64 << 30, process_bytes=RUNTIME_BYTES + 10 * MIB)
    plan = plan_of(SPEC, machine, interface_bytes=12 * MIB)
    assert "process" not in plan.component_bytes
    assert plan.component_bytes["interface"] == 12 * MIB


def test_a_server_counts_its_requests_and_its_guests() -> None:
    alone = plan_of(SPEC)
    cells: Any = {"context_size": 1024, "serves": True}
    assert "guests" not in alone.component_bytes
    parts = plan_of(SPEC, **cells, keeps_to_form=True).component_bytes
    assert parts["guests"] == guests_bytes(SPEC.vocab_size, 1024)
    assert parts["requests"] == requests_bytes(1024)
    assert plan_of(SPEC, **cells).component_bytes["guests"] == guests_bytes(0, 1024)


@pytest.mark.own_memory
def test_memory_is_reachable_where_it_is_free_or_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_bytes", lambda: 100 * MIB)
    with held(64 * MIB):
        with_ballast = reachable_bytes()
        assert with_ballast >= 164 * MIB
        assert this_machine().process_bytes >= resident_bytes() - MIB
    assert reachable_bytes() <= with_ballast - 60 * MIB
    assert private_bytes() <= resident_bytes()


@pytest.mark.model
@pytest.mark.own_memory
def test_what_an_earlier_engine_gave_back_is_not_free_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """600 MiB were held and are not any more; somebody else has taken them."""
    spec = read_model_spec(embedded_model())
    plan = make_run_plan(spec, Request(context_size=512, drafter="none"), machine_with(64 << 30))
    with held(600 * MIB):
        pass
    now, half = private_bytes(), plan.predicted_peak_bytes // 2
    assert peak_resident_bytes() > now + 300 * MIB
    monkeypatch.setattr(host, "available_bytes", lambda: half)
    around = replace(plan, components=(*plan.components, Component("process", now)))
    with pytest.raises(DoesNotFitError, match="free any more"):
        load_plan(spec, around)


@pytest.mark.model
def test_a_program_that_holds_much_stays_inside_its_plan() -> None:
    """A program with 300 MiB of its own, and a budget for all of it."""
    program = """
import numpy as np
ballast = np.ones(300 << 20, np.uint8)
import edgespec
from edgespec.errors import DoesNotFitError
from edgespec.measure import timing
from edgespec.memory.device.track import peak_resident_bytes
from edgespec.setup import loading
timing._LOOK_SECONDS, loading._CURVE_SECONDS = 0.0, 0.1
try:
    edgespec.load(budget_bytes=250 << 20)
except DoesNotFitError:
    print("refused")
options = dict(budget_bytes=600 << 20, context_size=1024)
planned = edgespec.plan(**options).predicted_peak_bytes
with edgespec.load(**options) as engine:
    engine.generate("Name three colours.", max_tokens=24)
print(planned, peak_resident_bytes())
planned = edgespec.plan(**options).predicted_peak_bytes  # now with what was measured
with edgespec.load(**options) as engine:
    engine.generate("Name three colours.", max_tokens=24)
print(planned, peak_resident_bytes())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    refused, first, second = done.stdout.splitlines()
    assert refused == "refused"
    for line in (first, second):
        planned, peak = map(int, line.split())
        assert planned <= 600 * MIB
        assert planned - 40 * MIB <= peak <= planned
