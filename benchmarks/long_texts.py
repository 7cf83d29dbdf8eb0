"""Long conversations and long texts: what a turn reads, and drafts behind thousands of tokens.

    python benchmarks/long_texts.py turns MODEL|SHAPE [--turns 20]
    python benchmarks/long_texts.py users MODEL [--tokens 9750]
    python benchmarks/long_texts.py window MODEL --text FILE [--depth 7500] [--tokens 63]

`turns`: a conversation whose last answer is written anew in each turn, so that the cache has to go
back. Processor time to a turn's first token beside reading its new tokens alone, at the same depth.
SHAPE is lfm2, qwen35, nemotron_h or gpt-oss: random weights in the shape of a real model or of
some of its layers, written to the folder for temporary files (0.4 to 1.7 GB).
`users`: two users in turns whose conversations begin with the same long prompt.
`window`: plainly, with `suffix` and with `suffix,window`, in turns, behind the first tokens of a
text that does not repeat. One thread each: processor time counts beside other programs, too.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

from shared import run

import edgespec
from edgespec.backends.llama.states import States
from edgespec.drafting.drafters import make_drafter
from edgespec.sampling.params import SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/support/gguf"))
from hybrid_gguf import Shape, write_hybrid
from random_gguf import Q8_0

_HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"layers": 16, "width": 1024, "hidden": 4608, "heads": 16, "kv_heads": 8, "head": 64,
             "interval": 3},
    "qwen35": {"layers": 24, "width": 1024, "hidden": 3584, "heads": 8, "kv_heads": 2, "head": 256,
               "state": 128, "state_heads": 16, "groups": 16, "interval": 4},
    "nemotron_h": {"layers": 7, "width": 3136, "hidden": 12544, "heads": 40, "kv_heads": 8,
                   "head": 128, "state": 128, "state_heads": 112, "groups": 8},
    "gpt-oss": {"layers": 2, "width": 2880, "hidden": 5760, "heads": 64, "kv_heads": 8, "head": 64,
                "experts": 32, "used": 4},
}  # fmt: skip
_WORDS = ("where", "is", "the", "file", "that", "I", "wrote", "in", "June")
_TURN, _ANSWER, _CONTEXT = 500, 60, 12288  # characters; tokens


def turns() -> None:
    parser = argparse.ArgumentParser(prog="long_texts.py turns")
    parser.add_argument("model")
    parser.add_argument("--turns", type=int, default=20)
    chosen = parser.parse_args()
    path, ratios = _file(chosen.model), []
    load: dict[str, Any] = {"context_size": _CONTEXT, "drafter": "none", "threads": 1}
    with edgespec.load(path, **load) as engine, edgespec.load(path, **load) as other:
        _newlines_begin_messages(engine)
        text, alone = _ids(engine, _said(99, _TURN)), other.backend
        for turn in range(chosen.turns):
            prompt = text + _ids(engine, _said(turn, _TURN) + "bot:")
            start = process_time()
            found = engine.generate(prompt, max_tokens=1, reuse=True)
            ours, known = process_time() - start, found.counters.reused_tokens
            alone.truncate(known)
            _read(alone, prompt[alone.length : known])
            start = process_time()
            _read(alone, prompt[known:])
            ratios.append(ours / (process_time() - start))
            told = f"{len(prompt)} tokens, {len(prompt) - known} read, {ours:.2f} s"
            print(f"{told}, {ratios[-1]:.2f}x", flush=True)
            text = prompt + _ids(engine, _said(1000 + turn, _ANSWER))
        held = engine.memory_bytes().get("states", 0)
    median = statistics.median(ratios[1:])
    print(f"median {median:.2f}x, longest {max(ratios[1:]):.2f}x, states {held / 2**20:.1f} MiB")


def users() -> None:
    parser = argparse.ArgumentParser(prog="long_texts.py users")
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=9750)
    chosen = parser.parse_args()
    load: dict[str, Any] = {"context_size": _CONTEXT, "drafter": "none", "threads": 1}
    with edgespec.load(_file(chosen.model), users=2, **load) as engine:
        _newlines_begin_messages(engine)
        begun = _ids(engine, _said(7, 5 * chosen.tokens))[: chosen.tokens - 1] + _ids(engine, "\n")
        texts = {"a": begun, "b": begun}
        for turn in range(3):
            for user, text in texts.items():
                prompt = text + _ids(engine, _said(100 * ord(user) + turn, _TURN) + "bot:")
                start = process_time()
                found = engine.generate(prompt, max_tokens=4, reuse=True)
                known, spent = found.counters.reused_tokens, process_time() - start
                print(f"{user}: {len(prompt)} tokens, {len(prompt) - known} read, {spent:.2f} s")
                texts[user] = prompt + _ids(engine, _said(turn, _ANSWER))


def window() -> None:
    parser = argparse.ArgumentParser(prog="long_texts.py window")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=7500)
    parser.add_argument("--tokens", type=int, default=63)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=2)
    chosen = parser.parse_args()
    size = chosen.depth + chosen.tokens + 64
    spent: dict[str, list[float]] = {"none": [], "suffix": [], "suffix,window": []}
    with edgespec.load(
        chosen.model, context_size=size, drafter="suffix,window", users=1, threads=1
    ) as engine:
        prompt = engine.encode(chosen.text.read_text())[: chosen.depth]
        drafter: Any = engine.drafter
        drafters = {"suffix": make_drafter("suffix"), "suffix,window": drafter}
        engine.generate(prompt, max_tokens=1, reuse=True)
        for number in range(chosen.rounds):
            for name, times in spent.items():
                engine.drafter = drafters.get(name)
                found = engine.generate(
                    prompt,
                    max_tokens=chosen.tokens,
                    sampling=SamplingParams(temperature=chosen.temperature, seed=number),
                    speculate=name != "none",
                    reuse=True,
                )
                times.append(1e3 * found.counters.decode_s / len(found.token_ids))
                took = found.counters.accepted_by.get("window", 0)
                print(f"{name}: {times[-1]:.1f} ms a token, {took} drafts of the window taken",
                      flush=True)  # fmt: skip
    plain = statistics.mean(spent["none"])
    print(", ".join(f"{name} {plain / statistics.mean(ms):.2f}x" for name, ms in spent.items()))


def _file(name: str) -> Path:
    if name not in _HYBRIDS:
        return Path(name)
    path = Path(tempfile.gettempdir()) / f"edgespec-{name}.gguf"
    return path if path.exists() else write_hybrid(path, Shape(name, **_HYBRIDS[name]), Q8_0)


def _ids(engine: edgespec.Engine, text: str) -> list[int]:
    return list(engine.backend.tokenizer.encode(text, add_special=False))


def _newlines_begin_messages(engine: edgespec.Engine) -> None:
    """Random models have no control tokens, which begin messages else."""
    newline = _ids(engine, "\n")[-1]
    States._begins_message = lambda self, token: token == newline  # type: ignore[method-assign]


def _read(backend: Any, ids: Sequence[int]) -> None:
    for start in range(0, len(ids), backend.batch_size):
        backend.prefill(ids[start : start + backend.batch_size])


def _said(number: int, size: int) -> str:
    """So many characters of words, the last one ending a line."""
    words = random.Random(number).choices(_WORDS, k=size)
    return " ".join(words)[: size - 1] + "\n"


if __name__ == "__main__":
    run(__doc__, turns=turns, users=users, window=window)
