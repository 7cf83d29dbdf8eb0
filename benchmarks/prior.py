"""How often drafts hold, learned from recorded answers: what a drafter begins with.

    python benchmarks/prior_record.py MODEL --out smollm2.jsonl   (and other models, and sampled)
    python benchmarks/prior.py learn smollm2.jsonl qwen.jsonl --out edge/drafting/priors.json
    python benchmarks/prior.py compare smollm2.jsonl qwen.jsonl --on DEV_RECORDING --first 39

`learn` replays the recordings and writes the counts of the suffix drafter's cells, all recordings
together. `compare` says what counts of the recordings are worth on one that is not among them, of
a model that is not: the mean log-loss of the probabilities, and the speed by replay, with nothing
known and with the counts. Learn from prompts of `prior_record.py`, compare on others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay import _curve, _replay

from edgespec.drafting.calibration import Calibration, Counts
from edgespec.drafting.drafters import suffix
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.suffix import VERSION, SuffixDrafter, cautious

_MOST = 1000.0  # tries of a cell that are written: more say no more
_LEAST = 2.0


class Watched(Calibration):
    """Counts that keep what was counted, and how likely it had seemed."""

    counted: list[tuple[int, bool, float]]

    def count(self, cell: int, hit: bool) -> None:
        chance = min(max(self.probability(cell), 1e-3), 1 - 1e-3)
        self.counted.append((cell, hit, -math.log(chance if hit else 1 - chance)))
        super().count(cell, hit)


def _drafter(known: Counts) -> tuple[CombinedDrafter, Watched]:
    """A new drafter that begins with these counts."""
    watched = suffix.new_calibration(known, Watched)
    assert isinstance(watched, Watched)
    watched.counted = []
    drafter = SuffixDrafter()
    drafter._calibration = watched
    return CombinedDrafter([drafter]), watched


def _rows(path: Path) -> list[dict[str, Any]]:
    """Answers of two tokens and more, in an order in which categories take turns."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(row["output"]) > 1:
            by_category[row["category"]].append(row)
    turns = [
        (place, category, row)
        for category, some in by_category.items()
        for place, row in enumerate(some)
    ]
    return [row for _, _, row in sorted(turns, key=lambda turn: turn[:2])]


def counts_of(paths: Sequence[Path], curve: str) -> Counts:
    """Hits and tries by cell."""
    hits: Counter[int] = Counter()
    tries: Counter[int] = Counter()
    for path in paths:
        drafter, watched = _drafter({})
        for row in _rows(path):
            _replay(row, drafter, _curve(curve), Counter())
        for cell, hit, _ in watched.counted:
            hits[cell] += hit
            tries[cell] += 1
    return {cell: (float(hits[cell]), float(tries[cell])) for cell in sorted(tries)}


def _learn(arguments: argparse.Namespace) -> None:
    cells = {}
    for cell, (hits, tries) in counts_of(arguments.recordings, arguments.curve).items():
        part = min(1.0, _MOST / tries)
        if tries >= _LEAST:
            cells[str(cell)] = [round(part * hits), round(part * tries)]
    document = {"version": VERSION, "suffix": {"num_cells": suffix.NUM_CELLS, "cells": cells}}
    arguments.out.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(cells)} cells, {sum(tries for _, tries in cells.values())} tries")


def _compare(arguments: argparse.Namespace) -> None:
    known = counts_of(arguments.recordings, arguments.curve)
    rows = _rows(arguments.on)[: arguments.first]
    for name, counts in (("nothing known", {}), ("with the counts", cautious(known))):
        drafter, watched = _drafter(counts)
        times = [_replay(row, drafter, _curve(arguments.curve), Counter()) for row in rows]
        ratios = sorted(plain / drafted for plain, drafted in times)
        plain_ms, drafted_ms = (sum(column) for column in zip(*times, strict=True))
        losses = [loss for _, _, loss in watched.counted]
        print(
            f"{name:<16} {len(rows)} answers: log-loss {sum(losses) / len(losses):.4f} of "
            f"{len(losses)}, speed {plain_ms / drafted_ms:.3f}, "
            f"a tenth of the answers below {ratios[len(ratios) // 10]:.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True)
    learn, compare = commands.add_parser("learn"), commands.add_parser("compare")
    for command in (learn, compare):
        command.add_argument("recordings", nargs="+", type=Path)
        command.add_argument("--curve", default="cpu2-smollm2-q4_0-kernels")
    learn.add_argument("--out", type=Path, required=True)
    learn.set_defaults(action=_learn)
    compare.add_argument("--on", type=Path, required=True)
    compare.add_argument("--first", type=int, default=None)
    compare.set_defaults(action=_compare)
    arguments = parser.parse_args()
    arguments.action(arguments)


if __name__ == "__main__":
    main()
