"""What a drafter is: something that proposes continuations with calibrated probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Proposal:
    """Candidate nodes below the root, most probable first.

    A node's probability is that of its whole path, so it never exceeds its parent's and the best
    n nodes always form a tree.
    """

    tokens: Sequence[int]  # [n]
    parents: Sequence[int]  # [n], index into this proposal; -1 is the root
    probabilities: Sequence[float]  # [n], non-increasing

    def __len__(self) -> int:
        return len(self.tokens)


EMPTY = Proposal((), (), ())


class Drafter(Protocol):
    """A source of candidate nodes."""

    @property
    def name(self) -> str: ...

    @property
    def nbytes(self) -> int:
        """Bytes its tables may take at most (a ceiling, allocated as they fill)."""

    def begin(self, tokens: Sequence[int]) -> None:
        """A new text starts with `tokens`, the prompt."""

    def extend(self, tokens: Sequence[int]) -> None:
        """`tokens` were emitted."""

    def propose(self, max_nodes: int, min_probability: float) -> Proposal:
        """Candidates for what comes after the text so far, at most `max_nodes`.

        Nodes below `min_probability` cannot pay and need not be proposed.
        """

    def observe(self, emitted: Sequence[int]) -> None:
        """`emitted` is what the target wrote after the last `propose`; count and extend."""

    def state(self) -> dict[str, Any]:
        """What should survive a restart (calibration), as a JSON document."""

    def load_state(self, document: dict[str, Any] | None) -> None:
        """Take over the state of an earlier run; anything unusable is ignored."""
