"""How many tokens of prompts are read in a step of running answers.

Answers wait for what reading adds to their step, and keep a set share of their speed meanwhile.
Where several prompts wait, they keep less: small pieces would keep more people waiting, and longer,
than they keep others going, and once they are answered each step serves more of them.
What reading adds is read off a line: the milliseconds of the last steps by the tokens fed to each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_FURTHER = 0.5  # of what the first prompt may add, each further one that waits
_FIRST = 8  # tokens of the first piece, whose price nobody knows
_GROWTH = 2.0  # of a piece over the one before: nobody knows how far the line goes on
_PLAIN_EVERY = 16  # steps, of which one reads nothing: it says what a step takes now
_REMEMBERED = 48  # steps that read
_HICCUP = 3.0  # times as long as expected: something else computed


class Pace:
    """Sizes of pieces of prompts.

    Args:
        latency: most time that reading one prompt may add to a step, in steps.
        apart: pieces are read in runs of their own between the steps, and not in these.
    """

    def __init__(self, latency: float = 1.0, *, apart: bool = False) -> None:
        self.latency = latency
        self._apart = apart
        # Tokens and ms of steps that read, and of those that did not.
        self._reading: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._plain: deque[tuple[int, float]] = deque(maxlen=_PLAIN_EVERY)
        self._since_plain = 0
        self._last = 0  # tokens of the last piece
        self._known = 0.0, 0.0  # the line as it was when steps last differed

    def piece(self, num_nodes: int, most: int, waiting: int = 1) -> int:
        """Tokens of `waiting` prompts to be read with a step over so many nodes, at most `most`.

        0: with the next step.
        """
        if not self._plain or (self._since_plain >= _PLAIN_EVERY - 1 and not self._apart):
            return 0
        if not self._reading:
            return min(most, _FIRST)
        base_ms, token_ms = self._line()
        size = _GROWTH * self._last
        if token_ms > 0.0:
            latency = self.latency * (1.0 + _FURTHER * (waiting - 1))
            spare_ms = latency * (base_ms + token_ms * num_nodes) - base_ms * self._apart
            size = min(size, spare_ms / token_ms)
        return max(1, min(most, int(size)))

    def has_stepped(self, num_nodes: int, num_read: int, ms: float) -> None:
        """A step that answers waited for took `ms`, over so many nodes and what was read in it."""
        num_tokens = num_nodes + num_read
        if self._plain and self._reading:
            base_ms, token_ms = self._line()
            ms = min(ms, _HICCUP * (base_ms + max(0.0, token_ms) * num_tokens))
        if num_read:
            self._reading.append((num_tokens, ms))
            self._last = num_read
            self._since_plain += 1
        else:
            self._plain.append((num_tokens, ms))
            self._since_plain = 0

    def _line(self) -> tuple[float, float]:
        """Milliseconds of a step without tokens, and of each token."""
        self._known = _line_through([*self._plain, *self._reading]) or self._known
        return self._known


def _line_through(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Offset, not below zero, and slope of the line with the least squares of errors.

    None where all points lie at one place.
    """
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread < 1.0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    return max(0.0, mean_y - slope * mean_x), slope
