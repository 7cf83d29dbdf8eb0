"""Several drafters as one: each is asked where it pays, and their nodes share one tree.

The first drafter is asked in every round. Each other one has a purse of milliseconds, into which
every round pays a small allowance:

* A drafter of tables is asked while its purse is not empty. It pays the time it takes and what its
  nodes add to the target's step; each of its tokens that is accepted brings the time of a plain
  step.
* A drafter that needs a model's time says beforehand what it expects, and is asked where that
  raises the round's tokens/ms. Elsewhere it is tried whenever its purse can pay for it.

So a drafter that never pays costs its allowance, and is never given up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from edgespec.controller import choose_size
from edgespec.drafters.base import Drafter, Outcome
from edgespec.drafters.merging import merge
from edgespec.proposal import EMPTY, Proposal, Prospects, Stakes

_ALLOWANCE = 0.004  # of the time of the target's steps
_FIRST_STEPS = 4.0  # plain steps' worth of time to begin with
_MOST_STEPS = 50.0  # that a purse holds, so that old merits do not last for ever


@dataclass(slots=True)
class _Source:
    drafter: Drafter
    prospects: Callable[[Stakes], Prospects] | None
    purse_ms: float = 0.0
    was_asked: bool = True


class CombinedDrafter:
    """Drafters in the order in which they propose; each is told what those before it propose."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.name = ",".join(drafter.name for drafter in drafters)
        self._first = drafters[0]
        self._others = [_Source(drafter, _prospects_of(drafter)) for drafter in drafters[1:]]
        self._stakes: Stakes | None = None

    @property
    def drafters(self) -> list[Drafter]:
        """All of them, in order."""
        return [self._first, *(source.drafter for source in self._others)]

    @property
    def nbytes(self) -> int:
        """Bytes of all tables together."""
        return sum(drafter.nbytes for drafter in self.drafters)

    def begin(self, tokens: Sequence[int]) -> None:
        """Start a new text."""
        for drafter in self.drafters:
            drafter.begin(tokens)

    def propose(self, stakes: Stakes, base: Proposal = EMPTY) -> Proposal:
        """One tree of what every drafter that is asked proposes."""
        if self._stakes is None:
            for source in self._others:
                source.purse_ms = _FIRST_STEPS * stakes.step_ms(1)
        self._stakes = stakes
        merged = merge(base, _named(self._first, stakes, base))
        for source in self._others:
            source.was_asked = self._pays(source, merged, stakes)
            if source.was_asked:
                start = perf_counter()
                merged = merge(merged, _named(source.drafter, stakes, merged))
                if source.prospects is None:
                    source.purse_ms -= (perf_counter() - start) * 1e3
        return merged

    def observe(self, outcome: Outcome) -> None:
        """Let every drafter learn, as far as its purse allows."""
        self._first.observe(outcome)
        if not self._others or self._stakes is None:
            return
        plain_ms, nodes = self._stakes.step_ms(1), len(outcome.tree)
        step_ms = self._stakes.step_ms(nodes)
        node_ms = (step_ms - plain_ms) / max(1, nodes - 1)
        sources = outcome.tree.sources
        for source in self._others:
            source.purse_ms += _ALLOWANCE * step_ms
            start = perf_counter()
            can_learn = source.prospects is not None or source.purse_ms >= 0.0
            source.drafter.observe(outcome if can_learn else replace(outcome, successors=_nothing))
            if source.prospects is None:
                name = source.drafter.name
                accepted = sum(sources[node] == name for node in outcome.path) if sources else 0
                source.purse_ms += accepted * plain_ms - sources.count(name) * node_ms
                source.purse_ms -= (perf_counter() - start) * 1e3
            source.purse_ms = min(source.purse_ms, _MOST_STEPS * plain_ms)

    def state(self) -> dict[str, Any]:
        """What each drafter keeps, by its name."""
        return {drafter.name: drafter.state() for drafter in self.drafters}

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Give each drafter what it kept."""
        for drafter in self.drafters:
            kept = (document or {}).get(drafter.name)
            drafter.load_state(kept if isinstance(kept, dict) else None)

    @staticmethod
    def _pays(source: _Source, merged: Proposal, stakes: Stakes) -> bool:
        """Whether to ask a drafter in this round; a trial is paid here."""
        if source.prospects is None:
            return source.purse_ms >= 0.0
        hope = source.prospects(stakes)
        _, rate = choose_size(merged.probabilities, stakes, kept=merged.kept)
        size, hoped = choose_size(
            hope.probabilities, stakes, spent_ms=hope.before_ms, node_ms=hope.node_ms
        )
        if hoped > rate:
            return True
        loss_ms = hope.before_ms + max(1, size) * hope.node_ms
        if source.purse_ms < loss_ms:
            return False
        source.purse_ms -= loss_ms
        return True


def _prospects_of(drafter: Drafter) -> Callable[[Stakes], Prospects] | None:
    return getattr(drafter, "prospects", None)


def _named(drafter: Drafter, stakes: Stakes, base: Proposal) -> Proposal:
    """A proposal whose nodes say which drafter they are from."""
    proposal = drafter.propose(stakes, base)
    return (
        proposal if proposal.sources else replace(proposal, sources=[drafter.name] * len(proposal))
    )


def _nothing(_node: int) -> None:
    """Successors that nobody looked at."""
