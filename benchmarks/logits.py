"""How far the ONNX Runtime backend's logits are from llama.cpp's on the same file.

    python benchmarks/logits.py MODEL... [--tokens 500]

Both decode the same text token by token (the target's own greedy words); printed are the mean
Kullback-Leibler divergence of their distributions and how often the best token is the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import edgespec
from edgespec.backends.tree import DraftTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    arguments = parser.parse_args()
    for model in arguments.models:
        prompt, text, theirs = reference(model, arguments.tokens)
        options: dict[str, Any] = {"context_size": context_for(arguments.tokens)}
        with edgespec.load(model, backend="onnx", drafter="none", **options) as engine:
            ours = log_probabilities(engine.backend, prompt, text)
        divergence, agreement = compared(theirs, ours)
        print(f"{model.name}: KL {divergence:.4f}, top-1 {agreement:.3f}", flush=True)


def context_for(tokens: int) -> int:
    """Tokens of context for the prompt and so many more."""
    return tokens + 64


def reference(model: Path, count: int) -> tuple[list[int], list[int], Any]:
    """A prompt, llama.cpp's greedy answer, and its log probabilities over that, [count, V]."""
    options: dict[str, Any] = {"context_size": context_for(count), "drafter": "none"}
    with edgespec.load(model, backend="llamacpp", **options) as engine:
        prompt = engine.encode("Tell a long story about a lighthouse and the people around it.")
        text = list(engine.generate(prompt, max_tokens=count).token_ids)
        return prompt, text, log_probabilities(engine.backend, prompt, text)


def compared(theirs: Any, ours: Any) -> tuple[float, float]:
    """Mean Kullback-Leibler divergence, and how often the best token is the same."""
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    agreement = theirs.argmax(axis=-1) == ours.argmax(axis=-1)
    return float(divergence.mean()), float(agreement.mean())


def log_probabilities(backend: Any, prompt: list[int], text: list[int]) -> Any:
    """Of each next token, [len(text), V], the text forced."""
    backend.truncate(0)
    for start in range(0, len(prompt), backend.batch_size):
        backend.prefill(prompt[start : start + backend.batch_size])
    rows = []
    for token in text:
        row = backend.verify(DraftTree.chain((token,)))[0].astype(np.float64)
        backend.commit([0])
        row -= row.max()
        rows.append((row - np.log(np.exp(row).sum())).astype(np.float32))
    return np.array(rows)


if __name__ == "__main__":
    main()
