"""Steps of a loaded backend against the clock, on arbitrary tokens that are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from time import perf_counter

from edgespec.backends.base import Backend, KeepsSnapshots
from edgespec.backends.tree import DraftTree
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.measuring import in_turns, measure_depth

_DEPTH_SECONDS = 0.6
_PROBES = 4  # single steps that tell whether a stored curve still holds
_TURNS, _TURNS_SECONDS = (3, 12), 0.4  # of two models, at least and at most
_BUSY = 1.4  # CPU contention alone makes a machine that much slower
_READS = (8, 2, 32, 4, 16)  # tokens that a model which takes over has missed
_READ_SECONDS = 1.0
_COST_SECONDS, _COST_TURNS, _COST_STEPS = 0.6, 3, (2, 12)  # at least and at most
_USUAL_COST = 1.1  # of snapshots; other programs may have made it more
_DEPTHS = (128, 256, 512, 768, 1024)  # less than that drowns in noise


def measured_while_busy(
    backend: Backend, stored: CostCurve, between: Callable[[], None] = lambda: None
) -> bool:
    """Whether a step takes much less now than when the curve was measured.

    A machine is never faster than when it is idle, so a curve can only be too slow. Steps of
    another model that come `between` are not timed.
    """
    return stored.base[1] > _BUSY * fastest_step(backend, between)


def fastest_step(backend: Backend, between: Callable[[], None] = lambda: None) -> float:
    """Milliseconds of the fastest of some plain steps, with what comes `between` them."""
    _, singles = _turns([between, partial(one_step, backend, 1)], _PROBES)
    return min(singles)


def _turns(
    steps: Sequence[Callable[[], object]], least: int, most: int = 0, seconds: float = 0.0
) -> list[list[float]]:
    return in_turns(steps, max(least, most), seconds, least=least, clock=perf_counter)


def one_step(backend: Backend, nodes: int) -> None:
    """Verify a chain of arbitrary tokens and take it back; what cannot be is one token more.

    A cache that these have filled is emptied.
    """
    returns = backend.capabilities.rollback and not backend.capabilities.snapshots
    if not returns and backend.length + nodes > backend.context_size:
        backend.truncate(0)
    backend.verify(DraftTree.chain(some_tokens(backend, nodes)))
    if returns:
        backend.truncate(backend.length)
    else:
        backend.commit((0,))


def times_behind(other: Backend, backend: Backend, curve: CostCurve) -> float:
    """How many times as long as `curve` says a draft's steps take behind a step of its target.

    That leaves none of their weights in the processor's caches: steps of a small head of SmolLM2
    take 0.24 ms (two tokens) and 0.15 ms (one) alone, and 0.9 and 0.5 ms there. The median of some
    turns of both models.
    """
    steps = [
        partial(one_step, other, 1),
        partial(one_step, backend, 2),
        partial(one_step, backend, 1),
    ]
    _, twos, ones = _turns(steps, *_TURNS, _TURNS_SECONDS)
    taken_ms = median(map(sum, zip(twos, ones, strict=True)))
    return max(1.0, taken_ms / (curve.base[2] + curve.base[1]))


def snapshots_cost(backend: KeepsSnapshots, plain_ms: float) -> float:
    """How many times as long a plain step takes with a backend's snapshots as without; 1 or more.

    `plain_ms` is what one takes about. In turns, and the best of each, since a machine's speed
    drifts; more turns where it seems to be much. The cache is empty then.
    """
    count = backend.capabilities.snapshots
    step = partial(one_step, backend, 1)
    steps = int(_COST_SECONDS * 1e3 / (2 * _COST_TURNS * plain_ms))
    best = {0: float("inf"), count: float("inf")}
    for turn in range(3 * _COST_TURNS):
        if turn >= _COST_TURNS and best[count] <= _USUAL_COST * best[0]:
            break
        for kept in best:  # in the end as before
            backend.keep_snapshots(kept)
            step()
            [times] = _turns([step], min(max(_COST_STEPS[0], steps), _COST_STEPS[1]))
            best[kept] = min(best[kept], *times)
    backend.truncate(0)
    return max(1.0, best[count] / best[0])


def reading_ms(backend: Backend) -> float:
    """Milliseconds a token takes where a whole batch of a prompt is read; the cache is empty then.

    The best of three.
    """
    tokens = some_tokens(backend, min(backend.batch_size, backend.context_size))
    _, times = _turns([partial(backend.truncate, 0), partial(backend.prefill, tokens)], 3)
    backend.truncate(0)
    return min(times) / len(tokens)


def measure_reads(
    backend: Backend, curve: CostCurve, *, clock: Callable[[], float] = perf_counter
) -> CostCurve:
    """Milliseconds of reading n tokens for one row of logits, with a single-token step before.

    The best of up to three, in an empty cache and about a second, the most useful n first; what
    depth adds is that of the steps of `curve`.
    """
    most = min(backend.batch_size, backend.context_size)
    deadline = clock() + _READ_SECONDS
    best = {1: float("inf")}
    for size in [size for size in _READS if size <= most] * 3:
        if len(best) > 1 and clock() > deadline:
            break
        backend.truncate(0)
        one_step(backend, 1)
        read = partial(backend.prefill, some_tokens(backend, size))
        steps: list[Callable[[], object]] = [partial(one_step, backend, 1), read]
        [single_ms], [read_ms] = in_turns(steps, 1, least=1, clock=clock)
        best[size] = min(best.get(size, float("inf")), read_ms)
        best[1] = min(best[1], single_ms)
    backend.truncate(0)
    if len(best) == 1:
        return curve.resized(1)
    base = [best.get(size, float("inf")) for size in range(max(best) + 1)]
    return CostCurve(base, curve.depth_ms, curve.depth_node_ms)


def some_tokens(backend: Backend, count: int) -> list[int]:
    """Some tokens; which ones makes no difference to the time of a step."""
    return [token % backend.tokenizer.vocab_size for token in range(100, 100 + count)]


def measure_depths(backend: Backend, curve: CostCurve) -> None:
    """Fill the cache for a moment and see how much slower steps get.

    A model that cannot prefill the smallest depth in time is left without: next to its weights
    a short context costs little.
    """
    largest = curve.max_nodes
    fitting = [
        depth
        for depth in _DEPTHS
        if depth + largest <= backend.context_size
        and depth * curve.base[largest] / largest <= _DEPTH_SECONDS * 1e3
    ]
    if not fitting:
        return

    def fill() -> int:
        backend.truncate(0)  # of steps that could not be taken back
        tokens = some_tokens(backend, fitting[-1])
        for start in range(0, len(tokens), backend.batch_size):
            backend.prefill(tokens[start : start + backend.batch_size])
        return len(tokens)

    measure_depth(curve, partial(one_step, backend), fill, partial(backend.truncate, 0))
    backend.truncate(0)
