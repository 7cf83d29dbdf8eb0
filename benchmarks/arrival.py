"""How long answers wait while a long prompt of somebody else is read.

    python benchmarks/arrival.py [MODEL] [--writing 1,7] [--prompt 3000] [--latency 1] [--exact]

So many users are being answered when a prompt of another one comes. In turns: no prompt, and one.
Printed are the times between two rounds of an answer: in the median before the prompt came (a plain
step of theirs, without drafts), and while it was read, with the longest in plain steps; then when
its first token came. One engine in this process, so that no reader gathers events.
"""

from __future__ import annotations

import argparse
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

_SETTLED_S = 1.5  # of answers before the prompt comes


@dataclass
class Late:
    """The prompt that comes: when it was asked, and when its first token was there."""

    asked_s: float = 0.0
    first_s: float = 0.0


@dataclass
class Writer:
    """Answers to somebody else, one after the other: when the rounds of each came."""

    answers: list[list[float]] = field(default_factory=list)

    def gaps_ms(self, start_s: float, end_s: float) -> list[float]:
        pairs = (pair for rounds in self.answers for pair in pairwise(rounds))
        return [1e3 * (b - a) for a, b in pairs if start_s <= b and a <= end_s]


def main() -> None:
    arguments = parse()
    writing = [int(part) for part in arguments.writing.split(",")]
    with edgespec.load(
        arguments.model,
        users=max(writing) + 1,
        context_size=arguments.prompt + 1024,
        drafter="none",
        latency=arguments.latency,
        exact=arguments.exact,
    ) as engine:
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
        end.set()
    before = [g for one in writers for g in one.gaps_ms(late.asked_s - 1.0, late.asked_s - 0.1)]
    during = [g for one in writers for g in one.gaps_ms(late.asked_s, late.first_s)]
    plain_ms, longest_ms = statistics.median(before), max(during)
    return {
        "writing": users,
        "plain_step_ms": round(plain_ms, 2),
        "median_ms": round(statistics.median(during), 2),
        "p99_ms": round(sorted(during)[int(0.99 * len(during))], 2),
        "longest_ms": round(longest_ms, 2),
        "longest_in_plain_steps": round(longest_ms / plain_ms, 2),
        "first_token_s": round(late.first_s - late.asked_s, 2),
    }


if __name__ == "__main__":
    main()
