"""Pieces of a text that grows, and the tokens of one vocabulary for them.

In each round a draft model of another vocabulary reads in its own tokens what the target wrote.
Asking a tokenizer takes 12 us a word, and 75 us where llama.cpp's pre-tokenizer has no fast path.
So nothing is tokenized again before the last place that further text cannot move, pieces that come
again are looked up, and words of ASCII letters are joined here where that gives the same.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

from edgespec.backends.base import ListsTokens, Tokenizer

MOST_OPEN = 16  # tokens that are tokenized again where no word begins
MOST_PIECES = 4096  # that are kept; a word of prose takes some 100 bytes
# Tokens of a vocabulary whose words are joined here: listing 49,152 takes 40 ms of a load.
_MOST_LISTED = 1 << 16
_BETWEEN_PIECES = re.compile(
    rb"(?<=\S)(?= \S)|(?<=[A-Za-z])(?=[!-/:-@\[-`{-~\n])|(?<=\n)(?=[A-Za-z])"
)
# Words that all pre-tokenizers leave whole, and single letters and signs.
_LETTERS = re.compile(rb" ?[A-Z]?[a-z]+|[!-~\n]")
_SPACE, _SPACES = 0x20, frozenset(b" \t\n\r\f\v")
_BEHIND_LETTERS = frozenset(b"\n!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")


def begins_piece(before: bytes, piece: bytes) -> bool:
    """Whether a piece is tokenized for itself behind other bytes.

    So is a word with its space, a sign or a line break behind a letter, and a letter behind a line
    break, as pre-tokenizers have it.
    """
    first = piece[0]
    if first == _SPACE:
        return len(piece) > 1 and piece[1] not in _SPACES
    if first in _BEHIND_LETTERS:
        return before[-1:].isalpha()
    return before[-1:] == b"\n" and piece[:1].isalpha()


def complete(data: bytes) -> int:
    """How many bytes are whole characters, as far as the last one is concerned."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= needed else len(data) - back
    return len(data)


class Merges:
    """A vocabulary of byte pair encoding whose tokens are numbered in the order of its merges.

    The pair that is the token of the lowest number is joined first (as in tiktoken). 64 bits of a
    hash stand for the bytes of a token: 32 bytes a token in all.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        size = 1 << (2 * len(tokens)).bit_length()
        self._hashes, self._ids = array("q", bytes(8 * size)), array("i", bytes(4 * size))
        self._mask = mask = size - 1
        for token, piece in enumerate(tokens):
            if piece:
                found = hash(piece)
                place = found & mask
                while self._ids[place]:
                    place = (place + 1) & mask
                self._hashes[place], self._ids[place] = found, token + 1

    def find(self, piece: bytes) -> int:
        """The token with these bytes, or -1."""
        found, mask = hash(piece), self._mask
        place = found & mask
        while (token := self._ids[place]) and self._hashes[place] != found:
            place = (place + 1) & mask
        return token - 1

    def join(self, word: bytes) -> list[int]:
        """The tokens of a word."""
        find, parts = self.find, [word[place : place + 1] for place in range(len(word))]
        if (whole := find(word)) >= 0:
            return [whole]
        last = len(self._ids)  # behind all tokens

        def rank(place: int) -> int:
            found = find(parts[place] + parts[place + 1])
            return last if found < 0 else found

        ranks = list(map(rank, range(len(parts) - 1)))
        while ranks and (best := min(ranks)) < last:
            place = ranks.index(best)
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
            del ranks[place]
            for changed in range(max(0, place - 1), min(place + 1, len(ranks))):
                ranks[changed] = rank(changed)
        return list(map(find, parts))


class Pieces:
    """The tokens of pieces of a text, as they are behind other text.

    SentencePiece puts a space before a text: a line break keeps it away from a piece.

    Args:
        joins: words may be joined here, where that gives what the tokenizer gives.
    """

    def __init__(self, tokenizer: Tokenizer, *, joins: bool = False) -> None:
        self.tokenizer = tokenizer
        self._controls = tokenizer.control_texts
        self._known: dict[bytes, Sequence[int]] = {}
        first = self._encoded("a")
        self._adds_space = b"".join(map(tokenizer.token_bytes, first)) == b" a"
        self._line_break = self._encoded("\n") if self._adds_space else []
        self._merges = self._tried_merges() if joins and not self._adds_space else None

    def _tried_merges(self) -> Merges | None:
        """The vocabulary's merges, if words of it and of two of its tokens are joined alike."""
        if not isinstance(self.tokenizer, ListsTokens) or self.tokenizer.vocab_size > _MOST_LISTED:
            return None
        tokens = self.tokenizer.all_bytes()
        merges = Merges(tokens)
        # A thousand tokens of the vocabulary must be joined as the tokenizer does it.
        some = [one for one in tokens[:: len(tokens) // 1024 + 1] if _LETTERS.fullmatch(one)]
        begins = [one for one in some if one[:1] == b" "]
        goes_on = [one for one in some if one.islower() and one[:1] != b" "]
        words = begins + [a + b for a, b in zip(begins, goes_on, strict=False)]
        text = b"".join(words).decode()
        joined = [token for word in words for token in merges.join(word)]
        return merges if words and self._encoded(text) == joined else None

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(self._controls.mark(text), add_special=False)

    def tokens(self, piece: bytes) -> Sequence[int]:
        """Token ids of a piece; texts of control tokens in it are words.

        Raises UnicodeDecodeError for one that begins within a character.
        """
        found = self._known.get(piece)
        if found is None:
            words = _BETWEEN_PIECES.split(piece)
            if len(words) > 1:
                return [token for word in words for token in self.tokens(word)]
            if len(self._known) >= MOST_PIECES:
                self._known.clear()
            if self._merges is not None and _LETTERS.fullmatch(piece):
                found = self._merges.join(piece)
            else:
                found = self._look_up(piece.decode())
            self._known[piece] = found
        return found

    def _look_up(self, piece: str) -> Sequence[int]:
        if not self._adds_space:
            return self._encoded(piece)
        ids, skipped = self._encoded("\n" + piece), len(self._line_break)
        if ids[:skipped] == self._line_break:
            return ids[skipped:]
        return self._encoded(piece.removeprefix(" "))

    def open_part(self, tokens: Sequence[int]) -> tuple[int, bytes]:
        """Where the part begins that more text may change, and its bytes.

        That is the last word. A control token ends it, too.
        """
        token_bytes, found = self.tokenizer.token_bytes, b""
        for start in range(len(tokens) - 1, max(-1, len(tokens) - 1 - MOST_OPEN), -1):
            piece = token_bytes(tokens[start]) if tokens[start] >= 0 else b""
            if not piece or (found and begins_piece(piece, found)):
                return start + 1, found
            found = piece + found
            if piece[0] == _SPACE and begins_piece(b"", piece):
                return start, found
        return len(tokens), b""  # no word begins in it: what comes is taken for itself
