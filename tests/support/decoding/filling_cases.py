"""A vocabulary with tokens for filling in the middle."""

from __future__ import annotations

from decoding_cases import END, VOCAB

from edgespec.backends.base import FillTokens
from edgespec.testing import ByteTokenizer

PREFIX, SUFFIX, MIDDLE, REPOSITORY, FILE = 1, 2, 3, 4, 5  # control characters, as bytes


class Filling(ByteTokenizer):
    """A vocabulary with tokens for filling in the middle."""

    def __init__(self, *, with_files: bool = True) -> None:
        super().__init__(VOCAB, END)
        more = (REPOSITORY, FILE) if with_files else ()
        self._fill = FillTokens(PREFIX, SUFFIX, MIDDLE, *more)

    def fill_tokens(self) -> FillTokens | None:
        return self._fill
