"""Measures step-time curves: the most useful sizes first, in a second or two.

A slow model leaves some sizes unmeasured, but never all of those above 1, or it would never draft.
Answers try the others, and a later measurement goes on with them. The machine's speed drifts
meanwhile, so every time is taken beside one of a step whose time is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from statistics import median

from edgespec.memory.times.curve import CostCurve, typical_ms

_ALIKE = 1.1  # empty caches further apart than this: the machine changed its speed
_DOUBT = 0.02  # relative standard deviation of the best of a few steps
_FIRST = (4, 8, 2, 16)  # sizes that are measured twice before any other is
_SAMPLES = 5  # of a size, where there is time: a quick model has it
_SINGLES = 8
_QUICK = 100  # single tokens in the time that there is
_PREPARES = 1.5  # a first step this many times slower than the next ones: made ready for its size
_DEEP_SAMPLES, _DEEP_SECONDS = 12, 0.1  # of a size, with and without tokens in the cache
_ORDER = (4, 8, 2, 16, 3, 12, 32, 6, 5, 24, 7, 20, 10, 28, 9, 11, 14, 13, 15)


def measure_curve(
    run: Callable[[int], None],
    max_nodes: int,
    *,
    seconds: float = 1.2,
    known: CostCurve | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> CostCurve:
    """Measure t(n) in about `seconds`, the most useful n first.

    `run(n)` performs one step over n tokens and takes it back. `known` is an earlier curve, whose
    sizes come last. Some GPUs' drivers compile programs for each size that they meet. Where the
    first step of two tokens is seen to take longer than the next ones, the first steps of all sizes
    are thrown away.
    """
    timer = _Timer(run, clock)
    deadline = clock() + seconds
    run(1)
    same = typical_ms(timer.few_ms(1, _SINGLES, seconds / 8))
    if max_nodes == 1:
        return CostCurve([float("inf"), same])
    changed, twos = timer.changed_ms(1, 2, _SINGLES, seconds / 8)
    unprepared = set(range(3, max_nodes + 1)) if twos[0] > _PREPARES * max(twos[1:]) else set()
    usual = typical_ms(changed)  # of a single token after another size
    earlier = known.measured_ms(max_nodes) if known is not None else {}
    quick = _QUICK * same <= 1e3 * seconds
    rows: list[tuple[int, float]] = []  # sizes, and what they took after single tokens
    first, second = [changed[-1]], [same]  # single tokens after sizes; those after these
    for n in _order(max_nodes, earlier):
        if clock() > deadline and (rows or len(earlier) > 1):
            break
        if n in unprepared:
            unprepared.remove(n)
            run(n)
            first[-1] = timer.ms(1)
        rows.append((n, timer.ms(n)))
        first.append(timer.ms(1))
        if quick:
            second.append(timer.ms(1))
    drifts = _drifts(first, usual)
    if quick and len(rows) >= _SINGLES:
        # Those at first may have come before caches held the weights.
        same, usual = median(second[1:]), median(first[1:])
        drifts = _drifts(second, same)
    change_ms = max(0.0, usual - same)
    samples: dict[int, list[float]] = {}
    for (n, ms), drift in zip(rows, drifts, strict=True):
        samples.setdefault(n, []).append(max(ms / drift - change_ms, same / 2))
    return _curve_of(max_nodes, samples, same, change_ms, known)


def _drifts(beside: Sequence[float], usual_ms: float) -> list[float]:
    """How many times as long steps take, between each of some single tokens and the next.

    By the six around: one that was disturbed, or came after a large step, moves nothing then.
    """
    around = (median(beside[max(0, i - 2) : i + 4]) for i in range(len(beside) - 1))
    return [min(max(ms / usual_ms, 0.7), 1.5) for ms in around]


def _curve_of(
    max_nodes: int,
    samples: dict[int, list[float]],
    same: float,
    change_ms: float,
    known: CostCurve | None,
) -> CostCurve:
    """From samples by size, and what a single token takes.

    Known times are of another moment: they are brought to the speed of this one.
    """
    speed = 1.0 if known is None else same / known.base[1]
    for n, ms in ({} if known is None else known.measured_ms(max_nodes)).items():
        samples.setdefault(n, []).append(ms * speed)
    samples[1] = [same]
    base = [_middle(samples[n]) if n in samples else float("inf") for n in range(max_nodes + 1)]
    curve = CostCurve(base, change_ms=change_ms)
    if known is not None:
        curve.go_on_from(known, speed)
    return curve


def _middle(samples: Sequence[float]) -> float:
    """Of many samples; of two, one of which may be disturbed, the faster where they differ."""
    return median(samples) if len(samples) > 2 else typical_ms(samples)


def _order(max_nodes: int, known: Container[int]) -> Sequence[int]:
    """Sizes above 1, each as often as it is measured at most.

    Those never measured come first, of these the more useful ones, and of the most useful ones a
    second sample: one alone may be disturbed.
    """
    useful = [n for n in _ORDER if n <= max_nodes]
    rest = [n for n in range(2, max_nodes + 1) if n not in useful]
    once = sorted([*useful, *rest], key=lambda n: n in known)
    first = [n for n in once if n in _FIRST and n not in known]
    later = [n for n in once if n not in first]
    return [*first, *first, *later, *later, *once * (_SAMPLES - 2)]


def measure_depth(
    curve: CostCurve,
    run: Callable[[int], None],
    fill: Callable[[], int],
    empty: Callable[[], None],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """Learn the slopes over depth: each t(n) grows by a part per step and a part per node.

    `fill()` puts tokens into the empty cache and returns how many, `empty()` takes them out again;
    `run` as in `measure_curve`. What is deep is compared with the empty caches before and after:
    with the slower one where they differ, because what else got slower in between must not look
    like depth. Growth is brought to the speed at which the curve was measured. What the curve
    expected counts as far as the measurement is unsure.
    """
    few, many = 1, min(8, curve.max_nodes)
    timer = _Timer(run, clock)
    before = {n: timer.usual_ms(n) for n in (few, many)}
    depth = fill()
    deep = {n: timer.usual_ms(n) for n in (few, many)}
    empty()
    after = {n: timer.usual_ms(n) for n in (few, many)}
    empty_ms = sum(before[n] + after[n] for n in before) / 2
    level = min(max(sum(curve.estimated_ms(n, 0) for n in before) / empty_ms, 0.7), 1.5)
    for n in sorted({few, many}):
        least, most = sorted((before[n], after[n]))
        alike = most <= _ALIKE * least
        grown_ms = deep[n] - ((least + most) / 2 if alike else most)
        doubt_ms = _DOUBT * deep[n] + (most - least)
        curve.learn_growth(n, depth, level * grown_ms, level * doubt_ms)


class _Timer:
    """Times steps, in milliseconds."""

    def __init__(self, run: Callable[[int], None], clock: Callable[[], float]) -> None:
        self._run, self._clock = run, clock

    def ms(self, nodes: int) -> float:
        """Of one step."""
        start = self._clock()
        self._run(nodes)
        return (self._clock() - start) * 1e3

    def few_ms(self, nodes: int, most: int, seconds: float, *, least: int = 2) -> list[float]:
        """Of two steps or more: one may be disturbed; a slow model needs its time for others."""
        enough = self._clock() + seconds
        found: list[float] = []
        while len(found) < least or (len(found) < most and self._clock() < enough):
            found.append(self.ms(nodes))
        return found

    def changed_ms(
        self, nodes: int, other: int, most: int, seconds: float
    ) -> tuple[list[float], list[float]]:
        """The same with a step of another size before each; of these, too."""
        enough = self._clock() + seconds
        found: tuple[list[float], list[float]] = [], []
        while len(found[0]) < 2 or (len(found[0]) < most and self._clock() < enough):
            found[1].append(self.ms(other))
            found[0].append(self.ms(nodes))
        return found

    def usual_ms(self, nodes: int) -> float:
        """What three steps take, or more where they are quick, after one that builds the graph."""
        self._run(nodes)
        return typical_ms(self.few_ms(nodes, _DEEP_SAMPLES, _DEEP_SECONDS, least=3))
