"""How long answers wait while a long prompt of somebody else is read.

    python benchmarks/arrival.py [MODEL] [--writing 1,7] [--prompt 3000] [--latency 1] [--exact]
        [--drafter none] [--repeats 1]

So many users are being answered when a prompt of another one comes. Printed are the times between
two rounds of an answer: in the median before the prompt came and after it was answered (a step of
theirs, without drafts unless `--drafter` names some), and while it was read. Answers grow
meanwhile, and their steps with them: a wait is told in plain steps of its moment, on the line from
those before to those after. Then when the prompt's first token came. One engine in this process,
so that no reader gathers events; as in the server, nothing is searched for garbage that was there
before.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import edgespec
from edgespec.decode.engine import Engine
from edgespec.models.embedded import embedded_model

_SETTLED_S = 1.5  # of answers before the prompt comes, and after its first token
_MARGIN_S = 0.1  # between these and the prompt


@dataclass
class Late:
    """The prompt that comes: when it was asked, and when its first token was there."""

    asked_s: float = 0.0
    first_s: float = 0.0


@dataclass
class Writer:
    """Answers to somebody else, one after the other: when the rounds of each came."""

    answers: list[list[float]] = field(default_factory=list)

    def gaps(self, start_s: float, end_s: float) -> list[tuple[float, float]]:
        """When each ended, and its milliseconds."""
        pairs = (pair for rounds in self.answers for pair in pairwise(rounds))
        return [(b, 1e3 * (b - a)) for a, b in pairs if start_s <= b and a <= end_s]


def main() -> None:
    arguments = parse()
    writing = [int(part) for part in arguments.writing.split(",")]
    with edgespec.load(
        arguments.model,
        users=max(writing) + 1,
        context_size=arguments.prompt + 1024,
        drafter=arguments.drafter,
        latency=arguments.latency,
        exact=arguments.exact,
    ) as engine:
        gc.freeze()
        meet(engine, 1, arguments.prompt, seed=0)  # what reading adds to a step is found out
        for repeat in range(arguments.repeats):
            for users in writing:
                found = meet(engine, users, arguments.prompt, seed=1 + repeat)
                print(json.dumps(found), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, nargs="?", default=embedded_model())
    parser.add_argument("--writing", default="1,7")
    parser.add_argument("--prompt", type=int, default=3000)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--repeats", type=int, default=1)
    return parser.parse_args()


def meet(engine: Engine, users: int, size: int, seed: int) -> dict[str, float]:
    """A prompt of so many tokens comes while so many users are answered."""
    rng, end = random.Random(seed), threading.Event()
    writers, late = [Writer() for _ in range(users)], Late()

    def some(count: int) -> list[int]:
        return [rng.randrange(1000, engine.vocab_size - 1000) for _ in range(count)]

    def write(writer: Writer, prompt: list[int]) -> None:
        while not end.is_set():  # an answer may be short
            writer.answers.append([])
            for _ in engine.stream(prompt, max_tokens=900, cancel=end):
                writer.answers[-1].append(perf_counter())

    with ThreadPoolExecutor(users) as pool:
        prompts = [some(40) for _ in writers]
        for made in zip(writers, prompts, strict=True):
            pool.submit(write, *made)
        sleep(_SETTLED_S)
        late.asked_s = perf_counter()
        for _ in engine.stream(some(size), max_tokens=1):
            late.first_s = late.first_s or perf_counter()
        sleep(_SETTLED_S)
        end.set()
    return summary(writers, late)


def summary(writers: list[Writer], late: Late) -> dict[str, float]:
    """Times between two rounds, before, while and after the prompt was read."""

    def gaps(start_s: float, end_s: float) -> list[tuple[float, float]]:
        return [gap for one in writers for gap in one.gaps(start_s, end_s)]

    def typical_ms(start_s: float, end_s: float) -> float:
        return statistics.median(ms for _, ms in gaps(start_s, end_s))

    asked_s, first_s, reading_s = late.asked_s, late.first_s, late.first_s - late.asked_s
    before_ms = typical_ms(asked_s - 1.0, asked_s - _MARGIN_S)
    after_ms = typical_ms(first_s + _MARGIN_S, first_s + _SETTLED_S)
    during = gaps(asked_s, first_s)
    grown_ms = (after_ms - before_ms) / reading_s
    waits = sorted(ms / (before_ms + grown_ms * (end_s - asked_s)) for end_s, ms in during)
    found = {
        "writing": len(writers),
        "plain_step_ms": before_ms,
        "plain_step_after_ms": after_ms,
        "median_ms": statistics.median(ms for _, ms in during),
        "longest_ms": max(ms for _, ms in during),
        "median_steps": statistics.median(waits),
        "p99_steps": waits[int(0.99 * len(waits))],
        "longest_steps": waits[-1],
        "first_token_s": reading_s,
    }
    return {name: round(value, 2) for name, value in found.items()}


if __name__ == "__main__":
    main()
