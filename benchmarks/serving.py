"""A server under load: several users or models, what HTTP costs, and long prompts.

python benchmarks/serving.py compare MODEL --prompts FILE [--server llama-server]
    [--users 1,2,4,8] [--answers 2] [--tokens 96] [--repeats 1] [--threads N] [--latency 2,4]
    [--exact] [--results | --json OUT]
python benchmarks/serving.py http [MODEL] [--repeats 10] [--tokens 192]
python benchmarks/serving.py arrival [MODEL] [--writing 1,7] [--prompt 3000] [--latency 1]
    [--exact] [--drafter none] [--repeats 1]
python benchmarks/serving.py completions [MODEL] [--n 4] [--prompt 1000] [--tokens 64]
python benchmarks/serving.py models A.gguf B.gguf C.gguf [--requests 300] [--clients 8]
    [--tokens 16] [--loads 50] [--seed 1]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx
from shared import free_port, run, running

import edgespec
from edgespec.decode.engine import Engine
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.models.embedded import embedded_model
from edgespec.serve.client import Client
from edgespec.serve.server import Server

# -- compare ---------------------------------------------------------------------------------


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


def compare() -> None:
    """Several users of one server: edgespec beside llama.cpp's own, with as many slots.

    All servers are started once, with caches of `--ctx` tokens for each user, and asked in
    turns, the order changing from turn to turn; those that are not asked do not compute. N
    users each ask for `--answers` greedy answers, one after the other, every one to a prompt of
    its own; a row is

    - tokens/s of all users together: what servers count, by wall clock
    - time to the first event of an answer, and between two events: median and 95th percentile, ms
    - the slowest answer's tokens/s over the mean, and how many were below half of it
    - the same over the mean of plain edgespec's answers to the same prompts: accepted drafts raise
      the mean of all, so that who copies nothing falls behind it without being any slower

    No prompt is asked twice (as long as there are enough), so that nobody finds one in a cache.
    Of several `--repeats` the medians are told; of tokens/s the smallest and the largest, too,
    and what the median is over plain edgespec's of the same prompts, with an interval that
    holds it in 95 of 100 cases (by resampling repeats). `below_half` is of all.

    Not timed: loading, and one answer of each server beforehand. llama.cpp's best n-gram
    setting on these CPUs is the default of `--spec`. edgespec begins with an empty cache
    directory: step times are measured as it is loaded, and no drafter knows what earlier runs
    counted. `--latency` and `--exact` add servers with these options. `--results` writes
    benchmarks/results/serving-MODEL-PROCESSOR.json, of which `docs/generate.py` makes the
    tables of docs/measurements.md.
    """
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
    parser = argparse.ArgumentParser("serving.py compare")
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


# -- http ------------------------------------------------------------------------------------


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


def http() -> None:
    """What HTTP costs: one user's tokens/s over a server against the same engine without one.

    Both ways answer the same prompts in turns with one loaded engine, plainly and greedily, so
    that they write the same tokens. The client streams, in a process of its own, as clients do.
    Not timed: loading, connecting, the first answer of each way.
    """
    parser = argparse.ArgumentParser("serving.py http")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--client", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.client:
        client(asked.client)
        return
    with edgespec.load(asked.model, drafter="none") as engine, Server(engine) as server:
        command = [sys.executable, __file__, "http", "--client", server.start()]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as user:
            ways: dict[str, Callable[[str], tuple[float, int]]] = {
                "engine": lambda prompt: without(engine, prompt, asked.tokens),
                "http": lambda prompt: over_http(user, prompt, asked.tokens),
            }
            print(json.dumps(http_measure(ways, asked.repeats)))
            assert user.stdin is not None
            user.stdin.close()


def http_measure(
    ways: dict[str, Callable[[str], tuple[float, int]]], repeats: int
) -> dict[str, Any]:
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


# -- arrival ---------------------------------------------------------------------------------


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


def arrival() -> None:
    """How long answers wait while a long prompt of somebody else is read.

    So many users are being answered when a prompt of another one comes. Printed are the times
    between two rounds of an answer: in the median before the prompt came and after it was
    answered (a step of theirs, without drafts unless `--drafter` names some), and while it was
    read. Answers grow meanwhile, and their steps with them: a wait is told in plain steps of
    its moment, on the line from those before to those after. Then when the prompt's first token
    came. One engine in this process, so that no reader gathers events; as in the server,
    nothing is searched for garbage that was there before.
    """
    arguments = arrival_parse()
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


def arrival_parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser("serving.py arrival")
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
    return arrival_summary(writers, late)


def arrival_summary(writers: list[Writer], late: Late) -> dict[str, float]:
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


# -- completions -------------------------------------------------------------------------------


def completions() -> None:
    """What n completions of one prompt cost, over one: they share its cells and their steps.

    In turns, sampled, each behind another prompt. Processor time is this process's: the server
    and its client.
    """
    parser = argparse.ArgumentParser("serving.py completions")
    parser.add_argument("model", nargs="?")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    context = asked.n * (asked.prompt + asked.tokens + 16)
    loading = {"context_size": context, "users": asked.n}
    spent: dict[int, list[tuple[float, float]]] = {1: [], asked.n: []}
    with edgespec.load(asked.model, **loading) as engine, Server(engine) as server:
        address, tokenizer = Client(server.start()), engine.backend.tokenizer
        ends = filter(tokenizer.is_end, range(tokenizer.vocab_size))
        never = {str(token): -100.0 for token in ends}
        for turn in range(asked.repeats + 1):
            for count, taken in spent.items():
                source = random.Random(10 * turn + count)
                body = {
                    "prompt": [source.randrange(1000, 9000) for _ in range(asked.prompt)],
                    "n": count,
                    "max_tokens": asked.tokens,
                    "logit_bias": never,
                    "temperature": 0.8,
                    "seed": turn,
                }
                began, computed = perf_counter(), time.process_time()
                for _ in address.stream("completions", body):
                    pass
                if turn:
                    taken.append((perf_counter() - began, time.process_time() - computed))
        cells = engine.memory_bytes()["kv_cache"]
    found: dict[str, Any] = {"n": asked.n, "prompt": asked.prompt, "tokens": asked.tokens}
    for place, name in enumerate(("wall_s", "processor_s")):
        one, several = (statistics.median(t[place] for t in taken) for taken in spent.values())
        found |= {f"{name}_1": one, f"{name}_{asked.n}": several, f"{name}_ratio": several / one}
    print(json.dumps(found | {"kv_cache_bytes": cells}))


# -- models ----------------------------------------------------------------------------------

_PATIENCE_S = 600.0
_SHORT_PROMPTS = ("Why is the sky blue?", "Write a haiku about rain.", "Count from one to ten.")
_CHAT, _EMBED = "chat", "embed"
_SETTLED = 2  # turns of all models, after which memory has to stay as it is


def belady_loads(asked: Sequence[str], sizes: dict[str, int], room: int) -> int:
    """Loads of who knows which model is asked for when."""
    there, loads = set[str](), 0
    for now, name in enumerate(asked):
        if name in there:
            continue
        loads += 1
        next_use = {one: [*asked[now:], one].index(one) for one in there}
        while there and sum(sizes[one] for one in there) + sizes[name] > room:
            there.remove(max(there, key=lambda one: next_use[one]))
        there.add(name)
    return loads


class Clients:
    """Threads that ask, and what became of it."""

    def __init__(self, address: str, models: dict[str, str], tokens: int, seed: int) -> None:
        self.address, self.models, self.tokens = address, models, tokens
        self.random = random.Random(seed)
        self.lock = threading.Lock()
        self.asked: list[str] = []
        self.first_s: list[float] = []
        self.whole_s: list[float] = []
        self.went_away = 0
        self.problems: list[str] = []

    def run(self, clients: int, requests: int) -> None:
        threads = [threading.Thread(target=self._work, args=(requests,)) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, requests: int) -> None:
        with httpx.Client(base_url=self.address, timeout=_PATIENCE_S) as client:
            while True:
                with self.lock:
                    number = len(self.asked)
                    if number >= requests:
                        return
                    name = self.random.choice(sorted(self.models))
                    kind = self.random.choice(("stream", "whole", "completion", "count"))
                    prompt = self.random.choice(_SHORT_PROMPTS)
                    self.asked.append(name)
                try:
                    self._ask(client, name, kind, prompt, leaves=number % 10 == 9)
                except Exception as problem:
                    self.problems.append(f"{kind} of {name}: {problem!r}")

    def _ask(
        self, client: httpx.Client, name: str, kind: str, prompt: str, *, leaves: bool
    ) -> None:
        began = time.perf_counter()
        path, body = "/v1/completions", dict[str, Any](model=name, max_tokens=self.tokens)
        body["prompt"] = prompt
        if self.models[name] == _EMBED:
            path, body = "/v1/embeddings", {"model": name, "input": [prompt] * 5}
        elif kind == "count":
            path, body = "/tokenize", {"model": name, "content": prompt}
        elif self.models[name] == _CHAT and kind != "completion":
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        if path.startswith("/v1") and "input" not in body and (leaves or kind == "stream"):
            body["stream"] = True
        with client.stream("POST", path, json=body) as answer:
            text = ""
            for line in answer.iter_lines():
                if not text:
                    self.first_s.append(time.perf_counter() - began)
                text += f"{line}\n"
                if leaves:
                    self.went_away += 1
                    return
            if answer.status_code != 200 or '"error"' in text:
                self.problems.append(f"{answer.status_code} {text[:200]}")
            self.whole_s.append(time.perf_counter() - began)


def served(models: Sequence[Path], budget: int, log: list[str]) -> tuple[Any, str]:
    """A server, whose log is read by a thread."""
    command = [sys.executable, "-m", "edgespec.cli.main", "serve", *map(str, models)]
    command += ["-v", "--port", "0", "--ctx", "1024", "--budget", f"{budget >> 20}MiB"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = iter(process.stderr.readline, "")
    for line in lines:
        log.append(line)
        if found := re.search(r"listening on (\S+);", line):
            threading.Thread(target=log.extend, args=(lines,), daemon=True).start()
            return process, found[1]
    raise SystemExit("".join(log))


def sizes_of(models: Sequence[Path]) -> tuple[dict[str, int], int]:
    """Bytes that each model adds to a server, and what that has once."""
    process, address = served(models, 1 << 40, [])
    try:
        cards = httpx.get(f"{address}/v1/models").json()["data"]
        memory = httpx.get(f"{address}/status").json()["memory"]
        return {one["id"]: one["bytes"] for one in cards}, memory["planned_peak_bytes"]
    finally:
        process.terminate()
        process.wait()


def resident_by_load(address: str, kinds: dict[str, str], loads: int) -> list[int]:
    """Bytes held with nothing loaded, after each of some loads."""
    held, models = list[int](), sorted(kinds)
    for number in range(loads):
        name = models[number % len(models)]
        path, body = "completions", dict[str, Any](model=name, prompt="Hi", max_tokens=4)
        if kinds[name] == _EMBED:
            path, body = "embeddings", {"model": name, "input": ["Hi"] * 40}
        httpx.post(f"{address}/v1/{path}", json=body, timeout=_PATIENCE_S).raise_for_status()
        for name in models:
            httpx.post(f"{address}/models/unload", json={"model": name}, timeout=_PATIENCE_S)
        held.append(httpx.get(f"{address}/status").json()["memory"]["resident_bytes"])
    return held


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 95th percentile and the longest."""
    order = sorted(seconds) or [0.0]
    pick = {"median_s": 0.5, "p95_s": 0.95, "longest_s": 1.0}
    return {name: round(order[int(part * (len(order) - 1))], 2) for name, part in pick.items()}


def models() -> None:
    """Several models of one server under a budget that holds all but one of them.

    Starts `edgespec serve` with the models and a budget in which all but the smallest fit. Clients
    ask for one of the models by chance, one request after the other: streams, whole answers,
    completions and token counts, or embeddings of five texts; every tenth one goes away in the
    middle. Then each model is loaded and unloaded in turns, `--loads` times in all. It prints JSON:

    - how many requests were answered, and went away; what failed, which ends it with status 1
    - the peak of the process beside its budget
    - loads, each with the reason in the log, beside those of who knows the future: Belady's choice
      by bytes for the requests in the order in which they were sent (the one leaves whose next
      request is farthest, until there is room; optimal for models of one size)
    - seconds until the first byte and until an answer: median, 95th percentile, longest
    - bytes held with no model loaded: the most in each turn of all models, from the third one on
    """
    parser = argparse.ArgumentParser("serving.py models")
    parser.add_argument("models", nargs="+", type=Path)
    for name, default in (("requests", 300), ("clients", 8), ("tokens", 16), ("loads", 50)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    sizes, shared = sizes_of(given.models)
    room = sum(sorted(sizes.values())[1:]) + (4 << 20)
    log: list[str] = []
    process, address = served(given.models, shared + room, log)
    try:
        cards = {}
        for name in sizes:  # once before: what is measured at a first load is kept
            httpx.post(f"{address}/models/load", json={"model": name}, timeout=_PATIENCE_S)
            told = httpx.get(f"{address}/props", params={"model": name}).json()
            kind = httpx.get(f"{address}/v1/models/{name}").json()["kind"]
            cards[name] = kind if kind == _EMBED or told.get("chat_template") else "text"
        before = sum("loaded:" in line for line in log)
        clients = Clients(address, cards, given.tokens, given.seed)
        began = time.perf_counter()
        clients.run(given.clients, given.requests)
        spent_s = time.perf_counter() - began
        loads = [line for line in log if " loaded: " in line][before:]
        memory = httpx.get(f"{address}/status").json()["memory"]
        held = resident_by_load(address, cards, given.loads)
    finally:
        process.terminate()
        process.wait()
    optimum = belady_loads(clients.asked, sizes, room)
    count = len(sizes)
    turns = [max(held[i : i + count]) for i in range(0, len(held) - count + 1, count)][_SETTLED:]
    found = {
        "models": sizes,
        "requests": len(clients.asked),
        "answered": len(clients.whole_s),
        "went_away": clients.went_away,
        "problems": clients.problems,
        "seconds": round(spent_s, 1),
        "budget_bytes": memory["limit_bytes"],
        "peak_bytes": memory["peak_bytes"],
        "loads": len(loads),
        "loads_of_belady": optimum,
        "loads_over_belady": round(len(loads) / optimum, 2),
        "without_a_reason": sum("wait" not in line for line in loads),
        "first_byte": quantiles(clients.first_s),
        "answer": quantiles(clients.whole_s),
        "resident_bytes": turns,
        "resident_last_over_first": round(turns[-1] / turns[0], 4) if turns else None,
    }
    print(json.dumps(found, indent=1))
    sys.exit(bool(clients.problems) or memory["peak_bytes"] > memory["limit_bytes"])


if __name__ == "__main__":
    run(
        __doc__, compare=compare, http=http, arrival=arrival, completions=completions, models=models
    )
