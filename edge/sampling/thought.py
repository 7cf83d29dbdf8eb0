"""Answers whose thoughts have an end: at the limit the closing tag is written for the model.

A model may think until the context is full, and then there is no answer at all. What is forced are
tokens of the answer like others: they are in the cache, count, and may be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgespec.backends.base import Logits
from edgespec.sampling.constrained import ConstrainedSampler
from edgespec.sampling.params import ThoughtLimit
from edgespec.sampling.sampling import Sampler

_MOST_UNFINISHED = 3  # tokens that may be needed until a character is complete
_MOST_BLANK = 256  # bytes of white space before a thought


class LimitedThought:
    """A sampler that closes the thought of an answer when its tokens are used up.

    Args:
        sampler: picks all tokens but the forced ones, which it is told of.
        end_ids: what is forced: the closing tag, with what stands around it.
        token_bytes: of a token.
    """

    def __init__(
        self,
        sampler: Sampler | ConstrainedSampler,
        limit: ThoughtLimit,
        end_ids: Sequence[int],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._sampler, self._limit = sampler, limit
        self._end_ids, self._token_bytes = list(end_ids), token_bytes
        self._is_thinking = limit.within
        self._is_over = False
        self._forced: list[int] = []  # still to be written, the next one last
        self._left = limit.max_tokens
        self._text = b""  # the last bytes, as many as a tag needs

    @property
    def seed(self) -> int:
        """Seed of the random numbers."""
        return self._sampler.seed

    def pick(self, logits_row: Logits) -> int:
        """The next token for logits [V], which is also recorded. Raises as the sampler."""
        if self._is_over and not self._forced:
            return self._sampler.pick(logits_row)
        if self._is_thinking and self._must_end():
            self._forced, self._is_over = self._end_ids[::-1], True
            self._is_thinking = False
        if self._forced:
            token = self._forced.pop()
            self._sampler.force(token)
            return token
        token = self._sampler.pick(logits_row)
        self._follow(token)
        return token

    def _must_end(self) -> bool:
        """Not within a character, unless it never gets complete."""
        return self._left <= 0 and (self._left < -_MOST_UNFINISHED or _is_whole(self._text))

    def _follow(self, token: int) -> None:
        """Find the tags in what the model writes."""
        opening, closing = self._limit.opening.encode(), self._limit.closing.encode()
        self._text += self._token_bytes(token)
        if self._is_thinking:
            self._left -= 1
            self._is_over = closing in self._text
            self._text = self._text[-len(closing) - 64 :]
            return
        start = self._text.lstrip()
        if start.startswith(opening):
            self._is_thinking, self._text = True, start[len(opening) :]
        elif not opening.startswith(start) or len(self._text) > _MOST_BLANK:
            self._is_over = True  # an answer without a thought


def _is_whole(text: bytes) -> bool:
    """Whether the last character of UTF-8 is complete."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte >= 0xC0:
            return back >= (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
        if byte < 0x80:
            return True
    return True
