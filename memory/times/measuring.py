"""Measures step-time curves: the most useful sizes first, in a second or two.

A slow model leaves some sizes unmeasured, but never all of those above 1, or it would never draft.
Answers try the others, and a later measurement goes on with them. The machine's speed drifts
meanwhile, so every time is taken beside one of a step whose time is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from edgespec.memory.times.curve import CostCurve, typical_ms

_ALIKE = 1.1  # empty caches further apart than this: the machine changed its speed
_DOUBT = 0.02  # relative standard deviation of the best of a few steps
_FIRST = (4, 8, 2, 16)  # sizes that are measured twice before any other is
_SAMPLES = 5  # of a size, where there is time: a quick model has it
_SINGLES = 8
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
    change_ms = max(0.0, typical_ms(changed) - same)
    samples, speed = {1: [same]}, 1.0
    if known is not None:  # times of another moment: bring them to the speed of this one
        speed = same / known.base[1]
        samples = {n: [ms * speed] for n, ms in known.measured_ms(max_nodes).items()}
    before = changed[-1]
    for n in _order(max_nodes, samples):
        if clock() > deadline and len(samples) > 1:
            break
        if n in unprepared:
            unprepared.remove(n)
            run(n)
            before = timer.ms(1)
        ms, after = timer.ms(n), timer.ms(1)
        # Each size is compared with the single tokens beside it: the faster one, because a single
        # token that was disturbed would make a size look cheap.
        drift = min(max(min(before, after) / (same + change_ms), 0.7), 1.5)
        samples.setdefault(n, []).append(max(ms / drift - change_ms, same / 2))
        before = after
    base = [typical_ms(samples[n]) if n in samples else float("inf") for n in range(max_nodes + 1)]
    curve = CostCurve(base, change_ms=change_ms)
    if known is not None:
        curve.go_on_from(known, speed)
    return curve


def _order(max_nodes: int, known: Mapping[int, list[float]]) -> Sequence[int]:
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
    like depth. What the curve expected counts as far as the measurement is unsure.
    """
    few, many = 1, min(8, curve.max_nodes)
    timer = _Timer(run, clock)
    before = {n: timer.usual_ms(n) for n in (few, many)}
    depth = fill()
    deep = {n: timer.usual_ms(n) for n in (few, many)}
    empty()
    after = {n: timer.usual_ms(n) for n in (few, many)}
    for n in sorted({few, many}):
        least, most = sorted((before[n], after[n]))
        alike = most <= _ALIKE * least
        grown_ms = deep[n] - ((least + most) / 2 if alike else most)
        curve.learn_growth(n, depth, grown_ms, _DOUBT * deep[n] + (most - least))


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
