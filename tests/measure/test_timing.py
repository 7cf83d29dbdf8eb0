"""How far the cache is filled to see what depth costs: as far as the time allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgespec.measure.timing import measure_depths
from edgespec.memory.times.curve import CostCurve


class Cache:
    """The part of a backend that steps and prompts need; it takes no time and computes nothing."""

    batch_size, context_size = 128, 4096
    capabilities = SimpleNamespace(rollback=True, snapshots=0)
    tokenizer = SimpleNamespace(vocab_size=1000)

    def __init__(self) -> None:
        self.length = self.read = 0

    def prefill(self, tokens: Sequence[int]) -> None:
        assert len(tokens) <= self.batch_size
        self.length += len(tokens)
        self.read += len(tokens)

    def verify(self, _tree: Any) -> None:
        """Nothing: the step is taken back."""

    def truncate(self, length: int) -> None:
        self.length = length


@pytest.mark.parametrize(("token_ms", "depth"), [(0.1, 1024), (1.0, 512), (4.0, 128), (10.0, 0)])
def test_slow_models_are_looked_at_less_deep(token_ms: float, depth: int) -> None:
    """Six tenths of a second, at the pace of the largest step that was measured."""
    backend = Cache()
    curve = CostCurve([math.inf, *(token_ms * n for n in range(1, 9))])
    measure_depths(backend, curve)  # type: ignore[arg-type]
    assert (backend.read, backend.length) == (depth, 0)
    if depth == 0:
        assert not curve.knows_depth
