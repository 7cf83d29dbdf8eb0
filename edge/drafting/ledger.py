"""One ledger for each drafter: what it may still lose, in plain steps of this moment.

    every round     balance += ALLOWANCE
    may be asked    balance >= price      what asking costs and a draft adds to the step: the most
                                          that the round can lose
    afterwards      balance += accepted tokens - measured extra time;  at most `most`

So the loss of k rounds is at most first + ALLOWANCE k, however wrong counts are (the constraint of
conservative bandits: Wu et al., 2016), and that of one step more where an n-gram hit is drafted
without a price. A drafter that pays
stands at its cap, and the ledger does not limit it. Who is not asked is asked again after
(price - balance) / ALLOWANCE rounds; no other rule makes a drafter wait. Imports no numpy, because
plans are made from savings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite
from time import time
from typing import Any

from edgespec.drafting import constants
from edgespec.memory.times.speed import Round

# What is kept between runs: rounds, the plain steps that their tokens would have taken, and the
# steps that the drafter saved of these.
SAVINGS = ("rounds", "usual_steps", "saved_steps")
TIME = "time"  # of the last run that added to them, in seconds since the epoch
_KEPT_ROUNDS = 20_000.0  # of a history; older ones fade out beyond
_MOST_NODES = 1 << 16  # of a round that can have been


@dataclass(slots=True)
class Ledger:
    """The account of one drafter, in plain steps; reading a usual prompt takes `reading`."""

    reading: float = 0.0
    balance: float = constants.FIRST_BALANCE
    rounds: float = 0.0
    usual_steps: float = 0.0
    saved_steps: float = 0.0

    def expect_reading(self, steps: float, *, is_needed: bool) -> None:
        """Leave room for what reading a prompt takes; money too, where nothing comes before it."""
        self.reading = steps
        self.balance += steps * is_needed

    @property
    def most(self) -> float:
        """The cap of the balance."""
        return constants.HIGHEST_BALANCE + self.reading

    @property
    def is_full(self) -> bool:
        """Whether the allowance would be lost if it was not spent on a try."""
        return self.balance >= self.most

    def pay(self, steps: float) -> None:
        """Asking took so much."""
        self.balance -= steps
        self.saved_steps -= steps

    def add(self, rounds: int, tokens: float, gain: float = 0.0) -> None:
        """Rounds with so many tokens have ended, of which drafts saved `gain` steps.

        Rounds without tokens say nothing about savings: the drafter could not draft.
        """
        self.balance = min(self.balance + constants.ALLOWANCE * rounds + gain, self.most)
        self.rounds += rounds if tokens else 0
        self.usual_steps += tokens
        self.saved_steps += gain
        if self.rounds > constants.MOST_ROUNDS:
            for name in SAVINGS:
                setattr(self, name, getattr(self, name) / 2.0)

    def rounds_until(self, price: float) -> float:
        """Rounds until the balance reaches a price; inf for one that it never reaches."""
        if price > self.most:
            return inf
        return max(0, ceil((price - self.balance) / constants.ALLOWANCE - 1e-9))

    def savings(self) -> dict[str, float]:
        """What is kept between runs."""
        return {name: getattr(self, name) for name in SAVINGS}

    def load_savings(self, document: Mapping[str, Any]) -> None:
        """Go on from the savings of an earlier run; anything else is ignored."""
        savings = {name: document.get(name) for name in SAVINGS}
        if all(isinstance(part, float) and isfinite(part) for part in savings.values()):
            for name, part in savings.items():
                setattr(self, name, part)
            self.rounds = min(max(0.0, self.rounds), constants.MOST_ROUNDS)


class StepTimes:
    """What steps over drafts took, as far as that is believed.

    Other programs disturb some. Those that take longer for good teach the curve, unless they take
    several times as long, which is no accident of two in a row.
    """

    def __init__(self) -> None:
        self._before = 1.0  # times as long as estimated took the one before

    def believed_ms(self, ms: float, estimated_ms: float) -> float:
        """Milliseconds of a step that took `ms`."""
        ratio, before = ms / estimated_ms, self._before
        self._before = ratio
        is_dear = min(ratio, before) >= constants.LONGEST_STEP
        most = constants.LONGEST_STEP if is_dear else constants.LONGEST_ALONE
        return min(ratio, most) * estimated_ms


class RoundHistory:
    """How many tokens rounds of each size emitted."""

    def __init__(self, rounds: Sequence[Round] = ()) -> None:
        self._counts: dict[tuple[int, int], float] = {(n, e): times for n, e, times in rounds}
        self._total = sum(self._counts.values())

    def observe(self, num_nodes: int, num_emitted: int) -> None:
        """Count one round."""
        key = (num_nodes, num_emitted)
        self._counts[key] = self._counts.get(key, 0.0) + 1.0
        self._total += 1.0
        if self._total > _KEPT_ROUNDS:
            self._counts = {key: times / 2 for key, times in self._counts.items() if times >= 1.0}
            self._total = sum(self._counts.values())

    def __len__(self) -> int:
        return int(self._total)

    def rounds(self) -> list[Round]:
        """Nodes, tokens emitted and how often, for the cache and for predictions."""
        return [(n, e, times) for (n, e), times in sorted(self._counts.items())]

    @classmethod
    def from_json(cls, document: object) -> RoundHistory:
        """The history of `rounds()`; an empty one from anything else."""
        if not isinstance(document, list):
            return cls()
        rounds = []
        for item in document:
            try:
                nodes, emitted, times = item
                rounds.append((int(nodes), int(emitted), float(times)))
            except (TypeError, ValueError, OverflowError):
                return cls()
        most = 2 * _KEPT_ROUNDS
        return cls([r for r in rounds if 1 <= r[1] <= r[0] <= _MOST_NODES and 0 < r[2] <= most])


def recalled(document: Mapping[str, Any] | None) -> dict[str, Any]:
    """A document of `dated` without savings that are too old."""
    kept = dict(document or {})
    if not is_recent(kept.get(TIME)):
        for name in SAVINGS:
            kept.pop(name, None)
    return kept


def is_recent(seen: object) -> bool:
    """Whether a time of a document is so late that what it says decides."""
    return isinstance(seen, float) and 0.0 <= time() - seen <= constants.LASTING_S


def dated(learned: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is to be stored after a run: as old as `before` if no round was added to it."""
    is_same = all(learned.get(name) == before.get(name) for name in SAVINGS)
    return {**learned, TIME: before.get(TIME, time()) if is_same else time()}
