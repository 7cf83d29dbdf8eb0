"""What a plan says of switching: what was calibrated for the pair, and which use of it is faster.

Imports no inference library and no numpy, as the rest of planning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from edgespec.decode.generation import LARGE, SMALL, ModelTurn
from edgespec.errors import UnsupportedError
from edgespec.memory.store import cache
from edgespec.memory.times.curve import CostCurve
from edgespec.models.early_exit import read_exit
from edgespec.models.pairing import check_pair
from edgespec.models.spec import ModelSpec
from edgespec.switching.policy import MOST_TOKENS, SwitchPolicy

_KIND = "switching"
Curves: TypeAlias = Mapping[str, CostCurve]  # step times of the pair, by LARGE and SMALL


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
    try:
        return _read(document) if isinstance(document, dict) else None
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


def _read(document: dict[str, Any]) -> Calibrated:
    """Raises KeyError, IndexError, TypeError, ValueError or UnsupportedError for a damaged one."""
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


def _number(value: Any, most: int) -> float:
    if not 0 <= value <= most:
        raise ValueError(f"{value} is not between 0 and {most}")
    return float(value)


def _model(name: object) -> str:
    if name not in (LARGE, SMALL):
        raise ValueError(f"{name} is no model of a pair")
    return str(name)
