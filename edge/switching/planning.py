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
from the distribution of the model that writes it, and drafts change nothing.

Also what a plan says of it: what was calibrated for the pair, and which use of it is faster. Pure:
no model inside, no inference library and no numpy.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from edgespec.decode.generation import LARGE, SMALL, ModelTurn
from edgespec.errors import UnsupportedError
from edgespec.memory.store import cache
from edgespec.memory.times import CostCurve
from edgespec.models.early_exit import read_exit
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec

_KIND = "switching"
MOST_TOKENS = 1 << 30  # of a text
Curves: TypeAlias = Mapping[str, CostCurve]  # step times of the pair, by LARGE and SMALL


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
    """

    up_nats: float = 0.7
    down_nats: float = 0.3
    window: int = 1
    min_stay: int = 0

    def __post_init__(self) -> None:
        if not (self.up_nats > -math.inf and self.down_nats > -math.inf):
            raise UnsupportedError("an entropy threshold must be a number of nats")
        for name, value, least in (("window", self.window, 1), ("min_stay", self.min_stay, 0)):
            if not isinstance(value, int) or value < least:
                raise UnsupportedError(f"{name} must be at least {least} tokens, got {value}")
        if max(self.window, self.min_stay) > MOST_TOKENS:
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
        return cls(**values)

    @classmethod
    def always(cls, model: str) -> SwitchPolicy:
        """One model, `LARGE` or `SMALL`, writes everything."""
        up = 0.0 if model == LARGE else math.inf
        return cls(up_nats=up, down_nats=-1.0 if model == LARGE else math.inf)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What `edgespec profile --switch` found out about a pair.

    `turns` are those of the texts that the policy was found with. `drafted[k - 1]` is how many of k
    tokens that the small model drafts the large one would accept.
    """

    policy: SwitchPolicy
    large_share: float
    quality: float
    turns: Sequence[Sequence[ModelTurn]]
    drafted: Sequence[float]

    @property
    def num_tokens(self) -> int:
        """Tokens of all texts but the first ones, whose time is the prompt's."""
        return sum(tokens for turns in self.turns for _, tokens in turns) - len(self.turns)

    def switching_tokens_per_s(self, curves: Curves, depth: int) -> float:
        """Predicted speed of the models in turns; prompts were read by both before."""
        spent = sum(turns_ms(turns, curves, depth) for turns in self.turns)
        return 1e3 * self.num_tokens / spent if spent else 0.0

    def drafting_tokens_per_s(self, curves: Curves, depth: int) -> float:
        """Predicted speed of the lossless use: the small model drafts, the large one verifies."""
        large, small_ms = curves[LARGE], curves[SMALL].step_ms(1, depth)
        rates = [1.0 / large.step_ms(1, depth)]
        for drafted, accepted in enumerate(self.drafted, 1):
            if drafted + 1 <= large.max_nodes:
                verified_ms = large.estimated_ms(drafted + 1, depth)
                rates.append((1.0 + accepted) / (drafted * small_ms + verified_ms))
        return 1e3 * max(rates)


def turns_ms(turns: Sequence[ModelTurn], curves: Curves, depth: int) -> float:
    """Time of decoding in these turns without drafts, behind the first token and `depth` others.

    The model that takes over reads what the other one has written, which gives its first token.
    """
    spent, missed = 0.0, 0
    for number, (model, tokens) in enumerate(turns):
        curve = curves[model]
        if number:
            # Its own last token was never fed to the large model; to the small one it was.
            spent += curve.read_ms(missed + (model == LARGE), depth)
        spent += (tokens - 1) * curve.step_ms(1, depth + tokens // 2)
        if model == SMALL and number + 1 < len(turns):  # its last row is thrown away
            spent += curve.step_ms(1, depth + tokens)
        missed, depth = tokens, depth + tokens
    return spent


def check_switch(spec: ModelSpec, small: ModelSpec) -> None:
    """Raise UnsupportedError unless `small` can take turns with the model of `spec`."""
    check_pair(spec, small)
    if read_exit(small) is not None:
        raise UnsupportedError(
            f"{small.path.name} is an early exit: it drafts and does not write on its own",
            hint="use it with --draft-model, or switch to a smaller model",
        )


def stored_switch(spec: ModelSpec, small: ModelSpec) -> Calibrated | None:
    """What was calibrated for a pair, or None."""
    return read_calibrated(cache.load(_KIND, _key(spec, small)))


def read_calibrated(document: object) -> Calibrated | None:
    """What `keep_switch` kept; None of anything else."""
    if not isinstance(document, dict):
        return None
    try:
        turns = [[(_model(model), tokens) for model, tokens in text] for text in document["turns"]]
        for text in turns:
            if not all(isinstance(tokens, int) for _, tokens in text):
                raise ValueError("a part of a token")
            # Only between others is the small model asked in vain.
            if min(text[0][1], text[-1][1], *(n for model, n in text if model == LARGE)) < 1:
                raise ValueError("a turn without tokens")
            if not all(0 <= tokens <= MOST_TOKENS for _, tokens in text):
                raise ValueError("fewer than no tokens, or more than any text has")
        return Calibrated(
            SwitchPolicy.from_json(document["policy"]),
            _number(document["large_share"], 1),
            _number(document["quality"], 1),
            turns,
            [_number(accepted, drafted) for drafted, accepted in enumerate(document["drafted"], 1)],
        )
    except (KeyError, IndexError, TypeError, ValueError, UnsupportedError):
        return None


def keep_switch(spec: ModelSpec, small: ModelSpec, found: Calibrated) -> None:
    """Remember it for the pair."""
    document = {**asdict(found), "policy": found.policy.as_json()}
    cache.store(_KIND, _key(spec, small), document)


def switch_reason(
    found: Calibrated | None, curves: Curves, depth: int, alone: float
) -> tuple[str, float]:
    """Why and at what cost, in words, and the tokens/s to expect.

    Args:
        curves: of the pair on this device.
        alone: predicted tokens/s of the large model with its own drafts.
    """
    if found is None:
        return "as asked; lossy; not calibrated: edgespec profile MODEL --switch SMALL", alone
    level = curves[LARGE].level  # as `alone` has it
    switching = found.switching_tokens_per_s(curves, depth) / level
    drafting = max(alone, found.drafting_tokens_per_s(curves, depth) / level)
    faster = "switching" if switching > drafting else "drafting"
    return (
        f"as asked; lossy: the large model writes {found.large_share:.0%} of the tokens, which "
        f"removes {found.quality:.0%} of the disagreement; {switching:.1f} tokens/s predicted, "
        f"{drafting:.1f} if the pair drafts, which is lossless: {faster} is faster"
    ), switching


def _key(spec: ModelSpec, small: ModelSpec) -> str:
    return f"{spec.fingerprint} | {small.fingerprint}"


def _number(value: Any, most: int) -> float:
    if not 0 <= value <= most:
        raise ValueError(f"{value} is not between 0 and {most}")
    return float(value)


def _model(name: object) -> str:
    if name not in (LARGE, SMALL):
        raise ValueError(f"{name} is no model of a pair")
    return str(name)
