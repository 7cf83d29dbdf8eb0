"""Step times that no clock changes, for tests in which the choice of a draft's size matters."""

from __future__ import annotations

from edgespec.decode.engine import Engine
from edgespec.memory.times import CostCurve

INF = float("inf")
_SLOW_MS = 1000.0  # more than any step takes here, so that no answer's drafts seem to lose time


class Frozen(CostCurve):
    """Step times that stay as they are, whatever the clock of the test machine says."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        pass


def free_drafts(most: int) -> Frozen:
    """A step over up to `most` tokens takes as long as one over a single token: all is drafted."""
    return Frozen([INF, *[_SLOW_MS] * most])


def let_drafts_pay(engine: Engine) -> None:
    """Whatever was measured on this machine, which may be busy: all measured sizes are free."""
    assert engine.curve is not None
    engine.curve = Frozen([ms if ms == INF else _SLOW_MS for ms in engine.curve.base])
