"""Two models that are tables, and the rule that switches between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from fake_backend import FakeBackend
from frozen_times import free_drafts
from numpy.typing import NDArray
from random_gguf import Q4_0, Q8_0, write_model

from edgespec.decode.engine import Engine
from edgespec.decode.generation import LARGE, SMALL
from edgespec.drafting.suffix import SuffixDrafter
from edgespec.memory.plan.plan import Request
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.switching.engine import SwitchingEngine, entropy_nats
from edgespec.switching.planning import SwitchPolicy

VOCAB = 6
PROMPT = [1, 2, 3]


class Table:
    """Logits that depend on the last two tokens, by a seed; `sharp` ones repeat themselves."""

    def __init__(self, seed: int, scale: float) -> None:
        random = np.random.default_rng(seed)
        self._rows = random.normal(0.0, scale, (VOCAB, VOCAB, VOCAB)).astype(np.float32)

    def row(self, context: tuple[int, ...]) -> NDArray[np.float32]:
        before = context[-2] if len(context) > 1 else 0
        row: NDArray[np.float32] = self._rows[before, context[-1]]
        return row

    def __call__(self, context: tuple[int, ...]) -> Sequence[float]:
        return self.row(context).tolist()  # type: ignore[no-any-return]


LARGE_TABLE, SMALL_TABLE = Table(1, 2.0), Table(2, 1.5)


def engine(table: Table, drafts: bool, end: int = -1, tree: bool = True) -> Engine:
    backend = FakeBackend(table, VOCAB, end=end, tree=tree)
    drafter = SuffixDrafter() if drafts else None
    return Engine(backend, curve=free_drafts(16) if drafts else None, drafter=drafter)


def switching(policy: SwitchPolicy, drafts: bool = True, end: int = -1) -> SwitchingEngine:
    backend = FakeBackend(LARGE_TABLE, VOCAB, end=end)
    return SwitchingEngine(
        backend,
        small=engine(SMALL_TABLE, drafts, end),
        policy=policy,
        curve=free_drafts(16) if drafts else None,
        drafter=SuffixDrafter() if drafts else None,
    )


POLICIES = [
    SwitchPolicy(up_nats=up, down_nats=down, window=window, min_stay=stay)
    for up, down, window, stay in (
        (1.2, 1.0, 1, 0),
        (1.2, math.inf, 1, 0),
        (1.1, 1.2, 3, 0),
        (1.2, 1.0, 1, 1),
        (1.0, 1.3, 1, 1),
        (1.1, 1.1, 3, 2),
        (1.3, 0.6, 2, 4),
    )
]


def obvious(policy: SwitchPolicy, count: int) -> tuple[list[int], list[str]]:
    """The rule written out for greedy decoding, with no cache and no drafts."""
    text, models = list(PROMPT), list[str]()
    writer, recent, stay, first = SMALL, list[float](), 0, True
    while len(models) < count:
        table = LARGE_TABLE if writer == LARGE else SMALL_TABLE
        row = table.row(tuple(text))
        recent = [*recent, entropy_nats(row)][-policy.window :]
        mean = sum(recent) / len(recent)
        if writer == SMALL and mean >= policy.up_nats and (first or stay >= policy.min_stay):
            writer, recent, stay, first = LARGE, [], 0, False
            continue
        text.append(int(np.argmax(row)))
        models.append(writer)
        stay += 1
        if writer == LARGE and mean <= policy.down_nats and stay >= policy.min_stay:
            writer, recent, stay, first = SMALL, [], 0, False
    return text[len(PROMPT) :], models


def document() -> dict[str, Any]:
    """What calibrating a pair found."""
    ends = ({"large_share": 0.0, "quality": 0.0}, {"large_share": 1.0, "quality": 1.0})
    points = [
        {"agreement": 0.8 + 0.2 * end["quality"], "tokens_per_s": 200.0 - 80.0 * end["quality"],
         "up_nats": 1.5, "down_nats": 0.5, **end}
        for end in ends
    ]  # fmt: skip
    return {
        "large": "large.gguf",
        "small": "small<b>.gguf",
        "policy": {"up_nats": 1.5, "down_nats": 0.5, "window": 5, "min_stay": 10},
        "expected": {**points[0], "large_share": 0.4, "quality": 0.6, "agreement": 0.92},
        "alone": {SMALL: points[0], LARGE: points[1]},
        "lossless": {"drafting_tokens_per_s": 150.0},
        "points": points,
    }


Pair = tuple[ModelSpec, ModelSpec]  # the large one and the small one


def written_pair(folder: Path) -> Pair:
    """Two models of random weights and one vocabulary."""
    large = write_model(folder / "large.gguf", "llama", Q8_0)
    small = write_model(folder / "small.gguf", "llama", Q4_0, seed=6)
    return read_model_spec(large), read_model_spec(small)


def request_for(pair: Pair, **changes: object) -> Request:
    return replace(Request(switch=pair[1].path, backend="llamacpp"), **changes)  # type: ignore[arg-type]
