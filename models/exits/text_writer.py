"""The target writes its own training text, many conversations at once, with what it knew of them.

Each conversation is a user turn and an answer. The user turn is sampled after the chat template's
user header, often from the first words of some task and a random word of the vocabulary, at a
temperature that makes turns differ; some begin with a task and passages from earlier answers, so
that long contexts occur. Most answers are greedy, some sampled. Beside each token, read or written,
the target's likeliest next tokens and their logits are kept: what a drafter is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exits.network import (
    Block,
    Hyperparameters,
    Tensor,
    Weights,
    causal_attention,
    hyperparameters_of,
    import_torch,
    rms_norm,
    rotations,
    run_block,
    work_s,
)
from edgespec.models.exits.openings import Chat
from edgespec.models.exits.target_states import bits_of
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
from edgespec.models.spec import ModelSpec

LENGTH, LONG_LENGTH = 320, 960  # most tokens of a text, and of one with passages
LONG_PART = 0.2  # of the conversations have them
_CANDIDATES = 128  # that are sampled from
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

    def text(self) -> TrainingText:
        count = len(self.ids)
        return TrainingText(
            np.array(self.tokens[:count], np.int32),
            np.array(self.kinds[1 : count + 1], np.uint8),
            np.stack(self.ids),
            np.stack(self.logits),
            {layer: np.stack(rows[:count]) for layer, rows in self.states.items()},
        )


@dataclass(slots=True)
class _Lane:
    """Rows of one longest length and their cache [layers, 2, rows, kv heads, length, values]."""

    rows: slice
    length: int
    cache: Tensor


class _Network(NamedTuple):
    """The target's weights."""

    hyperparameters: Hyperparameters
    blocks: Sequence[Block]
    norm: Tensor  # [width]
    embedding: Tensor  # [V, width]
    head: Tensor  # [V, width]


def _network_of(spec: ModelSpec, dtype: Any) -> _Network:
    weights = Weights(spec, dtype)
    embedding = weights.embedding()
    return _Network(
        hyperparameters_of(spec),
        [weights.block(number) for number in range(spec.num_layers)],
        weights.tensor("output_norm.weight"),
        embedding,
        embedding if spec.tied_embeddings else weights.head(),
    )


class TextWriter:
    """Writes conversations with the target, `batch` at once, token by token."""

    def __init__(
        self,
        spec: ModelSpec,
        chat: Chat,
        *,
        batch: int,
        dtype: Any,
        seed: int,
        written: int = 0,  # texts that there are already
        layers: Sequence[int] = (),  # after so many blocks, states are kept
    ) -> None:
        self._written, self._layers = written, layers
        torch = self._torch = import_torch()
        self._network = _network_of(spec, dtype)
        self._chat = chat
        self._random = np.random.default_rng(seed)
        self._prompts: list[Sequence[int]] = []
        self._passages: list[Sequence[int]] = []
        many = int(batch * LONG_PART) if chat.tasks else 0
        self._lanes = [
            _Lane(rows, length, torch.zeros(self._cache_shape(rows, length), dtype=dtype))
            for rows, length in ((slice(0, many), LONG_LENGTH), (slice(many, batch), LENGTH))
            if rows.stop > rows.start
        ]
        self._rows = [
            _Row([], USER, lane.length)
            for lane in self._lanes
            for _ in range(lane.rows.start, lane.rows.stop)
        ]

    def _cache_shape(self, rows: slice, length: int) -> tuple[int, ...]:
        shape = self._network.hyperparameters
        lane = (2, rows.stop - rows.start, shape.num_kv_heads, length, shape.head_length)
        return (len(self._network.blocks), *lane)

    def answer_first(self, prompts: Sequence[Sequence[int]]) -> None:
        """Answer these user turns before writing others."""
        self._prompts = list(prompts)

    def write(self) -> Iterator[TrainingText]:
        """Texts as they are finished, without end."""
        with self._torch.inference_mode():
            while True:
                yield from self._step()

    def unfinished(self) -> list[TrainingText]:
        """Conversations whose answers have begun; without them long ones would be too few."""
        return [row.text() for row in self._rows if ANSWER in row.kinds[: len(row.ids)]]

    def _step(self) -> Iterator[TrainingText]:
        for number, row in enumerate(self._rows):
            if not row.tokens:
                self._rows[number] = self._new_row(row.length)
                self._read(number)
        values, ids = _best(self._logits(), _CANDIDATES)
        for number, (row, logits, candidates) in enumerate(
            zip(self._rows, values, ids, strict=True)
        ):
            _note(row, logits, candidates)
            if not self._advance(row, logits, candidates):
                self._rows[number] = _Row([], USER, row.length)
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

    # -- the network -----------------------------------------------------------------------

    def _read(self, number: int) -> None:
        """Take in what a new row begins with, all but its last token at once."""
        row, network = self._rows[number], self._network
        *known, last = row.forced
        row.forced = []
        for token, kind in known:
            row.append(token, kind)
        if known:
            lane = next(lane for lane in self._lanes if number < lane.rows.stop)
            place = number - lane.rows.start
            x = network.embedding[self._torch.tensor([row.tokens])]
            angles = rotations(network.hyperparameters, self._torch.arange(x.shape[1])[None])
            for layer, (block, cache) in enumerate(zip(network.blocks, lane.cache, strict=True)):
                if layer in self._layers:
                    row.states.setdefault(layer, []).extend(bits_of(x[0]))

                def attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor = cache) -> Tensor:
                    cache[0, place, :, : k.shape[1]] = k[0].transpose(0, 1)
                    cache[1, place, :, : k.shape[1]] = v[0].transpose(0, 1)
                    return causal_attention(q, k, v)

                x = run_block(network.hyperparameters, block, x, angles, attention)
            for logits, candidates in zip(*_best(self._project(x[0]), TEACHER), strict=True):
                _note(row, logits, candidates)
        row.append(*last)

    def _logits(self) -> Tensor:
        """Logits after each row's last token, [B, V]; fills the caches."""
        torch, network = self._torch, self._network
        positions = torch.tensor([len(row.tokens) for row in self._rows]) - 1
        x = network.embedding[torch.tensor([row.tokens[-1] for row in self._rows])][:, None]
        angles = rotations(network.hyperparameters, positions[:, None])
        masks = [_mask(positions[lane.rows], lane.length, x.dtype) for lane in self._lanes]
        for number, block in enumerate(network.blocks):
            if number in self._layers:
                for row, state in zip(self._rows, bits_of(x[:, 0]), strict=True):
                    row.states.setdefault(number, []).append(state)

            def attention(q: Tensor, k: Tensor, v: Tensor, number: int = number) -> Tensor:
                mixed = []
                for lane, mask in zip(self._lanes, masks, strict=True):
                    rows, cache = lane.rows, lane.cache[number]
                    everyone = torch.arange(rows.stop - rows.start)
                    cache[0, everyone, :, positions[rows]] = k[rows, 0]
                    cache[1, everyone, :, positions[rows]] = v[rows, 0]
                    mixed.append(_attend(q[rows], cache, mask, network.hyperparameters))
                return torch.cat(mixed)

            x = run_block(network.hyperparameters, block, x, angles, attention)
        return self._project(x[:, 0])

    def _project(self, x: Tensor) -> Tensor:
        x = rms_norm(x, self._network.norm, self._network.hyperparameters.epsilon)
        return self._torch.nn.functional.linear(x, self._network.head)


def _best(logits: Tensor, count: int) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
    """The largest logits of each row and their tokens, both [n, count]."""
    values, ids = logits.float().topk(count)
    return values.numpy(), ids.numpy().astype(np.int32)


def _note(row: _Row, logits: NDArray[np.float32], candidates: NDArray[np.int32]) -> None:
    row.ids.append(candidates[:TEACHER])
    row.logits.append(logits[:TEACHER].astype(np.float16))


def _mask(positions: Tensor, length: int, dtype: Any) -> Tensor:
    """What each row may attend to, [B, S]: 0 up to its position, -inf after it."""
    torch = import_torch()
    hidden = torch.arange(length)[None] > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, float("-inf"))


def _attend(q: Tensor, cache: Tensor, mask: Tensor, shape: Hyperparameters) -> Tensor:
    """Attention of one token a row over its cache [2, B, kv heads, S, head_length]."""
    groups = shape.num_heads // shape.num_kv_heads
    grouped = q[:, 0].unflatten(1, (shape.num_kv_heads, groups))  # [B, kv heads, groups, length]
    # Written out: the library's fused attention takes twice as long for so few queries. The keys
    # stand first, rows and heads are one axis and the caches are read to their end, because they
    # would be copied otherwise.
    keys, values = cache.flatten(1, 2)
    scores = (keys @ grouped.flatten(0, 1).transpose(1, 2)).transpose(1, 2)
    scores = scores.unflatten(0, grouped.shape[:2]).float() * shape.head_length**-0.5
    shares = (scores + mask[:, None, None]).softmax(-1).to(q.dtype)
    return (shares.flatten(0, 1) @ values).view(len(q), 1, shape.num_heads, shape.head_length)


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
