"""Texts to measure a model with: written by the model itself, several at once, or from a file.

A model that is compared with its own source is best asked where the source would go, and such text
needs no download and no license. Turns of a user and answers are drawn from the model's own
distribution, in its chat format; what only the format dictates is not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.progress import TimeLimit
from edgespec.quantize.context import EvalContext

LENGTH = 256  # tokens of a text
_SEQUENCES = 16  # written at once
_USER_LENGTH = 48
_LEAST_COUNTED = 8  # tokens of a text that time cut short
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


@dataclass(slots=True)
class _Row:
    """A text being written; `forced` tokens come before the model's own."""

    forced: list[int]
    tokens: list[int] = field(default_factory=list)
    counted: list[bool] = field(default_factory=list)
    is_answer: bool = False
    written: int = 0  # tokens of this turn

    def append(self, token: int, chat: Chat) -> bool:
        """Take the next token, `token` unless another is forced; whether the text goes on."""
        self.counted.append(not self.forced)
        if self.forced:
            self.tokens.append(self.forced.pop(0))
            return True
        self.written += 1
        ended = token in chat.ends
        if not self.is_answer and (ended or self.written > _USER_LENGTH):
            self.counted[-1] = False
            self.forced, self.is_answer = list(chat.between), True
            self.tokens.append(self.forced.pop(0) if self.forced else token)
            return True
        self.tokens.append(token)
        return not ended


def write_texts(
    model: Path,
    chat: Chat,
    count: int,
    *,
    threads: int,
    seed: int,
    length: int = LENGTH,
    limit: TimeLimit | None = None,
    progress: Callable[[float], None] = lambda _part: None,
) -> list[CountedText]:
    """Let `model` write so many texts of at most `length` tokens, drawn at temperature 1.

    When time is over, what it has written by then: fewer texts, the last ones shorter.
    """
    random = np.random.default_rng(seed)
    sequences = min(_SEQUENCES, count)
    done: list[CountedText] = []
    with EvalContext(
        model, context_size=length, batch_size=sequences, threads=threads, sequences=sequences
    ) as context:
        rows = [_new_row(chat, random) for _ in range(sequences)]
        for row in rows:
            row.append(0, chat)
        while len(done) < count:
            if limit and limit.left() <= 0:
                begun = [row for row in rows if sum(row.counted) >= _LEAST_COUNTED]
                if done or begun:
                    done += map(_text_of, begun)
                    break
            begun_part = sum(len(row.tokens) for row in rows) / length
            progress(min(1.0, (len(done) + begun_part) / count))
            numbers = list(range(sequences))
            places = [len(row.tokens) - 1 for row in rows]
            context.step([row.tokens[-1] for row in rows], places, numbers)
            drawn = _draw(context.rows(sequences), random)
            for number, row in enumerate(rows):
                if row.append(int(drawn[number]), chat) and len(row.tokens) < length:
                    continue
                if sum(row.counted) >= length // 8:  # a shorter one says little
                    done.append(_text_of(row))
                rows[number] = _new_row(chat, random)
                rows[number].append(0, chat)
                context.forget(number)
    return done[:count]


def _new_row(chat: Chat, random: np.random.Generator) -> _Row:
    forced = list(chat.before)
    if chat.openings and random.random() < _OPENED:
        forced += chat.openings[int(random.integers(len(chat.openings)))]
    return _Row(forced)


def _text_of(row: _Row) -> CountedText:
    counted = np.array([*row.counted[1:], False])
    return CountedText(np.array(row.tokens, np.int32), counted)


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
