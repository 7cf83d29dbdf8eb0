"""What `--exact` measures, and what it remembers of that."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from fake_backend import FakeBackend
from planning_cases import SPEC

from edgespec.errors import UnsupportedError
from edgespec.memory.bytes.config import RunConfig
from edgespec.setup import loading
from edgespec.setup.loading import largest_exact_step, prefill_is_exact
from edgespec.setup.stored import STEPS, keep_compared, known_exact_step

SETTINGS = RunConfig(512, threads=2, kv_type_k="bf16", drafter="suffix")
DEEPEST = 704


def backend(max_nodes: int, depth: int) -> FakeBackend:
    return FakeBackend(lambda _context: [0.0] * 256, 256, context_size=depth, max_nodes=max_nodes)


class Measurements:
    """Counts measurements; steps of more than `limit` nodes round differently."""

    def __init__(self, limit: Callable[[int], int]) -> None:
        self.limit = limit
        self.of_steps: list[tuple[int, int]] = []
        self.of_prefills: list[tuple[int, int]] = []

    def step(self, of: FakeBackend, **_options: object) -> int:
        self.of_steps.append((of.max_nodes, of.context_size))
        return min(of.max_nodes, self.limit(of.context_size))

    def prefill(self, of: FakeBackend, step: int) -> bool:
        self.of_prefills.append((step, of.context_size))
        return step < 8


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measurements:
    made = Measurements(lambda _depth: 99)
    monkeypatch.setattr(loading, "largest_invariant_step", made.step)
    monkeypatch.setattr(loading, "prefill_is_invariant", made.prefill)
    return made


def load(max_nodes: int, depth: int) -> tuple[int, bool]:
    """The largest step of a plan, and whether it may keep its cache."""
    one = backend(max_nodes, depth)
    step = largest_exact_step(one, SPEC, SETTINGS, lambda _what, _part: None)
    return step, prefill_is_exact(one, SPEC, SETTINGS, step)


def test_plans_in_turn_are_measured_once_each(measured: Measurements) -> None:
    """One has larger steps, the other a deeper cache: neither result replaces the other."""
    plans = (32, 512), (4, DEEPEST)
    results = [load(*plan) for _ in range(3) for plan in plans]
    assert results == [(32, False), (4, True)] * 3
    assert measured.of_steps == list(plans)
    assert measured.of_prefills == list(plans)


def test_a_result_stands_for_those_it_covers(measured: Measurements) -> None:
    for plan in ((4, 512), (8, 256), (32, DEEPEST), (4, 512), (8, 256)):
        load(*plan)
    assert measured.of_steps == [(4, 512), (8, 256), (32, DEEPEST)]


def test_a_limit_says_all_about_larger_steps_and_nothing_about_deeper_caches(
    measured: Measurements,
) -> None:
    measured.limit = lambda depth: 6 if depth < DEEPEST else 3
    assert [load(8, 512)[0], load(32, 512)[0], load(4, 300)[0]] == [6, 6, 4]
    assert known_exact_step(SPEC, SETTINGS) == 6
    assert [load(32, DEEPEST)[0], load(8, 512)[0]] == [3, 3], "the deeper one is the stricter one"
    assert measured.of_steps == [(8, 512), (32, DEEPEST)]
    assert known_exact_step(SPEC, SETTINGS) == 3


def test_any_order_of_plans_measures_no_plan_twice(measured: Measurements) -> None:
    plans = list(product((2, 8, 32), (100, 512, DEEPEST)))
    for plan in (*plans, *reversed(plans), *plans[::2]):
        assert load(*plan)[0] == plan[0]
    assert len(measured.of_steps) == len(set(measured.of_steps)) <= len(plans)


def test_a_file_without_such_steps_is_refused(measured: Measurements) -> None:
    measured.limit = lambda _depth: 1
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="exact is not possible") as caught:
            load(4, 512)
        assert "--exact" in str(caught.value.hint)
    assert len(measured.of_steps) == 1
    assert load(1, 512)[0] == 1, "single tokens are exact"
    assert known_exact_step(SPEC, SETTINGS) is None


def test_what_is_known_of_steps_and_of_prefills_lies_side_by_side(measured: Measurements) -> None:
    load(4, 512)
    keep_compared(SPEC, SETTINGS, STEPS, (32, 600), 32)
    load(4, 512)
    assert (len(measured.of_steps), len(measured.of_prefills)) == (1, 1)
