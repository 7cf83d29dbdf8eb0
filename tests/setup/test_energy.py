"""Drafts by joules: how powers of steps are measured and kept, and what is drafted by them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import edgespec
from edgespec import EdgespecWarning
from edgespec.drafting.proposal import StepContext, choose_size
from edgespec.measure.timing import measure_powers
from edgespec.memory.device.energy import EnergyMeter, Source, energy_meter
from edgespec.memory.plan.plan import Plan
from edgespec.memory.plan.settings import settings_of
from edgespec.memory.times.curve import CostCurve
from edgespec.models.embedded import embedded_model
from edgespec.models.spec import read_model_spec
from edgespec.setup import loading, planning
from edgespec.setup.stored import keep_powers, stored_powers

INF = float("inf")
SIZES = 16
SURE = [0.99**n for n in range(1, SIZES)]  # drafts that are nearly always right
TEXT = "one two three four five six seven " * 6


class Machine:
    """Its steps take `ms` and `watts` of their size."""

    def __init__(self, ms: list[float], watts: list[float]) -> None:
        self.ms, self.watts = ms, watts
        self.now_s = self.joules = 0.0

    def run(self, nodes: int) -> None:
        self.now_s += self.ms[nodes] / 1e3
        self.joules += self.watts[nodes] * self.ms[nodes] / 1e3

    def powers(self) -> list[float]:
        return measure_powers(self.run, SIZES, lambda: self.joules, clock=lambda: self.now_s)


def drafted(powers: list[float], ms: list[float]) -> int:
    curve = CostCurve(ms)
    curve.powers = powers
    return choose_size(SURE, StepContext(SIZES - 1, 0.0, curve, 0))[0]


def test_powers_are_those_of_the_machine_and_between_sizes_on_the_line() -> None:
    watts = [0.0, 10.0, *(10.0 + 2.0 * (n - 1) for n in range(2, SIZES + 1))]
    powers = Machine([0.0, *[4.0] * SIZES], watts).powers()
    assert powers[1:] == pytest.approx([one / 10.0 for one in watts[1:]])


def test_a_counter_that_stands_still_says_nothing() -> None:
    assert Machine([0.0, *[4.0] * SIZES], [0.0] * (SIZES + 1)).powers() == []


def test_drafts_that_cost_no_time_may_cost_joules() -> None:
    """All steps take as long, and each node a fifth more power."""
    ms = [INF, *[10.0] * SIZES]
    watts = [0.0, *(10.0 * 1.25 ** (n - 1) for n in range(1, SIZES + 1))]
    machine = Machine([0.0, *ms[1:]], watts)
    assert drafted([], ms) == SIZES - 1
    assert 0 < drafted(machine.powers(), ms) < 8


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.lists(st.floats(1.0, 4.0), min_size=SIZES - 1, max_size=SIZES - 1))
def test_where_all_steps_take_the_same_power_nothing_changes(growth: list[float]) -> None:
    ms = [INF, 10.0, *(10.0 * one for one in growth)]
    assert drafted([1.0] * (SIZES + 1), ms) == drafted([], ms)


def test_other_curves_of_a_model_have_its_powers() -> None:
    curve = CostCurve([INF, 1.0, 2.0])
    curve.powers = [1.0, 1.0, 3.0]
    for one in (curve.contended(2.0), curve.together(2), curve.scaled(2.0), curve.resized(1)):
        assert one.power(2) == one.power(9) == 3.0
    assert CostCurve([INF, 1.0]).power(7) == 1.0


# -- with a model --------------------------------------------------------------------------


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """A counter of this machine; nothing is measured yet."""
    (tmp_path / "energy_uj").write_text("0")
    source = Source("RAPL: made up", [(tmp_path / "energy_uj",)], 1e-6, [1e3])

    @contextmanager
    def meter() -> Iterator[tuple[EnergyMeter, None]]:
        with EnergyMeter(source) as opened:
            yield opened, None

    monkeypatch.setattr(planning, "find_source", lambda: source)
    monkeypatch.setattr(loading, "energy_meter", meter)
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path / "cache"))
    return source


def preference(plan: Plan) -> tuple[object, str]:
    return next((one.value, one.reason) for one in plan.choices if one.name == "prefer")


@pytest.mark.model
def test_a_machine_without_a_counter_goes_by_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGESPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(planning, "find_source", lambda: "this machine shows no energy counter")
    plan = edgespec.plan(prefer="energy", context_size=512)
    assert preference(plan) == ("speed", "not energy: this machine shows no energy counter")
    assert not plan.prefers_energy
    with (
        pytest.warns(EdgespecWarning, match="by speed, not energy: this machine shows no"),
        edgespec.load(prefer="energy", context_size=512, threads=1) as engine,
    ):
        assert engine.curve is not None and not engine.curve.powers
    with energy_meter(tmp_path) as (meter, missing):
        assert meter is None and missing


@pytest.mark.model
def test_what_was_measured_is_kept_and_drafts_go_by_it(counter: Source) -> None:
    """Steps over drafts that take fifty times the power are never made; the text is the same."""
    spec = read_model_spec(embedded_model())
    options = {"context_size": 512, "drafter": "suffix", "draft_max": 7, "threads": 1}
    with edgespec.load(**options) as engine:  # type: ignore[arg-type]
        text = engine.generate(TEXT, raw=True, max_tokens=40)
    assert text.counters.drafted_tokens > 0
    plan = edgespec.plan(prefer="energy", **options)  # type: ignore[arg-type]
    assert preference(plan) == ("energy", "drafts are chosen by tokens a joule (RAPL: made up)")
    powers = [1.0, 1.0, *[50.0] * 7]
    keep_powers(spec, settings_of(plan), counter.name, powers)
    assert stored_powers(spec, settings_of(plan), counter.name) == powers
    assert stored_powers(spec, settings_of(plan), "another") == []
    with edgespec.load(prefer="energy", **options) as engine:  # type: ignore[arg-type]
        again = engine.generate(TEXT, raw=True, max_tokens=40)
        assert engine.curve is not None and list(engine.curve.powers) == powers
    assert again.counters.drafted_tokens == 0
    assert again.token_ids == text.token_ids


@pytest.mark.model
def test_a_counter_that_stands_still_changes_nothing(counter: Source) -> None:
    options = {"context_size": 512, "drafter": "suffix", "draft_max": 3, "threads": 1}
    with edgespec.load(prefer="energy", **options) as engine:  # type: ignore[arg-type]
        assert engine.curve is not None and not engine.curve.powers
