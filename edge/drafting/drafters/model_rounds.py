"""What rounds of a draft model take and bring: learned from round to round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from edgespec.memory.times.curve import CostCurve

LONGEST = 16  # tokens drafted ahead
_FIRST_HOPE = 0.7  # that a drafted token is accepted, before anything was counted
_HOPE_RATE = 0.05
_USUAL_STEPS, _USUAL_RATE = 3.0, 0.05  # of a round, before there was one; of each one later
_LASTING_RATE = 0.005  # of a round in what texts are usually like
_PROMISED_ROUNDS = 20  # that a promise is worth
_SETTLED = 100  # rounds after which all count alike
_PACE_MEMORY = 0.95  # of what rounds took, from round to round
_SLOWEST = 10.0  # times as long as the curve says
_FIRST_STEPS = 10.0  # that the curve's own times count for


class RoundTimes:
    """How long rounds take lately.

    They take longer than their steps: other threads have just run, and there is the work on this
    side. What they took lately is kept beside what the curve says of them.
    """

    def __init__(self, curve: CostCurve) -> None:
        self._curve = curve
        self._taken_ms = self._curve_ms = _FIRST_STEPS * curve.base[1]

    @property
    def _pace(self) -> float:
        """How long steps take lately, in units of what the curve says."""
        return self._taken_ms / self._curve_ms

    def step_ms(self, depth: int) -> float:
        """One step behind so many tokens."""
        return self._pace * self._curve.step_ms(1, depth)

    def catch_up_ms(self, missing: int, depth: int) -> float:
        """What it takes to feed so many tokens, beyond the step that drafts the first one."""
        return self._pace * self._curve.read_ms(missing, depth) - self.step_ms(depth)

    def learn(self, ms: float, missing: int, steps: float, depth: int) -> None:
        """A round read so many tokens, and drafted in so many steps, in `ms`."""
        if missing > self._curve.max_nodes:  # what reading more takes is a guess
            return
        curve_ms = (self.catch_up_ms(missing, depth) + steps * self.step_ms(depth)) / self._pace
        # A round that stood still must not keep others from being asked for, and so from showing.
        self._taken_ms = _PACE_MEMORY * self._taken_ms + min(ms, _SLOWEST * curve_ms)
        self._curve_ms = _PACE_MEMORY * self._curve_ms + curve_ms


class UsualRound:
    """What a round drafts: probabilities of its nodes, best first, and the steps it takes.

    `hope` is how often a drafted token is accepted when the one before it was. `promised[i]` is
    what an i + 1st draft was measured to add to the tokens of a round; without any, nobody knows.
    """

    def __init__(self, promised: Sequence[float] = ()) -> None:
        self.hope = promised[0] if promised else _FIRST_HOPE
        self.probabilities = [_FIRST_HOPE ** (i + 1) for i in range(LONGEST)]
        if promised:
            self.probabilities = [*promised, *[0.0] * LONGEST][:LONGEST]
        self._lasting = list(self.probabilities)
        self.num_steps = _USUAL_STEPS
        self._rounds = _PROMISED_ROUNDS if promised else 0

    def begin(self) -> None:
        """Another text: the last one may have been a hard one."""
        self.probabilities = list(self._lasting)

    def learn(self, probabilities: Sequence[float], num_steps: int) -> None:
        """A round has drafted nodes with these probabilities."""
        part = 1.0 / (self._rounds + 2)
        rate = max(_USUAL_RATE, part)
        self._rounds += 1
        self.num_steps += rate * (num_steps - self.num_steps)
        found = [*sorted(probabilities, reverse=True), *[0.0] * LONGEST]
        self.probabilities = _nearer(self.probabilities, found, rate)
        self._lasting = _nearer(self._lasting, found, max(_LASTING_RATE, part))

    def learn_hits(self, drafted: Sequence[int], emitted: Sequence[int]) -> None:
        """Count which tokens of a draft were written, up to the first that was not."""
        for token, written in zip(drafted, emitted, strict=False):
            self.hope += _HOPE_RATE * ((token == written) - self.hope)
            if token != written:
                break

    def state(self) -> dict[str, Any]:
        """What was learned."""
        return {
            "hope": self.hope,
            "usual": self._lasting,
            "usual_steps": self.num_steps,
        }

    def load_state(self, document: Mapping[str, Any]) -> None:
        """Start from what an earlier run learned."""
        hope = document.get("hope")
        if isinstance(hope, float) and 0.0 <= hope <= 1.0:
            self.hope = hope
        usual, steps = document.get("usual"), document.get("usual_steps")
        if _is_usual(usual) and isinstance(steps, float) and 1.0 <= steps <= LONGEST:
            self._lasting, self.num_steps, self._rounds = usual, steps, _SETTLED
            self.begin()


def _nearer(usual: Sequence[float], found: Sequence[float], rate: float) -> list[float]:
    return [p + rate * (q - p) for p, q in zip(usual, found, strict=False)]


def _is_usual(value: Any) -> TypeGuard[list[float]]:
    if not isinstance(value, list) or len(value) != LONGEST:
        return False
    return all(isinstance(part, float) and 0.0 <= part <= 1.0 for part in value)
