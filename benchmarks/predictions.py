"""Predicted against real step times, in loads that each begin with nothing.

    python benchmarks/predictions.py loads MODEL [--loads 20] [--own] [--out FOLDER]
    python benchmarks/predictions.py record MODEL --out RECORD
    python benchmarks/predictions.py replay RECORD...

`record` measures a curve, and then times 1,000 steps of ten texts behind 0 to 2,000 tokens, three
in ten of them over 2 to 16. `replay` predicts each from those before it, needs no model, and so
compares the estimators of two versions: the mean relative error, with the curve as it was measured
and with sizes that are 10% and slopes that are a factor of two off; and how many steps pass until
it is within a tenth for good after all of them take several times as long.

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
import json
import os
import random
import tempfile
from collections.abc import Iterable, Sequence
from math import exp
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray
from partial import results_file, stoppable, write_results

from edgespec.backends.base import Backend
from edgespec.backends.tree import DraftTree
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
_TEXT_DEPTHS = (40, 600, 1500, 200, 2000, 900, 20, 300, 1200, 1800)
_TEXT_STEPS, _DRAFTED, _DRAFT_SIZES = 100, 0.3, (2, 3, 4, 5, 6, 8, 10, 12, 16)
_BASE_ERROR, _SLOPE_ERROR = 0.1, 0.7  # of logarithms
_SLOWER, _EVERY, _STAYS = (1.5, 3.0, 5.0, 1 / 3), 37, 20
Times = NDArray[np.float64]  # [depths, sizes]
Step = tuple[int, int, int, float]  # nodes, depth, nodes of the step before, ms


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


# -- recorded steps ------------------------------------------------------------------------


def record(model: str, out: Path) -> None:
    """Write the curve that a load begins with, and what the steps of some texts take."""
    steps: list[Step] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_CACHE"] = folder
        with load(model, context_size=2560, draft_max=15) as engine:
            assert engine.curve is not None
            curve, draw = engine.curve.as_json(), random.Random(1)
            for depth in _TEXT_DEPTHS:
                steps += _steps_behind(engine.backend, depth, draw)
    out.write_text(json.dumps({"model": Path(model).name, "curve": curve, "steps": steps}))


def _steps_behind(backend: Backend, depth: int, draw: random.Random) -> Iterable[Step]:
    backend.truncate(0)
    for start in range(0, depth, backend.batch_size):
        backend.prefill(some_tokens(backend, min(backend.batch_size, depth - start)))
    previous = 0
    for _ in range(_TEXT_STEPS):
        nodes = draw.choice(_DRAFT_SIZES) if draw.random() < _DRAFTED else 1
        before = backend.length
        start_s = perf_counter()
        backend.verify(DraftTree.chain(some_tokens(backend, nodes)))
        yield nodes, before, previous, (perf_counter() - start_s) * 1e3
        backend.commit((0,))
        previous = nodes


def replay(paths: Sequence[Path]) -> None:
    """Print how far predictions of recorded steps are off."""
    for path in paths:
        _replay(json.loads(path.read_text()))


def _replay(recorded: dict[str, Any]) -> None:
    steps: list[Step] = [tuple(step) for step in recorded["steps"]]
    print(recorded["model"])
    for name, seeds in (("as measured", [None]), ("10% off", list(range(6)))):
        errors = [_predict(_curve_of(recorded["curve"], seed), steps)[0] for seed in seeds]
        for kind, of_kind in (("one token", True), ("several", False)):
            kinds = [step[0] == 1 for step in steps]
            off = [
                fmean(e for e, k in zip(es, kinds, strict=True) if k == of_kind) for es in errors
            ]
            print(f"  {name}, {kind}: {fmean(off):.1%}")
        print(f"  {name}, the first hundred: {fmean(fmean(es[:100]) for es in errors):.1%}")
    usual = _predict(_curve_of(recorded["curve"]), steps)[1]
    for times in _SLOWER:
        needed = []
        for start in range(100, len(steps) - 100, _EVERY):
            slow = [
                (n, d, p, ms * (times if i >= start else 1.0))
                for i, (n, d, p, ms) in enumerate(steps)
            ]
            found = _predict(_curve_of(recorded["curve"]), slow)[1]
            needed.append(_steps_until(found[start:], usual[start:], times))
        print(f"  {times:.2f} times as long: {median(needed):.0f} steps, at most {max(needed)}")


def _curve_of(document: dict[str, Any], seed: int | None = None) -> CostCurve:
    """The curve, or one that was measured less well."""
    if seed is not None:
        draw = random.Random(seed)
        one, *further = document["base_ms"][1:]
        base = [None, one, *(ms and ms * exp(draw.gauss(0.0, _BASE_ERROR)) for ms in further)]
        names = ("depth_ms", "depth_node_ms", "change_ms")
        slopes = {name: document[name] * exp(draw.gauss(0.0, _SLOPE_ERROR)) for name in names}
        document = {**document, **slopes, "base_ms": base, "learned_ms": base}
    return CostCurve.from_json(document)


def _predict(curve: CostCurve, steps: Sequence[Step]) -> tuple[list[float], list[float]]:
    """How far each step was off by those before, and what a plain one behind 500 tokens takes."""
    errors, plain_ms = [], []
    for nodes, depth, previous, ms in steps:
        errors.append(abs(curve.scale * curve.estimated_ms(nodes, depth, previous) / ms - 1.0))
        curve.observe(nodes, depth, previous, ms)
        plain_ms.append(curve.scale * curve.estimated_ms(1, 500))
    return errors, plain_ms


def _steps_until(found: Sequence[float], usual: Sequence[float], times: float) -> int:
    """Steps until the estimate is within a tenth of what is true, for twenty steps."""
    near = [abs(ms / (times * known) - 1.0) < _NEAR for ms, known in zip(found, usual, strict=True)]
    starts = (i + 1 for i in range(len(near)) if all(near[i : i + _STAYS]))
    return next(starts, len(near))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    loads = commands.add_parser("loads")
    loads.add_argument("model")
    loads.add_argument("--loads", type=int, default=20)
    loads.add_argument("--own", action="store_true", help="steps after one of their own size")
    loads.add_argument("--out", type=Path, metavar="FOLDER")
    loads.set_defaults(action=_loads)
    recording = commands.add_parser("record")
    recording.add_argument("model")
    recording.add_argument("--out", type=Path, required=True, metavar="RECORD")
    recording.set_defaults(action=lambda arguments: record(arguments.model, arguments.out))
    replayed = commands.add_parser("replay")
    replayed.add_argument("records", type=Path, nargs="+", metavar="RECORD")
    replayed.set_defaults(action=lambda arguments: replay(arguments.records))
    arguments = parser.parse_args()
    arguments.action(arguments)


def _loads(arguments: argparse.Namespace) -> None:
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
