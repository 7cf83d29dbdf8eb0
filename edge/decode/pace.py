"""Chunked prefill: how many tokens of prompts are read in a step of running answers.

Answers wait for what reading adds to their step, and keep a set share of their speed meanwhile.
Where several prompts wait, they keep less: small chunks would keep more people waiting, and longer,
than they keep others going, and once they are answered each step serves more of them.
What a chunk adds says the curve of step times, with what stands before it.
"""

from __future__ import annotations

from bisect import bisect_left

from edgespec.memory.times.curve import Chunk, CostCurve

_FURTHER = 0.5  # of what the first prompt may add, each further one that waits
# Standard error of a plain step from which on one is made that reads nothing. A chunk is then off
# by a tenth of its step, which is as far as steps differ anyway.
_UNSURE = 0.1
_PLAIN_EVERY = 16  # steps at most, of which one reads nothing: what a chunk adds shows beside it


class Pace:
    """Sizes of chunks of prompts.

    Args:
        latency: most time that reading one prompt may add to a step, in steps.
        apart: chunks are read in runs of their own between the steps, and not in these.
        curve: step times of the model, where they were measured.
    """

    def __init__(
        self, latency: float = 1.0, *, apart: bool = False, curve: CostCurve | None = None
    ) -> None:
        self.latency = latency
        self._apart = apart
        self._curve = CostCurve.unmeasured() if curve is None else curve.together(1)
        self._since_plain = 0  # steps with chunks

    def piece(self, num_nodes: int, most: int, waiting: int = 1, depth: int = 0) -> int:
        """Tokens of `waiting` prompts to be read with a step over so many nodes, at most `most`.

        The first of them stands behind `depth` others of its text. 0: with the next step.
        """
        plain_ms, error = self._curve.t(num_nodes, 0)
        if error > _UNSURE or (self._since_plain >= _PLAIN_EVERY - 1 and not self._apart):
            return 0
        latency = self.latency * (1.0 + _FURTHER * (waiting - 1))

        def with_chunk_ms(tokens: int) -> float:
            return self._curve.t(0 if self._apart else num_nodes, 0, Chunk(tokens, depth))[0]

        most_ms = plain_ms * (latency + (not self._apart))
        return max(1, bisect_left(range(1, most + 1), most_ms, key=with_chunk_ms))

    def has_stepped(self, num_nodes: int, num_read: int, ms: float, depth: int = 0) -> None:
        """A step that answers waited for took `ms`, over so many nodes and what was read in it.

        That began behind `depth` tokens of its text.
        """
        if num_read:
            self._curve.observe_chunk(Chunk(num_read, depth), num_nodes, ms)
        else:
            self._curve.observe(num_nodes, 0, 0, ms)
        self._since_plain = self._since_plain + 1 if num_read else 0
