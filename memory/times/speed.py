"""What a plan is worth: predicted tokens per second, before anything is loaded.

    plain        1 / t(1)
    speculative  sum of e / sum of ceil(e / c) t(min(n, c))   over the rounds of the history

t is the step-time curve at the depth in question; a round of the history verified n nodes and
emitted e tokens, and c caps the nodes of the plan: a chain of which e tokens were emitted is then
emitted in pieces. The history is what earlier runs of this file counted; before there were any,
what Spec-Bench prompts gave on two other models. A prediction is a range: how sure the step times
are, and texts that leave less or more to draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from math import exp

from edgespec.memory.times.curve import USUAL_FURTHER, CostCurve

Round = tuple[int, int, float]  # nodes, tokens emitted, how often
NO_DIFFERENCE = 1.01  # between two speeds, not measured: to choose by less would be by chance

# Per 1000 rounds, suffix drafter: Spec-Bench, greedy, mean of SmolLM2-135M and Qwen2.5-Coder-1.5B
# on a curve that rises with every fourth token (2 CPU cores).
DEFAULT_ROUNDS: tuple[Round, ...] = (
    *((1, 1, 815.0), (4, 1, 36.0), (4, 2, 26.0), (4, 3, 19.0), (4, 4, 56.0)),
    *((8, 1, 4.0), (8, 3, 4.0), (8, 6, 2.0), (8, 8, 8.0), (16, 1, 2.0), (16, 4, 3.0)),
    *((16, 7, 2.0), (16, 16, 9.0), (32, 1, 1.0), (32, 32, 8.0)),
)
# Times as many rounds with nothing to draft: Spec-Bench's categories had 0.99x to 1.54x of plain
# where their mean was 1.25x, and this many give 1.1x to 2x by the curves of four machines.
_OTHER_TEXTS = (4.0, 0.25)


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Predicts tokens per second; `source` says what the step times rest on.

    `is_measured`: the curve's sizes were; of one that is estimated single tokens alone may have
    been. `is_from_busy_moment`: other programs computed while the bandwidth was measured that it is
    estimated from. `likely` are slower and faster curves, between which it lies.
    """

    curve: CostCurve
    is_measured: bool
    rounds: tuple[Round, ...] = DEFAULT_ROUNDS
    is_from_busy_moment: bool = False
    likely: tuple[CostCurve, CostCurve] | None = None

    @property
    def source(self) -> str:
        """Where the step times come from, in words."""
        if not self._knows_plain_steps:
            busy = ", measured while other programs computed" if self.is_from_busy_moment else ""
            return f"estimated from memory bandwidth{busy}"
        said = "measured on this device"
        if self.curve.measured_s:
            day = datetime.fromtimestamp(self.curve.measured_s)
            said = f"measured on {day.day} {day:%B %Y}"
        if self.curve.contention > 1.0:
            part = f"{1.0 / self.curve.contention:.0%} of its threads"
            said += f" with {part}, as other programs computed"
        return said if self.is_measured else f"{said}, drafts estimated"

    @property
    def _knows_plain_steps(self) -> bool:
        return self.is_measured or self.curve.measured_s > 0.0

    def range_of(self, draft_max: int, depth: int) -> tuple[float, float]:
        """Between what `tokens_per_s` is likely to lie, while nothing else computes.

        Of drafts that is with texts that leave a quarter as much to draft, or four times as much.
        """
        curves, texts = self.likely or 2 * (self.curve,), _OTHER_TEXTS if draft_max else (1.0, 1.0)
        speeds: list[float] = []
        for curve, times in zip(curves, texts, strict=True):  # more or fewer rounds draft nothing
            rounds = tuple((n, e, k * times if n == 1 else k) for n, e, k in self.rounds)
            model = replace(self, curve=curve, rounds=rounds)
            speeds.append(model.tokens_per_s(draft_max, depth))
        # What a device without measurements does of what its bandwidth allows: single steps of five
        # files, with and without kernels, took 1.4 to 2.75 times as long beside other programs,
        # 1.03 on a quiet machine (EPYC Zen 3). Copies beside other programs had half of what they
        # have alone there.
        least, most = 1 / 2.8, 1.15
        if self._knows_plain_steps:
            most = exp(1.64 * self.curve.speed_error)  # of either side: nine of ten lie between
            least = 1.0 / most
        elif self.is_from_busy_moment:
            most *= 2.0
        return least * speeds[0], most * speeds[1]

    def tokens_per_s(self, draft_max: int, depth: int) -> float:
        """Decoding speed with drafts of at most `draft_max` tokens, `depth` tokens in the cache."""
        plain_ms = self.curve.step_ms(1, depth)
        tokens = spent_ms = 0.0
        for nodes in {nodes for nodes, _, _ in self.rounds}:
            size, step_ms = self._step(min(nodes, draft_max + 1), depth)
            drafted_ms = undrafted_ms = 0.0
            for _, emitted, times in (r for r in self.rounds if r[0] == nodes):
                drafted_ms += times * -(-emitted // size) * step_ms
                undrafted_ms += times * emitted * plain_ms
                tokens += times * emitted
            # Where drafts of this size lose on this device the controller does not draft.
            spent_ms += min(drafted_ms, undrafted_ms)
        rate = tokens / spent_ms if spent_ms else 1.0 / plain_ms
        return 1e3 * rate / self.curve.level

    def _step(self, size: int, depth: int) -> tuple[int, float]:
        """The largest step that was measured and is not larger, and its time.

        A step beyond all that an earlier plan had room for is taken to go on as the measured ones
        do: a plan would never have room for it again if it could only be as good as smaller ones.
        """
        base, largest = self.curve.base, self.curve.max_nodes
        if size >= len(base) and largest > 1:
            return size, self.curve.estimated_ms(size, depth)
        size = min(size, largest)
        while base[size] == float("inf"):
            size -= 1
        return size, self.curve.step_ms(size, depth)


def estimated_curve(
    bytes_per_token: int, bytes_per_s: float, max_nodes: int, plain: CostCurve | None = None
) -> CostCurve:
    """Step times of a device where nothing but `plain` was measured: a step over one token.

    Without it that is reading the weights of a token.
    """
    first = max(0.05, 1e3 * bytes_per_token / bytes_per_s)
    base = [first * (1.0 + USUAL_FURTHER * (n - 1)) for n in range(1, max_nodes + 1)]
    curve = CostCurve([float("inf"), *base])
    if plain is not None:
        curve = curve.scaled(plain.base[1] / curve.base[1])
        curve.measured_s, curve.contention = plain.measured_s, plain.contention
    return curve


def predicted_speedup(
    gains: Sequence[float],
    target_ms: Sequence[float],
    draft_ms: float,
    first_ms: float | None = None,
) -> tuple[float, float]:
    """Speed over plain decoding and tokens per round, at the best fixed draft length.

    E(n) = 1 + the sum of `gains`[:n] tokens come from n drafted ones; a round takes
    `target_ms`[n + 1] + n x `draft_ms` (arXiv 2211.17192, section 3.3, with measured times), the
    first of these `first_ms` if that differs. Those of plain decoding where no step of a draft was
    measured.
    """
    plain, found = target_ms[1], []
    more_ms = 0.0 if first_ms is None else first_ms - draft_ms
    for count in range(1, min(len(gains), len(target_ms) - 2) + 1):
        length = 1.0 + sum(gains[:count])
        if target_ms[count + 1] != float("inf"):
            round_ms = target_ms[count + 1] + more_ms + count * draft_ms
            found.append((length * plain / round_ms, length))
    return max(found, default=(1.0, 1.0), key=lambda pair: pair[0])
