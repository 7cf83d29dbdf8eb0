"""The bound on texts: what is too long for any tokens, and when the vocabulary is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from edgespec.backends.vocabulary import TextBound
from edgespec.memory.bytes.requests import TOKEN_CHARS

NAMES = ["a", "\u2581", "x" * 40]
CONTEXT = 8


class Names:
    """A vocabulary of three tokens, which counts who asks."""

    vocab_size = len(NAMES)
    asked = 0

    def token_text(self, token: int) -> str:
        """The name of a token."""
        self.asked += 1
        return NAMES[token]


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u6f22"])
def test_texts_of_usual_length_do_not_look_at_the_vocabulary(character: str) -> None:
    """In any script: of 152,000 names that takes longer than a second."""
    vocabulary: Any = Names()
    bound = TextBound(vocabulary, CONTEXT)
    size = CONTEXT * TOKEN_CHARS // len(character.encode())
    assert bound.least_tokens(character * size) == 0
    assert bound.least_tokens(*[character] * size) == 0
    assert vocabulary.asked == 0


@pytest.mark.parametrize("character", ["a", "\u00e9", "\u6f22", "\U0001f600"])
def test_only_texts_of_more_bytes_than_the_longest_tokens_are_too_long(character: str) -> None:
    """As many as the context has."""
    vocabulary: Any = Names()
    bound = TextBound(vocabulary, CONTEXT)
    most = CONTEXT * len(NAMES[2]) // len(character.encode())
    assert bound.least_tokens(character * most) == 0
    assert bound.least_tokens(character * (most + 1)) == CONTEXT + 1
    assert bound.least_tokens(character * 10 * most) in range(10 * CONTEXT // 4, 10 * CONTEXT + 1)
    assert vocabulary.asked == len(NAMES)
