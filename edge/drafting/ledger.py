"""One ledger for each drafter: what it may still lose, in plain steps of this moment.

    every round     balance += ALLOWANCE
    may be asked    balance >= price      what asking costs and a draft adds to the step: the most
                                          that the round can lose
    afterwards      balance += accepted tokens - measured extra time;  at most `most`

So the loss of k rounds is at most first + ALLOWANCE k, however wrong counts are (the constraint of
conservative bandits: Wu et al., 2016), and that of one step more where an n-gram hit is drafted
without a price. A drafter that pays stands at its cap, and the ledger does not limit it. Who is not
asked is asked again after (price - balance) / ALLOWANCE rounds; no other rule makes a drafter wait.

A pause (a lid, a CPU quota, Ctrl-Z) is nobody's fault. Work in this thread is charged processor
time, which stands still meanwhile; steps are charged by the clock, and what is far off alone counts
as a fixed multiple of what was expected (`BelievedTimes`). Imports no numpy, because plans are made
from savings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, isfinite, sqrt
from time import time
from typing import Any

from edgespec.drafting import constants
from edgespec.memory.times.curve import SHORTEST_MS
from edgespec.memory.times.speed import Round

# What is kept between runs: rounds, the plain steps that their tokens would have taken, the steps
# that the drafter saved of these, and the sum of the squares of what each round saved.
SAVINGS = ("rounds", "usual_steps", "saved_steps", "squares")
# Of the last run that added to them, and of the first one: seconds since the epoch.
TIME, SINCE = "time", "since"
KEPT = (*SAVINGS, TIME, SINCE)
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
    squares: float = 0.0
    paid: float = 0.0  # in the round under way

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
        self.paid += steps

    def add(self, rounds: int, tokens: float, gain: float = 0.0) -> None:
        """Rounds with so many tokens have ended, of which drafts saved `gain` steps.

        Rounds without tokens say nothing about savings: the drafter could not draft.
        """
        self.balance = min(self.balance + constants.ALLOWANCE * rounds + gain, self.most)
        saved, self.paid = gain - self.paid, 0.0
        self.rounds += rounds if tokens else 0
        self.usual_steps += tokens
        self.saved_steps += saved
        self.squares += saved * saved
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
        """Go on from the savings of earlier runs; anything else is ignored.

        They count as at most `TELLING_ROUNDS`, so that as many rounds of this process say as much.
        """
        savings = {name: document.get(name) for name in SAVINGS}
        if all(isinstance(part, float) and isfinite(part) for part in savings.values()):
            part = min(1.0, constants.TELLING_ROUNDS / max(1.0, document["rounds"]))
            for name, value in savings.items():
                setattr(self, name, part * value)
            self.rounds = max(0.0, self.rounds)


class BelievedTimes:
    """What steps took, as far as that is believed (winsorized: beside what was expected).

    Pauses and other programs disturb some. One counts as at most `alone` times as long as expected;
    several times as long is no accident of two in a row, and `repeated` is the most then.
    """

    def __init__(
        self, alone: float = constants.LONGEST_ALONE, repeated: float = constants.LONGEST_STEP
    ) -> None:
        self._alone, self._repeated = alone, repeated
        self._before = 1.0  # times as long as expected took the one before

    def believed_ms(self, ms: float, expected_ms: float) -> float:
        """Milliseconds of one that took `ms`."""
        ratio, before = ms / max(expected_ms, SHORTEST_MS), self._before
        self._before = ratio
        is_dear = min(ratio, before) >= constants.LONGEST_STEP
        most = min(before, self._repeated) if is_dear else self._alone
        return ms if ratio <= most else most * expected_ms


class UsualTime:
    """What something short usually takes, learned from what is believed of each time."""

    def __init__(self) -> None:
        self.ms = 0.0  # 0: not known yet
        self._times = BelievedTimes(constants.LONGEST_STEP, inf)

    def believed_ms(self, ms: float, first_ms: float) -> float:
        """Milliseconds of one that took `ms`; the first one of all counts as at most `first_ms`."""
        if not self.ms:
            self.ms = ms
            return min(ms, first_ms)
        ms = self._times.believed_ms(ms, self.ms)
        self.ms += constants.ASKING_RATE * (ms - self.ms)
        return ms


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


def part_saved(document: Mapping[str, Any] | None) -> tuple[float, float, float]:
    """Rounds of a document, the part of the time that was saved in them, and its standard error.

    No rounds where it has no savings.
    """
    values = [(document or {}).get(name) for name in SAVINGS]
    if not all(isinstance(value, float) and isfinite(value) for value in values):
        return 0.0, 0.0, 0.0
    rounds, usual, saved, squares = (float(value) for value in values if value is not None)
    if usual <= 0.0:
        return 0.0, 0.0, 0.0
    return rounds, saved / usual, sqrt(max(0.0, squares)) / usual


def is_recent(seen: object, lasting_s: float = constants.LASTING_S) -> bool:
    """Whether a time of a document is so late that drafts may be given up for what it says."""
    return isinstance(seen, float) and 0.0 <= time() - seen <= min(lasting_s, constants.LASTING_S)


def keeps_out(document: Mapping[str, Any]) -> bool:
    """Whether savings that are none keep a drafter out: for as long as it took to learn them."""
    last, first = document.get(TIME), document.get(SINCE)
    if not isinstance(last, float) or not isinstance(first, float):
        return False
    return is_recent(last, last - first)


def dated(
    learned: Mapping[str, Any], before: Mapping[str, Any] | None, began_s: float
) -> dict[str, Any]:
    """What is to be stored after a run that `began_s`: beside what was stored before.

    The savings are those of `before`, and as old, if the run added no round to them.
    """
    before, again = before or {}, Ledger()
    again.load_savings(before)
    if again.savings() == {name: learned.get(name) for name in SAVINGS}:
        return {**learned, **{name: before[name] for name in KEPT if name in before}}
    return {**learned, TIME: time(), SINCE: before.get(SINCE, began_s)}
