"""Steps of a loaded backend against the clock, on arbitrary tokens that are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean, median
from time import perf_counter

from edgespec.backends.base import Backend, DraftTree, KeepsSnapshots
from edgespec.memory.times import CostCurve
from edgespec.models.spec import ModelSpec

_LOOK_SECONDS = 0.6  # two looks at what else computes


def contention_now(backend: Backend) -> float:
    """How many times fewer threads than planned steps have, while they are made for a moment.

    What else computes is seen after a quarter of a second of steps.
    """
    in_turns([partial(one_step, backend, 1)], 10_000, _LOOK_SECONDS)
    return backend.contention


def one_step(backend: Backend, nodes: int, tokens: Sequence[int] = ()) -> None:
    """Verify a chain of arbitrary tokens and take it back; what cannot be is one token more.

    A cache that these have filled is emptied. It is these `tokens` if there are any.
    """
    returns = backend.capabilities.rollback and not backend.capabilities.snapshots
    if not returns and backend.length + nodes > backend.context_size:
        backend.truncate(0)
    backend.verify(DraftTree.chain(tokens or some_tokens(backend, nodes)))
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
    _, twos, ones = in_turns(steps, 12, 0.4, least=3)
    taken_ms = median(map(sum, zip(twos, ones, strict=True)))
    return max(1.0, taken_ms / (curve.base[2] + curve.base[1]))


def snapshots_cost(backend: KeepsSnapshots, plain_ms: float) -> float:
    """How many times as long a plain step takes with a backend's snapshots as without; 1 or more.

    `plain_ms` is what one takes about. In turns, and the best of each, since a machine's speed
    drifts; more turns where it seems to be much. The cache is empty then.
    """
    count = backend.capabilities.snapshots
    step = partial(one_step, backend, 1)
    steps = min(max(2, int(100.0 / plain_ms)), 12)  # three turns of both take 0.6 s
    best = {0: float("inf"), count: float("inf")}
    for turn in range(9):
        if turn >= 3 and best[count] <= 1.1 * best[0]:  # more may be other programs' doing
            break
        for kept in best:  # in the end as before
            backend.keep_snapshots(kept)
            step()
            [times] = in_turns([step], steps, least=steps)
            best[kept] = min(best[kept], *times)
    backend.truncate(0)
    return max(1.0, best[count] / best[0])


def reading_ms(backend: Backend) -> float:
    """Milliseconds a token takes where a whole batch of a prompt is read; the cache is empty then.

    The best of three.
    """
    tokens = some_tokens(backend, min(backend.batch_size, backend.context_size))
    _, times = in_turns([lambda: backend.truncate(0), lambda: backend.prefill(tokens)], 3, least=3)
    backend.truncate(0)
    return min(times) / len(tokens)


def some_tokens(backend: Backend, count: int, first: int = 0) -> list[int]:
    """Some tokens; which ones makes no difference to the time of a step without experts."""
    first += 100
    return [token % backend.tokenizer.vocab_size for token in range(first, first + count)]


def in_turns(
    steps: Sequence[Callable[[], object]],
    most: int,
    seconds: float = float("inf"),
    *,
    least: int = 2,
    clock: Callable[[], float] | None = None,
) -> list[list[float]]:
    """Milliseconds of each of some steps, made one after the other, again and again.

    At least `least` times, as one may be disturbed; at most `most` times, and until `seconds` are
    over: a slow model needs its time for others.
    """
    taken: list[list[float]] = [[] for _ in steps]
    clock = clock or perf_counter
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
    """The mean of the faster half, of two at least; the fastest, where another took 1.3 times that.

    >>> typical_ms([4.0, 4.2]), typical_ms([4.0, 9.0]), typical_ms([4.4, 9.0, 4.0, 4.2, 4.1])
    (4.1, 4.0, 4.1)
    """
    faster = sorted(samples)[: max(2, (len(samples) + 1) // 2)]
    return fmean(faster) if faster[-1] <= 1.3 * faster[0] else faster[0]


def measure_curve(
    run: Callable[[int], None],
    max_nodes: int,
    *,
    seconds: float = 1.2,
    known: CostCurve | None = None,
    clock: Callable[[], float] = perf_counter,
) -> CostCurve:
    """Measure t(n) in about `seconds`, the most useful n first.

    `run(n)` performs one step over n tokens and takes it back. `known` is an earlier curve, whose
    missing sizes are measured. Some GPUs' drivers compile programs for each size that they meet.
    Where the first step of two tokens is seen to take longer than the next ones, the first steps of
    all sizes are thrown away.
    """
    steps = [partial(run, n) for n in range(max_nodes + 1)]
    most = 8  # steps over one token at first; as many around sizes say how fast the machine is
    deadline = clock() + seconds
    run(1)
    [singles] = in_turns([steps[1]], most, seconds / 8, clock=clock)
    same = typical_ms(singles)
    if max_nodes == 1:
        return CostCurve([float("inf"), same])
    twos, changed = in_turns([steps[2], steps[1]], most, seconds / 8, clock=clock)
    unprepared = set(range(3, max_nodes + 1)) if twos[0] > 1.5 * max(twos[1:]) else set()
    usual = typical_ms(changed)  # of a single token after another size
    base = [float("inf")] * (max_nodes + 1) if known is None else known.resized(max_nodes).base
    quick = 100 * same <= 1e3 * seconds
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
    if quick and len(rows) >= most:
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
    return [min(max(ms / usual_ms, 0.7), 1.5) for ms in around]  # what is further off was disturbed


def _order(missing: Sequence[int]) -> Sequence[int]:
    """Sizes, each as often as it is measured at most, five times; the most useful ones twice first.

    A single sample may be disturbed, and a quick model has the time for more.
    """
    first = [n for n in (4, 8, 2, 3) if n in missing]  # most drafts are these
    # Multiples of 16 before those of 8, of 4, ...: sizes between others are estimated until then.
    later = sorted({*missing} - {*first}, key=lambda n: (-(n & -n), n))
    return [*first, *first, *later, *later, *[*first, *later] * 3]


def expect_slopes(curve: CostCurve, spec: ModelSpec) -> None:
    """Let a curve begin with the slopes that are likely for this model.

    Behind a token of context a step reads that token's keys and values, and each of its nodes
    multiplies with them, both as fast as with the weights times a factor: 1.4 and 9 with SmolLM2
    135M, 2.5 and 6 with Qwen2.5 1.5B (Q4_0, 2 CPU cores, edgespec's kernels). So 2 and 8 are off by
    0.4 there, and more with llama.cpp's attention.
    """
    sliding = spec.is_sliding or (False,) * spec.num_layers
    whole = [i for i in range(spec.num_layers) if not sliding[i] and spec.num_kv_heads[i]]
    per_head = {layer: spec.key_length[layer] + spec.value_length[layer] for layer in whole}
    values = sum(spec.num_kv_heads[layer] * both for layer, both in per_head.items())
    products = sum(spec.num_heads[layer] * both for layer, both in per_head.items())
    weights = _weights(spec)
    if not (values and weights and spec.weight_bytes):
        return
    first_ms, many = curve.base[1], min(8, curve.max_nodes)
    read_ms = first_ms * values * 2 / spec.weight_bytes  # two bytes a value
    node_ms = first_ms
    if many > 1:
        node_ms = max(0.0, curve.estimated_ms(many, 0) - first_ms) / (many - 1)
    multiply_ms = node_ms * products / weights
    curve.expect_slopes(2.0 * read_ms, 8.0 * multiply_ms, 1.0)


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
