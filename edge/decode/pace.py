"""How many tokens of prompts are read in a step of running answers.

Answers wait for what reading adds to their step, and keep a set share of their speed meanwhile.
Where several prompts wait, they keep less: small pieces would keep more people waiting, and longer,
than they keep others going, and once they are answered each step serves more of them.
What a token of a prompt adds grows with what stands before it, so it is known by depth: the next
long prompt begins with small prices, and one that goes on from a long prefix with large ones.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_FURTHER = 0.5  # of what the first prompt may add, each further one that waits
_FIRST = 8  # tokens of the first piece, whose price nobody knows
_GROWTH = 2.0  # of a piece over the one before: nobody knows how far its price holds
# Part of a token by which a piece of few may be too large. Some of what it takes is the same for
# any number: a single token does not show how many more there is time for.
_CURIOUS, _FEW = 0.7, 4
_PLAIN_EVERY = 16  # steps, of which one reads nothing: it says what a step takes now
_PLAIN_STEPS = 8  # that say what one takes
_DEPTHS = 256  # tokens of a text whose prices are one
_RATE = 0.25  # of a piece in the price of its depth
_HICCUP = 3.0  # times as long as expected: something else computed
_LEAST = 0.05  # of a plain step: nobody expects less of a token


class Pace:
    """Sizes of pieces of prompts.

    Args:
        latency: most time that reading one prompt may add to a step, in steps.
        apart: pieces are read in runs of their own between the steps, and not in these.
    """

    def __init__(self, latency: float = 1.0, *, apart: bool = False) -> None:
        self.latency = latency
        self._apart = apart
        self._plain: deque[tuple[int, float]] = deque(maxlen=_PLAIN_STEPS)  # nodes and ms of each
        self._since_plain = 0
        self._last = 0  # tokens of the last piece
        self._prices: dict[int, float] = {}  # ms that a token adds, by what stands before it

    def piece(self, num_nodes: int, most: int, waiting: int = 1, depth: int = 0) -> int:
        """Tokens of `waiting` prompts to be read with a step over so many nodes, at most `most`.

        The first of them stands behind `depth` others of its text. 0: with the next step.
        """
        if not self._plain or (self._since_plain >= _PLAIN_EVERY - 1 and not self._apart):
            return 0
        if not self._prices:
            return min(most, _FIRST)
        size, token_ms = _GROWTH * self._last, self._token_ms(depth)
        if token_ms > 0.0:
            latency = self.latency * (1.0 + _FURTHER * (waiting - 1))
            fits = latency * self._plain_ms(num_nodes) / token_ms
            size = min(size, fits + _CURIOUS * (self._last < min(fits, _FEW)))
        return max(1, min(most, int(size)))

    def has_stepped(self, num_nodes: int, num_read: int, ms: float, depth: int = 0) -> None:
        """A step that answers waited for took `ms`, over so many nodes and what was read in it.

        That began behind `depth` tokens of its text.
        """
        if not num_read:
            if self._plain:
                ms = min(ms, _HICCUP * self._plain_ms(num_nodes))
            self._plain.append((num_nodes, ms))
            self._since_plain = 0
            return
        self._last = num_read
        self._since_plain += 1
        if self._plain:
            alone_ms = 0.0 if self._apart else self._plain_ms(num_nodes)
            self._learn(depth, max(0.0, ms - alone_ms) / num_read)

    def _learn(self, depth: int, token_ms: float) -> None:
        if self._prices:
            expected_ms = self._token_ms(depth)
            most_ms = _HICCUP * max(expected_ms, _LEAST * self._plain_ms(1))
            token_ms = expected_ms + _RATE * (min(token_ms, most_ms) - expected_ms)
        self._prices[depth // _DEPTHS] = token_ms

    def _token_ms(self, depth: int) -> float:
        """What a token there adds; as at the nearest depth that is known."""
        place = depth // _DEPTHS
        return self._prices[min(self._prices, key=lambda known: (abs(known - place), known))]

    def _plain_ms(self, num_nodes: int) -> float:
        """What a step that reads nothing takes; a node more is like a token that is read."""
        node_ms = self._prices[min(self._prices)] if self._prices and not self._apart else 0.0
        found = (ms + node_ms * (num_nodes - nodes) for nodes, ms in self._plain)
        return max(median(found), min(ms for _, ms in self._plain) / _HICCUP)
