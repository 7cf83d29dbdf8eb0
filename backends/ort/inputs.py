"""What every graph is given besides tokens: who may look at whom, and how positions rotate."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.tree import DraftTree
from edgespec.models.onnx.facts import GraphFacts
from edgespec.models.onnx.weights import dequantize, raw_rows
from edgespec.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Step:
    """Nodes behind `length` committed tokens, of which those from `first_row` on want logits.

    A chain has no tree: every node sees all before it.
    """

    length: int
    # [n]
    positions: NDArray[np.int64]
    tree: DraftTree | None = None
    first_row: int = 0

    @property
    def count(self) -> int:
        return len(self.positions)


def attention_bias(
    step: Step, window: int, masked: float, *, past: int | None = None, nodes: int | None = None
) -> NDArray[np.float32]:
    """What is added to attention scores, [1, 1, nodes, past + nodes]: 0, or `masked`.

    Args:
        window: a token sees the `window` last positions, its own included; 0 means all.
        past: cells before the nodes, of which those from `step.length` on are empty.
        nodes: rows, of which those behind the step's are padding: each sees only itself.
    """
    length, count = step.length, step.count
    past, nodes = length if past is None else past, nodes or count
    bias = np.full((1, 1, nodes, past + nodes), masked, np.float32)
    rows = bias[0, 0]
    rows[:count, :length] = 0.0
    below = rows[:, past:]
    np.fill_diagonal(below, 0.0)
    if step.tree is None:
        below[:count, :count][np.tri(count, dtype=np.bool_)] = 0.0
    else:
        for node in range(len(step.tree)):
            below[node, step.tree.path(node)] = 0.0
    if window:
        lowest = step.positions[:, None] - window
        rows[:count, :length][np.arange(length)[None] <= lowest] = masked
        below[:count, :count][step.positions[None] <= lowest] = masked
    return bias


def rope_tables(
    spec: ModelSpec, facts: GraphFacts, capacity: int
) -> dict[str, NDArray[np.float32]]:
    """Cosines and sines of every position, [capacity, D / 2], for full and sliding layers."""
    half = np.arange(0, spec.key_length[0], 2) / spec.key_length[0]
    factors = np.float64(1.0)
    if long := spec.tensors.get("rope_freqs.weight"):
        factors = dequantize(long, raw_rows(spec.path, long)).reshape(-1).astype(np.float64)
    tables: dict[str, NDArray[np.float32]] = {}
    bases = {"": (facts.rope_base, facts.rope_factor * factors)}
    if any(spec.is_sliding):
        bases["_window"] = (facts.window_rope_base, np.float64(1.0))
    for name, (base, divisor) in bases.items():
        angles = np.arange(capacity)[:, None] * (base**-half / divisor)[None]
        tables[f"cos{name}"] = np.cos(angles).astype(np.float32)
        tables[f"sin{name}"] = np.sin(angles).astype(np.float32)
    return tables
