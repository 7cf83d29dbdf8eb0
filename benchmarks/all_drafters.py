"""All drafters on step times of five machines: what each brings over plain decoding.

    python benchmarks/replay.py record MODEL --prompts edge/measure/prompts.jsonl --out RECORDING
    python benchmarks/all_drafters.py RECORDING

The real drafters, estimators and ledgers work through recorded answers (`replay.py`). What drafts
with an engine is simulated: it is right at a recorded token as often as was measured, likelier
where the model is sure, and its steps take as many plain steps as were measured. Two curves are
measured; three are arithmetic: bytes of weights over bandwidth, and multiplications over a rate.
Marked with * is what `--drafter auto` takes there, by its own rules, with nothing counted yet.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import Any

import numpy as np
from replay import PricedCurve, _curve, _replay

from edgespec.backends.base import Logits
from edgespec.drafting import constants
from edgespec.drafting.drafters import combined as combined_module
from edgespec.drafting.drafters import model as model_module
from edgespec.drafting.drafters.base import Drafter
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.model import HeadDrafter, HeadText
from edgespec.drafting.drafters.recycling import RecyclingDrafter
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.memory.times.curve import CostCurve
from edgespec.memory.times.speed import predicted_speedup
from edgespec.setup.drafter_choice import _HOLDS, _WORTH_A_WINDOW
from edgespec.setup.planning import _FLAT, _MANY

_SIZES = 32  # nodes of a step on simulated machines
_SLOPE_ERROR = 0.1  # relative, of what depth adds: as behind some long texts


@dataclass(frozen=True, slots=True)
class Engine:
    """What drafts with steps of its own: right `agrees` of the time, for `step` plain steps."""

    agrees: float
    step: float
    bytes_part: float  # of what a plan may take: what `auto` asks it to bring besides


# Measured with SmolLM2 (LOG.md): the shipped early exit, and a head trained for 25 minutes. A
# smaller model of the same family is a guess.
ENGINES = {
    "early exit": Engine(0.520, 0.12, 0.01),
    "head": Engine(0.592, 0.10, 0.01),
    "draft model (assumed)": Engine(0.7, 0.2, 0.1),
}
WINDOW_AGREES = 0.85  # LOG.md: SmolLM2 over 512 cells behind 7,500 tokens
DEPTHS = (8_000, 16_000)


def simulated(first_ms: float, more_ms: float, depth_ms: float = 0.0) -> PricedCurve:
    """A step reads the weights once, and multiplies for each of its tokens."""
    return PricedCurve(
        [inf, *(first_ms + more_ms * n for n in range(_SIZES))], depth_ms, depth_ms / 2
    )


# Name, curve, and whether attention passes over cells that a sequence does not see.
MACHINES: dict[str, tuple[Callable[[], PricedCurve], bool]] = {
    "2 cores, SmolLM2 Q4_0 (measured)": (lambda: _curve("cpu2-smollm2-q4_0-kernels"), True),
    # 0.94 GB at 60 GB/s; a token takes an eighth of the time that it does on one core of a Xeon
    # with AVX-512, twice as long without.
    "8-core laptop, 1.5B Q4_0 (arithmetic)": (lambda: simulated(15.7, 1.5, 0.0005), True),
    # 0.94 GB at 0.7 of 68 GB/s; 3.1 thousand million multiplications at 2.5e12 a second.
    "Orin Nano, 1.5B Q4_0 (arithmetic)": (lambda: simulated(19.8, 1.2, 0.0006), False),
    # 4.7 GB at 0.85 of 272 GB/s; 16 thousand million at 30e12.
    "8 GB GPU, 8B Q4_0 (arithmetic)": (lambda: simulated(20.3, 0.55, 0.0005), False),
    "H200, 8B Q4_0 (measured)": (lambda: _curve("h200-8b-q4_0"), False),
}


class Simulated:
    """A head that is right at random places of a recorded answer; its steps move the clock."""

    context_size, num_unread, block, token_ids = 1 << 20, 0, 0, None
    reads_prompts = False
    spent_ms = 0.0

    def __init__(self, agrees: float, step_ms: float, vocab_size: int) -> None:
        self.text = HeadText(self)
        self.agrees, self._step_ms, self._vocab_size = agrees, step_ms, vocab_size
        self._right: list[tuple[int, float, bool]] = []
        self._at = self._start = 0

    def answers(self, row: dict[str, Any], power: float) -> None:
        """The answer that is replayed next; shares to this power are how often it is right."""
        source = random.Random(len(row["prompt"]))
        self._start = len(row["prompt"])
        self._right = []
        for token, (_, shares) in zip(row["output"], row["successors"], strict=True):
            chance = shares[0] ** power
            self._right.append((token, chance, source.random() < chance))

    def power_for(self, rows: Sequence[dict[str, Any]]) -> float:
        """The power at which it is right as often as it should be."""
        shares = np.array([one[1][0] for row in rows for one in row["successors"]])
        powers = np.linspace(0.0, 8.0, 801)
        means = np.array([(shares**power).mean() for power in powers])
        return float(powers[np.abs(means - self.agrees).argmin()])

    def begin(self, token: int) -> Logits:
        self._at = len(self.text.tokens) - self._start
        return self._row()

    def go_on(self, token: int) -> Logits:
        self._at += 1
        return self._row()

    def _row(self) -> Logits:
        Simulated.spent_ms += self._step_ms
        token, chance, is_right = self._right[min(self._at, len(self._right) - 1)]
        row = np.full(self._vocab_size, -30.0, np.float32)
        said = token if is_right else (token + 1) % self._vocab_size
        row[said] = log(max(chance, 1e-4))
        row[(token + 2) % self._vocab_size] = log(max(1.0 - chance, 1e-4))
        return row

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recording", type=Path)
    recording = parser.parse_args().recording
    rows = [json.loads(line) for line in recording.read_text().splitlines()]
    vocab_size = 1 + max(max(*row["prompt"], *row["output"]) for row in rows)
    for module in (combined_module, model_module):
        module.perf_counter = lambda: Simulated.spent_ms / 1e3  # type: ignore[attr-defined]
    lines: dict[str, list[str]] = {}

    def add(name: str, cell: str) -> None:
        lines.setdefault(name, []).append(cell)

    for make, skips in MACHINES.values():
        curve = make()
        flat = curve.step_ms(_MANY, 0) <= _FLAT * curve.base[1]
        tables: list[Callable[[], Drafter]] = [SuffixDrafter, RecyclingDrafter]
        add("suffix", cell(speed(rows, make, [tables[0]]), is_auto=not flat))
        add("suffix, recycling", cell(speed(rows, make, tables), is_auto=flat))
        for name, engine in ENGINES.items():
            made = Simulated(engine.agrees, engine.step * curve.base[1], vocab_size)
            promised, _ = predicted_speedup(
                [_HOLDS * engine.agrees ** (place + 1) for place in range(constants.LONGEST)],
                curve.base,
                engine.step * curve.base[1],
            )
            takes = promised > constants.NO_DIFFERENCE + engine.bytes_part
            found = speed(rows, make, [SuffixDrafter], made)
            add(f"suffix, {name}", cell(found, is_auto=takes))
        for depth in DEPTHS:
            name = f"suffix, window, behind {depth:,} tokens"
            if not skips or not curve.depth_ms:
                add(name, "")
                continue
            step_ms = curve.step_ms(1, constants.WINDOW_FIRST + constants.WINDOW_LAST)
            steps = [curve.step_ms(size, depth) for size in range(len(curve.base))]
            promised, _ = predicted_speedup(constants.WINDOW_GAINS, steps, step_ms)
            made = Simulated(WINDOW_AGREES, step_ms, vocab_size)
            found = speed(rows, make, [SuffixDrafter], made, before=depth)
            add(name, cell(found, is_auto=promised > _WORTH_A_WINDOW))
            add(
                f"suffix, behind {depth:,} tokens",
                cell(speed(rows, make, tables[:1], before=depth)),
            )
    print("| | " + " | ".join(MACHINES) + " |")
    print("| --- |" + " --- |" * len(MACHINES))
    for name, cells in lines.items():
        print(f"| {name} | " + " | ".join(cells + [""] * (len(MACHINES) - len(cells))) + " |")


def cell(speed_up: float, *, is_auto: bool = False) -> str:
    return f"{speed_up:.2f}x" + "*" * is_auto


def speed(
    rows: Sequence[dict[str, Any]],
    make: Callable[[], CostCurve],
    tables: Sequence[Callable[[], Drafter]],
    engine: Simulated | None = None,
    before: int = 0,
) -> float:
    """Times plain decoding, over all answers together."""
    curve, drafters = make(), [one() for one in tables]
    curve.expect_slopes(curve.depth_ms, curve.depth_node_ms, _SLOPE_ERROR)
    power = 1.0
    if engine is not None:
        steps = CostCurve([inf, *[engine._step_ms] * 8])
        promised = [engine.agrees ** (place + 1) for place in range(constants.LONGEST)]
        drafters.append(HeadDrafter(engine.text, steps, engine._vocab_size, promised))
        power = engine.power_for(rows)
    drafter, plain_ms, spent_ms = CombinedDrafter(drafters), 0.0, 0.0
    for row in rows:
        if engine is not None:
            engine.answers(row, power)
        plain, spent = _replay(row, drafter, curve, Counter(), before=before)
        plain_ms, spent_ms = plain_ms + plain, spent_ms + spent
    return plain_ms / spent_ms


if __name__ == "__main__":
    main()
