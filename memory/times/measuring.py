"""Measures step times: the most useful sizes first, in a second or two.

A slow model leaves some sizes unmeasured, but never all of those above 1, or it would never draft.
Answers try the others, and a later measurement goes on with them. The machine's speed drifts
meanwhile, so every time is taken beside one of a step whose time is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median

from edgespec.memory.times.curve import CostCurve
from edgespec.models.spec import ModelSpec

_AGREEMENT = 1.3  # samples further apart than this: the slower one was disturbed
_ALIKE = 1.1  # empty caches further apart than this: the machine changed its speed
_BEST_ERROR = 0.02  # relative standard error of the typical one of a dozen steps
_FIRST = (4, 8, 2, 16)  # sizes that are measured twice before any other is: most drafts are these
_ORDER = (4, 8, 2, 16, 3, 12, 32, 6, 5, 24, 7, 20, 10, 28, 9, 11, 14, 13, 15)
_SAMPLES = 5  # of a size, where there is time: a quick model has it
_SINGLES = 8  # steps over one token at first, and around a size that say how fast the machine is
_QUICK = 100  # single tokens in the time that there is
_PREPARES = 1.5  # a first step this many times slower than the next ones: made ready for its size
_MOST_DRIFT = (0.7, 1.5)  # what is further off was disturbed
_DEEP_SAMPLES, _DEEP_SECONDS = 12, 0.1  # of a size, with and without tokens in the cache


def in_turns(
    steps: Sequence[Callable[[], object]],
    most: int,
    seconds: float = float("inf"),
    *,
    least: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> list[list[float]]:
    """Milliseconds of each of some steps, made one after the other, again and again.

    At least `least` times, as one may be disturbed; at most `most` times, and until `seconds` are
    over: a slow model needs its time for others.
    """
    taken: list[list[float]] = [[] for _ in steps]
    start = clock()
    enough = start + seconds
    while len(taken[-1]) < least or (len(taken[-1]) < most and start < enough):
        for times, step in zip(taken, steps, strict=True):
            step()
            end = clock()
            times.append((end - start) * 1e3)
            start = end
    return taken


def typical_ms(samples: Sequence[float]) -> float:
    """The mean of the faster half, of two at least; the fastest, where others were disturbed.

    >>> typical_ms([4.0, 4.2]), typical_ms([4.0, 9.0]), typical_ms([4.4, 9.0, 4.0, 4.2, 4.1])
    (4.1, 4.0, 4.1)
    """
    faster = sorted(samples)[: max(2, (len(samples) + 1) // 2)]
    return fmean(faster) if faster[-1] <= _AGREEMENT * faster[0] else faster[0]


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
    missing sizes are measured. Some GPUs' drivers compile programs for each size that they meet.
    Where the first step of two tokens is seen to take longer than the next ones, the first steps of
    all sizes are thrown away.
    """
    steps = [partial(run, n) for n in range(max_nodes + 1)]
    deadline = clock() + seconds
    run(1)
    [singles] = in_turns([steps[1]], _SINGLES, seconds / 8, clock=clock)
    same = typical_ms(singles)
    if max_nodes == 1:
        return CostCurve([float("inf"), same])
    twos, changed = in_turns([steps[2], steps[1]], _SINGLES, seconds / 8, clock=clock)
    unprepared = set(range(3, max_nodes + 1)) if twos[0] > _PREPARES * max(twos[1:]) else set()
    usual = typical_ms(changed)  # of a single token after another size
    base = [float("inf")] * (max_nodes + 1) if known is None else known.resized(max_nodes).base
    quick = _QUICK * same <= 1e3 * seconds
    rows: list[tuple[int, float]] = []  # sizes, and what they took after single tokens
    first, second = [changed[-1]], [same]  # single tokens after sizes; those after these
    for n in _order([n for n in range(2, max_nodes + 1) if base[n] == float("inf")]):
        if clock() > deadline and (rows or min(base[2:]) < float("inf")):
            break
        if n in unprepared:
            unprepared.remove(n)
            run(n)
            [first[-1:]] = in_turns([steps[1]], 1, least=1, clock=clock)
        turn = [steps[n], *steps[1:2] * (2 if quick else 1)]
        [step_ms], [after_ms], *more = in_turns(turn, 1, least=1, clock=clock)
        rows.append((n, step_ms))
        first.append(after_ms)
        second += more[0] if quick else []
    drifts = _drifts(first, usual)
    if quick and len(rows) >= _SINGLES:
        # Those at first may have come before caches held the weights.
        same, usual = median(second[1:]), median(first[1:])
        drifts = _drifts(second, same)
    change_ms = max(0.0, usual - same)
    if known is None:
        curve = CostCurve([*base[:1], same, *base[2:]])
    else:  # at the speed of this moment
        curve = known.resized(max_nodes).scaled(same / known.base[1])
    curve.change_ms = change_ms
    samples: dict[int, list[float]] = {}
    for (n, step_ms), drift in zip(rows, drifts, strict=True):
        samples.setdefault(n, []).append(max(step_ms / drift - change_ms, same / 2))
    for n, some in samples.items():
        curve.base[n] = median(some) if len(some) > 2 else typical_ms(some)
    return curve


def _drifts(beside: Sequence[float], usual_ms: float) -> list[float]:
    """How many times as long steps take, between each of some single tokens and the next.

    By the six around: one that was disturbed, or came after a large step, moves nothing then.
    """
    around = (median(beside[max(0, i - 2) : i + 4]) for i in range(len(beside) - 1))
    least, most = _MOST_DRIFT
    return [min(max(ms / usual_ms, least), most) for ms in around]


def _order(missing: Sequence[int]) -> Sequence[int]:
    """Sizes, each as often as it is measured at most; of the most useful ones twice at first.

    A single sample may be disturbed.
    """
    once = sorted(missing, key=lambda n: _ORDER.index(n) if n in _ORDER else len(_ORDER) + n)
    first = [n for n in once if n in _FIRST]
    later = [n for n in once if n not in first]
    return [*first, *first, *later, *later, *once * (_SAMPLES - 2)]


def measure_depth(
    curve: CostCurve,
    run: Callable[[int], None],
    fill: Callable[[], int],
    empty: Callable[[], object],
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
    sizes = sorted({1, min(8, curve.max_nodes)})

    def usual_ms() -> list[float]:
        found = []
        for n in sizes:
            run(n)  # which builds the graph
            [times] = in_turns(
                [partial(run, n)], _DEEP_SAMPLES, _DEEP_SECONDS, least=3, clock=clock
            )
            found.append(typical_ms(times))
        return found

    before = usual_ms()
    depth = fill()
    deep = usual_ms()
    empty()
    after = usual_ms()
    least, most = _MOST_DRIFT
    level = 2.0 * sum(curve.estimated_ms(n, 0) for n in sizes) / sum([*before, *after])
    level = min(max(level, least), most)
    for n, deep_ms, *around in zip(sizes, deep, before, after, strict=True):
        fast, slow = sorted(around)
        grown_ms = deep_ms - (fmean(around) if slow <= _ALIKE * fast else slow)
        error_ms = _BEST_ERROR * deep_ms + (slow - fast)
        curve.learn_growth(n, depth, level * grown_ms, level * error_ms)


_READ_FACTOR = 2.0
_MULTIPLY_FACTOR = 8.0
_ERROR = 1.0  # relative standard error; 0.4 of these two models, more with llama.cpp's attention
_CACHE_BYTES = 2  # of a number
_COMPARED = 8  # nodes whose step says what further tokens take


def expect_slopes(curve: CostCurve, spec: ModelSpec) -> None:
    """Let a curve begin with the slopes that are likely for this model."""
    whole = _whole_layers(spec)
    per_head = {layer: spec.key_length[layer] + spec.value_length[layer] for layer in whole}
    values = sum(spec.num_kv_heads[layer] * both for layer, both in per_head.items())
    products = sum(spec.num_heads[layer] * both for layer, both in per_head.items())
    weights = _weights(spec)
    if not (values and weights and spec.weight_bytes):
        return
    first_ms, many = curve.base[1], min(_COMPARED, curve.max_nodes)
    read_ms = first_ms * values * _CACHE_BYTES / spec.weight_bytes
    node_ms = first_ms
    if many > 1:
        node_ms = max(0.0, curve.estimated_ms(many, 0) - first_ms) / (many - 1)
    multiply_ms = node_ms * products / weights
    curve.expect_slopes(_READ_FACTOR * read_ms, _MULTIPLY_FACTOR * multiply_ms, _ERROR)


def _whole_layers(spec: ModelSpec) -> list[int]:
    """Layers that attend to the whole context."""
    sliding = spec.is_sliding or (False,) * spec.num_layers
    return [i for i in range(spec.num_layers) if not sliding[i] and spec.num_kv_heads[i]]


def _weights(spec: ModelSpec) -> int:
    """Multiplications of one token with the weights of the blocks and the head."""
    width, total = spec.embedding_size, spec.embedding_size * spec.vocab_size
    used = max(1, spec.num_experts_used)
    for layer in range(spec.num_layers):
        keys, values = spec.key_length[layer], spec.value_length[layer]
        heads = spec.num_heads[layer] * (keys + values)
        forward = spec.expert_feed_forward_size * used if spec.num_experts else 0
        forward = forward or spec.feed_forward_size[layer]
        total += width * (heads + spec.num_kv_heads[layer] * (keys + values) + 3 * forward)
    return total
