"""How many tokens of a prompt are read between two steps of running answers.

Both prices are measured as they are paid: what a step takes at the moment, and what reading a token
takes. Answers keep a set share of their speed while others' prompts are read.
"""

from __future__ import annotations

_RATE = 0.2  # of a new measurement
_FIRST = 8  # tokens of the first piece, whose price nobody knows


class Pace:
    """Sizes of pieces of prompts.

    Args:
        latency: most time that reading may take between two steps, in steps.
    """

    def __init__(self, latency: float = 1.0) -> None:
        self.latency = latency
        self._token_ms = 0.0  # 0: unknown
        self._step_ms = 0.0

    def piece(self, most: int) -> int:
        """Tokens to be read before the next step, from 1 to `most`."""
        if self._token_ms == 0.0 or self._step_ms == 0.0:
            return min(most, _FIRST)
        return max(1, min(most, int(self.latency * self._step_ms / self._token_ms)))

    def has_read(self, num_tokens: int, ms: float) -> None:
        """A piece took `ms`."""
        self._token_ms = _mixed(self._token_ms, ms / num_tokens)

    def has_stepped(self, ms: float) -> None:
        """A step of the running answers took `ms`."""
        self._step_ms = _mixed(self._step_ms, ms)


def _mixed(known_ms: float, ms: float) -> float:
    return ms if known_ms == 0.0 else known_ms + _RATE * (ms - known_ms)
