"""Engines on models that are functions: every token is known beforehand."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from fake_backend import FakeBackend
from frozen_times import free_drafts
from waiting import PATIENCE_S

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode.engine import Engine
from edgespec.drafting.proposal import EMPTY, Drafter, Proposal, StepContext, VerifyResult
from edgespec.memory.times import CostCurve

Model = Callable[[tuple[int, ...]], Sequence[float]]
INF = float("inf")
END = 256
VOCAB = 257
ONE_HOT: list[list[float]] = np.eye(VOCAB).tolist()


def writes(text: bytes, prompt_length: int = 1) -> Model:
    """A model that writes `text` and the end token after any prompt of that length."""
    tokens = [*text, END]

    def next_logits(context: tuple[int, ...]) -> Sequence[float]:
        return ONE_HOT[tokens[min(max(len(context) - prompt_length, 0), len(text))]]

    return next_logits


def flat() -> CostCurve:
    """All sizes cost the same: everything that is proposed is verified."""
    return free_drafts(32)


class Prophet(Drafter):
    """Drafts `num_nodes` tokens of what the model will write; keeps what it is told."""

    name = "prophet"

    def __init__(self, model: Model, num_nodes: int) -> None:
        self._model = model
        self._num_nodes = num_nodes
        self.text: list[int] = []
        self.calls: list[str] = []
        self.min_probability = -1.0
        self.remaining: list[float] = []

    def begin(self, tokens: Sequence[int]) -> None:
        self.calls.append("begin")
        self.text = list(tokens)

    def observe(self, outcome: VerifyResult) -> None:
        self.calls.append("observe")
        self.text += outcome.emitted

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        self.calls.append("propose")
        self.min_probability = context.min_probability
        self.remaining.append(context.remaining)
        size = min(self._num_nodes, context.max_nodes)
        tokens: list[int] = []
        for _ in range(size):
            tokens.append(int(np.argmax(self._model((*self.text, *tokens)))))
        return Proposal(tokens, range(-1, size - 1), [1.0] * size) if size else EMPTY

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, document: dict[str, Any] | None) -> None:
        pass


def engine_of(model: Model, num_nodes: int = 0, **options: Any) -> Engine:
    """An engine that drafts `num_nodes` right tokens a round; 0 decodes plainly."""
    backend = FakeBackend(model, VOCAB, end=END, **options)
    drafter: Drafter | None = Prophet(model, num_nodes) if num_nodes else None
    return Engine(backend, curve=flat(), drafter=drafter)


def echo_model(context: tuple[int, ...]) -> Sequence[float]:
    """Writes the prompt's last three tokens again and again."""
    return ONE_HOT[context[-3]]


class Gate:
    """Holds a model at one context length until it is opened from another thread."""

    def __init__(self, model: Model, length: int) -> None:
        self._model = model
        self._length = length
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, context: tuple[int, ...]) -> Sequence[float]:
        if len(context) == self._length and not self.opened.is_set():
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        return self._model(context)


class Mortal(FakeBackend):
    """A backend whose library would crash when it is used after it was freed."""

    def prefill(self, tokens: Sequence[int]) -> Logits:
        assert not self.closed, "the model was used after it had been freed"
        return super().prefill(tokens)

    def verify(self, tree: DraftTree) -> Logits:
        assert not self.closed, "the model was used after it had been freed"
        return super().verify(tree)

    def truncate(self, length: int) -> int:
        assert not self.closed, "the model was used after it had been freed"
        return super().truncate(length)
