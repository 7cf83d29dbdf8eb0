"""What a step takes: one Gaussian state, one update (`observe`), one question (`t`).

    step = scale x (base[n] + (depth_ms + depth_node_ms * n) * depth + change_ms * changed)

`depth` is the number of tokens in the cache, `changed` is 1 where the step before had another n:
the engine then builds its graph again. A step over several texts reads the cache of each: it has
depth_ms as many times, and `depth` is the mean. A chunk of a prompt in the step adds its tokens to
n, and reads what stands before it. `scale` is the speed factor of this moment: heat, CPU
contention. Decisions need only ratios t(n)/t(1), in which it cancels.

t(n) is neither flat nor monotone (a batch of three can cost more than one of four), so every n has
a time of its own, with a standard error. A size that was not measured counts as infinite when sizes
are chosen. If a step of it has to be made, or is tried, its time is interpolated, and its first
measurement gets a large weight. Beyond the largest size times grow on.

The update is a Kalman filter over the logarithm of a step's time: what is unsure moves the most.
Single tokens have no time of their own to move, so `scale` cannot drift away from the shape of the
curve. A step that is far off counts as far as is likely, and one that takes several times as long
not at all. But where plain steps are off in a row, the machine has another speed from then on. If
that is the memory's, steps over several tokens, which compute meanwhile, are off by less: what each
size takes is unsure again until it is made some times.

A plan is worth, before anything is loaded (`SpeedModel`), in tokens per second:

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
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from math import copysign, exp, hypot, log, pi, sqrt
from statistics import median
from typing import Any, NamedTuple

from edgespec.memory.device.neighbours import note_stall

_NEVER = float("inf")

# Relative standard errors. With those of noise and drift 4,000 recorded steps are predicted within
# 4.7% (benchmarks/LOG.md); 0.04 to 0.1 and 0.005 to 0.04 give 4.5% to 5.1%, but a
# speed that drifts faster keeps slopes from being learned. A measured size is off by 0.08 on a
# busy machine: two measurements of one load agree within a tenth in two of three sizes. 0.05 to
# 0.12 there, and 0.08 to 0.3 where a process begins, change the error by 0.1% at most.
_NOISE = 0.06  # of a step
_BASE = 0.08  # of a measured size
_BASE_LOAD = 0.02  # of its drift from load to load
_GUESSED = 0.2  # of a size between measured ones
_SPEED = 0.15  # of the machine, where a process begins
_SPEED_STEP = 0.01  # of its drift from step to step, and of that of tokens beyond all sizes
_FURTHER = 1.0  # of a token beyond all sizes
_ANY_SPEED = 10.0  # of the logarithm, where nothing was measured
USUAL_FURTHER = 0.35  # of a single token one more takes: 0.1 to 0.6, by model and kernels
# Slopes that nothing is known of, in steps of a single token. With a token of depth SmolLM2 takes
# 1/2700 of a step longer, and each node 1/4300 (llama.cpp: 1/1600, 1/1200); larger models less.
_UNKNOWN = (1 / 2000, 1 / 8000, 0.15)  # per token of depth, per token and node, for a change

_LIMIT = 3.0  # standard errors, beyond which one normal value in four hundred lies
HICCUP = 3.0  # times as long as expected: other programs' doing
_TOGETHER = 8  # plain steps that are one observation, so that most cost nothing; or another speed

SHORTEST_MS, _LONGEST_MS = 1e-6, 1e9  # of any step there is


class Chunk(NamedTuple):
    """Tokens of a prompt that are read in a step, behind `depth` others of it."""

    tokens: int = 0
    depth: int = 0


_NO_CHUNK = Chunk()


class _Step(NamedTuple):
    """A step's predicted time at the measured speed, and how it depends on each parameter."""

    ms: float
    base_ms: float
    shares: tuple[float, ...]  # derivatives of its logarithm by those of `_State.cov`, [5]


@dataclass(slots=True)
class _State:
    """How sure a curve's parameters are, and what it has seen of the steps just made.

    `cov` is the covariance of (log scale, depth_ms, depth_node_ms, change_ms, log further), [5, 5];
    `own` holds the standard errors of sizes, which are independent of it and of each other.
    """

    cov: list[list[float]]
    own: dict[int, float] = field(default_factory=dict)
    further: float = 1.0  # times as long as expected take tokens beyond all sizes
    plain: list[tuple[int, int, float]] = field(default_factory=list)  # size, depth, off
    is_new: bool = True  # of this process, without a plain step yet
    far_off: int = 0  # plain steps in a row, below 0 for those that were faster
    last_off: float = 0.0  # the logarithm of how far the last of them was

    @classmethod
    def of(cls, slopes: Sequence[float]) -> _State:
        """Independent parameters; the slopes with these standard errors."""
        errors = (_SPEED, *slopes, _FURTHER)
        return cls([[a * a * (i == j) for j in range(5)] for i, a in enumerate(errors)])

    @property
    def slopes(self) -> list[float]:
        """Standard errors of depth_ms, depth_node_ms and change_ms."""
        return [sqrt(max(0.0, self.cov[i][i])) for i in (1, 2, 3)]

    def copied(self, factor: float) -> _State:
        """As sure as this one, of a process that begins and takes so many times as long."""
        state = _State.of([factor * one for one in self.slopes])
        state.own, state.further = dict(self.own), self.further
        return state

    def products(self, shares: Sequence[float]) -> tuple[list[float], float]:
        """The covariance times the shares of a step, and the variance that they make together."""
        a, b, c, d, e = shares
        rows = [r[0] * a + r[1] * b + r[2] * c + r[3] * d + r[4] * e for r in self.cov]
        variance = a * rows[0] + b * rows[1] + c * rows[2] + d * rows[3] + e * rows[4]
        return rows, max(0.0, variance)

    def narrow(self, products: Sequence[float], variance: float) -> None:
        """Be as sure as after a step of this variance, noise included."""
        for row, product in zip(self.cov, products, strict=True):
            gain = product / variance
            for place, other in enumerate(products):
                row[place] -= gain * other


@dataclass(slots=True)
class CostCurve:
    """Milliseconds of a target step by number of nodes.

    `base[n]` is infinite where n was not measured; `base[0]` is unused. `level` is for predictions:
    what rounds of real answers took, the work beside their steps included, in units of what was
    predicted for their steps. `answered_ms` is how much that was. `contention` is how many times
    fewer threads than planned measured it, beside other programs; the times are for all of them.
    `measured_s` is when that was, in seconds since 1970; 0 where nobody knows.
    """

    base: list[float]
    depth_ms: float = 0.0  # per token of context
    depth_node_ms: float = 0.0  # per token of context and node
    change_ms: float = 0.0
    level: float = 1.0
    answered_ms: float = 0.0
    contention: float = 1.0
    measured_s: float = field(default=0.0, compare=False)
    texts: int = field(default=1, init=False, compare=False)  # in a step, at least
    scale: float = field(init=False)  # of this process; begins at the level of earlier ones
    misfit: float = field(default=0.0, init=False)
    _state: _State = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._state = _State.of([part * self.base[1] for part in _UNKNOWN])
        self.scale = self.level

    @classmethod
    def unmeasured(cls) -> CostCurve:
        """A curve that knows nothing: its first step says how fast the machine is."""
        curve = cls([_NEVER, 1.0])
        curve._state.cov[0][0] = _ANY_SPEED * _ANY_SPEED
        curve._state.further = USUAL_FURTHER
        return curve

    # -- asking ----------------------------------------------------------------------------

    @property
    def max_nodes(self) -> int:
        """Largest n that was measured."""
        return next(n for n in range(len(self.base) - 1, 0, -1) if self.base[n] != _NEVER)

    @property
    def speed_error(self) -> float:
        """Relative standard error of this machine's speed in a process that begins.

        What was measured beside other programs is off as a size between measured ones is.
        """
        return hypot(_SPEED, _GUESSED * (self.contention > 1.0))

    @property
    def stopped_fitting(self) -> bool:
        """Whether recent steps were so far off that the curve should be measured again."""
        return self.misfit > 0.35

    def t(self, num_nodes: int, depth: int, chunk: Chunk = _NO_CHUNK) -> tuple[float, float]:
        """Milliseconds that a step takes now, and the relative standard error of that."""
        step = self._step(num_nodes, depth, False, chunk)
        own = self._own_error(num_nodes + chunk.tokens) * step.base_ms / step.ms
        _, variance = self._state.products(step.shares)
        return self.scale * step.ms, hypot(own, sqrt(variance))

    def step_ms(self, num_nodes: int, depth: int, previous: int = 0) -> float:
        """Milliseconds at the measured speed, infinite for a size that was not measured.

        `previous` is the size of the step before (0: do not care).
        """
        base_ms = self.base[num_nodes] if num_nodes < len(self.base) else _NEVER
        return self._at_depth(base_ms, num_nodes, depth, previous)

    def estimated_ms(self, num_nodes: int, depth: int, previous: int = 0) -> float:
        """As `step_ms`, and an estimate where the size was not measured."""
        base_ms, _ = self._base_ms(num_nodes)
        return self._at_depth(base_ms, num_nodes, depth, previous)

    def steps_ms(self, sizes: Sequence[int], depth: int, previous: int = 0) -> list[float]:
        """Milliseconds now of steps of these sizes, [len(sizes)], as `estimated_ms` has them.

        Not by asking it: a choice of drafts has up to 33 sizes, which takes 9 us here and 16 there.
        """
        base, scale = self.base, self.scale
        found = []
        for size in sizes:
            base_ms = base[size] if size < len(base) else _NEVER
            if base_ms == _NEVER and size:
                base_ms, _ = self._base_ms(size)
            slope_ms = self.depth_ms * self.texts + self.depth_node_ms * size
            changed = self.change_ms if previous not in (0, size) else 0.0
            found.append(scale * (base_ms + slope_ms * depth + changed))
        return found

    def _at_depth(self, base_ms: float, num_nodes: int, depth: int, previous: int) -> float:
        changed = self.change_ms if previous not in (0, num_nodes) else 0.0
        slope_ms = self.depth_ms * self.texts + self.depth_node_ms * num_nodes
        return base_ms + slope_ms * depth + changed

    def read_ms(self, num_tokens: int, depth: int, chunk: int = 0) -> float:
        """To read tokens in chunks as large as were measured, all of one size but the last.

        Or of `chunk` tokens, where these are more.
        """
        size = min(max(1, num_tokens), max(chunk, self.max_nodes))
        full, rest = divmod(num_tokens, size)
        rest_ms = self.estimated_ms(rest, depth) if rest else 0.0
        return full * self.estimated_ms(size, depth) + rest_ms

    def standard_errors(self, sizes: Sequence[int], depth: int) -> list[float]:
        """Relative standard errors of steps of these sizes, beside a step's without drafts."""
        found, node_error = [], self._state.slopes[1]
        for size in sizes:
            base_ms = self.base[size] if size < len(self.base) else _NEVER
            if size <= self.texts or base_ms == _NEVER:
                found.append(0.0 if size <= self.texts else _GUESSED)
                continue
            own_ms = self._state.own.get(size, _BASE) * base_ms
            error_ms = own_ms + node_error * (size - 1) * depth
            found.append(error_ms / self._at_depth(base_ms, size, depth, 0))
        return found

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
            if self.base[n] != _NEVER
        ]
        return min(0.5, max(0.01, 0.5 * min(added, default=plain) / plain))

    def _step(self, num_nodes: int, depth: float, changed: bool, chunk: Chunk = _NO_CHUNK) -> _Step:
        size = num_nodes + chunk.tokens
        base_ms, further_ms = self._base_ms(size)
        if size < len(self.base):
            further_ms = 0.0  # which that size alone will tell of
        reads = self.texts * depth + chunk.depth * (chunk.tokens > 0)
        rows = num_nodes * depth + chunk.tokens * chunk.depth
        beside_ms = self.depth_ms * reads + self.depth_node_ms * rows + self.change_ms * changed
        ms = base_ms + beside_ms
        return _Step(ms, base_ms, (1.0, reads / ms, rows / ms, changed / ms, further_ms / ms))

    def _base_ms(self, size: int) -> tuple[float, float]:
        """A step behind nothing, and what of it is beyond all sizes.

        Of a size that was not measured it is on the line between its neighbours. Beyond the largest
        one steps go on as they grew up to there; where only single tokens were measured, each takes
        as long as one.
        """
        base = self.base
        if size < len(base) and base[size] != _NEVER:
            return base[size], 0.0
        for above in range(size + 1, len(base)):
            if base[above] != _NEVER:
                below = next(n for n in range(size, 0, -1) if base[n] != _NEVER)
                node_ms = (base[above] - base[below]) / (above - below)
                return base[below] + node_ms * (size - below), 0.0
        largest = self.max_nodes
        first, last = self.base[1], self.base[largest]
        node_ms = max(0.01 * first, last - first) / (largest - 1) if largest > 1 else first
        further_ms = self._state.further * node_ms * (size - largest)
        return last + further_ms, further_ms

    def _own_error(self, size: int) -> float:
        """Of its base, beside what all sizes have in common."""
        if size <= self.texts or size >= len(self.base):
            return 0.0
        if self.base[size] != _NEVER:
            return self._state.own.get(size, _BASE)
        base_ms, further_ms = self._base_ms(size)
        return hypot(_GUESSED, sqrt(self._state.cov[4][4]) * further_ms / base_ms)

    # -- learning --------------------------------------------------------------------------

    def observe(
        self, num_nodes: int, depth: int, previous: int, ms: float, round_ms: float | None = None
    ) -> None:
        """Learn from a step that took `ms`, after one over `previous` nodes (0: do not care).

        `round_ms` is what the whole round took, the work beside the step included.
        """
        ms = max(ms, SHORTEST_MS)
        expected_ms = self.estimated_ms(num_nodes, depth, previous)
        ratio = ms / (self.scale * expected_ms)
        if ratio > 20.0 and ms > 500.0:  # long enough for a person to notice
            note_stall(ms, self.scale * expected_ms)
        self.misfit += 0.02 * (min(1.0, abs(ratio - 1.0)) - self.misfit)
        if 1.0 / HICCUP < ratio < HICCUP:
            # A pause beside the step is no more of this device than one within it.
            most_ms = HICCUP * self.scale * expected_ms
            round_ms = ms if round_ms is None else min(round_ms, most_ms)
            self.answered_ms = min(self.answered_ms, 20_000.0) + expected_ms  # older answers fade
            level = self.level + (round_ms - self.level * expected_ms) / self.answered_ms
            self.level = min(max(level, 1 / HICCUP), HICCUP)
        changed = previous not in (0, num_nodes)
        has_own = self.texts < num_nodes < len(self.base)
        if not (has_own or changed):
            # A step without a time of its own to move: eight in a row are one observation.
            state = self._state
            if state.plain and state.plain[-1][0] != num_nodes:
                self._learn_plain()
            state.plain.append((num_nodes, depth, log(ratio)))
            if state.is_new or len(state.plain) == _TOGETHER:  # the very first says much
                state.is_new = False
                self._learn_plain()
        elif ratio <= HICCUP or not has_own:  # else a size that may be dear on this machine
            self._learn_plain()
            step = self._step(num_nodes, depth, changed)
            self._learn(step, log(ms / (self.scale * step.ms)), 1, num_nodes if has_own else 0)

    def observe_chunk(self, chunk: Chunk, num_nodes: int, ms: float) -> None:
        """Learn from a step over so many nodes in which a chunk was read."""
        self._learn_plain()
        step = self._step(num_nodes, 0, False, chunk)
        self._learn(step, log(max(ms, SHORTEST_MS) / (self.scale * step.ms)), 1, 0)

    def _learn_plain(self) -> None:
        """Let the plain steps that nothing was learned of yet be one observation."""
        plain, self._state.plain = self._state.plain, []
        if plain:
            depth = sum(depth for _, depth, _ in plain) / len(plain)
            step = self._step(plain[0][0], depth, False)
            self._learn(step, median(off for _, _, off in plain), len(plain), 0)

    def _learn(self, step: _Step, off: float, count: int, size: int) -> None:
        """Move everything that is in a step's time towards it, what is unsure the most.

        `off` is the logarithm of what it took over what was expected, the median of `count` steps;
        `size` is that of the base that may move, 0 for none.
        """
        state = self._state
        cov = state.cov
        cov[0][0] += count * _SPEED_STEP * _SPEED_STEP
        cov[4][4] += (step.shares[4] > 0.0) * _SPEED_STEP * _SPEED_STEP
        is_known = not size or self.base[size] != _NEVER
        own = self._own_error(size) if size else 0.0
        own_share = step.base_ms / step.ms
        # A median has 2/pi of the information of a mean.
        noise = _NOISE * _NOISE / (1.0 if count == 1 else 2.0 / pi * count)
        # A slope of nothing cannot be what makes a step shorter.
        slopes = (1.0, self.depth_ms, self.depth_node_ms, self.change_ms, 1.0)
        shares = [a * (off > 0.0 or b > 0.0) for a, b in zip(step.shares, slopes, strict=True)]
        rows, shared = state.products(shares)
        variance = shared + (own * own_share) ** 2 + noise
        most = _LIMIT * sqrt(variance)
        if abs(off) <= most:
            if not size or abs(state.last_off) > log(HICCUP):
                state.far_off = 0  # else memory may be another one, which fewer steps wait for
        elif not size and self._is_another_speed(off, count):
            cov[0][0] += off * off
            state.own.clear()  # memory of another speed: other ratios, as unsure as at a load
            rows, shared = state.products(shares)
            variance = shared + noise
        elif is_known and state.far_off * off > 0.0:
            return  # other programs' doing, or another speed, of which plain steps will tell
        else:
            variance *= abs(off) / most
        part = off / variance
        state.narrow(rows, variance)
        self.scale *= exp(rows[0] * part)
        self.depth_ms = max(0.0, self.depth_ms + rows[1] * part)
        self.depth_node_ms = max(0.0, self.depth_node_ms + rows[2] * part)
        self.change_ms = max(0.0, self.change_ms + rows[3] * part)
        state.further *= exp(rows[4] * part)
        if size:
            self.base[size] = self._base_ms(size)[0] * exp(own * own * own_share * part)
            state.own[size] = own * sqrt(1.0 - (own * own_share) ** 2 / variance)

    def _is_another_speed(self, off: float, count: int) -> bool:
        """Whether so many plain steps in a row were far off in one direction."""
        state = self._state
        state.last_off = off
        count += abs(state.far_off) if state.far_off * off > 0.0 else 0
        state.far_off = 0 if count >= _TOGETHER else int(copysign(count, off))
        return count >= _TOGETHER

    def expect_slopes(self, depth_ms: float, depth_node_ms: float, error: float) -> None:
        """Begin with what is likely of a model, within a relative standard error."""
        self.depth_ms, self.depth_node_ms = depth_ms, depth_node_ms
        *_, change = self._state.slopes
        self._state = _State.of((error * depth_ms, error * depth_node_ms, change))

    # -- the same for other steps ----------------------------------------------------------

    def _like(self, base: list[float], factor: float = 1.0) -> CostCurve:
        """This curve with other base times, on a machine that takes so many times as long."""
        depth, node, change = self.depth_ms, self.depth_node_ms, self.change_ms
        slopes = (factor * depth, factor * node, factor * change)
        known = self.level, self.answered_ms, self.contention, self.measured_s
        curve = CostCurve(base, *slopes, *known)
        curve._state = self._state.copied(factor)
        return curve

    def resized(self, max_nodes: int) -> CostCurve:
        """The same curve for steps of at most `max_nodes`; new sizes are unmeasured."""
        more = [_NEVER] * (max_nodes + 1 - len(self.base))
        return self._like(self.base[: max_nodes + 1] + more)

    def scaled(self, factor: float) -> CostCurve:
        """The same curve for steps that take so many times as long."""
        return self._like([ms * factor for ms in self.base], factor)

    def longer(self, more_ms: Sequence[float]) -> CostCurve:
        """The same curve for steps over n nodes that take `more_ms[n]` longer."""
        return self._like([ms + more for ms, more in zip(self.base, more_ms, strict=True)])

    def updated(self, newer: CostCurve) -> CostCurve:
        """All that `newer` knows, and sizes that only this curve has, at the speed of that one."""
        older = self.scaled(newer.base[1] / self.base[1])
        pairs = zip_longest(newer.base, older.base, fillvalue=_NEVER)
        curve = newer._like([old if ms == _NEVER else ms for ms, old in pairs])
        curve._state.own = older._state.own | newer._state.own
        return curve

    def contended(self, times: float) -> CostCurve:
        """The same curve for so many times fewer threads.

        Reading the weights, most of a single token's step, is bound by memory; what further tokens
        add is arithmetic, and takes as many times as long (measured with 1 and 2 threads: 1.5x for
        the second token, 2.0x to 2.1x for 4 to 16).
        """
        first = self.base[1]
        further = (first + times * (ms - first) for ms in self.base[2:])
        curve = self._like([_NEVER, first, *further])
        curve.depth_node_ms *= times
        return curve

    def uncontended(self, times: float) -> CostCurve:
        """A curve that so many times fewer threads measured, as it is for all of them."""
        curve = self if times == 1.0 else self.contended(1.0 / times)
        curve.contention = times
        return curve

    def together(self, texts: int) -> CostCurve:
        """The same curve for steps over so many texts.

        It learns apart from this one: rows of several texts look at other cells each, so that a
        step over them may take longer, drafts or none. That is the speed of such steps then, and
        says nothing of what drafts add to them.
        """
        curve = self._like(list(self.base))
        curve.texts, curve.scale = texts, self.scale
        return curve

    # -- keeping ---------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """A document for the cache; times in ms. Those of another moment are less sure."""
        errors = {
            str(size): round(min(_BASE, hypot(error, _BASE_LOAD)), 4)
            for size, error in self._state.own.items()
        }
        return {
            "base_ms": [None if ms == _NEVER else ms for ms in self.base],
            "depth_ms": self.depth_ms,
            "depth_node_ms": self.depth_node_ms,
            "change_ms": self.change_ms,
            "deviations_ms": self._state.slopes,
            "standard_errors": errors,
            "level": self.level,
            "answered_ms": self.answered_ms,
            "contention": self.contention,
            "measured_s": self.measured_s,
        }

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> CostCurve:
        """The curve of `as_json`; raises KeyError, TypeError or ValueError on a damaged one."""
        depth_ms, depth_node_ms, change_ms = (
            _between(document[name], 0, _LONGEST_MS)
            for name in ("depth_ms", "depth_node_ms", "change_ms")
        )
        level = _between(document.get("level", 1.0), 1 / HICCUP, HICCUP)
        answered_ms = _between(document.get("answered_ms", 0.0), 0, _LONGEST_MS)
        contention = _between(document.get("contention", 1.0), 1.0, 4096.0)
        measured_s = _between(document.get("measured_s", 0.0), 0, 2.0**37)
        base = _times(document["base_ms"])
        slopes = depth_ms, depth_node_ms, change_ms
        curve = cls(base, *slopes, level, answered_ms, contention, measured_s)
        errors = document.get("deviations_ms")
        if errors is not None:
            depth, node, change = (_between(error, 0, _LONGEST_MS) for error in errors)
            curve._state = _State.of((depth, node, change))
        own = dict(document.get("standard_errors") or {})
        curve._state.own = {int(size): _between(error, 0, _BASE) for size, error in own.items()}
        return curve


def _times(document: Any) -> list[float]:
    """The times [1 + nodes] of a document; the first one stands for nothing."""
    _, *times = document
    if not times or times[0] is None:
        raise ValueError("no step time for a single token")
    found = (_NEVER if ms is None else _between(ms, SHORTEST_MS, _LONGEST_MS) for ms in times)
    return [_NEVER, *found]


def _between(value: Any, least: float, most: float) -> float:
    """A number within bounds; raises TypeError or ValueError for anything else."""
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return float(value)


# -- what a plan is worth: predicted tokens per second -------------------------------------

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
