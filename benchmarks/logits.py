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
from edgespec.tree import DraftTree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=500)
    arguments = parser.parse_args()
    for model in arguments.models:
        divergence, agreement = _compare(model, arguments.tokens)
        print(f"{model.name}: KL {divergence:.4f}, top-1 {agreement:.3f}", flush=True)


def _compare(model: Path, count: int) -> tuple[float, float]:
    options: dict[str, Any] = {"context_size": count + 64, "drafter": "none"}
    with edgespec.load(model, backend="llamacpp", **options) as engine:
        prompt = engine.encode("Tell a long story about a lighthouse and the people around it.")
        text = list(engine.generate(prompt, max_tokens=count).token_ids)
        theirs = _log_probabilities(engine.backend, prompt, text)
    with edgespec.load(model, backend="onnx", **options) as engine:
        ours = _log_probabilities(engine.backend, prompt, text)
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=-1)
    agreement = theirs.argmax(axis=-1) == ours.argmax(axis=-1)
    return float(divergence.mean()), float(agreement.mean())


def _log_probabilities(backend: Any, prompt: list[int], text: list[int]) -> Any:
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
