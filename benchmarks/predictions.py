"""Predicted against real step times, in loads that each begin with nothing.

    python benchmarks/predictions.py MODEL [--loads 20] [--own] [--out FOLDER]

Every load has an empty cache directory. After the load, and again after a first answer of 64 tokens
behind some 200, steps over 1 to 16 tokens behind 0, 500 and 2,000 are predicted; then they are
timed, each after two steps of one token, as drafts are verified in an answer; with `--own` after
one of its own size, so that no graph is built anew. All of it is timed twice: what two measurements
of one load differ by, no prediction can be better than. Ratios are beside the steps over 1, 2 and 4
tokens behind nothing of the same load: decisions need nothing else. On a machine where other
programs compute, times say more about these; how many rounds had fewer threads is said, too, and
what becomes of the loads whose two measurements agree.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from time import perf_counter

import numpy as np
from numpy.typing import NDArray
from partial import results_file, stoppable, write_results

from edgespec.backends.base import Backend
from edgespec.measure.timing import one_step, some_tokens
from edgespec.memory.times.curve import CostCurve
from edgespec.setup.loading import load

_SIZES, _DEPTHS = (1, 2, 4, 8, 16), (0, 500, 2000)
_TURNS = 7
_TYPICAL = 30  # percentile of the turns: disturbances only lengthen
_NEAR = 0.1
_PROMPT = "Summarize: " + 8 * (
    "The committee met on Monday to discuss the new bridge over the river, and whether the town "
    "could pay for it. "
)
Times = NDArray[np.float64]  # [depths, sizes]


def predicted(curve: CostCurve, own: bool) -> Times:
    """Milliseconds, by depth and size, after a step of one token or of its own size."""
    previous = 0 if own else 1
    return np.array([[curve.estimated_ms(n, depth, previous) for n in _SIZES] for depth in _DEPTHS])


def real(backend: Backend, own: bool) -> Times:
    """Milliseconds, by depth and size; the cache is empty then."""
    rows = []
    for depth in _DEPTHS:
        backend.truncate(0)
        tokens = some_tokens(backend, depth)
        for start in range(0, depth, backend.batch_size):
            backend.prefill(tokens[start : start + backend.batch_size])
        turns = [[_timed(backend, n, own) for n in _SIZES] for _ in range(_TURNS)]
        rows.append(np.percentile(turns, _TYPICAL, axis=0))
    backend.truncate(0)
    return np.array(rows)


def _timed(backend: Backend, nodes: int, own: bool) -> float:
    """Of a step after one of its size, or after two of one token."""
    for size in [nodes] if own else [1, 1]:
        one_step(backend, size)
    start = perf_counter()
    one_step(backend, nodes)
    return (perf_counter() - start) * 1e3


def one_load(model: str, own: bool) -> tuple[Times, Times, Times]:
    """Predicted over real, after the load and after the first answer; real over real again."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_CACHE"] = folder
        with load(model, context_size=2560) as engine:
            assert engine.curve is not None
            before = predicted(engine.curve, own)
            counters = engine.generate(_PROMPT, max_tokens=64).counters
            after = predicted(engine.curve, own)
            times, again = real(engine.backend, own), real(engine.backend, own)
            slopes = engine.curve.depth_ms, engine.curve.depth_node_ms, engine.curve.change_ms
    depth, node, change = slopes
    print(
        f"t(1) {times[0, 0]:.2f} ms, depth {depth:.5f}, a node {node:.5f}, a change {change:.2f}; "
        f"{counters.crowded_rounds} of {counters.rounds} rounds with fewer threads",
        flush=True,
    )
    return beside(before, times), beside(after, times), beside(times, again)


def beside(some: Times, others: Times) -> Times:
    """Ratios, each at the speed of its few tokens behind nothing."""
    few = (slice(0, 1), slice(0, 3))
    return some / others * np.median(others[few] / some[few])


def show(name: str, ratios: Times) -> None:
    """`ratios` are [loads, depths, sizes]."""
    print(f"\n{name}: median and range")
    for depth, columns in zip(_DEPTHS, ratios.transpose(1, 2, 0), strict=True):
        cells = (f"{np.median(c):.2f} [{c.min():.2f}, {c.max():.2f}]" for c in columns)
        print(
            f"behind {depth:>4}: "
            + "  ".join(f"{n}: {c}" for n, c in zip(_SIZES, cells, strict=True))
        )
    print(_share(ratios))


def _share(ratios: Times) -> str:
    near = np.abs(ratios - 1.0) < _NEAR
    loads = near.all(axis=(1, 2)).mean()
    return f"within {_NEAR:.0%}: {near.mean():.0%} of all; all of them in {loads:.0%} of the loads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--own", action="store_true", help="steps after one of their own size")
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    found: list[tuple[Times, Times, Times]] = []
    with stoppable():
        for number in range(1, arguments.loads + 1):
            print(f"{number} of {arguments.loads}: ", end="")
            found.append(one_load(arguments.model, arguments.own))
    if not found:
        return
    before, after, repeated = (np.array(some) for some in zip(*found, strict=True))
    show("predicted after the load, over real", before)
    show("predicted after the first answer, over real", after)
    show("real, over real again", repeated)
    quiet = (np.abs(repeated - 1.0) < _NEAR).all(axis=(1, 2))
    if quiet.any():
        print(f"\nin {quiet.sum()} loads whose two measurements agree, {_share(after[quiet])}")
    if arguments.out is not None:
        ratios = {
            "after_load": before.tolist(),
            "after_first_answer": after.tolist(),
            "repeated": repeated.tolist(),
        }
        write_results(
            results_file(arguments.out, "predictions", arguments.model),
            {
                "model": Path(arguments.model).name,
                "sizes": _SIZES,
                "depths": _DEPTHS,
                "own": arguments.own,
                **ratios,
            },
        )


if __name__ == "__main__":
    main()
