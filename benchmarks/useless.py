"""Whole answers with drafters that are never right, against plain decoding without snapshots.

    python benchmarks/useless.py MODEL [--loads K] [--texts N] [--tokens T] [--threads N]

MODEL has random weights, and a head where that is to be wrong, such as `write_hybrid` of
tests/hybrid_gguf.py writes: what it draws at a high temperature repeats nothing. Each load begins
with what those before it have learned, the first one with nothing. Texts are written in turns by an
engine with `--drafter auto` and one with `none`, the prompt included; what counts is processor
time, which other programs change least.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from time import process_time

from edgespec import load
from edgespec.bench.interleaving import order_of
from edgespec.decode.engine import Engine
from edgespec.sampling.params import SamplingParams


def seconds(engine: Engine, prompt: list[int], tokens: int, seed: int) -> float:
    """Processor time of a whole answer."""
    began = process_time()
    sampling = SamplingParams(temperature=2.0, seed=seed)
    engine.generate(prompt, max_tokens=tokens, sampling=sampling)
    return process_time() - began


def in_turns(engines: list[Engine], arguments: argparse.Namespace, first: int) -> list[float]:
    """Of each text, plain decoding's time over that with drafters."""
    source, ratios = random.Random(first), []
    for number in range(arguments.texts):
        prompt = [source.randrange(200) for _ in range(arguments.prompt)]
        spent = [0.0, 0.0]
        for place in order_of(number, 2):
            spent[place] = seconds(engines[place], prompt, arguments.tokens, first + number)
        ratios.append(spent[1] / spent[0])
    return ratios


def run(arguments: argparse.Namespace) -> None:
    """One line for each load."""
    options = {
        "context_size": arguments.prompt + arguments.tokens,
        "threads": arguments.threads,
        "kernels": arguments.kernels,
    }
    print("load  drafter      snapshots  median  least   most  drafted")
    for number in range(arguments.loads):
        with (
            closing(load(arguments.model, **options)) as drafting,
            closing(load(arguments.model, drafter="none", **options)) as plain,
        ):
            kept = drafting.backend.capabilities.snapshots
            names = drafting.drafter.name if drafting.drafter is not None else "none"
            for engine in (drafting, plain):
                seconds(engine, [1, 2, 3], 8, 0)
            ratios = in_turns([drafting, plain], arguments, 1000 * number)
            drafted = drafting.history.rounds()
        size = sum(times * (nodes - 1) for nodes, _, times in drafted)
        print(
            f"{number + 1:>4}  {names:<12} {kept:>9}  {statistics.median(ratios):>6.3f} "
            f"{min(ratios):>6.3f} {max(ratios):>6.3f} {size:>8.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--loads", type=int, default=4)
    parser.add_argument("--texts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=150)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each prompt")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kernels", default="auto")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGESPEC_CACHE"] = folder
        run(parser.parse_args())


if __name__ == "__main__":
    main()
