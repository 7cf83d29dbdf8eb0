"""Several drafters as one: each is asked where it pays, and their nodes share one tree.

Each has a ledger that bounds what it can lose. One whose balance does not cover the price of a
round is not asked, and drafts no more than its balance covers. A table that finds an n-gram hit is
asked as long as it owes nothing: where steps were measured beside other
programs and are thought to be dear, nothing else would show what they take. One that needs a
model's time says beforehand what it expects, and is asked where that raises the round's tokens/ms,
or where its ledger is full: then a try costs only the allowance.

One ledger for each drafter: what it may still lose, in plain steps of this moment.

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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import ceil, inf, isfinite, sqrt
from operator import mul
from time import perf_counter, thread_time, time
from typing import Any

from edgespec.backends.base import Grammar
from edgespec.drafting import constants
from edgespec.drafting.proposal import (
    EMPTY,
    Calibration,
    CountingDrafter,
    Drafter,
    DraftEstimate,
    Proposal,
    StepContext,
    VerifyResult,
    choose_size,
)
from edgespec.memory.store.texts import KeptText
from edgespec.memory.times import HICCUP, SHORTEST_MS, Round

# What is kept between runs: rounds, the plain steps that their tokens would have taken, the steps
# that the drafter saved of these, and the sum of the squares of what each round saved.
SAVINGS = ("rounds", "usual_steps", "saved_steps", "squares")
# Of the last run that added to them, and of the first one: seconds since the epoch.
TIME, SINCE = "time", "since"
KEPT = (*SAVINGS, TIME, SINCE)


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

    def __init__(self, alone: float = constants.LONGEST_ALONE, repeated: float = HICCUP) -> None:
        self._alone, self._repeated = alone, repeated
        self._before = 1.0  # times as long as expected took the one before

    def believed_ms(self, ms: float, expected_ms: float) -> float:
        """Milliseconds of one that took `ms`."""
        ratio, before = ms / max(expected_ms, SHORTEST_MS), self._before
        self._before = ratio
        is_dear = min(ratio, before) >= HICCUP
        most = min(before, self._repeated) if is_dear else self._alone
        return ms if ratio <= most else most * expected_ms


class UsualTime:
    """What something short usually takes, learned from what is believed of each time."""

    def __init__(self) -> None:
        self.ms = 0.0  # 0: not known yet
        self._times = BelievedTimes(HICCUP, inf)

    def believed_ms(self, ms: float) -> float:
        """Milliseconds of one that took `ms`; the first one of all, in cold caches, counts none."""
        if not self.ms:
            self.ms = ms
            return 0.0
        ms = self._times.believed_ms(ms, self.ms)
        self.ms += (1.0 - constants.RECENT_DECAY) * (ms - self.ms)
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
        if self._total > constants.MOST_ROUNDS:
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
        most = 2 * constants.MOST_ROUNDS
        return cls([r for r in rounds if 1 <= r[1] <= r[0] <= 1 << 16 and 0 < r[2] <= most])


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


# Why a drafter has no node in a round, in words for people.
_LOW, _BLIND = "its balance did not cover the price", "it found nothing"
_DEAR, _CANNOT = "a try was not expected to pay", "it cannot read this text"
_SHARED = "others are answered in the same steps"
_WORTHLESS, _VERIFIED = "its drafts were not worth verifying", "verified"


@dataclass(slots=True)
class _Source:
    """A drafter and its account; all but the ledger is of the round under way."""

    drafter: Drafter
    is_first: bool
    ledger: Ledger
    price: float = 0.0  # that the balance has to cover, in plain steps
    is_open: bool = True  # whether it does
    is_free: bool = False  # an n-gram hit: whatever the step takes
    estimate: DraftEstimate | None = None
    num_proposed: int = 0
    why: str = _BLIND  # it has no node, as far as that is known
    lookups: UsualTime = field(default_factory=UsualTime)  # of a table
    lessons: UsualTime = field(default_factory=UsualTime)
    drafts: BelievedTimes = field(  # of an engine
        default_factory=lambda: BelievedTimes(HICCUP, inf)
    )

    def limit(self, context: StepContext, token_ms: float) -> int:
        """The most nodes whose loss the balance covers; 0: it is not asked."""
        estimate, balance = self.estimate, self.ledger.balance
        fixed_ms, node_ms, reserve = self.lookups.ms, 0.0, constants.RESERVE
        if estimate is not None:
            fixed_ms, node_ms = estimate.read_ms + estimate.first_ms, estimate.node_ms
            reserve = 0.0
        step_ms = context.ms

        def price(nodes: int) -> float:
            ms = fixed_ms + nodes * node_ms + step_ms[1 + nodes] - step_ms[1]
            return max(0.0, ms) / token_ms

        self.price = price(1) + reserve
        if estimate is None and self.price - fixed_ms / token_ms <= self.ledger.most:
            # One bad moment may have said what lookups take: a full balance asks again.
            self.price = min(self.price, self.ledger.most)
        self.is_open = balance >= self.price
        most = context.max_nodes
        if self.is_open and price(most) <= balance:
            return most
        if estimate is None and balance >= 0.0 and self.drafter.has_hit():
            self.is_open, self.is_free = True, True
            return most
        if not self.is_open:
            return 0
        return next((n - 1 for n in range(2, most) if price(n) > balance), most - 1)

    def is_worth_asking(self, merged: Proposal, context: StepContext) -> bool:
        """Whether what a draft model expects raises the round's tokens/ms, or a try is free.

        What it has to read first must be saved by the tokens that may still come.
        One that has to read a text does so beside nobody else's: of two short answers at once,
        reading both took more than their drafts saved (0.91 times the speed; LOG.md).
        """
        estimate = self.estimate
        assert estimate is not None
        if context.others and self.drafter.has_to_read:
            self.why = _SHARED
            return False
        _, rate = choose_size(merged.probabilities, context, kept=merged.kept)
        size, hoped = choose_size(
            estimate.probabilities,
            context,
            spent_ms=estimate.first_ms,
            node_ms=estimate.node_ms,
            tries=True,
        )
        saved_ms = context.remaining * (1.0 / rate - 1.0 / hoped)
        if (size > 0 and saved_ms > estimate.read_ms) or self.ledger.is_full:
            return True
        self.price, self.why = self.ledger.most, _DEAR
        return False

    def ask(self, context: StepContext, merged: Proposal, token_ms: float) -> Proposal:
        """Its proposal, whose time it pays for: a table the processor's, an engine the clock's."""
        began, worked = perf_counter(), thread_time()
        proposal = self.drafter.propose(context, merged)
        if (estimate := self.estimate) is None:
            ms = (thread_time() - worked) * 1e3 * (constants.ASKING_TIMES if self.is_first else 1.0)
            ms = self.lookups.believed_ms(ms)
        else:
            expected_ms = max(1, len(proposal.tokens)) * estimate.node_ms
            expected_ms += estimate.read_ms + estimate.first_ms
            ms = self.drafts.believed_ms((perf_counter() - began) * 1e3, expected_ms)
            proposal = replace(proposal, draft_ms=min(proposal.draft_ms, ms))
        self.ledger.pay(ms / token_ms)
        self.num_proposed = len(proposal.tokens)
        if proposal.sources or not self.num_proposed:
            return proposal
        return replace(proposal, sources=[self.drafter.name] * self.num_proposed)


class CombinedDrafter(Drafter):
    """Drafters in the order in which they propose; each is told what those before it propose."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.name = ",".join(drafter.name for drafter in drafters)
        self.draws = any(drafter.draws for drafter in drafters)
        self._drafters = list(drafters)
        self._sources = [
            _Source(drafter, number == 0 and not drafter.has_engine, Ledger())
            for number, drafter in enumerate(drafters)
        ]
        self._has_begun = False
        self._whys: Counter[tuple[str, str]] = Counter()  # rounds of this text

    @property
    def nbytes(self) -> int:
        return sum(drafter.nbytes for drafter in self._drafters)

    @property
    def failure(self) -> str | None:  # type: ignore[override]
        """Why one of them is not asked any more, or None."""
        return next((one.failure for one in self._drafters if one.failure is not None), None)

    def member(self, name: str) -> Drafter | None:
        """The drafter of that name, if it is one of these."""
        return next((drafter for drafter in self._drafters if drafter.name == name), None)

    def ledger(self, name: str) -> Ledger:
        """The account of the drafter of that name."""
        return next(source.ledger for source in self._sources if source.drafter.name == name)

    def begin(self, tokens: Sequence[int]) -> None:
        self._whys.clear()
        for drafter in self._drafters:
            drafter.history = self.history
            drafter.begin(tokens)

    def prepare(self, tokens: Sequence[int], count: int, *, ahead: bool = False) -> None:
        for drafter in self._drafters:
            drafter.history = self.history
            drafter.prepare(tokens, count, ahead=ahead)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """One tree of what every drafter that is asked proposes."""
        token_ms, merged, asked = context.token_ms, base, 0
        if not self._has_begun:
            self._has_begun = True
            for source in self._sources:
                drafter = source.drafter
                source.ledger.expect_reading(
                    drafter.reading_ms() / token_ms, is_needed=drafter.has_to_read
                )
        for source in self._sources:
            source.num_proposed, source.why, source.is_free = 0, _BLIND, False
            has_engine = source.drafter.has_engine
            source.estimate = estimate = source.drafter.estimate(context) if has_engine else None
            if estimate is not None and not estimate.probabilities:
                source.is_open, source.price, source.why = False, inf, _CANNOT
                continue
            limit = source.limit(context, token_ms)
            if limit < 1:
                source.why = _LOW
                continue
            if estimate is not None and not source.is_worth_asking(merged, context):
                continue
            allowed = context if limit >= context.max_nodes else replace(context, max_nodes=limit)
            added = source.ask(allowed, merged, token_ms)
            merged = merge(merged, added) if merged.tokens else added
            asked += source.num_proposed > 0
        return self._within_means(merged, context) if asked > 1 else merged

    def _within_means(self, merged: Proposal, context: StepContext) -> Proposal:
        """The merged tree, cut off where a drafter's share of the step would exceed its balance."""
        token_ms, step_ms = context.token_ms, context.ms
        balances = {
            one.drafter.name: one.ledger.balance for one in self._sources if not one.is_free
        }
        counts = Counter(merged.sources[: merged.kept])
        for size in range(merged.kept + 1, len(merged) + 1):
            if size > context.max_nodes:
                return merged.part(range(size - 1))
            counts[merged.sources[size - 1]] += 1
            each = (step_ms[1 + size] - step_ms[1]) / (size * token_ms)
            if any(each * count > balances.get(name, inf) for name, count in counts.items()):
                return merged.part(range(size - 1))
        return merged

    def cooldown(self) -> int:
        """Rounds until a balance covers its price again."""
        rounds = min(source.ledger.rounds_until(source.price) for source in self._sources)
        return int(min(max(0, rounds - 1), 1 << 20))  # this one's allowance is still to come

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the text ends as it did before, and who found that owes nothing.

        Each of `tokens` was a round.
        """
        earned = constants.ALLOWANCE * len(tokens)
        return any(
            source.ledger.balance + earned >= 0.0 and source.drafter.has_hit(tokens)
            for source in self._sources
        )

    def observe(self, result: VerifyResult) -> None:
        """Let every drafter learn, as far as its balance allows, and keep the accounts."""
        context, nodes = result.context, len(result.tree.tokens)
        token_ms, node_ms = context.token_ms, result.node_ms
        if node_ms is None:
            is_drafted, step_ms = nodes > 1 and result.rounds == 1, context.ms
            node_ms = (step_ms[nodes] - step_ms[1]) / (nodes - 1) if is_drafted else 0.0
        sources = result.tree.sources
        for source in self._sources:
            worked, ledger, name = thread_time(), source.ledger, source.drafter.name
            is_taught = source.is_open and result.rounds == 1
            seen = result if is_taught else replace(result, top_tokens=lambda _node: None)
            source.drafter.observe(seen)
            if is_taught and not source.is_first:
                ms = source.lessons.believed_ms((thread_time() - worked) * 1e3)
                ledger.pay(ms / token_ms)
            num_nodes = sum(one == name for one in sources)
            accepted = sum(sources[node] == name for node in result.path) if num_nodes else 0
            gain = accepted - num_nodes * node_ms / token_ms
            # Rounds in which it cannot draft say nothing about it.
            tokens = 0 if source.price == inf else len(result.emitted)
            ledger.add(result.rounds, tokens, gain)
            if source.num_proposed and result.rounds == 1:
                source.why = _VERIFIED if num_nodes else _WORTHLESS
            self._whys[name, source.why] += result.rounds
            if source.drafter.has_engine:
                # What is above the first balance was earned, and reading has to earn itself back.
                pays = ledger.balance > ledger.reading + constants.FIRST_BALANCE
                source.drafter.can_read_prompts(pays=pays)
        for source in self._sources:
            source.num_proposed = 0  # the next round may ask nobody

    # -- for people ------------------------------------------------------------------------

    def reasons(self) -> str:
        """In one line, what became of each drafter in the rounds of the last text."""
        parts = []
        for drafter in self._drafters:
            found = [
                f"{why} ({count} rounds)"
                for (name, why), count in self._whys.most_common()
                if name == drafter.name
            ]
            parts.append(f"{drafter.name}: {', '.join(found) or 'was not asked'}")
        return "; ".join(parts)

    # -- between runs ----------------------------------------------------------------------

    @property
    def saved_part(self) -> float | None:
        """Of the time of plain steps, what drafts have saved; None while that says too little."""
        if self._sources[0].ledger.usual_steps < constants.TELLING_ROUNDS:
            return None
        ledgers = [source.ledger for source in self._sources]
        return sum(one.saved_steps / one.usual_steps for one in ledgers if one.usual_steps)

    def state(self) -> dict[str, Any]:
        return {
            source.drafter.name: source.drafter.state()
            | (source.ledger.savings() if source.drafter.has_engine else {})
            for source in self._sources
        }

    def load_state(self, document: dict[str, Any] | None) -> None:
        for source in self._sources:
            kept = (document or {}).get(source.drafter.name)
            source.drafter.load_state(kept if isinstance(kept, dict) else None)
            if source.drafter.has_engine and isinstance(kept, dict):
                source.ledger.load_savings(kept)

    def share_with(self, other: CombinedDrafter) -> None:
        for mine, others in zip(self._drafters, other._drafters, strict=False):
            mine.share_with(others)

    def recall(self, texts: Sequence[KeptText]) -> None:
        for drafter in self._drafters:
            drafter.recall(texts)

    def memory_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for drafter in self._drafters:
            found |= drafter.memory_bytes()
        return found

    def close(self) -> None:
        for drafter in self._drafters:
            drafter.close()


def merge(base: Proposal, added: Proposal) -> Proposal:
    """Both proposals in one tree, kept nodes first, then by probability; both name sources.

    Nodes that spell the same text are one node, with the larger probability: the surer drafter
    looks at more. It counts for the one that proposed it first, and costs least: a surer one would
    take its hits, and leave it what was wrong. Siblings exclude each other, so a later one gets at
    most what those before it leave of their parent. At most one of the two has kept nodes.
    """
    if not added.tokens or not base.tokens:
        return base if base.tokens else added
    tokens, parents = list(base.tokens), list(base.parents)
    probabilities, sources = list(base.probabilities), list(base.sources)
    distributions = [*(base.distributions or [None] * len(base))]
    added_distributions = added.distributions or [None] * len(added)
    nodes = {key: node for node, key in enumerate(zip(parents, tokens, strict=True))}
    left: dict[int, float] = {-1: 1.0}  # of a parent's probability, not yet given to a child
    for parent, probability in zip(parents, probabilities, strict=True):
        left[parent] = left.get(parent, probabilities[parent]) - probability
    kept = dict.fromkeys(range(base.kept))  # in the order in which they were drawn
    places: list[int] = []
    for i, token in enumerate(added.tokens):
        parent = places[added.parents[i]] if added.parents[i] >= 0 else -1
        node = nodes.get((parent, token), -1)
        already = probabilities[node] if node >= 0 else 0.0
        most = probabilities[parent] if parent >= 0 else 1.0
        room = min(most, left.get(parent, most) + already)  # not even by rounding more
        probability = max(already, min(added.probabilities[i], room))
        left[parent] = room - probability
        if node < 0:
            node = len(tokens)
            nodes[parent, token] = node
            tokens.append(token)
            parents.append(parent)
            probabilities.append(probability)
            sources.append(added.sources[i])
            distributions.append(added_distributions[i])
        elif probability > already or i < added.kept:
            # The children's share of this node stays what it was, so what is left of it grows.
            if node in left:
                left[node] += probability - already
            probabilities[node] = probability
            sources[node] = added.sources[i] if i < added.kept else sources[node]
            distributions[node] = added_distributions[i] if i < added.kept else distributions[node]
        if i < added.kept:
            kept[node] = None
        places.append(node)
    merged = Proposal(
        tokens,
        parents,
        probabilities,
        sources,
        distributions if kept else (),
        draft_ms=base.draft_ms + added.draft_ms,
    )
    others = sorted(set(range(len(tokens))) - kept.keys(), key=lambda n: (-probabilities[n], n))
    return replace(merged.part([*kept, *others]), kept=len(kept))


class GrammarDrafter(CountingDrafter):
    """Drafts what a grammar forces, for free, and what another drafter proposes where it does not.

    The text is certain, and most of its cut into tokens: the grammar says how far that is sure.
    Behind that a token may go on beyond what is forced: how often it does not is counted.

    It lives as long as one answer. `counts` are shared by all answers of an engine: of how often
    forced text is cut as the tokenizer does it where it need not be.
    """

    name = "grammar"

    def __init__(self, grammar: Grammar, inner: Drafter, counts: Calibration) -> None:
        super().__init__(counts)
        self._grammar = grammar
        self._inner = inner

    def begin(self, tokens: Sequence[int]) -> None:
        self._inner.begin(tokens)

    def prepare(self, tokens: Sequence[int], count: int, *, ahead: bool = False) -> None:
        self._inner.prepare(tokens, count, ahead=ahead)

    def propose(self, context: StepContext, base: Proposal = EMPTY) -> Proposal:
        """The forced text, cut into tokens, or the other drafter's proposal."""
        self._proposal = EMPTY
        forced, num_sure = self._grammar.forced()
        tokens = list(forced[: context.max_nodes])
        if not tokens:
            return self._inner.propose(context, base)
        self._cells = [-1 if place < num_sure else 0 for place in range(len(tokens))]
        last = self._calibration.probability(0)
        chances = [1.0 if cell < 0 else last for cell in self._cells]
        self._proposal = Proposal(
            tokens,
            range(-1, len(tokens) - 1),
            list(accumulate(chances, mul)),
            [self.name] * len(tokens),
        )
        return self._proposal

    def observe(self, result: VerifyResult) -> None:
        super().observe(result)
        self._inner.observe(result)

    def cooldown(self) -> int:
        """As long as the other drafter's; text that is forced ends it."""
        return self._inner.cooldown()

    def has_hit(self, tokens: Sequence[int] = ()) -> bool:
        """Whether the grammar, which has gone on with `tokens`, forces text now."""
        return bool(self._grammar.forced()[0]) or self._inner.has_hit(tokens)
