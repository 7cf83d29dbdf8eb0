"""Who writes the next token: the one thing that the decode loop knows of several models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # commands ask for the names alone
    from edgespec.backends.base import Logits

LARGE, SMALL = "large", "small"  # their names
# A model and the tokens it wrote before the other one did: 0, if all it did was to be asked.
ModelTurn = tuple[str, int]


class Writers:
    """Who writes a text: one model, unless a subclass knows more."""

    writer = ""  # the one that is writing; empty where there is only one
    is_due = False  # another model writes the next token

    @property
    def goes_on(self) -> float:
        """Chance that it also writes the token after the next one: what a draft is worth there."""
        return 1.0

    @property
    def turns(self) -> Sequence[ModelTurn]:
        """Who wrote how many tokens, in order; the last one may have written more."""
        return ()

    def hands_over(self, row: Logits) -> bool:
        """Whether another model writes the token of this row.

        Told each row of the writer, in order, before its token is picked; a round ends there.
        """
        return False


ALONE = Writers()
