"""Drafts of several users at once against plain decoding of the same prompts, in one process.

    python benchmarks/together.py MODEL --prompts spec_bench_dev.jsonl [--users 8] [--tokens 96]
        [--sets 10] [--drafter auto]

As many prompts as users are answered at once, with drafts and without, in turns: A B, B A, ...
Each prompt is answered once either way, so that no drafter has seen its answer. Printed are, for
each set of prompts, the tokens/s with drafts over those without: by the clock, and by the
processor time of this process, which other programs disturb less; then what a round brought, and
what it took in the step and beside it. Last come the medians over all sets with an interval that
holds the median in 95 of 100 cases (by resampling sets). One engine in this process: no server, no
reader that gathers events.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from serving import interval, read_prompts

import edgespec
from edgespec.decode.engine import Engine
from edgespec.models.embedded import embedded_model


@dataclass
class Turn:
    """What one set of prompts took, one way."""

    tokens: int
    spent_s: float
    cpu_s: float
    rounds: int
    drafted: int
    accepted: int
    step_s: float  # of all rounds: each counts the whole step that it was in
    host_s: float


def main() -> None:
    arguments = parse()
    prompts = read_prompts(arguments.prompts)
    users, pairs = arguments.users, []
    with edgespec.load(
        arguments.model, users=users, context_size=arguments.ctx, drafter=arguments.drafter
    ) as engine:
        answer(engine, ["Hello."] * users, arguments.tokens, speculate=False)
        for number in range(arguments.sets):
            start = number * users
            some = [prompts[i % len(prompts)] for i in range(start, start + users)]
            order = (True, False) if number % 2 else (False, True)
            turns = {one: answer(engine, some, arguments.tokens, speculate=one) for one in order}
            pairs.append((turns[True], turns[False]))
            print(json.dumps(row(*pairs[-1])), flush=True)
    rows = [row(*pair) for pair in pairs]
    for key in ("by_clock", "by_cpu"):
        print(json.dumps({key: interval([one[key] for one in rows])}))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path, nargs="?", default=embedded_model())
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--sets", type=int, default=10)
    parser.add_argument("--drafter", default="auto")
    return parser.parse_args()


def answer(engine: Engine, prompts: Sequence[str], tokens: int, *, speculate: bool) -> Turn:
    """All prompts at once, until the last answer has ended."""

    def one(prompt: str) -> edgespec.Result:
        return engine.generate(prompt, max_tokens=tokens, speculate=speculate)

    began, cpu = perf_counter(), process_time()
    with ThreadPoolExecutor(len(prompts)) as pool:
        counters = [result.counters for result in pool.map(one, prompts)]
    return Turn(
        tokens=sum(one.generated_tokens for one in counters),
        spent_s=perf_counter() - began,
        cpu_s=process_time() - cpu,
        rounds=sum(one.rounds for one in counters),
        drafted=sum(one.drafted_tokens for one in counters),
        accepted=sum(one.accepted_tokens for one in counters),
        step_s=sum(one.step_s for one in counters),
        host_s=sum(one.host_s for one in counters),
    )


def row(drafted: Turn, plain: Turn) -> dict[str, float]:
    """One set: with drafts over without."""
    return {
        "by_clock": round(speed(drafted.tokens, drafted.spent_s, plain), 3),
        "by_cpu": round(drafted.tokens / drafted.cpu_s * plain.cpu_s / plain.tokens, 3),
        "plain_tokens_per_s": round(plain.tokens / plain.spent_s, 1),
        "drafted": drafted.drafted,
        "accepted": drafted.accepted,
        "acceptance_length": round(1 + drafted.accepted / drafted.rounds, 3),
        "step_ms": round(1e3 * drafted.step_s / drafted.rounds, 2),
        "plain_step_ms": round(1e3 * plain.step_s / plain.rounds, 2),
        "host_ms": round(1e3 * drafted.host_s / drafted.rounds, 2),
        "plain_host_ms": round(1e3 * plain.host_s / plain.rounds, 2),
    }


def speed(tokens: int, spent_s: float, plain: Turn) -> float:
    return tokens / spent_s * plain.spent_s / plain.tokens


if __name__ == "__main__":
    main()
