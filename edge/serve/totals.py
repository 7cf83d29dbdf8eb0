"""What the server has done since it started, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field

from edgespec.decode.stats import Counters


@dataclass(slots=True)
class Totals:
    """Sums over all generations, and how many requests had which status."""

    generations: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    rounds: int = 0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, counters: Counters, *, cancelled: bool) -> None:
        """Count a generation that has ended."""
        with self._lock:
            self.generations += 1
            self.cancelled += cancelled
            self.prompt_tokens += counters.prompt_tokens
            self.cached_tokens += counters.reused_tokens
            self.generated_tokens += counters.generated_tokens
            self.drafted_tokens += counters.drafted_tokens
            self.accepted_tokens += counters.accepted_tokens
            self.rounds += counters.rounds
            self.prompt_s += counters.time_to_first_token_s
            self.decode_s += counters.decode_s
            self.drafted_by.update(counters.drafted_by)
            self.accepted_by.update(counters.accepted_by)

    def add_status(self, status: int) -> None:
        """Count a request that was answered."""
        with self._lock:
            self.statuses[status] += 1
