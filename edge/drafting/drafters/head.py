"""A head: the block of the target's own file that predicts one token more than the target.

It reads the target's own rows, so there is nothing to catch up with but what the target has read
since it drafted last. Else it writes ahead like a draft model, and is priced like one: by the time
of its own steps, with no draft at all as one of the choices in every round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Logits
from edgespec.drafting.constants import LONGEST, USUAL_PROMPT
from edgespec.drafting.drafters.model import WritingDrafter
from edgespec.drafting.drafters.model_text import DraftText
from edgespec.memory.times.curve import CostCurve


class Head(Protocol):
    """What drafts beside a backend that tells it all it reads.

    `reads_prompts` says whether it reads prompts as the backend does, or the last tokens of one
    when it drafts first. A step drafts `block` tokens, or one if that is 0.
    """

    reads_prompts: bool

    @property
    def token_ids(self) -> NDArray[np.int64] | None:
        """V' of the target's tokens, which rows of logits stand for; None: all of them."""

    @property
    def block(self) -> int:
        """Tokens that a step drafts; 0: one by one, each behind those before it."""

    @property
    def context_size(self) -> int:
        """Tokens there is room for."""

    @property
    def num_unread(self) -> int:
        """Tokens of the text that are fed before anything is drafted."""

    def begin(self, token: int) -> Logits:
        """Logits of what comes after `token`, which the backend has not read yet, [V']."""

    def go_on(self, token: int) -> Logits:
        """Logits of what comes after one token more, [V']; of a block no more than it has."""

    def memory_bytes(self) -> dict[str, int]:
        """Bytes the engine says it allocated, by component."""

    def close(self) -> None:
        """Free it; safe to call twice."""


class HeadText(DraftText):
    """The text as a head sees it: one that goes on and back with its model by itself."""

    backend: Head

    def __init__(self, head: Head) -> None:
        super().__init__(head)

    @property
    def can_be_read(self) -> bool:
        """Whether there is room for drafts behind it."""
        return len(self.tokens) + LONGEST <= self.backend.context_size

    @property
    def num_missing(self) -> int:
        """Tokens to be fed before anything can be drafted."""
        return self.backend.num_unread + 1

    def catch_up(self) -> Logits:
        """Logits after the last token, [V']."""
        return self.backend.begin(self.tokens[-1])

    def feed_draft(self, token: int) -> Logits:
        """Go on with a token that is not in the text yet; logits after it, [V']."""
        return self.backend.go_on(token)


class HeadDrafter(WritingDrafter):
    """Drafts with a text's head for a target of `vocab_size`; its steps take what `curve` says.

    `promised` as of `WritingDrafter`, where its file says so.
    """

    name = "head"
    _who, _component = "the head", "head"
    _text: HeadText

    def __init__(
        self,
        text: HeadText,
        curve: CostCurve,
        vocab_size: int,
        promised: Sequence[float] = (),
    ) -> None:
        super().__init__(curve, vocab_size, text.backend.token_ids, promised)
        self._text, self._block = text, text.backend.block
        text.backend.reads_prompts = False

    def can_read_prompts(self, *, pays: bool) -> None:
        """As of `Drafter`."""
        self._text.backend.reads_prompts = pays

    def reading_ms(self) -> float:
        """As of `Drafter`."""
        return self._read_ms(USUAL_PROMPT)
