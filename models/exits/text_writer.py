"""The target writes its own training text, many conversations at once, with what it knew of them.

Each conversation is a user turn and an answer. The user turn is sampled after the chat template's
user header, often from the first words of some task and a random word of the vocabulary, at a
temperature that makes turns differ; some begin with a task and passages from earlier answers, so
that long contexts occur. Most answers are greedy, some sampled. Beside each token, read or written,
the target's likeliest next tokens and their logits are kept: what a drafter is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exits.network import work_s
from edgespec.models.exits.openings import Chat
from edgespec.models.exits.training_texts import (
    ANSWER,
    FORCED,
    TEACHER,
    USER,
    TrainingText,
    is_held_out,
    save_training_texts,
    text_files,
)

LENGTH, LONG_LENGTH = 320, 960  # most tokens of a text, and of one with passages
LONG_PART = 0.2  # of the conversations have them
CANDIDATES = 64  # that are sampled from
_USER_LENGTH = 80
_USER_TEMPERATURES = (1.0, 1.15, 1.3)
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.0, 0.8)
_FIRST_TEMPERATURE = 2.0  # of a turn's first token, which decides most about it
_OPENED = 0.7  # of the turns begin with an opening
_WORDED = 0.6  # of the openings are followed by a random word
_PASSAGES, _PASSAGE_LENGTH = 512, 40  # that are kept to be read, and the least of one
_LEAST_DISTINCT = 0.6  # of a passage's pairs of tokens: greedy answers may go in circles
_ANSWER_ROOM = 280  # kept for the answer to a passage


@dataclass(slots=True)
class _Row:
    """One conversation being written; `forced` are the tokens to come and why."""

    forced: list[tuple[int, int]]
    phase: int
    length: int
    user_temperature: float = 1.0
    answer_temperature: float = 0.0
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logits: list[NDArray[np.float16]] = field(default_factory=list)
    states: dict[int, list[NDArray[np.uint16]]] = field(default_factory=dict)
    written: int = 0  # tokens of this turn

    def append(self, token: int, kind: int) -> None:
        self.tokens.append(token)
        self.kinds.append(kind)

    def note(self, seen: Seen, those: slice) -> None:
        """Keep what the model knew after those tokens."""
        self.ids.extend(seen.ids[those, :TEACHER])
        self.logits.extend(seen.logits[those, :TEACHER].astype(np.float16))
        for layer, states in seen.states.items():
            self.states.setdefault(layer, []).extend(states[those])

    def text(self) -> TrainingText:
        count = len(self.ids)
        return TrainingText(
            np.array(self.tokens[:count], np.int32),
            np.array(self.kinds[1 : count + 1], np.uint8),
            np.stack(self.ids),
            np.stack(self.logits),
            {layer: np.stack(rows[:count]) for layer, rows in self.states.items()},
        )


class Seen(NamedTuple):
    """What a model knew after each of n tokens."""

    ids: NDArray[np.int32]  # [n, CANDIDATES]: the likeliest next tokens, the best one first
    logits: NDArray[np.float32]  # [n, CANDIDATES]
    states: Mapping[int, NDArray[np.uint16]]  # [n, width] each, as TrainingText has them


class Target(Protocol):
    """The model: `places` texts of at most `length` tokens lie in it at once."""

    places: int
    length: int

    def begin(self, place: int, tokens: Sequence[int]) -> Seen:
        """Read the first tokens of a new text in a place."""

    def step(self, first: int, tokens: Sequence[int], positions: Sequence[int]) -> Seen:
        """Read one token more of each text in so many places from `first` on."""


class TextWriter:
    """Writes conversations with the target, one in each of its places, token by token."""

    def __init__(self, target: Target, chat: Chat, *, seed: int, written: int = 0) -> None:
        self._target, self._chat = target, chat
        self._written = written  # texts that there are already
        self._random = np.random.default_rng(seed)
        self._prompts: list[Sequence[int]] = []
        self._passages: list[Sequence[int]] = []
        # Those of one length take their steps together, as none should wait for longer ones.
        many = int(target.places * LONG_PART) if chat.tasks else 0
        parts = (
            (range(many), min(LONG_LENGTH, target.length)),
            (range(many, target.places), LENGTH),
        )
        self._lanes = [places for places, _ in parts if places]
        self._rows = [_Row([], USER, length) for places, length in parts for _ in places]

    def answer_first(self, prompts: Sequence[Sequence[int]]) -> None:
        """Answer these user turns before writing others."""
        self._prompts = list(prompts)

    def write(self) -> Iterator[TrainingText]:
        """Texts as they are finished, without end."""
        while True:
            for places in self._lanes:
                yield from self._step(places)

    def unfinished(self) -> list[TrainingText]:
        """Conversations whose answers have begun; without them long ones would be too few."""
        return [row.text() for row in self._rows if ANSWER in row.kinds[: len(row.ids)]]

    def _step(self, places: range) -> Iterator[TrainingText]:
        for place in places:
            if not self._rows[place].tokens:
                self._rows[place] = self._new_row(self._rows[place].length)
                self._read(place)
        rows = [self._rows[place] for place in places]
        last = [len(row.tokens) - 1 for row in rows]
        seen = self._target.step(places.start, [row.tokens[-1] for row in rows], last)
        for number, (place, row) in enumerate(zip(places, rows, strict=True)):
            row.note(seen, slice(number, number + 1))
            if not self._advance(row, seen.logits[number], seen.ids[number]):
                self._rows[place] = _Row([], USER, row.length)
                # What is held out from training must not come back as part of another text.
                if not is_held_out(self._written):
                    self._keep_passage(row)
                self._written += 1
                yield row.text()

    def _advance(self, row: _Row, logits: Any, candidates: Any) -> bool:
        """Append the row's next token; whether the text goes on."""
        if row.forced:
            row.append(*row.forced.pop(0))
            return len(row.tokens) < row.length
        token = int(candidates[self._choice(row, logits)])
        ended = token in self._chat.ends
        if row.phase == USER and (ended or row.written >= _USER_LENGTH):
            row.forced = [(token, FORCED) for token in self._chat.between]
            row.phase, row.written = ANSWER, 0
            return self._advance(row, logits, candidates)
        row.append(token, row.phase)
        row.written += 1
        return not ended and len(row.tokens) < row.length

    def _choice(self, row: _Row, logits: NDArray[np.float32]) -> int:
        temperature = row.answer_temperature
        if row.phase == USER:
            temperature = row.user_temperature if row.written else _FIRST_TEMPERATURE
        if temperature == 0.0:
            return 0
        noise = self._random.gumbel(size=len(logits))  # the largest sum is a sample
        return int(np.argmax(logits / temperature + noise))

    # -- what conversations begin with -----------------------------------------------------

    def _new_row(self, length: int) -> _Row:
        chat, random = self._chat, self._random
        before = [(token, FORCED) for token in chat.before]
        between = [(token, FORCED) for token in chat.between]
        user: list[int] = []
        is_open = True
        if self._prompts:
            user, is_open = self._prompt(length // 2), False
        elif length > LENGTH and self._passages:
            user, is_open = self._task(length - _ANSWER_ROOM)
        elif chat.openings and random.random() < _OPENED:
            user = list(chat.openings[int(random.integers(len(chat.openings)))])
            if chat.words and random.random() < _WORDED:
                user.append(chat.words[int(random.integers(len(chat.words)))])
        forced = [*before, *((token, USER) for token in user), *(() if is_open else between)]
        return _Row(
            forced,
            USER if is_open else ANSWER,
            length,
            user_temperature=float(random.choice(_USER_TEMPERATURES)),
            answer_temperature=float(random.choice(_ANSWER_TEMPERATURES)),
        )

    def _prompt(self, room: int) -> list[int]:
        """The next prompt of so many tokens at most; the next one's beginning if all are longer."""
        fits = (i for i, prompt in enumerate(self._prompts) if len(prompt) <= room)
        return list(self._prompts.pop(next(fits, 0)))[:room]

    def _task(self, room: int) -> tuple[list[int], bool]:
        """A task about some passages in so many tokens, and whether the user goes on after it."""
        random = self._random
        first, last = self._chat.tasks[int(random.integers(len(self._chat.tasks)))]
        room = int(random.uniform(0.2, 1.0) * room) - len(first) - len(last)
        passages: list[int] = []
        while len(passages) < room:
            passages += self._passages[int(random.integers(len(self._passages)))]
        return [*first, *passages[:room], *last], bool(last)

    def _keep_passage(self, row: _Row) -> None:
        """Remember an answer as a passage for others, unless it goes in circles."""
        answer = [t for t, kind in zip(row.tokens, row.kinds, strict=True) if kind == ANSWER]
        answer = [token for token in answer if token not in self._chat.ends]
        pairs = len(set(pairwise(answer)))
        if len(answer) < _PASSAGE_LENGTH or pairs < _LEAST_DISTINCT * len(answer):
            return
        if len(self._passages) < _PASSAGES:
            self._passages.append(answer)
        else:
            self._passages[int(self._random.integers(_PASSAGES))] = answer

    def _read(self, place: int) -> None:
        """Take in what a new row begins with, all but its last token at once."""
        row = self._rows[place]
        *known, last = row.forced
        row.forced = []
        for token, kind in known:
            row.append(token, kind)
        if known:
            row.note(self._target.begin(place, row.tokens), slice(None))
        row.append(*last)


def write_texts(
    writer: TextWriter,
    folder: Path,
    *,
    seconds: float,
    progress: Callable[[float, int], None],
    at_least: int = 64,
    per_file: int = 256,
) -> int:
    """Write for some time, and so many texts, into files of `folder`; returns the tokens.

    Ctrl-C keeps what is done.
    """
    folder.mkdir(parents=True, exist_ok=True)
    number = len(text_files(folder))
    start, saved, tokens = work_s(), 0.0, 0
    texts: list[TrainingText] = []
    try:
        for count, text in enumerate(writer.write(), 1):
            texts.append(text)
            tokens += len(text.tokens)
            spent = work_s() - start
            progress(min(1.0, spent / seconds), tokens)
            is_done = spent >= seconds and count >= at_least
            if is_done:
                texts += writer.unfinished()
            if len(texts) >= per_file or is_done:
                save_training_texts(folder / f"texts-{number:05}.npz", texts, spent - saved)
                number, texts, saved = number + 1, [], spent
            if is_done:
                break
    except KeyboardInterrupt:
        if texts:
            spent = work_s() - start
            save_training_texts(folder / f"texts-{number:05}.npz", texts, spent - saved)
        raise
    return tokens
