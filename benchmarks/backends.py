"""Step times of both backends on one file, and what speculation makes of them.

    python benchmarks/backends.py MODEL [--json OUT]

Each backend is measured in processes of its own, alternating A B A B, because their thread pools
wait in busy loops and would disturb each other: t(n) after 256 tokens of context (median of 9), and
plain and speculative tokens/s over the built-in prompts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
_PAST = 256
_REPEATS = 9
_TURNS = 2
_TOKENS = 96


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path, metavar="OUT")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_measure(arguments.model, arguments.one)))
        return
    runs: dict[str, list[dict[str, Any]]] = {"llamacpp": [], "onnx": []}
    for turn in range(_TURNS):
        for backend in sorted(runs, reverse=bool(turn % 2)):
            runs[backend].append(_in_own_process(arguments.model, backend))
    theirs, ours = runs["llamacpp"], runs["onnx"]
    print(f"{arguments.model.name}: ms a step after {_PAST} tokens, best of {_TURNS} medians")
    for size in map(str, _SIZES):
        llama = min(run["step_ms"][size] for run in theirs)
        onnx = min(run["step_ms"][size] for run in ours)
        print(
            f"n={size:<3} llama.cpp {llama:7.2f}   ONNX Runtime {onnx:7.2f}   {onnx / llama:.2f}x"
        )
    for name in ("plain_tokens_per_s", "tokens_per_s"):
        pairs = [(a[name], b[name]) for a, b in zip(theirs, ours, strict=True)]
        ratio = statistics.mean(b / a for a, b in pairs)
        print(f"{name}: {', '.join(f'{a:.1f} / {b:.1f}' for a, b in pairs)}   {ratio:.2f}x")
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n")


def _in_own_process(model: Path, backend: str) -> dict[str, Any]:
    command = [sys.executable, __file__, str(model), "--one", backend]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _measure(model: Path, name: str) -> dict[str, Any]:
    import edgespec
    from edgespec.backends.tree import DraftTree
    from edgespec.measure.prompts import PROMPTS

    with edgespec.load(model, backend=name, context_size=2048, draft_max=15) as engine:
        backend = engine.backend
        while backend.length < _PAST:
            backend.prefill(range(100, 100 + min(64, backend.batch_size)))
        times: dict[str, float] = {}
        for size in _SIZES:
            tree, found = DraftTree.chain(range(100, 100 + size)), []
            for _ in range(_REPEATS + 1):
                start = perf_counter()
                backend.verify(tree)
                found.append((perf_counter() - start) * 1e3)
                backend.truncate(backend.length)
            times[str(size)] = statistics.median(found[1:])
        speeds = {}
        for key, speculate in (("plain_tokens_per_s", False), ("tokens_per_s", True)):
            runs = [
                engine.generate(prompt.text, max_tokens=_TOKENS, speculate=speculate).counters
                for prompt in PROMPTS[:10]
            ]
            tokens = sum(c.accepted_tokens + c.rounds for c in runs)
            speeds[key] = tokens / sum(c.decode_s for c in runs)
    return {"step_ms": times, **speeds}


if __name__ == "__main__":
    main()
