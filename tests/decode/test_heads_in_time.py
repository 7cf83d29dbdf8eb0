"""A head beside plain decoding of the same answers, in made-up milliseconds.

The host takes its time, too: more in a round in which drafters are asked than in a plain one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
from simulated_time import Clock, Timed

from edgespec.backends.base import Logits
from edgespec.backends.tree import DraftTree
from edgespec.decode.engine import Engine
from edgespec.drafting.drafters.base import Outcome
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.head import HeadDrafter, HeadText
from edgespec.drafting.drafters.suffix import SuffixDrafter
from edgespec.drafting.proposal import EMPTY, Proposal, Stakes
from edgespec.memory.times.curve import CostCurve

INF = float("inf")
VOCAB = 250
PROMPT, TOKENS, ANSWERS = 100, 128, 5
NODES, UNREAD, FED = 8, 64, 8  # of a step, waiting for the head, and fed to it at once
ROUND_MS, TELLING_MS, LOOKUP_MS, FOLLOWING_MS = 0.06, 0.08, 0.05, 0.02  # of the host


class Device(NamedTuple):
    """What a plain step takes, what each further token adds to it, and a step of the head."""

    step_ms: float
    node_ms: float
    head_ms: float

    def target(self, tokens: int) -> float:
        return self.step_ms + self.node_ms * (tokens - 1)

    def head(self, tokens: int) -> float:
        return self.head_ms * (1.0 + 0.25 * (tokens - 1))


DEVICES = {"small": Device(5.0, 1.5, 0.5), "large": Device(28.0, 8.4, 3.0)}


def following(context: Sequence[int]) -> int:
    """Text that repeats nothing."""
    return random.Random(hash(tuple(context[-20:]))).randrange(VOCAB)


def row_of(token: int) -> list[float]:
    row = [0.0] * VOCAB
    row[token] = 20.0
    return row


class Target(Timed):
    """A model that is followed by a head."""

    head: FakeHead | None = None

    def verify(self, tree: DraftTree) -> Logits:
        self.clock.ms += ROUND_MS
        if self.head is not None:
            self.clock.ms += FOLLOWING_MS
        return super().verify(tree)

    def truncate(self, length: int) -> int:
        if self.head is not None:
            self.head.read = min(self.head.read, length)
        return super().truncate(length)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        logits = super().prefill(tokens)
        if self.head is not None and self.head.reads_prompts:
            self.head.catch_up()
        return logits


class FakeHead:
    """Right in a given part of all places."""

    reads_prompts = False
    context_size = 4096

    def __init__(self, target: Target, device: Device, agreement: float) -> None:
        self.target, self.device, self.agreement = target, device, agreement
        self.read, self.spent_ms, self.text = 0, 0.0, list[int]()

    @property
    def num_unread(self) -> int:
        return min(UNREAD, self.target.length - self.read)

    def catch_up(self) -> None:
        for left in range(self.num_unread, 0, -FED):
            self._take(min(left, FED))
        self.read = self.target.length

    def _take(self, tokens: int) -> None:
        self.spent_ms += self.device.head(tokens)
        self.target.clock.ms += self.device.head(tokens)

    def begin(self, token: int) -> Logits:
        self.catch_up()
        self.text = list(self.target.tokens)
        return self.go_on(token)

    def go_on(self, token: int) -> Logits:
        self._take(1)
        self.text.append(token)
        right = following(self.text)
        is_right = random.Random(hash((right, *self.text[-20:]))).random() < self.agreement
        return np.array(row_of(right if is_right else (right + 1) % VOCAB), np.float32)

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


class SlowSuffix(SuffixDrafter):
    """Looking up takes time."""

    clock: Clock

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        self.clock.ms += LOOKUP_MS
        return super().propose(stakes, base)


class SlowCombined(CombinedDrafter):
    """Asking, and telling what came of it, takes time."""

    clock: Clock

    def observe(self, outcome: Outcome) -> None:
        self.clock.ms += TELLING_MS
        super().observe(outcome)


def answers_ms(
    clock: Clock, device: Device, agreement: float | None, count: int, *, drafts: bool = True,
    seed: int = 1,
) -> tuple[list[float], HeadDrafter | None, Engine]:
    """What each answer takes, its prompt's reading apart; no agreement is no head."""
    target = Target(clock, device.target, lambda text: row_of(following(text)), VOCAB,
                    max_nodes=NODES, context_size=4096)
    suffix = SlowSuffix()
    suffix.clock = clock
    head = None
    drafters: list = [suffix]
    if agreement is not None:
        target.head = FakeHead(target, device, agreement)
        curve = CostCurve([INF, *map(device.head, range(1, FED + 1))])
        head = HeadDrafter(HeadText(target.head), curve, VOCAB)
        drafters.append(head)
    combined = SlowCombined(drafters)
    combined.clock = clock
    curve = CostCurve([INF, *map(device.target, range(1, NODES + 1))])
    engine = Engine(target, curve=curve if drafts else None, drafter=combined if drafts else None)
    rng, taken = random.Random(seed), []
    for _ in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT)]
        began = clock.ms
        engine.generate(prompt, max_tokens=TOKENS)
        taken.append(clock.ms - began)
    return taken, head, engine
