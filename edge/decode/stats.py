"""What is counted of a generation, and which model writes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgespec.backends.tree import DraftTree

if TYPE_CHECKING:  # commands ask for the names alone
    from edgespec.backends.base import Logits


@dataclass(slots=True)
class Counters:
    """What happened, in numbers. Times are in seconds.

    `time_to_first_token_s` counts from the call, the wait for a turn included; `prompt_s` is what
    reading the prompt took from then on. A round is one step of the target after the prompt.
    `step_s` is what the target's steps took, `draft_s` a draft model's, and `host_s` everything
    else: tables, choosing, accepting, counting.
    `drafted_by` and `accepted_by` split the drafted and accepted tokens by drafter. Of the prompt,
    `reused_tokens` were in the cache already. `caught_up_tokens` are what a model had to prefill
    when it took over from another one, in `catch_up_s`; its first token is of that prefill.
    `switches` are all hand-overs, those to a small model that hands back at once included.
    `contended_rounds` had fewer threads than the plan, because other processes computed.
    `changed_tokens` were drafts that typical acceptance took in place of what the target picked.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    rounds: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    time_to_first_token_s: float = 0.0
    prompt_s: float = 0.0
    decode_s: float = 0.0
    host_s: float = 0.0
    step_s: float = 0.0
    draft_s: float = 0.0
    drafted_by: Counter[str] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    switches: int = 0
    caught_up_tokens: int = 0
    catch_up_s: float = 0.0
    contended_rounds: int = 0
    changed_tokens: int = 0

    def add_reading(self, num_tokens: int, num_reused: int, seconds: float) -> None:
        """Count what was read before a first token: a prompt, or what another model wrote."""
        if self.generated_tokens == 0:
            self.reused_tokens = num_reused
        else:
            self.caught_up_tokens += num_tokens
            self.catch_up_s += seconds

    def add_first(self) -> None:
        """Count a token that came of reading; only that of the prompt is no round."""
        self.rounds += self.generated_tokens > 0
        self.generated_tokens += 1

    def add_round(
        self, tree: DraftTree, path: Sequence[int], step_s: float, draft_s: float, round_s: float
    ) -> tuple[str, ...]:
        """Count one round that verified `tree`, kept `path` and emitted one token for each node.

        One that was handed over before its first token takes time and is no round. Returns the
        drafters of the accepted tokens, in order, where the tree says them.
        """
        count = len(path)
        if count:
            self.rounds += 1
            self.generated_tokens += count
            self.accepted_tokens += count - 1
        self.drafted_tokens += len(tree.tokens) - 1
        self.step_s += step_s
        self.draft_s += draft_s
        self.host_s += max(0.0, round_s - step_s - draft_s)
        if not tree.sources:
            return ()
        accepted = tuple(tree.sources[node] for node in path[1:])
        self.drafted_by.update(tree.sources[1:])
        self.accepted_by.update(accepted)
        return accepted

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, the target's own one included: plain decoding is 1.00."""
        return (self.accepted_tokens + self.rounds) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed: tokens after the first one over the time after the first one."""
        tokens = self.accepted_tokens + self.rounds
        return tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def host_share(self) -> float:
        return host_share([self])


def host_share(counters: Iterable[Counters]) -> float:
    """Part of the decoding of some generations that was spent outside the steps of models."""
    total_s = steps_s = 0.0
    for one in counters:
        total_s += one.decode_s
        steps_s += one.step_s + one.draft_s + one.catch_up_s
    return max(0.0, 1.0 - steps_s / total_s) if total_s else 0.0


LARGE, SMALL = "large", "small"  # their names
# A model and the tokens it wrote before the other one did: 0, if all it did was to be asked.
ModelTurn = tuple[str, int]


class Writers:
    """Who writes a text: one model, unless a subclass knows more."""

    writer = ""  # the one that is writing; empty where there is only one
    is_due = False  # another model writes the next token

    @property
    def turns(self) -> Sequence[ModelTurn]:
        """Who wrote how many tokens, in order; the last one may have written more."""
        return ()

    def hands_over(self, row: Logits) -> bool:
        """Whether another model writes the token of this row.

        Told each row of the writer, in order, before its token is picked; a round ends there.
        """
        return False


ALONE = Writers()
