"""One answer of two models: who writes, since when, and how sure it is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import numpy as np

from edgespec.backends.base import Logits
from edgespec.decode.stats import LARGE, SMALL, ModelTurn, Writers
from edgespec.switching.policy import SwitchPolicy

_STAY_RATE = 0.2
_FORGIVING_RATE = 0.02  # by token that the small model would have been asked for, had it paid
_NOTHING = -80.0  # of a log-probability: exp of it adds nothing to an entropy
_LEAST, _MOST = 1e-3, 1e30  # sums of exponentials that are exact enough


def entropy_nats(row: Logits) -> float:
    """Entropy of the softmax of logits [V], in nats; minus infinity is a token without a chance.

    Logits are not shifted by their largest first, which would read them once more, unless their
    exponentials do not fit. No BLAS: its threads would wait beside those of the next step.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(row)
        total = float(weights.sum())
        weights *= row
        weighted = float(weights.sum())
    if _LEAST < total < _MOST and math.isfinite(weighted):
        return max(0.0, math.log(total) - weighted / total)
    most = row.max()
    if not math.isfinite(most):  # nothing can be chosen, which is for the sampler to say
        return math.nan
    return entropy_nats(np.maximum(row - most, _NOTHING))


class Switch(Writers):
    """One answer under a policy: who writes, since when, and how sure.

    The small model begins, unless it would never pay. That both read the prompt is not priced.

    Args:
        saved_ms: as `SwitchPrices.saved_ms`; None makes every way down.
        depth: tokens of the prompt.
    """

    def __init__(
        self,
        policy: SwitchPolicy,
        saved_ms: Callable[[float, int, int], float] | None = None,
        depth: int = 0,
    ) -> None:
        self.is_due = False  # the other model writes next
        self._policy = policy
        self._saved_ms = saved_ms if policy.only_where_it_pays else None
        self._depth = depth
        self._stays = {SMALL: policy.expected_stay, LARGE: 1.0 + max(1, policy.min_stay)}  # tokens
        self._recent: deque[float] = deque(maxlen=policy.window)
        self._ended: list[ModelTurn] = []  # that have ended
        self._rows = 0  # tokens of this stay, with one that a row is there for
        self._least = 0  # of a stay; an answer may begin with either model
        self._chance: float | None = None  # of `goes_on`, when it was asked for in this stay
        self.writer = SMALL if policy.up_nats == math.inf else LARGE
        if 0.0 < policy.up_nats < math.inf and self._pays():
            self.writer = SMALL

    @property
    def turns(self) -> list[ModelTurn]:
        """Who wrote how many tokens so far, in order."""
        return [*self._ended, (self.writer, self._rows)]

    @property
    def is_settled(self) -> bool:
        """Whether the writer never hands over, whatever its entropies are."""
        policy = self._policy
        if self.writer == SMALL:
            return policy.up_nats == math.inf
        return policy.down_nats < 0.0 or policy.up_nats <= 0.0

    @property
    def looks(self) -> bool:
        """Whether the next entropy can matter: not if the mean of any decision leaves it out."""
        row = self._rows + (self.writer == LARGE)
        return row + self._policy.window > self._least

    @property
    def goes_on(self) -> float:
        """Chance that the writer also writes the token after the next one.

        By its stays so far, for as long as this one lasts.
        """
        if self._chance is None:
            self._chance = self._chance_to_go_on()
        return self._chance

    def _chance_to_go_on(self) -> float:
        if self.is_settled or (self.writer == LARGE and not self._pays()):
            return 1.0
        # A stay that may be of 0 tokens has a chance to end before its first one, too.
        may_be_none = self.writer == SMALL and self._policy.min_stay == 0
        return 1.0 - 1.0 / max(1.0, self._stays[self.writer] + may_be_none)

    def hands_over(self, row: Logits) -> bool:
        """As `sees`, of logits [V], whose entropy is computed only where it can matter."""
        if self.is_settled or self.is_due:
            return self.is_due
        return self.sees(entropy_nats(row) if self.looks else 0.0)

    def sees(self, nats: float) -> bool:
        """Whether the other model writes the next token, which has this entropy.

        To be told that of each token of the writer, in order, before it is picked; any number does
        where it `looks` at none.
        """
        if self.is_due:
            return True
        policy = self._policy
        self._recent.append(nats)
        mean = sum(self._recent) / len(self._recent)
        if self.writer == SMALL:
            self.is_due = mean >= policy.up_nats and self._rows >= self._least
            self._rows += not self.is_due
            return self.is_due
        self._rows += 1
        down = mean <= policy.down_nats and self._rows >= self._least
        self.is_due = down and self._pays()
        if down and not self.is_due:
            # A few short stays must not keep it from ever being asked again.
            missing = policy.expected_stay - self._stays[SMALL]
            self._stays[SMALL] += _FORGIVING_RATE * missing
        return False

    def change(self) -> None:
        """The other model goes on."""
        self._stays[self.writer] += _STAY_RATE * (self._rows - self._stays[self.writer])
        if self._rows or self._ended:  # who begins does so with a token
            self._ended.append((self.writer, self._rows))
        self._depth += self._rows
        self.writer = LARGE if self.writer == SMALL else SMALL
        self.is_due, self._rows, self._least = False, 0, self._policy.min_stay
        self._chance = None
        self._recent.clear()

    def leave_out_small(self) -> None:
        """The large model writes all that follows."""
        if self.writer == SMALL:
            self.change()
        self._policy = SwitchPolicy.always(LARGE)

    def _pays(self) -> bool:
        if self._saved_ms is None:
            return True
        return self._saved_ms(self._stays[SMALL], self._rows, self._depth + self._rows) > 0.0
