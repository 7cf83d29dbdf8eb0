"""Predicted against real step times, in loads that each begin with nothing.

    python benchmarks/predictions.py MODEL [--loads 20] [--out FOLDER]

Every load has an empty cache directory. After the load, and again after a first answer of 64 tokens
behind some 200, steps over 1 to 16 tokens behind 0, 500 and 2,000 are predicted; then they are
timed, sizes in turns. Shown is predicted over real, both beside the steps over 1, 2 and 4 tokens
behind nothing of the same load: decisions need nothing but ratios. On a machine where other
programs compute, times say more about these; how many rounds had fewer threads is said, too.
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
_PROMPT = "Summarize: " + 8 * (
    "The committee met on Monday to discuss the new bridge over the river, and whether the town "
    "could pay for it. "
)
Times = NDArray[np.float64]  # [depths, sizes]


def predicted(curve: CostCurve) -> Times:
    """Milliseconds, by depth and size."""
    return np.array([[curve.estimated_ms(n, depth) for n in _SIZES] for depth in _DEPTHS])


def real(backend: Backend) -> Times:
    """Milliseconds, by depth and size; the cache is empty then."""
    rows = []
    for depth in _DEPTHS:
        backend.truncate(0)
        tokens = some_tokens(backend, depth)
        for start in range(0, depth, backend.batch_size):
            backend.prefill(tokens[start : start + backend.batch_size])
        turns = [[_timed(backend, n) for n in _SIZES] for _ in range(_TURNS)]
        rows.append(np.percentile(turns, _TYPICAL, axis=0))
    backend.truncate(0)
    return np.array(rows)


def _timed(backend: Backend, nodes: int) -> float:
    """Of a step after one of its size, which has built its graph."""
    one_step(backend, nodes)
    start = perf_counter()
    one_step(backend, nodes)
    return (perf_counter() - start) * 1e3


def one_load(model: str) -> tuple[Times, Times]:
    """Predicted over real, after the load and after the first answer."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_CACHE"] = folder
        with load(model, context_size=2560) as engine:
            assert engine.curve is not None
            before = predicted(engine.curve)
            counters = engine.generate(_PROMPT, max_tokens=64).counters
            after, times = predicted(engine.curve), real(engine.backend)
            slopes = engine.curve.depth_ms, engine.curve.depth_node_ms, engine.curve.change_ms
    depth, node, change = slopes
    print(
        f"t(1) {times[0, 0]:.2f} ms, depth {depth:.5f}, a node {node:.5f}, a change {change:.2f}; "
        f"{counters.crowded_rounds} of {counters.rounds} rounds with fewer threads",
        flush=True,
    )
    few = (slice(0, 1), slice(0, 3))
    return tuple(one / times * np.median(times[few] / one[few]) for one in (before, after))  # type: ignore[return-value]


def show(name: str, ratios: Times) -> None:
    """`ratios` are [loads, depths, sizes]."""
    print(f"\n{name}: predicted over real, median and range")
    for depth, columns in zip(_DEPTHS, ratios.transpose(1, 2, 0), strict=True):
        cells = (f"{np.median(c):.2f} [{c.min():.2f}, {c.max():.2f}]" for c in columns)
        print(
            f"behind {depth:>4}: "
            + "  ".join(f"{n}: {c}" for n, c in zip(_SIZES, cells, strict=True))
        )
    near = np.abs(ratios - 1.0) < 0.1
    print(
        f"within 10%: {near.mean():.0%} of all; "
        f"all of them in {near.all(axis=(1, 2)).mean():.0%} of the loads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    found: list[tuple[Times, Times]] = []
    with stoppable():
        for number in range(1, arguments.loads + 1):
            print(f"{number} of {arguments.loads}: ", end="")
            found.append(one_load(arguments.model))
    if not found:
        return
    before, after = (np.array(some) for some in zip(*found, strict=True))
    show("after the load", before)
    show("after the first answer", after)
    if arguments.out is not None:
        ratios = {"after_load": before.tolist(), "after_first_answer": after.tolist()}
        write_results(
            results_file(arguments.out, "predictions", arguments.model),
            {"model": Path(arguments.model).name, "sizes": _SIZES, "depths": _DEPTHS, **ratios},
        )


if __name__ == "__main__":
    main()
