"""llama.cpp on the embedded model, and how texts are read by it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from frozen_times import Frozen, free_drafts

from edgespec.backends.base import DraftTree, Logits
from edgespec.backends.llama.backend import LlamaBackend
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.plan.plan import Plan

# One thread: a second one waits in a busy loop, which is slow wherever something else runs. The
# tests about rounding take two, because llama.cpp splits a row's attention among the threads.
THREADS = 1
MEBIBYTE = 2**20
# llama.cpp's log gives sizes with two decimals.
LOG_ROUNDING = 0.006 * MEBIBYTE


class RecordingBackend(LlamaBackend):
    """Remembers what it verified: how many nodes and leaves, and how many tokens were pending."""

    seen: list[tuple[int, int, int]]

    def verify(self, tree: DraftTree) -> Logits:
        self.seen.append((len(tree), len(tree.leaves()), self.pending))
        return super().verify(tree)


def settings(context_size: int = 512, **changes: Any) -> RunConfig:
    """Steps of at most 32 tokens: from 64 on llama.cpp's attention works in tiles of rows."""
    values: dict[str, Any] = {"batch_size": 32, "max_nodes": 32, "max_leaves": 8}
    return RunConfig(context_size, **{**values, "threads": THREADS, **changes})


def recording(path: Path, chosen: RunConfig) -> RecordingBackend:
    made = RecordingBackend(path, chosen)
    made.seen = []
    return made


def feed(backend: LlamaBackend, tokens: Sequence[int], chunk: int = 0) -> Logits:
    """Prefill everything; the last token's logits, copied."""
    size = chunk or backend.batch_size
    for start in range(0, len(tokens), size):
        row = backend.prefill(tokens[start : start + size])
    last: Logits = row.copy()
    return last


def step(backend: LlamaBackend, token: int) -> Logits:
    """One token of plain decoding; its logits, copied."""
    row: Logits = backend.verify(DraftTree.chain((token,)))[0].copy()
    backend.commit([0])
    return row


def plain_rows(reference: LlamaBackend, text: Sequence[int], start: int) -> list[Logits]:
    """The slow way: logits of `text[start:]`, one token a step."""
    reference.truncate(0)
    feed(reference, text[:start])
    return [step(reference, token) for token in text[start:]]


def random_tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(250), k=count)


PROMPT = random_tokens(0, 40)


def assert_ceiling(found: dict[str, int], plan: Plan) -> None:
    """What llama.cpp says it allocated, against what the plan said before."""
    planned = plan.component_bytes
    for name, size in found.items():
        assert size <= planned.get(name, 0) + LOG_ROUNDING, name


def flat(max_nodes: int = 6) -> Frozen:
    """Small, so that the leaves of a step stay below the number of sequences."""
    return free_drafts(max_nodes)
