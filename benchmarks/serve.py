"""What HTTP costs: one user's tokens/s over a server against the same engine without one.

    python benchmarks/serve.py [MODEL] [--repeats 10] [--tokens 192]

Both ways answer the same prompts in turns with one loaded engine, plainly and greedily, so that
they write the same tokens. The client streams, in a process of its own, as clients do. Not timed:
loading, connecting, the first answer of each way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

import edgespec
from edgespec.serve.server import Server

PROMPTS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Describe a market in the morning.",
)


def client(address: str) -> None:
    """Asks for each line of stdin; prints the seconds from the first event to the last."""
    from edgespec.serve.client import Client

    server = Client(address)
    for line in sys.stdin:
        moments, tokens = [], 0
        for event in server.stream("chat/completions", json.loads(line)):
            moments.append(perf_counter())
            tokens = int(event.timings.get("predicted_n", tokens))
        print(json.dumps({"s": moments[-1] - moments[0], "tokens": tokens}), flush=True)


def over_http(user: subprocess.Popen[str], prompt: str, tokens: int) -> tuple[float, int]:
    """Seconds and tokens of an answer, as its user saw them."""
    assert user.stdin is not None and user.stdout is not None
    messages = [{"role": "user", "content": prompt}]
    user.stdin.write(json.dumps({"messages": messages, "max_tokens": tokens}) + "\n")
    user.stdin.flush()
    told = json.loads(user.stdout.readline())
    return told["s"], told["tokens"]


def without(engine: edgespec.Engine, prompt: str, tokens: int) -> tuple[float, int]:
    """The same of the engine itself, written to nowhere as `run` writes to a terminal."""
    moments, count = [], 0
    with open("/dev/null", "w", encoding="utf-8") as nowhere:
        messages = [{"role": "user", "content": prompt}]
        for chunk in engine.stream(messages, max_tokens=tokens, reuse=True):
            moments.append(perf_counter())
            count += len(chunk.token_ids)
            nowhere.write(chunk.text)
            nowhere.flush()
    return moments[-1] - moments[0], count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        client(asked.client)
        return
    with edgespec.load(asked.model, drafter="none") as engine, Server(engine) as server:
        command = [sys.executable, __file__, "--client", server.start()]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as user:
            ways: dict[str, Callable[[str], tuple[float, int]]] = {
                "engine": lambda prompt: without(engine, prompt, asked.tokens),
                "http": lambda prompt: over_http(user, prompt, asked.tokens),
            }
            print(json.dumps(measure(ways, asked.repeats)))
            assert user.stdin is not None
            user.stdin.close()


def measure(ways: dict[str, Callable[[str], tuple[float, int]]], repeats: int) -> dict[str, Any]:
    """Tokens/s of both ways by pairs, and their ratio."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        prompt = PROMPTS[number % len(PROMPTS)]
        order = list(ways) if number % 2 else list(reversed(ways))
        for name in order:
            seconds, tokens = ways[name](prompt)
            if number:
                speeds[name].append((tokens - 1) / seconds)
    ratios = [http / engine for http, engine in zip(speeds["http"], speeds["engine"], strict=True)]
    return {
        "engine_tokens_per_s": statistics.median(speeds["engine"]),
        "http_tokens_per_s": statistics.median(speeds["http"]),
        "http_over_engine_median": statistics.median(ratios),
        "http_over_engine": sorted(round(ratio, 3) for ratio in ratios),
    }


if __name__ == "__main__":
    main()
