"""What steps of all sizes share, and how sure that is: a Kalman filter.

    step = scale x (base[n] + depth_ms * depth + depth_node_ms * n * depth + change_ms * changed)

The speed of the moment, the slopes over depth and the price of a new graph are in every step, so
every step tells of them, in proportion to how unsure each is and how much it has in this step.
What a step of one size alone adds belongs to its base. Single tokens have none of their own to
move, so the speed cannot drift away from the shape of the curve.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import hypot, sqrt

# Relative standard deviations.
NOISE = 0.08  # of a step
_BASE = 0.08  # of a measured base
_BASE_STEP = 0.003  # of its drift from step to step of its size
_BASE_LOAD = 0.02  # and from load to load
_SPEED = 0.15  # of the machine, where a process begins
_SPEED_STEP = 0.01  # of its drift from step to step
_SPEED_TEXT = 0.03  # and from text to text
_LIMIT = 2.5  # standard deviations: what is further off counts as that far
_TOGETHER = 8  # plain steps in a row that are one observation: most steps then cost nothing
# Slopes that nothing is known of, in steps of a single token.
_UNKNOWN = (1 / 2000, 1 / 8000, 0.15)  # per token of depth, per token and node, for a change


@dataclass(slots=True)
class PlainSteps:
    """Steps of a single token in a row; `depth` and `ms` are their means."""

    depth: float
    ms: float
    count: int = 1

    def add(self, depth: int, ms: float) -> None:
        self.count += 1
        self.depth += (depth - self.depth) / self.count
        self.ms += (ms - self.ms) / self.count


class SharedTimes:
    """The covariance of (log speed, depth_ms, depth_node_ms, change_ms), [4, 4]."""

    __slots__ = ("_cov", "_depth", "_node_doubt", "_own_doubts", "_plain", "texts")

    def __init__(self, single_ms: float, deviations: Sequence[float] | None = None) -> None:
        """`deviations` are of the last three; None where nothing was measured."""
        self.texts = 1  # in a step: the least it is over, whose time says how fast the machine is
        self._depth = 0.0  # of the step before
        self._plain: PlainSteps | None = None  # that nothing was learned of yet
        self._own_doubts: dict[int, float] = {}
        known = deviations or [part * single_ms for part in _UNKNOWN]
        self._cov = [[0.0] * 4 for _ in range(4)]
        for place, deviation in enumerate((_SPEED, *known)):
            self._cov[place][place] = deviation * deviation
        self._node_doubt = sqrt(self._cov[2][2])

    def scaled(self, factor: float) -> SharedTimes:
        """As sure as this one, of a machine that takes so many times as long."""
        times = SharedTimes(1.0, [factor * part for part in self.deviations])
        times._own_doubts = dict(self._own_doubts)
        return times

    def own_doubts(self) -> dict[str, float]:
        """By size, for the next load; times of another moment are less sure."""
        return {
            str(size): round(min(_BASE, hypot(doubt, _BASE_LOAD)), 4)
            for size, doubt in self._own_doubts.items()
        }

    def know(self, own_doubts: Mapping[str, float]) -> None:
        """Begin with what an earlier load was sure of."""
        self._own_doubts = {int(size): min(_BASE, doubt) for size, doubt in own_doubts.items()}

    @property
    def deviations(self) -> tuple[float, float, float]:
        """Standard deviations of depth_ms, depth_node_ms and change_ms."""
        depth, node, change = (sqrt(self._cov[place][place]) for place in (1, 2, 3))
        return depth, node, change

    def doubts(self, num_nodes: int) -> tuple[float, float]:
        """Standard deviations: relative, of a base; and of depth_node_ms."""
        return self._own_doubts.get(num_nodes, _BASE), self._node_doubt

    def gather(self, depth: int, ms: float) -> bool:
        """Add a plain step to those before it; whether they are still too few."""
        if self._plain is None or depth < self._depth:
            self._plain = PlainSteps(float(depth), ms)
        else:
            self._plain.add(depth, ms)
        return self._plain.count < _TOGETHER

    def gathered(self) -> Iterator[PlainSteps]:
        """Those that nothing was learned of yet, if there are any."""
        if self._plain is not None:
            together, self._plain = self._plain, None
            yield together

    def go_on(self, depth: float, count: int = 1) -> None:
        """Time passes from step to step, and more of it to one of another text."""
        drift = _SPEED_TEXT if depth < self._depth else _SPEED_STEP
        self._cov[0][0] += count * drift * drift
        self._depth = depth

    def doubt_speed(self) -> None:
        """The machine has another speed, which is as unsure as where a process begins.

        Plain steps that nothing was learned of yet were made at the speed before.
        """
        self._plain = None
        for place in range(4):
            self._cov[0][place] = self._cov[place][0] = 0.0
        self._cov[0][0] = _SPEED * _SPEED

    def moves(
        self,
        shares: Sequence[float],
        off_ms: float,
        noise_ms: float,
        num_nodes: int = 1,
        own_ms: float = 0.0,
    ) -> tuple[list[float], float]:
        """What a step says of each parameter: how far to move them.

        Args:
            shares: derivatives of the step's time by each parameter, [4].
            off_ms: how much longer than predicted it took.
            noise_ms: standard deviation of what passes.
            num_nodes: of the step.
            own_ms: what its base takes of it; 0 where it has no base of its own to move.

        Returns:
            The moves of the four, and what of `off_ms` is the base's own.
        """
        own = 0.0
        if own_ms:
            own = self._own_doubts.get(num_nodes, _BASE) ** 2 + _BASE_STEP * _BASE_STEP
        cov, (a, b, c, d) = self._cov, shares
        products = [row[0] * a + row[1] * b + row[2] * c + row[3] * d for row in cov]
        told = a * products[0] + b * products[1] + c * products[2] + d * products[3]
        own_variance = own * own_ms * own_ms
        total = told + own_variance + noise_ms * noise_ms
        most = _LIMIT * sqrt(total)
        part = min(max(off_ms, -most), most) / total
        for row, product in zip(cov, products, strict=True):
            gain = product / total
            for place, other in enumerate(products):
                row[place] -= gain * other
        self._node_doubt = sqrt(max(0.0, cov[2][2]))
        if own:
            self._own_doubts[num_nodes] = sqrt(own * (1.0 - own_variance / total))
        return [product * part for product in products], own_variance * part
