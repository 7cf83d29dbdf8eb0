"""Which of two models writes the next token: entropy-adaptive switching, a lossy mode.

After Entropy Adaptive Decoding (arXiv 2502.06833). Terms:

entropy      H = -sum p ln p of the next token under the model that is writing, in nats, from its
             raw logits: before temperature, penalties and grammar
mean         of its last `window` entropies since it took over
stay         tokens a model has written since it took over; none, where the small one was asked and
             handed back at once
going up     the small model's mean reaches `up_nats`: the large one writes this very token. The
             small model's row is thrown away.
going down   the large model's mean is at most `down_nats`: its token is there already and is kept,
             the small one writes what follows

Each decision depends on the tokens before it and never on the one to come, so every token is drawn
from the distribution of the model that writes it, and drafts change nothing. Pure: no model inside.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.decode.stats import LARGE, SMALL, ModelTurn
from edgespec.errors import UnsupportedError
from edgespec.memory.times.curve import CostCurve

MOST_TOKENS = 1 << 30  # of a text


@dataclass(frozen=True, slots=True)
class SwitchPolicy:
    """When the large model writes and when the small one. Raises UnsupportedError out of range.

    Entropies of the two models have different scales, so each has its own threshold; the gap
    between them is the hysteresis. `edgespec profile MODEL --switch SMALL` calibrates them.

    Args:
        up_nats: mean entropy of the small model, in nats, from which on the large one takes over;
            0 is always the large one, infinity always the small one.
        down_nats: mean entropy of the large model, in nats, down to which the small one goes on.
        window: tokens over which entropies are averaged.
        min_stay: tokens a model writes before the other one may take over, but for the beginning
            of an answer. With 0 the small one may hand back before it has written any; with more
            it writes so many whatever its entropy is.
        expected_stay: tokens the small model is expected to write when it is asked.
        only_where_it_pays: whether a stay of the small model is left out that would cost more time
            than it is expected to save.
    """

    up_nats: float = 0.7
    down_nats: float = 0.3
    window: int = 1
    min_stay: int = 0
    expected_stay: float = 8.0
    only_where_it_pays: bool = True

    def __post_init__(self) -> None:
        if not (self.up_nats > -math.inf and self.down_nats > -math.inf):
            raise UnsupportedError("an entropy threshold must be a number of nats")
        for name, value, least in (("window", self.window, 1), ("min_stay", self.min_stay, 0)):
            if not isinstance(value, int) or value < least:
                raise UnsupportedError(f"{name} must be at least {least} tokens, got {value}")
        if not 0.0 <= self.expected_stay < math.inf:
            raise UnsupportedError(f"expected_stay must be a number, got {self.expected_stay}")
        if max(self.window, self.min_stay, self.expected_stay) > MOST_TOKENS:
            raise UnsupportedError(f"no text has more than {MOST_TOKENS} tokens")

    def as_json(self) -> dict[str, float | None]:
        """The values; a threshold that is infinite is None."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SwitchPolicy:
        """The policy of `as_json`. Raises TypeError or UnsupportedError for another document."""
        if not isinstance(document, Mapping):
            raise TypeError(f"a policy is not {type(document).__name__}")
        values: dict[str, Any] = {
            name: math.inf if value is None else value for name, value in document.items()
        }
        if not isinstance(values.get("only_where_it_pays", True), bool):
            raise TypeError("whether a stay has to pay is yes or no")
        return cls(**values)

    @classmethod
    def always(cls, model: str) -> SwitchPolicy:
        """One model, `LARGE` or `SMALL`, writes everything."""
        up = 0.0 if model == LARGE else math.inf
        return cls(up_nats=up, down_nats=-1.0 if model == LARGE else math.inf)


@dataclass(frozen=True, slots=True)
class SwitchPrices:
    """What ways between the models cost, in ms, from their measured step times.

    The curves are of when the models were loaded: what is learned while generating would make the
    same prompt give another text. `large_reads` and `small_reads` have the times of reading n
    tokens for one row of logits, with a single token before; a step has a row for each token, so
    without them the step times are an upper bound.
    """

    large: CostCurve
    small: CostCurve
    large_reads: CostCurve | None = None
    small_reads: CostCurve | None = None
    prompt_ms: float = 0.0  # in which the large model reads a token of a prompt; 0: not measured

    def catch_up_ms(self, model: str, tokens: int, depth: int) -> float:
        """Time of the one who takes over to read what it missed, its next step's delay included.

        The step after a larger one builds its graph anew.
        """
        is_large = model == LARGE
        curve, reads = (
            (self.large, self.large_reads) if is_large else (self.small, self.small_reads)
        )
        return (reads or curve).read_ms(tokens, depth) + (curve.change_ms if tokens > 1 else 0.0)

    def turns_ms(
        self, turns: Sequence[ModelTurn], prompt_tokens: int, reused_tokens: int = 0
    ) -> float:
        """Time of decoding without drafts, after the first token, in these turns.

        The large model reads the prompt when its first turn comes, but for the tokens that it has
        of earlier answers.
        """
        spent, depth, before = 0.0, prompt_tokens, 0
        unread = prompt_tokens - reused_tokens
        for number, (model, tokens) in enumerate(turns):
            curve = self.large if model == LARGE else self.small
            if number and model == LARGE and unread:
                spent += (unread + before) * self.prompt_ms
            elif number:
                # Its own last token was never fed to the large model; to the small one it was.
                spent += self.catch_up_ms(model, before + (model == LARGE), depth)
            spent += (tokens - 1) * curve.step_ms(1, depth + tokens // 2)
            if model == LARGE:
                unread = 0
            elif number + 1 < len(turns):
                spent += curve.step_ms(1, depth + tokens)
            before, depth = tokens, depth + tokens
        return spent

    def saved_ms(self, stay: float, missed: int, depth: int) -> float:
        """What the small model saves if it writes `stay` tokens now.

        It first reads the `missed` tokens, in one step with its first one, and its last row is
        thrown away; then the large model reads what the small one wrote.
        """
        whole = int(stay)
        if stay > whole:  # which happens on average only
            part, ends = stay - whole, (whole, whole + 1)
            fewer, more = (self.saved_ms(tokens, missed, depth) for tokens in ends)
            return (1.0 - part) * fewer + part * more
        tokens = whole
        small = self.catch_up_ms(SMALL, missed, depth) + tokens * self.small.step_ms(1, depth)
        back = self.catch_up_ms(LARGE, tokens + 1, depth) - self.large.step_ms(1, depth)
        return tokens * self.large.step_ms(1, depth) - small - back
