"""Several users of one server: edgespec beside llama.cpp's own, with as many slots.

    python benchmarks/serving.py MODEL --prompts spec_bench_dev.jsonl [--server llama-server]
        [--users 1,2,4,8] [--answers 2] [--tokens 96] [--repeats 1] [--threads N] [--latency 2,4]
        [--exact] [--results | --json OUT]

All servers are started once, with caches of `--ctx` tokens for each user, and asked in turns, the
order changing from turn to turn; those that are not asked do not compute. N users each ask for
`--answers` greedy answers, one after the other, every one to a prompt of its own; a row is

- tokens/s of all users together: what servers count, by wall clock
- time to the first event of an answer, and between two events: median and 95th percentile, ms
- the slowest answer's tokens/s over the mean, and how many were below half of it
- the same over the mean of plain edgespec's answers to the same prompts: drafts that hold raise the
  mean of all, so that who copies nothing falls behind it without being any slower

No prompt is asked twice (as long as there are enough), so that nobody finds one in a cache. Of
several `--repeats` the medians are told; of tokens/s the smallest and the largest, too, and what
the median is over plain edgespec's of the same prompts, with an interval that holds it in 95 of 100
cases (by resampling repeats). `below_half` is of all.

Not timed: loading, and one answer of each server beforehand. llama.cpp's best n-gram setting on
these CPUs is the default of `--spec`. edgespec begins with an empty cache directory: step times are
measured as it is loaded, and no drafter knows what earlier runs counted. `--latency` and `--exact`
add servers with these options. `--results` writes benchmarks/results/serving-MODEL-PROCESSOR.json,
of which `docs/generate.py` makes the tables of docs/serve.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any
from urllib.request import urlopen

from edgespec.errors import BackendError
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.serve.client import Client

_START_S = 120.0
_PLAIN = "edgespec plain"
_RESAMPLED = 2000
_RESULTS = Path(__file__).parent / "results"
_NGRAM = "--spec-type ngram-simple --spec-ngram-simple-size-n 4 --spec-ngram-simple-size-m 8"


@dataclass(slots=True)
class Answer:
    """One answer as its user saw it: seconds from the request on."""

    tokens: int = 0
    events_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        spent_s = self.events_s[-1] - self.events_s[0]
        return (self.tokens - 1) / spent_s if spent_s else 0.0


@dataclass(frozen=True, slots=True)
class Turn:
    """What some users saw of one server."""

    row: dict[str, float]
    speeds: list[float]  # tokens/s of each answer


def main() -> None:
    arguments = parse()
    prompts = read_prompts(arguments.prompts)
    numbers = [int(part) for part in arguments.users.split(",")]
    rows: dict[tuple[str, int], list[Turn]] = {}
    with ExitStack() as stack:
        if "EDGESPEC_CACHE" not in os.environ:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            os.environ["EDGESPEC_CACHE"] = folder
        found = contenders(arguments, max(numbers))
        clients = {
            name: Client(stack.enter_context(running(command, port)))
            for port, (name, command) in enumerate(found.items(), free_port())
        }
        for client in clients.values():
            ask(client, "Hello.", arguments.tokens)
        turns = [(repeat, users) for repeat in range(arguments.repeats) for users in numbers]
        asked = 0
        for number, (_, users) in enumerate(turns):
            order = list(clients)
            shift = number % len(order)
            for name in order[shift:] + order[:shift]:
                turn = measure(clients[name], prompts[asked:] + prompts[:asked], users, arguments)
                rows.setdefault((name, users), []).append(turn)
                print(json.dumps({"server": name, "users": users, **turn.row}), flush=True)
            asked = (asked + users * arguments.answers) % len(prompts)
    table = summary(rows)
    print(text_of(table))
    if out := results_file(arguments):
        out.write_text(json.dumps(document(arguments, table), indent=1) + "\n", encoding="utf-8")
        print(f"written: {out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--server", type=Path, help="llama-server's executable")
    parser.add_argument("--spec", default=_NGRAM, help="llama-server's options that draft")
    parser.add_argument("--users", default="1,2,4,8")
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--ctx", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--only", help="names of contenders, separated by commas")
    parser.add_argument("--latency", default="", help="values of further servers, by commas")
    parser.add_argument("--exact", action="store_true", help="a further server, with --exact")
    parser.add_argument("--results", action="store_true", help="write to benchmarks/results/")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def results_file(arguments: argparse.Namespace) -> Path | None:
    """Where the results go, if anywhere."""
    if not arguments.results:
        given: Path | None = arguments.json
        return given
    processor = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return _RESULTS / f"serving-{arguments.model.stem}-{processor}.json"


def document(arguments: argparse.Namespace, table: list[dict[str, Any]]) -> dict[str, Any]:
    """The results with what they are of."""
    return {
        "model": arguments.model.name,
        "machine": f"{cpu_name()}, {arguments.threads} threads",
        **{key: getattr(arguments, key) for key in ("answers", "tokens", "ctx", "repeats")},
        "rows": table,
    }


def read_prompts(path: Path) -> list[str]:
    """The first turns of a file of prompts, the tasks mixed."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    by_task: dict[str, list[str]] = {}
    for line in lines:
        by_task.setdefault(line["category"], []).append(line["turns"][0])
    longest = max(map(len, by_task.values()))
    return [texts[i] for i in range(longest) for texts in by_task.values() if i < len(texts)]


def contenders(arguments: argparse.Namespace, users: int) -> dict[str, list[str]]:
    """The command of each server, but for its port."""
    threads = ["--threads", str(arguments.threads)]
    ours = [sys.executable, "-m", "edgespec.cli.main", "serve", str(arguments.model), *threads]
    ours += ["--users", str(users), "--ctx", str(arguments.ctx)]
    found = {"edgespec": ours, _PLAIN: [*ours, "--drafter", "none"]}
    for latency in filter(None, arguments.latency.split(",")):
        found[f"edgespec --latency {latency}"] = [*ours, "--latency", latency]
    if arguments.exact:
        found["edgespec --exact"] = [*ours, "--exact"]
    if arguments.server:
        theirs = [str(arguments.server), "-m", str(arguments.model), *threads, "-fa", "on"]
        theirs += ["-np", str(users), "-kvu", "-c", str(users * arguments.ctx), "--no-webui"]
        found |= {"llama-server": theirs, "llama-server n-gram": theirs + arguments.spec.split()}
    names = arguments.only.split(",") if arguments.only else list(found)
    return {name: command for name, command in found.items() if name in names}


def free_port() -> int:
    """One from which on ports are likely to be free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[str]:
    """A server at an address, until the end of the block."""
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        until = perf_counter() + _START_S
        while not is_there(address):
            if process.poll() is not None or perf_counter() > until:
                raise BackendError(f"it does not start: {' '.join(command)}")
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()


def is_there(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def ask(client: Client, prompt: str, tokens: int) -> Answer:
    """One greedy answer."""
    began, answer = perf_counter(), Answer()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream_options": {"include_usage": True},
    }
    for event in client.stream("chat/completions", body):
        if event.text:
            answer.events_s.append(perf_counter() - began)
        answer.tokens = int(event.usage.get("completion_tokens", answer.tokens))
    return answer


def measure(
    client: Client, prompts: Sequence[str], users: int, arguments: argparse.Namespace
) -> Turn:
    """What `users` see who ask at once."""

    def use(user: int) -> list[Answer]:
        start = user * arguments.answers
        mine = (prompts[i % len(prompts)] for i in range(start, start + arguments.answers))
        return [ask(client, prompt, arguments.tokens) for prompt in mine]

    began = perf_counter()
    with ThreadPoolExecutor(users) as pool:
        answers = [one for found in pool.map(use, range(users)) for one in found]
    spent_s = perf_counter() - began
    answers = [one for one in answers if len(one.events_s) > 1]
    first_ms = [one.events_s[0] * 1e3 for one in answers]
    gaps_ms = [
        (later - earlier) * 1e3
        for one in answers
        for earlier, later in zip(one.events_s, one.events_s[1:], strict=False)
    ]
    row = {
        "tokens_per_s": sum(one.tokens for one in answers) / spent_s,
        "first_ms": statistics.median(first_ms),
        "first_p95_ms": percentile(first_ms, 0.95),
        "gap_ms": statistics.median(gaps_ms),
        "gap_p95_ms": percentile(gaps_ms, 0.95),
    }
    speeds = [one.tokens_per_s for one in answers]
    return Turn(row | fairness(speeds, statistics.mean(speeds)), speeds)


def fairness(speeds: Sequence[float], mean: float, suffix: str = "") -> dict[str, float]:
    """How far answers lie below a mean, tokens/s."""
    return {
        f"slowest_over_mean{suffix}": min(speeds) / mean,
        f"below_half{suffix}": sum(speed < 0.5 * mean for speed in speeds),
    }


def percentile(values: Sequence[float], part: float) -> float:
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, int(part * len(ranked)))]


def summary(turns: dict[tuple[str, int], list[Turn]]) -> list[dict[str, Any]]:
    """Medians over the repeats, the range of tokens/s, and how many answers were unfair."""
    table = []
    for (name, users), found in sorted(turns.items(), key=lambda item: item[0][1]):
        rows, ranges = [turn.row for turn in found], {}
        speeds = [row["tokens_per_s"] for row in rows]
        if plain := turns.get((_PLAIN, users)):
            rows = [beside(*pair) for pair in zip(found, plain, strict=True)]
            ratios = [row.pop("over_plain") for row in rows]
            ranges = {f"over_plain_{key}": value for key, value in interval(ratios).items()}
        medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        unfair = {key: sum(row[key] for row in rows) for key in medians if "below" in key}
        ranges |= {"tokens_per_s_low": min(speeds), "tokens_per_s_high": max(speeds)}
        table.append({"server": name, "users": users, **medians, **ranges, **unfair})
    return table


def beside(turn: Turn, plain: Turn) -> dict[str, float]:
    """A turn, and what it is beside plain edgespec's of the same prompts."""
    ratio = turn.row["tokens_per_s"] / plain.row["tokens_per_s"]
    unfair = fairness(turn.speeds, statistics.mean(plain.speeds), "_of_plain")
    return {**turn.row, "over_plain": ratio, **unfair}


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """The median, and where it lies in 95 of 100 resamplings."""
    rng = random.Random(0)
    found = [statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLED)]
    low, high = percentile(found, 0.025), percentile(found, 0.975)
    return {"median": statistics.median(ratios), "low": low, "high": high}


def text_of(table: Sequence[dict[str, Any]]) -> str:
    names = [name for name in table[0] if name not in ("server", "users")]
    lines = [f"| users | server | {' | '.join(names)} |", "| --- " * (2 + len(names)) + "|"]
    for row in table:
        values = " | ".join(f"{row[name]:.2f}" for name in names)
        lines.append(f"| {row['users']} | {row['server']} | {values} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
