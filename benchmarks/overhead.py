"""What the engine costs on top of the inference library.

    python benchmarks/overhead.py MODEL [--json OUT]

`ratio` is the engine's plain decoding (drafter none) over a bare llama_decode + argmax loop on the
same file and settings, in tokens/s, alternating A B A B in one process. `host_share` is the part
of speculative rounds spent drafting, choosing and accepting.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import edgespec
from edgespec.backends.llamacpp import LlamaBackend

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
_TOKENS = 192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model")
    parser.add_argument("--json", metavar="OUT")
    arguments = parser.parse_args()
    with edgespec.load(arguments.model) as engine:
        bare, plain, rounds = [], [], []
        for text in (_PROMPTS[0], *_PROMPTS):  # the first one warms up
            prompt = engine.encode(text)
            bare.append(_bare_loop(engine.backend, prompt))
            plain.append(_engine_speed(engine, prompt, speculate=False).tokens_per_s)
            rounds.append(_engine_speed(engine, prompt, speculate=True))
    ratios = [b / a for a, b in zip(bare[1:], plain[1:], strict=True)]
    host_s, step_s = (sum(getattr(c, name) for c in rounds[1:]) for name in ("host_s", "step_s"))
    document = {
        "model": Path(arguments.model).name,
        "bare_tokens_per_s": statistics.median(bare[1:]),
        "plain_tokens_per_s": statistics.median(plain[1:]),
        "ratio": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "host_share": host_s / (host_s + step_s),
    }
    print(json.dumps(document, indent=1))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def _engine_speed(engine: edgespec.Engine, prompt: list[int], *, speculate: bool) -> Any:
    return engine.generate(prompt, max_tokens=_TOKENS, speculate=speculate).counters


def _bare_loop(backend: Any, prompt: list[int]) -> float:
    """Tokens/s of the shortest loop that decodes greedily, on the engine's own context."""
    assert isinstance(backend, LlamaBackend)
    lib, context, batch = backend._lib, backend._context, backend._chain.struct
    backend.truncate(0)
    logits = backend.prefill(prompt)
    token, vocab_size = int(np.argmax(logits)), backend.tokenizer.vocab_size
    batch.n_tokens = 1
    row = None
    start = perf_counter()
    for place in range(len(prompt), len(prompt) + _TOKENS - 1):
        batch.token[0] = token
        batch.pos[0] = place
        lib.llama_decode(context, batch)
        pointer = lib.llama_get_logits(context)
        if row is None:
            row = np.ctypeslib.as_array(pointer, (vocab_size,))
        token = int(np.argmax(row))
    elapsed = perf_counter() - start
    backend._length = len(prompt) + _TOKENS - 1
    backend.truncate(0)
    return (_TOKENS - 1) / elapsed


if __name__ == "__main__":
    main()
