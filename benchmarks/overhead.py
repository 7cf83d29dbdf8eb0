"""What the engine costs on top of the inference library.

    python benchmarks/overhead.py MODEL [--json OUT]

`ratio` is the engine's plain decoding (drafter none) over a bare llama_decode + argmax loop on the
same file and settings, in tokens/s: short turns of both, in one process, the order changing from
pair to pair because the machine's speed drifts. `host_share` is the part of speculative rounds
spent drafting, choosing and accepting.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import numpy as np

import edgespec
from edgespec.backends.llama.backend import LlamaBackend

_PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
    "Explain how a bicycle stays upright, to a child of ten.",
    "Write a Python function that merges two sorted lists, with a docstring.",
    "List the planets of the solar system with one sentence about each.",
    "Translate into French: The train leaves at nine, and the station is far away.",
    "What should I pack for three days of hiking in the rain?",
    "Summarize in two sentences why bread rises when it is baked with yeast.",
    "A baker sells 12 loaves an hour for 7 hours. How many are left of 100? Show the steps.",
)
_TURN = 48  # tokens a turn
_PAIRS = 12  # turns of each kind, by prompt
_TOKENS = 192  # of a speculative answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    ratios: list[float] = []
    bare_s = plain_s = host_s = step_s = 0.0
    with edgespec.load(arguments.model) as engine:
        _pair(engine, engine.encode(_PROMPTS[0]), True)  # warms up
        for text in _PROMPTS:
            prompt = engine.encode(text)
            for turn in range(_PAIRS):
                bare, plain = _pair(engine, prompt, turn % 2 == 0)
                ratios.append(bare / plain)
                bare_s, plain_s = bare_s + bare, plain_s + plain
            counters = engine.generate(prompt, max_tokens=_TOKENS).counters
            host_s, step_s = host_s + counters.host_s, step_s + counters.step_s
    tokens = len(_PROMPTS) * _PAIRS
    low, ratio, high = statistics.quantiles(ratios, n=4)
    document = {
        "model": Path(arguments.model).name,
        "bare_tokens_per_s": tokens / bare_s,
        "plain_tokens_per_s": tokens / plain_s,
        "ratio": ratio,
        "ratio_quartiles": [low, high],
        "pairs": len(ratios),
        "host_share": host_s / (host_s + step_s),
    }
    print(json.dumps(document, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def _pair(engine: edgespec.Engine, prompt: list[int], bare_first: bool) -> tuple[float, float]:
    """Seconds a token of the bare loop and of the engine's plain decoding."""
    first = _bare_loop(engine, prompt) if bare_first else 0.0
    plain = 1.0 / _plain_speed(engine, prompt)
    return (first or _bare_loop(engine, prompt)), plain


def _plain_speed(engine: edgespec.Engine, prompt: list[int]) -> float:
    return engine.generate(prompt, max_tokens=_TURN, speculate=False).counters.tokens_per_s


def _bare_loop(engine: edgespec.Engine, prompt: list[int]) -> float:
    """Seconds a token of the shortest loop that decodes greedily, on the engine's own context."""
    backend = engine.backend
    assert isinstance(backend, LlamaBackend)
    lib, context = backend._context.lib, backend._context.handle
    batch = backend._shared.chain.struct
    backend.truncate(0)
    logits = backend.prefill(prompt)
    token, vocab_size = int(np.argmax(logits)), backend.tokenizer.vocab_size
    batch.n_tokens = 1
    row = None
    start = perf_counter()
    for place in range(len(prompt), len(prompt) + _TURN - 1):
        batch.token[0] = token
        batch.pos[0] = place
        lib.llama_decode(context, batch)
        pointer = lib.llama_get_logits(context)
        if row is None:
            row = np.ctypeslib.as_array(pointer, (vocab_size,))
        token = int(np.argmax(row))
    elapsed = perf_counter() - start
    backend._length = len(prompt) + _TURN - 1
    backend.truncate(0)
    return elapsed / (_TURN - 1)


if __name__ == "__main__":
    main()
