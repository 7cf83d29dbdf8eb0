"""Step times that no clock changes, for tests in which the choice of a draft's size matters."""

from __future__ import annotations

from edgespec.memory.times.curve import CostCurve


class Frozen(CostCurve):
    """Step times that stay as they are, whatever the clock of the test machine says."""

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        pass
