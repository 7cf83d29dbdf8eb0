"""Texts to measure a model with: written by the model itself, several at once, or from a file.

A model that is compared with its own source is best asked where the source would go, and such text
needs no download and no license. Turns of a user and answers are drawn from the model's own
distribution, in its chat format; what only the format dictates is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.quantize.context import EvalContext

LENGTH = 256  # tokens of a text
_SEQUENCES = 16  # written at once
_USER_LENGTH = 48
_OPENED = 0.7  # of the turns begin with an opening


@dataclass(frozen=True, slots=True)
class Chat:
    """The fixed tokens of a conversation: before the user's words, and between them and the answer.

    `ends` are the tokens that end a turn; `openings` are first words of a user's turn, `words` are
    tokens that are whole words; `tasks` stand before and after passages, which open turns are asked
    about.
    """

    before: Sequence[int]
    between: Sequence[int]
    ends: frozenset[int]
    openings: Sequence[Sequence[int]]
    words: Sequence[int] = ()
    tasks: Sequence[tuple[Sequence[int], Sequence[int]]] = ()


@dataclass(frozen=True, slots=True)
class CountedText:
    """T tokens; `counted[t]` says whether the prediction of token t + 1 is looked at."""

    tokens: NDArray[np.int32]  # [T]
    counted: NDArray[np.bool_]  # [T]


# Why a token stands in a text.
FORCED, USER, ANSWER = 0, 1, 2


@dataclass(slots=True)
class Row:
    """A text of at most `length` tokens that is being written.

    `forced` are tokens that come before the model's own, and why; of these the user's turn has at
    most `user_length`.
    """

    forced: list[tuple[int, int]]
    length: int
    user_length: int
    phase: int = USER
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)  # why each stands there
    written: int = 0  # tokens of this turn

    def append(self, token: int, kind: int) -> None:
        self.tokens.append(token)
        self.kinds.append(kind)

    def advance(self, pick: Callable[[], int], chat: Chat) -> bool:
        """Take the next token, the one picked unless another is forced; whether the text goes on.

        The format ends a user's turn, and not the token with which the model does.
        """
        if self.forced:
            self.append(*self.forced.pop(0))
            return len(self.tokens) < self.length
        token = pick()
        ended = token in chat.ends
        if self.phase == USER and (ended or self.written >= self.user_length):
            self.forced = [(one, FORCED) for one in chat.between]
            self.phase, self.written = ANSWER, 0
            return self.advance(pick, chat)
        self.append(token, self.phase)
        self.written += 1
        return not ended and len(self.tokens) < self.length


def write_texts(
    model: Path,
    chat: Chat,
    count: int,
    *,
    threads: int,
    seed: int,
    length: int = LENGTH,
    progress: Callable[[float], None] = lambda _part: None,
) -> list[CountedText]:
    """Let `model` write so many texts of at most `length` tokens, drawn at temperature 1."""
    random = np.random.default_rng(seed)
    sequences = min(_SEQUENCES, count)
    done: list[CountedText] = []
    with EvalContext(
        model, context_size=length, batch_size=sequences, threads=threads, sequences=sequences
    ) as context:
        rows = [_new_row(chat, length, random) for _ in range(sequences)]
        while len(done) < count:
            begun_part = sum(len(row.tokens) for row in rows) / length
            progress(min(1.0, (len(done) + begun_part) / count))
            numbers = list(range(sequences))
            places = [len(row.tokens) - 1 for row in rows]
            context.step([row.tokens[-1] for row in rows], places, numbers)
            drawn = _draw(context.rows(sequences), random)
            for number, row in enumerate(rows):
                if row.advance(partial(int, drawn[number]), chat):
                    continue
                drawn_ones = np.array(row.kinds) != FORCED
                if drawn_ones.sum() >= length // 8:  # a shorter one says little
                    counted = np.array([*drawn_ones[1:], False])
                    done.append(CountedText(np.array(row.tokens, np.int32), counted))
                rows[number] = _new_row(chat, length, random)
                context.remove(number, -1)
    return done[:count]


def _new_row(chat: Chat, length: int, random: np.random.Generator) -> Row:
    """A text with its first token."""
    forced = list(chat.before)
    if chat.openings and random.random() < _OPENED:
        forced += chat.openings[int(random.integers(len(chat.openings)))]
    row = Row([(token, FORCED) for token in forced], length, _USER_LENGTH)
    row.append(*row.forced.pop(0))
    return row


def _draw(logits: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.int64]:
    """A token of each row, [n], from the whole distribution."""
    sums = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1, dtype=np.float64)
    points = random.random(len(logits)) * sums[:, -1]
    places = [np.searchsorted(row, point) for row, point in zip(sums, points, strict=True)]
    drawn: NDArray[np.int64] = np.minimum(np.array(places), logits.shape[1] - 1)
    return drawn


def texts_of_tokens(
    parts: Sequence[Sequence[int]], start: Sequence[int], length: int = LENGTH
) -> list[CountedText]:
    """Texts of given tokens, cut into pieces that each begin with the tokens `start`."""
    texts = []
    room = length - len(start)
    for part in parts:
        for place in range(0, len(part), room):
            tokens = np.array([*start, *part[place : place + room]], np.int32)
            counted = np.ones(len(tokens), np.bool_)
            counted[-1] = False
            if len(tokens) >= 8:
                texts.append(CountedText(tokens, counted))
    return texts
