"""Several users of a fake model on a clock of its own: who waits for what, in made-up milliseconds.

Nothing runs in a thread and nothing is timed: the scheduler's turns are made one after the other,
and only steps of the model, and whoever says so, take time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import pytest
from fake_backend import FakeBackend, NextLogits

from edgespec.backends.base import DraftTree, Logits
from edgespec.decode import scheduler, step
from edgespec.decode.engine import Engine
from edgespec.decode.generation import Chunk
from edgespec.decode.options import GenerationOptions
from edgespec.decode.step import Job
from edgespec.drafting import combined


class Clock:
    """Milliseconds since the beginning."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> float:
        """As `time.perf_counter`."""
        return self.ms / 1e3

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the loop look at this clock and no other."""
        for module in (scheduler, step, combined):
            monkeypatch.setattr(module, "perf_counter", self)
        monkeypatch.setattr(combined, "thread_time", self)


class Timed(FakeBackend):
    """Its steps take `step_ms(tokens)`, of nodes and of what is read."""

    def __init__(
        self,
        clock: Clock,
        step_ms: Callable[[int], float],
        next_logits: NextLogits,
        vocab_size: int,
        **options: Any,
    ) -> None:
        self.clock, self.step_ms = clock, step_ms
        self.runs: list[tuple[int, int]] = []  # nodes and tokens read of each
        super().__init__(next_logits, vocab_size, **options)

    def prefill(self, tokens: Sequence[int]) -> Logits:
        self._take(0, len(tokens))
        return super().prefill(tokens)

    def verify_together(
        self,
        steps: Sequence[tuple[int, DraftTree]],
        pieces: Sequence[tuple[int, Sequence[int]]] = (),
    ) -> list[Logits]:
        self._take(*(sum(len(part) for _, part in parts) for parts in (steps, pieces)))
        return super().verify_together(steps, pieces)

    def _take(self, nodes: int, read: int) -> None:
        self.runs.append((nodes, read))
        self.clock.ms += self.step_ms(nodes + read)


@dataclass
class Asked:
    """What a user asks for, and what came of it, in milliseconds of the clock."""

    prompt: Sequence[int]
    options: GenerationOptions
    begins_ms: float = 0.0  # or when the answer before it has ended
    asked_ms: float = -1.0
    rounds_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    @property
    def first_ms(self) -> float:
        """From the question to the first token."""
        return self.rounds_ms[0] - self.asked_ms


class _Reader(SimpleQueue[Chunk | None]):
    """Takes what a round has written, at the clock's time."""

    def __init__(self, asked: Asked, clock: Clock) -> None:
        super().__init__()
        self._asked, self._clock = asked, clock

    def put(self, chunk: Chunk | None, block: bool = True, timeout: float | None = None) -> None:
        if chunk is not None:
            self._asked.rounds_ms.append(self._clock.ms)
            self._asked.tokens += chunk.token_ids


def simulate(engine: Engine, clock: Clock, users: Sequence[Sequence[Asked]]) -> None:
    """Let each user ask, one question after the other, until all are answered."""
    at_work = engine.scheduler
    to_come = [list(asked) for asked in users]
    current: list[Job | None] = [None] * len(users)
    while any(to_come) or any(current):
        for user, run in enumerate(current):
            if run is not None and run.has_ended:
                assert run.problem is None, run.problem
                current[user] = None
            if current[user] is None and to_come[user]:
                if to_come[user][0].begins_ms > clock.ms:
                    continue
                asked = to_come[user].pop(0)
                asked.asked_ms = clock.ms
                current[user] = run = engine._job(list(asked.prompt), asked.options)
                run.chunks = _Reader(asked, clock)
                at_work._waiting.append(run)
        at_work._make_turn()
        if not at_work._running and not any(current):
            assert not at_work._waiting, "nobody runs, and somebody waits for ever"
            clock.ms = min((rest[0].begins_ms for rest in to_come if rest), default=clock.ms)
