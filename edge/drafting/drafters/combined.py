"""Several drafters as one: each is asked where it pays, and their nodes share one tree.

Each drafter has a purse of milliseconds, into which every round pays a small allowance:

* The first drafter, if it takes no model's time, is asked while its purse is not empty, and where
  the text ends as it did before. It pays the time that asking takes; each of its tokens that is
  accepted brings the time of a plain step. The purse holds little, so that it is soon asked less
  where it is of no use, and soon again where it is. Beside other texts it may owe more, and is not
  asked at all until that is paid off.
* Any other drafter is asked while its purse is not empty. It pays the time it takes and what its
  nodes add to the target's step; each of its tokens that is accepted brings the time of a plain
  step.
* One that needs a model's time says beforehand what it expects, too. Where that does not raise the
  round's tokens/ms, its purse has to hold the price of a try before it is asked; where it holds
  less, nobody looks again for some rounds. One that was measured to bring something begins with a
  fuller purse, of which tries take no more than the allowance.

So a drafter that never pays costs its first purse and its allowance, whatever it promises, and is
never given up. Where no purse will hold enough for some rounds, these need no choice at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite
from time import perf_counter
from typing import Any

from edgespec.drafting.controller import choose_size
from edgespec.drafting.drafters.base import (
    Drafter,
    HoldsModel,
    KeepsTexts,
    Knows,
    Outcome,
    Promises,
    ReadsAlong,
    TakesTime,
)
from edgespec.drafting.drafters.merging import merge
from edgespec.drafting.drafters.model_savings import SAVINGS
from edgespec.drafting.proposal import EMPTY, Proposal, Prospects, Stakes
from edgespec.memory.store.texts import KeptText

_ALLOWANCE = 0.004  # of the time of the target's steps
_FIRST_STEPS = 4.0  # plain steps' worth of time to begin with
_FIRST_STEPS_OF_MODEL = 2.0  # which takes far more of it, and says what it expects,
_FIRST_STEPS_OF_PROMISED = 16.0  # or whose file says what it brings: some texts are harder
_FIRST_MOST = 1.0  # and most that the first one holds
# Rounds behind one in which it promised nothing and could not pay, and most behind a try.
_RESTS, _MOST_RESTS = 8, 500
_BESIDE = 3.0  # times as long as its lookup asking it takes: choosing, telling, counting
_FIRST_DEBT = 0.25  # and most that it owes
_SHARED_DEBT = 12.0  # beside other texts: more is paid off before it is asked again
_TYPICAL = "gain_of_a_text_ms"
_LONGEST_MS = 1e7
_TEXT_RATE = 0.2  # of a text in what texts usually gain
_MOST_STEPS = 50.0  # that a purse holds or owes: old savings and one bad moment fade
_MOST_ROUNDS = 5000.0  # that savings are of; older ones fade


@dataclass(slots=True)
class _Source:
    drafter: Drafter
    # Of one that takes a model's time; None once it has failed.
    prospects: Callable[[Stakes], Prospects | None] | None
    is_first: bool
    purse_ms: float = 0.0
    price_ms: float = 0.0  # that the purse has to hold for it to be asked
    rests: int = 0  # rounds in which nobody looks whether it promises anything
    missed_ms: float = 0.0  # that a model would have saved in this text, had it read all of it
    gained_ms: float = 0.0  # that it saved or would have saved in this text so far,
    typical_ms: float = 0.0  # and that texts before this one came to
    texts: int = 0  # that count in it
    is_open: bool = False  # whether there is a text
    is_promised: bool = False  # whether somebody has measured what it brings
    # Of a model: what rounds would have taken without it, and what it saved of that.
    rounds: float = 0.0
    usual_ms: float = 0.0
    saved_ms: float = 0.0
    # Of the first one, if it can tell: whether the text ends as it did before.
    is_familiar: Callable[[Sequence[int]], bool] = lambda _tokens: False

    def __post_init__(self) -> None:
        self.is_first = self.is_first and self.prospects is None
        self.is_promised = isinstance(self.drafter, Promises) and self.drafter.is_promised
        if self.is_first and isinstance(self.drafter, Knows):
            self.is_familiar = self.drafter.is_familiar

    @property
    def first_steps(self) -> float:
        """Plain steps' worth of time that its purse begins with."""
        if self.prospects is not None:
            return _FIRST_STEPS_OF_PROMISED if self.is_promised else _FIRST_STEPS_OF_MODEL
        return _FIRST_MOST if self.is_first else _FIRST_STEPS

    def typical_with_this_text(self) -> float:
        """What texts usually gain, in ms, this one included."""
        if not self.is_open:
            return self.typical_ms
        rate = max(_TEXT_RATE, 1.0 / (self.texts + 1))
        return self.typical_ms + rate * (self.gained_ms - self.typical_ms)

    def tell(self) -> None:
        """Tell a drafter that reads prompts what it may cost to."""
        if isinstance(self.drafter, ReadsAlong):
            self.drafter.expect(self.typical_ms)

    def buy(self, merged: Proposal, stakes: Stakes, allowance_ms: float) -> bool:
        """Whether a drafter that takes time is asked, and pay for it.

        Reading that pays has an account of its own, as long as no more than its price was lost so
        far; all else is paid for out of the purse.
        """
        if self.rests:  # what it promises changes slowly, and looking takes time
            self.rests -= 1
            return False
        hope = self.prospects(stakes) if self.prospects is not None else None
        if hope is None or not hope.probabilities:
            self.price_ms = inf
            return False
        try_ms = hope.before_ms + hope.draft_ms
        gain_ms = _expected_gain(hope, merged, stakes)
        is_promising = gain_ms > 0.0 and self.saved_ms >= -hope.before_ms
        self.price_ms = 0.0 if is_promising else try_ms
        if self.purse_ms < self.price_ms:
            self.rests = _RESTS
            return False
        if gain_ms <= 0.0 and self.is_promised and allowance_ms:
            # The purse is for what it promises: tries take what rounds between them bring.
            self.rests = min(_MOST_RESTS, int(try_ms / allowance_ms))
        if is_promising and self._saves(gain_ms, hope.before_ms):
            self.purse_ms -= hope.draft_ms
        elif self.purse_ms >= try_ms:
            self.purse_ms -= try_ms
        else:
            return False
        self.saved_ms -= try_ms
        return True

    def _saves(self, gain_ms: float, before_ms: float) -> bool:
        """Add a gain to those of this text; whether they come to what reading it takes.

        Reading what it has not seen is bought once and used in many rounds, nobody knows how many.
        It is bought where texts usually come to its price, and else when what it would have saved
        so far in this one does: that costs at most twice what knowing the future would (the
        ski-rental rule).
        """
        to_come_ms = self.typical_ms - self.gained_ms
        self.gained_ms += gain_ms
        self.missed_ms += gain_ms
        is_bought = max(self.missed_ms, to_come_ms) >= before_ms
        if is_bought:
            self.missed_ms = max(0.0, self.missed_ms - before_ms)
        return is_bought

    def settle(self, outcome: Outcome, plain_ms: float, step_ms: float, node_ms: float) -> None:
        """Pay for the nodes of a round, be paid for the accepted ones, and count both."""
        name, sources = self.drafter.name, outcome.tree.sources
        accepted = sum(sources[node] == name for node in outcome.path if sources)
        added = sum(one == name for one in sources)
        brought_ms = accepted * plain_ms - added * node_ms
        self.purse_ms += brought_ms
        if self.price_ms == inf:  # rounds in which it cannot draft say nothing about it
            return
        self.rounds += outcome.rounds
        self.usual_ms += step_ms + brought_ms
        self.saved_ms += brought_ms
        if self.rounds > _MOST_ROUNDS:
            for one in SAVINGS:
                setattr(self, one, getattr(self, one) / 2.0)


class CombinedDrafter:
    """Drafters in the order in which they propose; each is told what those before it propose."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.name = ",".join(drafter.name for drafter in drafters)
        self._sources = [
            _Source(
                drafter,
                drafter.prospects if isinstance(drafter, TakesTime) else None,
                is_first=number == 0,
            )
            for number, drafter in enumerate(drafters)
        ]
        drafters = [source.drafter for source in self._sources]
        self._models = [drafter for drafter in drafters if isinstance(drafter, HoldsModel)]
        self.paid_for = frozenset(one.drafter.name for one in self._sources if not one.is_first)
        self._was_asked = False
        self._allowance_ms = 0.0  # of a plain round
        self.history = ""  # that the next text is of

    @property
    def nbytes(self) -> int:
        """Bytes of all tables together."""
        return sum(source.drafter.nbytes for source in self._sources)

    @property
    def failure(self) -> str | None:
        """Why one of them is not asked any more, or None."""
        return next((one.failure for one in self._models if one.failure is not None), None)

    def member(self, name: str) -> Drafter | None:
        """The drafter of that name, if it is one of these."""
        drafters = (source.drafter for source in self._sources)
        return next((drafter for drafter in drafters if drafter.name == name), None)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text."""
        for drafter in self._with_texts():
            drafter.history = self.history
        for source in self._sources:
            source.typical_ms = source.typical_with_this_text()
            source.texts += source.is_open
            source.is_open = True
            source.missed_ms = source.gained_ms = 0.0
            source.rests = 0
            source.drafter.begin(tokens)
            source.tell()

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """One tree of what every drafter that is asked proposes."""
        if not self._was_asked:
            self._was_asked = True
            for source in self._sources:
                source.purse_ms += source.first_steps * stakes.estimated_ms(1)
        merged = base
        for source in self._sources:
            if source.prospects is not None:
                is_asked = source.buy(merged, stakes, self._allowance_ms)
            else:
                is_asked = source.purse_ms >= 0.0 or self._is_tempted(source, stakes)
            if is_asked:
                start = perf_counter()
                merged = merge(merged, _named(source.drafter, stakes, merged))
                if source.prospects is None:
                    times = _BESIDE if source.is_first else 1.0
                    source.purse_ms -= (perf_counter() - start) * 1e3 * times
        return merged

    def _is_tempted(self, source: _Source, stakes: Stakes) -> bool:
        """Whether the text ends as it did before, and asking there has not only cost so far.

        Beside others a draft gains little, and asking takes time of all of them.
        """
        if not source.is_familiar(()):
            return False
        plain_ms = stakes.estimated_ms(1) / (1 + stakes.others)
        return not stakes.others or source.purse_ms > -_SHARED_DEBT * plain_ms

    def pause(self) -> int:
        """Rounds until a purse holds enough again."""
        missing_ms = min(source.price_ms - source.purse_ms for source in self._sources)
        if missing_ms <= 0.0 or not self._allowance_ms:
            return 0
        rounds = min(missing_ms / self._allowance_ms, _MOST_STEPS / _ALLOWANCE)
        return ceil(rounds) - 1  # this one's brings the first

    def is_wanted(self, tokens: Sequence[int]) -> bool:
        """Whether the text ends as it did before."""
        return self._sources[0].is_familiar(tokens)

    def observe(self, outcome: Outcome) -> None:
        """Let every drafter learn, as far as its purse allows."""
        stakes, nodes = outcome.stakes, len(outcome.tree)
        plain_ms, step_ms = stakes.estimated_ms(1), stakes.estimated_ms(nodes)
        node_ms = (step_ms - plain_ms) / max(1, nodes - 1)
        if outcome.rounds > 1:
            step_ms = outcome.rounds * plain_ms
        plain_ms, step_ms = plain_ms / (1 + stakes.others), step_ms / (1 + stakes.others)
        self._allowance_ms = _ALLOWANCE * plain_ms
        sources = outcome.tree.sources
        for source in self._sources:
            drafter = source.drafter
            source.purse_ms += _ALLOWANCE * step_ms
            if source.is_first:
                drafter.observe(outcome)
                accepted = sum(sources[node] == drafter.name for node in outcome.path if sources)
                purse_ms = source.purse_ms + accepted * plain_ms
                least_ms = -inf if stakes.others else -_FIRST_DEBT * plain_ms
                source.purse_ms = min(max(purse_ms, least_ms), _FIRST_MOST * plain_ms)
                continue
            start = perf_counter()
            can_pay = source.purse_ms >= 0.0
            drafter.observe(outcome if can_pay else replace(outcome, top_tokens=_nothing))
            source.purse_ms -= (perf_counter() - start) * 1e3
            source.settle(outcome, plain_ms, step_ms, node_ms)
            most = _MOST_STEPS * plain_ms
            source.purse_ms = min(max(source.purse_ms, -most), most)

    def state(self) -> dict[str, Any]:
        """What each drafter keeps, by its name."""
        kept = {source.drafter.name: source.drafter.state() for source in self._sources}
        for source in self._sources:
            if source.prospects is not None:
                savings = {name: getattr(source, name) for name in SAVINGS}
                savings[_TYPICAL] = source.typical_with_this_text()
                kept[source.drafter.name] |= savings
        return kept

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Give each drafter what it kept."""
        for source in self._sources:
            kept = (document or {}).get(source.drafter.name)
            source.drafter.load_state(kept if isinstance(kept, dict) else None)
            if source.prospects is None or not isinstance(kept, dict):
                continue
            typical = kept.get(_TYPICAL)
            if isinstance(typical, float) and 0.0 <= typical < _LONGEST_MS:
                source.typical_ms, source.texts = typical, round(1.0 / _TEXT_RATE)
                source.tell()
            savings = {name: kept.get(name) for name in SAVINGS}
            if all(isinstance(part, float) and isfinite(part) for part in savings.values()):
                for name, part in savings.items():
                    setattr(source, name, part)
                source.rounds = min(max(0.0, source.rounds), _MOST_ROUNDS)

    def share_with(self, other: CombinedDrafter) -> None:
        """What drafters of one user know is known to those of the other."""
        for mine, others in zip(self._with_texts(), other._with_texts(), strict=True):
            mine.share_with(others)

    def recall(self, texts: Sequence[KeptText]) -> None:
        """Fill the tables from texts of earlier runs."""
        for drafter in self._with_texts():
            drafter.recall(texts)

    def _with_texts(self) -> list[KeepsTexts]:
        drafters = (source.drafter for source in self._sources)
        return [drafter for drafter in drafters if isinstance(drafter, KeepsTexts)]

    def memory_bytes(self) -> dict[str, int]:
        """What drafters with an engine of their own allocated, by component."""
        found: dict[str, int] = {}
        for drafter in self._models:
            found |= drafter.memory_bytes()
        return found

    def close(self) -> None:
        """Free what drafters hold beyond their tables."""
        for drafter in self._models:
            drafter.close()


def _expected_gain(hope: Prospects, merged: Proposal, stakes: Stakes) -> float:
    """What asking a drafter would save in this round, in ms."""
    _, rate = choose_size(merged.probabilities, stakes, kept=merged.kept)
    size, hoped = choose_size(hope.probabilities, stakes, spent_ms=hope.draft_ms)
    if size == 0 or hoped <= rate:
        return 0.0
    return (hope.draft_ms + stakes.step_ms(size + 1)) * (hoped / rate - 1.0)


def _named(drafter: Drafter, stakes: Stakes, base: Proposal) -> Proposal:
    """A proposal whose nodes say which drafter they are from."""
    proposal = drafter.propose(stakes, base)
    if proposal.sources or not len(proposal):
        return proposal
    return replace(proposal, sources=[drafter.name] * len(proposal))


def _nothing(_node: int) -> None:
    """TopTokens that nobody looked at."""
