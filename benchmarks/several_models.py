"""Several models of one server under a budget that holds all but one of them.

    python benchmarks/several_models.py A.gguf B.gguf C.gguf [--requests 300] [--clients 8]
        [--tokens 16] [--loads 50] [--seed 1]

Starts `edgespec serve` with the models and a budget in which all but the smallest fit. Clients ask
for one of the models by chance, one request after the other: streams, whole answers, completions
and token counts, or embeddings of five texts; every tenth one goes away in the middle. Then each
model is loaded and unloaded in turns, `--loads` times in all. It prints JSON:

- how many requests were answered, and went away; what failed, which ends it with status 1
- the peak of the process beside its budget
- loads, each with the reason in the log, beside those of who knows the future: Belady's choice by
  bytes for the requests in the order in which they were sent (the one leaves whose next request is
  farthest, until there is room; optimal for models of one size)
- seconds until the first byte and until an answer: median, 95th percentile, longest
- bytes held with no model loaded: the most in each turn of all models, from the third one on
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

_PATIENCE_S = 600.0
_PROMPTS = ("Why is the sky blue?", "Write a haiku about rain.", "Count from one to ten.")
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
                    prompt = self.random.choice(_PROMPTS)
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
        process.communicate()


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
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
        process.communicate()
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
    main()
