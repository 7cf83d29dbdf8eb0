"""The measured step-time curve t(n): what one target step over n tokens costs on this device.

t(n) is neither flat nor monotone (a batch of three can cost more than one of four), so it is read
at every n: an n that was not measured takes for ever and cannot be chosen. A step that is not
chosen, because it has to be made in any case or is far from being made, is estimated from its
neighbours; so is one that is tried, which two steps of an answer are enough to measure. Three
effects are kept apart:

    t(n, depth, changed) = base[n] + (depth_ms + depth_node_ms * n) * depth + change_ms * changed

`depth` is the number of tokens in the cache, `changed` is 1 when the step before had another n:
the engine then builds its graph again. A step over several texts reads the cache of each: it has
depth_ms as many times, and `depth` is the mean. Decisions only need the ratios t(n)/t(1). Steps are
timed anyway while generating. Each one tells how fast the machine is at the moment (`scale`: heat,
a busy neighbour), of the slopes and the price of a change, and, within bounds, of its own base[n],
in proportion to how unsure these are (`shared.py`). A step that is far off tells nothing, but a run
of plain ones does: the machine has another speed from then on. The next load takes over most of a
correction, so that a size that looked too dear is tried again; a curve that stops fitting is
measured again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import exp, sqrt
from statistics import median
from typing import Any

from edgespec.memory.times.shared import NOISE, SharedTimes

_NEVER = float("inf")
_AGREEMENT = 1.3  # samples further apart than this: the slower one was disturbed
_GUESSED = 0.2  # of a size that was not measured
_MAX_CORRECTION = 1.5  # how far steps may move base[n] from its measurement
_KEPT = 0.9  # of a correction, by the next load
_HICCUP = 3.0  # a step this many times slower than predicted tells nothing by itself
_RUN = 8  # plain steps in a row, this far off: another speed
_MOST_LEVEL = 1.3
_LEVEL_MEMORY_MS = 20_000.0  # of answers that a level is of; older ones fade
_TRIED_MS = 1000.0  # of answers after which predictions rest on them
_MISFIT_RATE = 0.02
_MISFIT_LIMIT = 0.35
_SHORTEST_MS, _LONGEST_MS = 1e-6, 1e9  # of any step there is


@dataclass(slots=True)
class _Rounds:
    """What rounds took since a curve was made, and what was predicted for their steps."""

    spent_ms: float = 0.0
    expected_ms: float = 0.0

    @property
    def level(self) -> float:
        """How many times as long they took."""
        return min(max(self.spent_ms / self.expected_ms, 1 / _MOST_LEVEL), _MOST_LEVEL)


@dataclass(slots=True)
class CostCurve:
    """Milliseconds of a target step by number of nodes.

    `base[n]` is infinite where n was not measured; `base[0]` is unused. Decisions need only ratios;
    `level` is for predictions.
    """

    base: list[float]
    depth_ms: float = 0.0  # per token of context
    depth_node_ms: float = 0.0  # per token of context and node
    change_ms: float = 0.0
    # What rounds of real answers took, the work beside their steps included, in units of what was
    # predicted for their steps; and how many ms of answers that is of.
    level: float = 1.0
    answered_ms: float = 0.0
    scale: float = field(init=False)  # of this process; begins at the level of earlier ones
    misfit: float = field(default=0.0, init=False)
    _measured: list[float] = field(init=False)
    _shared: SharedTimes = field(init=False, repr=False, compare=False)
    _tried_ms: dict[int, float] = field(default_factory=dict, init=False, compare=False)
    _rounds: _Rounds = field(default_factory=_Rounds, init=False, compare=False)
    _far_off: list[float] = field(default_factory=list, init=False, compare=False)

    def __post_init__(self) -> None:
        self._measured = list(self.base)
        self._shared = SharedTimes(self.base[1])
        self.scale = self.level

    @property
    def max_nodes(self) -> int:
        """Largest n that was measured."""
        return next(n for n in range(len(self.base) - 1, 0, -1) if self.base[n] != float("inf"))

    @property
    def knows_depth(self) -> bool:
        """Whether steps were found to take longer at depth; no: too shallow a cache, or noise."""
        return self.depth_ms + self.depth_node_ms > 0.0

    def resized(self, max_nodes: int) -> CostCurve:
        """The same curve for steps of at most `max_nodes`; new sizes are unmeasured."""
        more = [float("inf")] * (max_nodes + 1 - len(self.base))
        sizes = self._measured[: max_nodes + 1] + more
        curve = CostCurve(sizes, level=self.level, answered_ms=self.answered_ms)
        curve.base = self.base[: max_nodes + 1] + more
        curve.take_slopes(self)
        return curve

    def scaled(self, factor: float) -> CostCurve:
        """The same curve on a machine that takes so many times as long."""
        curve = CostCurve([ms * factor for ms in self._measured])
        curve.base = [ms * factor for ms in self.base]
        curve.take_slopes(self, factor)
        return curve

    def taking(self, times: float) -> CostCurve:
        """The same curve for steps that take so many times as long; rounds did as these."""
        curve = self.scaled(times)
        curve.level, curve.answered_ms = self.level, self.answered_ms
        return curve

    def take_slopes(self, other: CostCurve, factor: float = 1.0) -> None:
        """Have those of another curve, and be as sure of all, on a machine so many times slower."""
        self.depth_ms = factor * other.depth_ms
        self.depth_node_ms = factor * other.depth_node_ms
        self.change_ms = factor * other.change_ms
        self._shared = other._shared.scaled(factor)

    def expect_slopes(self, depth_ms: float, depth_node_ms: float, deviation: float) -> None:
        """Begin with what is likely of a model, within a relative standard deviation."""
        self.depth_ms, self.depth_node_ms = depth_ms, depth_node_ms
        change = self._shared.deviations[2]
        self._shared = SharedTimes(
            self.base[1], (deviation * depth_ms, deviation * depth_node_ms, change)
        )

    def learn_growth(self, num_nodes: int, depth: int, grown_ms: float, doubt_ms: float) -> None:
        """Learn the slopes from a step that took so much longer behind so many tokens."""
        shares = (0.0, float(depth), float(depth * num_nodes), 0.0)
        off_ms = grown_ms - (self.depth_ms + self.depth_node_ms * num_nodes) * depth
        (_, per_depth, per_node, _), _ = self._shared.moves(shares, off_ms, doubt_ms)
        self.depth_ms = max(0.0, self.depth_ms + per_depth)
        self.depth_node_ms = max(0.0, self.depth_node_ms + per_node)

    def crowded(self, times: float) -> CostCurve:
        """The same curve for so many times fewer threads.

        Reading the weights, most of a single token's step, is bound by memory; what further tokens
        add is arithmetic, and takes as many times as long (measured with 1 and 2 threads: 1.5x for
        the second token, 2.0x to 2.1x for 4 to 16).
        """
        curve = self.resized(len(self.base) - 1)
        first, first_measured = self.base[1], self._measured[1]
        curve.base[2:] = [first + times * (ms - first) for ms in self.base[2:]]
        curve._measured[2:] = [
            first_measured + times * (ms - first_measured) for ms in self._measured[2:]
        ]
        curve.depth_node_ms *= times
        return curve

    def together(self, texts: int) -> CostCurve:
        """The same curve for steps over so many texts.

        It learns apart from this one: rows of several texts look at other cells each, so that a
        step over them may take longer, drafts or none. That is the speed of such steps then, and
        says nothing of what drafts add to them.
        """
        curve = self.resized(len(self.base) - 1)
        curve._shared.texts, curve.scale = texts, self.scale
        return curve

    def at_the_level_of(self, other: CostCurve) -> CostCurve:
        """The same curve at the speed at which `other` was measured, by their plain steps."""
        return self.scaled(other.base[1] / self.base[1])

    def updated(self, newer: CostCurve) -> CostCurve:
        """This curve with the sizes that `newer` measured at the speed of its own moment."""
        older = self.at_the_level_of(newer)
        measured = _filled(newer._measured, older._measured)
        curve = CostCurve(measured, level=newer.level, answered_ms=newer.answered_ms)
        curve.base = _filled(newer.base, older.base)
        curve.take_slopes(newer)
        return curve

    def measured_ms(self, max_nodes: int) -> dict[int, float]:
        """Steps of at most `max_nodes` by size, as measured, without what answers taught."""
        pairs = enumerate(self._measured[: max_nodes + 1])
        return {n: ms for n, ms in pairs if n > 0 and ms != float("inf")}

    def go_on_from(self, known: CostCurve, speed: float) -> None:
        """Take over what answers and deep caches taught a curve of another moment.

        `speed` is how many times as long its steps take now.
        """
        self.level, self.answered_ms = known.level, known.answered_ms
        self.scale = self.level
        change_ms = self.change_ms  # which was just measured
        self.take_slopes(known)
        self.change_ms = change_ms
        for n, ms in enumerate(known.base[: len(self.base)]):
            if n > 1 and ms != float("inf"):
                self._correct(n, ms * speed)

    def step_ms(self, num_nodes: int, depth: int, previous: int = 0) -> float:
        """Predicted milliseconds of a step, infinite for a size that was not measured.

        `previous` is the size of the step before (0: do not care).
        """
        if num_nodes >= len(self.base):
            return _NEVER
        return self.base[num_nodes] + self._beside_ms(num_nodes, depth, previous)

    def _beside_ms(self, num_nodes: int, depth: int, previous: int) -> float:
        """What depth, and a new graph, add to a step."""
        changed = self.change_ms if previous not in (0, num_nodes) else 0.0
        return self._slope_ms(num_nodes) * depth + changed

    def _slope_ms(self, num_nodes: int) -> float:
        """What a token more in the cache of each text adds."""
        return self.depth_ms * self._shared.texts + self.depth_node_ms * num_nodes

    def estimated_ms(self, num_nodes: int, depth: int, previous: int = 0) -> float:
        """As `step_ms`, and a guess where the size was not measured.

        That is on the line between its measured neighbours. Beyond the largest one steps go on as
        they grew up to there; where only single tokens were measured, each takes as long as one.
        """
        known_ms = self.step_ms(num_nodes, depth, previous)
        if known_ms != _NEVER:
            return known_ms
        largest = self.max_nodes
        below = next(n for n in range(min(num_nodes, largest), 0, -1) if self._knows(n))
        above = next((n for n in range(num_nodes, largest + 1) if self._knows(n)), below)
        if above > below:
            node_ms = (self.base[above] - self.base[below]) / (above - below)
        elif below > 1:
            node_ms = max(0.0, self.base[below] - self.base[1]) / (below - 1)
        else:
            node_ms = self.base[1]
        base_ms = self.base[below] + node_ms * (num_nodes - below)
        return base_ms + self._beside_ms(num_nodes, depth, previous)

    def read_ms(self, num_tokens: int, depth: int) -> float:
        """To read tokens in pieces as large as were measured, all of one size but the last."""
        size = min(max(1, num_tokens), self.max_nodes)
        full, rest = divmod(num_tokens, size)
        rest_ms = self.estimated_ms(rest, depth) if rest else 0.0
        return full * self.estimated_ms(size, depth) + rest_ms

    def _knows(self, num_nodes: int) -> bool:
        return self.base[num_nodes] != float("inf")

    def least_useful_probability(self, depth: int) -> float:
        """A node less likely than this cannot pay for itself.

        A draft raises the rate only if its nodes bring more per millisecond than a plain step
        does, so a node must be worth its share of the cheapest batch. Half of that, because
        steps are not monotone: a node can be a cheap neighbour of a dear one.
        """
        plain = self.step_ms(1, depth)
        added = [
            (self.step_ms(n, depth) - plain) / (n - 1)
            for n in range(2, len(self.base))
            if self.base[n] != float("inf")
        ]
        return min(0.5, max(0.01, 0.5 * min(added, default=plain) / plain))

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        """Correct the curve with a step that was timed while generating.

        `round_ms` is what the whole round took, the work beside the step included.
        """
        predicted = self.step_ms(num_nodes, depth, previous)
        if predicted == _NEVER:
            if num_nodes < len(self.base):
                beside_ms = self._beside_ms(num_nodes, depth, previous)
                self._measure(num_nodes, ms / self.scale - beside_ms)
            return
        ratio = ms / predicted
        self.misfit += _MISFIT_RATE * (min(1.0, abs(ratio / self.scale - 1.0)) - self.misfit)
        if self._is_far_off(ratio, is_plain=num_nodes == self._shared.texts):
            return
        self._rounds.spent_ms += ms if round_ms is None else round_ms
        self._rounds.expected_ms += predicted
        changed = previous not in (0, num_nodes)
        is_plain = num_nodes == self._shared.texts and not changed
        if is_plain and self._shared.gather(depth, ms):
            return
        for together in self._shared.gathered():
            self._learn(self._shared.texts, together.depth, False, together.ms, together.count)
        if not is_plain:
            self._learn(num_nodes, depth, changed, ms)

    def _is_far_off(self, ratio: float, *, is_plain: bool) -> bool:
        """Whether a step took so many times as long as predicted that it tells nothing by itself.

        A run of plain steps that are far off, with none between that is not, is the speed of the
        machine. A step over drafts may be off for reasons of its own size.
        """
        is_fast = 0.0 < ratio < self.scale / _HICCUP
        if ratio <= _HICCUP * self.scale and not is_fast:
            self._far_off.clear()
            return False
        if is_plain:
            self._far_off.append(ratio)
        elif is_fast and not self._far_off:  # no program makes a step that fast: its size is
            return False
        if len(self._far_off) < _RUN:
            return True
        self.scale = median(self._far_off)
        self._shared.doubt_speed()
        self._far_off.clear()
        return False

    def _learn(
        self, num_nodes: int, depth: float, changed: bool, ms: float, count: int = 1
    ) -> None:
        """Move everything that is in a step's time towards it, what is unsure the most.

        `ms` and `depth` may be means of `count` steps.
        """
        self._shared.go_on(depth, count)
        scale, base = self.scale, self.base[num_nodes]
        slope_ms = scale * depth
        beside = self._slope_ms(num_nodes) * depth
        expected_ms = scale * (base + beside + self.change_ms * changed)
        texts = self._shared.texts
        shares = (expected_ms, slope_ms * texts, slope_ms * num_nodes, scale * changed)
        has_own = num_nodes > self._shared.texts
        (faster, per_depth, per_node, per_change), own_ms = self._shared.moves(
            shares,
            ms - expected_ms,
            NOISE * expected_ms / sqrt(count),
            num_nodes,
            scale * base * has_own,
        )
        self.scale *= exp(faster)
        self.depth_ms = max(0.0, self.depth_ms + per_depth)
        self.depth_node_ms = max(0.0, self.depth_node_ms + per_node)
        self.change_ms = max(0.0, self.change_ms + per_change)
        if has_own:
            self._correct(num_nodes, base + own_ms / scale)

    def doubt(self, num_nodes: int, depth: int) -> float:
        """Relative standard deviation of a step's time, beside that of a step without drafts."""
        if num_nodes <= self._shared.texts:
            return 0.0
        base = self.base[num_nodes] if num_nodes < len(self.base) else float("inf")
        if base == _NEVER:
            return _GUESSED
        own, per_node = self._shared.doubts(num_nodes)
        slopes_ms = self._slope_ms(num_nodes)
        return (own * base + per_node * (num_nodes - 1) * depth) / (base + slopes_ms * depth)

    def _measure(self, num_nodes: int, ms: float) -> None:
        """Take two steps of an answer for a measurement of their size; one may be disturbed."""
        ms = max(ms, self.base[1] / 2)
        if num_nodes not in self._tried_ms:
            self._tried_ms[num_nodes] = ms
            return
        self.base[num_nodes] = self._measured[num_nodes] = typical_ms(
            [self._tried_ms.pop(num_nodes), ms]
        )

    def _correct(self, num_nodes: int, ms: float) -> None:
        measured = self._measured[num_nodes]
        self.base[num_nodes] = min(max(ms, measured / _MAX_CORRECTION), measured * _MAX_CORRECTION)

    def learn(self, used: CostCurve) -> None:
        """Take over what answers taught this curve, or an earlier or a smaller one of this machine.

        These are the corrections, the slopes, and how much slower or faster rounds were altogether.
        """
        sizes = min(len(used.base), len(self.base))
        for n, ours, measured, learned in zip(
            range(sizes), self._measured, used._measured, used.base, strict=False
        ):
            if n > 1 and float("inf") not in (ours, measured):
                self._correct(n, ours * learned / measured)
            elif n > 1 and measured != float("inf"):  # by answers
                self._measured[n] = measured * self._measured[1] / used._measured[1]
                self._correct(n, self._measured[n] * learned / measured)
        if used._rounds.expected_ms == 0.0:
            return
        self.take_slopes(used, self._measured[1] / used._measured[1])
        spent_ms = used._rounds.spent_ms
        self.answered_ms = min(self.answered_ms, _LEVEL_MEMORY_MS) + spent_ms
        self.level += spent_ms / self.answered_ms * (used._rounds.level - self.level)

    @property
    def is_tried(self) -> bool:
        """Whether answers have shown how far predictions are off."""
        return self.answered_ms >= _TRIED_MS

    @property
    def stopped_fitting(self) -> bool:
        """Whether recent steps were so far off that the curve should be measured again."""
        return self.misfit > _MISFIT_LIMIT

    def as_json(self) -> dict[str, Any]:
        """A document for the cache; times in ms."""
        return {
            "base_ms": _finite(self._measured),
            "learned_ms": _finite(self.base),
            "depth_ms": self.depth_ms,
            "depth_node_ms": self.depth_node_ms,
            "change_ms": self.change_ms,
            "deviations_ms": list(self._shared.deviations),
            "doubts": self._shared.own_doubts(),
            "level": self.level,
            "answered_ms": self.answered_ms,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CostCurve:
        """The curve of `as_json`; raises KeyError, TypeError or ValueError on a damaged one."""
        base, learned = (_times(document[name]) for name in ("base_ms", "learned_ms"))
        if [ms == float("inf") for ms in learned] != [ms == float("inf") for ms in base]:
            raise ValueError("corrections of another curve")
        depth_ms, depth_node_ms, change_ms = (
            _between(document[name], 0, _LONGEST_MS)
            for name in ("depth_ms", "depth_node_ms", "change_ms")
        )
        level = _between(document.get("level", 1.0), 1 / _MOST_LEVEL, _MOST_LEVEL)
        answered_ms = _between(document.get("answered_ms", 0.0), 0, _LONGEST_MS)
        curve = cls(base, depth_ms, depth_node_ms, change_ms, level, answered_ms)
        deviations = document.get("deviations_ms")
        if deviations is not None:
            depth, node, change = (_between(part, 0, _LONGEST_MS) for part in deviations)
            curve._shared = SharedTimes(base[1], (depth, node, change))
            doubts = dict(document.get("doubts") or {})
            curve._shared.know({size: _between(part, 0, 1) for size, part in doubts.items()})
        for num_nodes in range(2, len(base)):
            if base[num_nodes] != float("inf"):
                correction = learned[num_nodes] / base[num_nodes]
                curve._correct(num_nodes, base[num_nodes] * correction**_KEPT)
        return curve


def _filled(times: list[float], others: list[float]) -> list[float]:
    """The times, and where nothing was measured those of `others`."""
    pairs = zip_longest(times, others, fillvalue=float("inf"))
    return [other if ms == float("inf") else ms for ms, other in pairs]


def _finite(times: list[float]) -> list[float | None]:
    return [None if ms == float("inf") else ms for ms in times]


def _times(document: Any) -> list[float]:
    """The times [1 + nodes] of a document; the first one stands for nothing."""
    _, *times = document
    if not times or times[0] is None:
        raise ValueError("no step time for a single token")
    found = (_NEVER if ms is None else _between(ms, _SHORTEST_MS, _LONGEST_MS) for ms in times)
    return [_NEVER, *found]


def _between(value: Any, least: float, most: float) -> float:
    """A number within bounds; raises TypeError or ValueError for anything else."""
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return float(value)


def typical_ms(samples: Sequence[float]) -> float:
    """The mean of the faster half, of two at least; the fastest, where others were disturbed.

    >>> typical_ms([4.0, 4.2]), typical_ms([4.0, 9.0]), typical_ms([4.4, 9.0, 4.0, 4.2, 4.1])
    (4.1, 4.0, 4.1)
    """
    faster = sorted(samples)[: max(2, (len(samples) + 1) // 2)]
    agree = faster[-1] <= _AGREEMENT * faster[0]
    return sum(faster) / len(faster) if agree else faster[0]
