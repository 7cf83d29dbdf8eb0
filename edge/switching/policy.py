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
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from edgespec.decode.generation import LARGE
from edgespec.errors import UnsupportedError

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
