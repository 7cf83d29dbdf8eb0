"""What is timed of a loaded backend: steps of a draft model behind its target."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from draft_model_cases import Clock

from edgespec.measure import timing
from edgespec.measure.timing import times_behind
from edgespec.memory.times import CostCurve


class Cache:
    """The part of a backend that steps need; it takes no time and computes nothing."""

    capabilities = SimpleNamespace(rollback=True, snapshots=0)
    tokenizer = SimpleNamespace(vocab_size=1000)

    def __init__(self) -> None:
        self.length = 0

    def verify(self, _tree: Any) -> None:
        """Nothing: the step is taken back."""

    def truncate(self, length: int) -> None:
        self.length = length


class Drafting(Cache):
    """Steps take 1 ms for each token, and twice that behind a step of somebody else."""

    def __init__(self, clock: Clock, other: Cache | None = None) -> None:
        super().__init__()
        self.clock, self.is_cold = clock, False
        if other is not None:
            other.verify = self.cool  # type: ignore[method-assign]

    def cool(self, _tree: Any) -> None:
        self.is_cold = True

    def verify(self, tree: Any) -> None:
        self.clock.ms += len(tree) * (2.0 if self.is_cold else 1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "perf_counter", made)
    return made


def test_a_drafts_steps_are_timed_behind_those_of_its_target(clock: Clock) -> None:
    """Two steps of 2 and 1 ms, which take 4 and 2 ms there."""
    target = Cache()
    draft = Drafting(clock, target)
    curve = CostCurve([math.inf, 1.0, 2.0])
    assert times_behind(target, draft, curve) == pytest.approx(2.0)  # type: ignore[arg-type]
    assert times_behind(target, Drafting(clock), curve) < 1.001  # type: ignore[arg-type]
