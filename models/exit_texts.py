"""The target writes its own training text, many conversations at once, with what it knew of them.

Each conversation is a user turn and an answer. The user turn is sampled after the chat template's
user header, often from the first words of some task, at a temperature that makes turns differ;
half of the answers are greedy, half sampled. Beside each token written, the target's likeliest next
tokens and their logits are kept: what the early exit is trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgespec.models.exit_network import (
    Shape,
    Tensor,
    Weights,
    import_torch,
    rms_norm,
    rotations,
    run_block,
    shape_of,
)
from edgespec.models.spec import ModelSpec

LENGTH = 320  # most tokens of a text
TEACHER = 32  # tokens of the target's distribution that are kept
_CANDIDATES = 128  # that are sampled from
_USER_LENGTH = 80
_USER_TEMPERATURES = (1.0, 1.15, 1.3)
_ANSWER_TEMPERATURES = (0.0, 0.0, 0.7, 1.0)
_FIRST_TEMPERATURE = 2.0  # of a turn's first token, which decides most about it
_OPENED = 0.7  # of the turns begin with an opening
OPENINGS = (
    "Write a short story about", "Write a poem about", "Write an email to", "Compose a blog post",
    "Write a Python function that", "Write a function in C++", "Fix this code:", "Explain",
    "Explain to a child", "What is", "What are", "Why", "How do I", "How does", "Who was",
    "When did", "Where is", "Which", "Can you", "Give me a list of", "List", "Compare",
    "Summarize the following text:", "Summarize:", "Translate into German:",
    "Translate into English:", "Translate to French:", "Rewrite this sentence:",
    "Given the following context, answer the question. Context:", "Extract all names from:",
    "Solve:", "A train", "If a man has", "Calculate", "Let", "Describe", "Imagine you are",
    "Act as", "Tell me", "Discuss", "Analyze", "Evaluate the following", "Answer in JSON:",
    "Design", "Plan a", "Classify", "The", "I", "My", "In",
)  # fmt: skip

# Why a token stands in a text.
FORCED, USER, ANSWER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Text:
    """One conversation of T tokens; row t of the teacher's says what may follow token t.

    `kinds[t]` says why the token after token t stands there.
    """

    tokens: NDArray[np.int32]  # [T]
    kinds: NDArray[np.uint8]  # [T]
    teacher_ids: NDArray[np.int32]  # [T, TEACHER]
    teacher_logits: NDArray[np.float16]  # [T, TEACHER]


@dataclass(frozen=True, slots=True)
class Chat:
    """The fixed tokens of a conversation: before the user's words, and between them and the answer.

    `ends` are the tokens that end a turn.
    """

    before: Sequence[int]
    between: Sequence[int]
    ends: frozenset[int]
    openings: Sequence[Sequence[int]]


@dataclass(slots=True)
class _Row:
    """One conversation being written."""

    forced: list[int]
    phase: int
    user_temperature: float
    answer_temperature: float
    tokens: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logits: list[NDArray[np.float16]] = field(default_factory=list)
    written: int = 0  # tokens of this turn

    def text(self) -> Text:
        count = len(self.ids)
        return Text(
            np.array(self.tokens[:count], np.int32),
            np.array(self.kinds[1 : count + 1], np.uint8),
            np.stack(self.ids),
            np.stack(self.logits),
        )


class TextWriter:
    """Writes conversations with the target, `batch` at once, token by token."""

    def __init__(self, spec: ModelSpec, chat: Chat, *, batch: int, dtype: Any, seed: int) -> None:
        torch = self._torch = import_torch()
        self._shape = shape_of(spec)
        weights = Weights(spec, dtype)
        self._blocks = [weights.block(number) for number in range(spec.num_layers)]
        self._norm = weights.tensor("output_norm.weight")
        self._embedding = weights.embedding()
        self._head = self._embedding if spec.tied_embeddings else weights.head()
        shape = (spec.num_layers, 2, batch, self._shape.num_kv_heads, LENGTH)
        self._cache = torch.zeros((*shape, self._shape.head_length), dtype=dtype)
        self._chat = chat
        self._random = np.random.default_rng(seed)
        self._prompts: list[Sequence[int]] = []
        self._rows = [self._new_row() for _ in range(batch)]

    def answer_first(self, prompts: Sequence[Sequence[int]]) -> None:
        """Answer these user turns before writing others."""
        self._prompts = list(prompts)

    def write(self) -> Iterator[Text]:
        """Texts as they are finished, without end."""
        with self._torch.inference_mode():
            while True:
                yield from self._step()

    def _step(self) -> Iterator[Text]:
        for row in self._rows:
            if not row.tokens:
                self._append(row, row.forced.pop(0), FORCED)
        values, ids = self._logits().float().topk(_CANDIDATES)
        rows = zip(self._rows, values.numpy(), ids.numpy().astype(np.int32), strict=True)
        for number, (row, logits, candidates) in enumerate(rows):
            row.ids.append(candidates[:TEACHER])
            row.logits.append(logits[:TEACHER].astype(np.float16))
            if not self._advance(row, logits, candidates):
                yield row.text()
                self._rows[number] = self._new_row()

    def _advance(self, row: _Row, logits: Any, candidates: Any) -> bool:
        """Append the row's next token; whether the text goes on."""
        if row.forced:
            self._append(row, row.forced.pop(0), FORCED)
            return len(row.tokens) < LENGTH
        token = int(candidates[self._choice(row, logits)])
        ended = token in self._chat.ends
        if row.phase == USER and (ended or row.written >= _USER_LENGTH):
            row.forced, row.phase, row.written = list(self._chat.between), ANSWER, 0
            return self._advance(row, logits, candidates)
        self._append(row, token, row.phase)
        row.written += 1
        return not ended and len(row.tokens) < LENGTH

    def _choice(self, row: _Row, logits: NDArray[np.float32]) -> int:
        temperature = row.answer_temperature
        if row.phase == USER:
            temperature = row.user_temperature if row.written else _FIRST_TEMPERATURE
        if temperature == 0.0:
            return 0
        noise = self._random.gumbel(size=len(logits))  # the largest sum is a sample
        return int(np.argmax(logits / temperature + noise))

    @staticmethod
    def _append(row: _Row, token: int, kind: int) -> None:
        row.tokens.append(token)
        row.kinds.append(kind)

    def _new_row(self) -> _Row:
        chat, random = self._chat, self._random
        before, between = list(chat.before), list(chat.between)
        temperatures = (
            float(random.choice(_USER_TEMPERATURES)),
            float(random.choice(_ANSWER_TEMPERATURES)),
        )
        if self._prompts:
            prompt = list(self._prompts.pop(0))[: LENGTH // 2]
            return _Row([*before, *prompt, *between], ANSWER, *temperatures)
        opening: Sequence[int] = ()
        if chat.openings and random.random() < _OPENED:
            opening = chat.openings[int(random.integers(len(chat.openings)))]
        return _Row([*before, *opening], USER, *temperatures)

    def _logits(self) -> Tensor:
        """Logits after each row's last token, [B, V]; fills the cache."""
        torch, shape = self._torch, self._shape
        lengths = [len(row.tokens) for row in self._rows]
        positions = torch.tensor(lengths) - 1
        x = self._embedding[torch.tensor([row.tokens[-1] for row in self._rows])][:, None]
        angles = rotations(shape, positions[:, None])
        most = max(lengths)
        hidden = torch.arange(most)[None] > positions[:, None]
        mask = torch.zeros(hidden.shape, dtype=x.dtype).masked_fill(hidden, float("-inf"))
        everyone = torch.arange(len(lengths))
        for block, cache in zip(self._blocks, self._cache, strict=True):

            def attention(q: Tensor, k: Tensor, v: Tensor, cache: Tensor = cache) -> Tensor:
                cache[0, everyone, :, positions] = k[:, 0]
                cache[1, everyone, :, positions] = v[:, 0]
                return _attend(q, cache[:, :, :, :most], mask, shape)

            x = run_block(shape, block, x, angles, attention)
        x = rms_norm(x[:, 0], self._norm, shape.epsilon)
        return torch.nn.functional.linear(x, self._head)


def _attend(q: Tensor, cache: Tensor, mask: Tensor, shape: Shape) -> Tensor:
    """Attention of one token a row over its cache [2, B, kv heads, S, head_length]."""
    groups = shape.num_heads // shape.num_kv_heads
    grouped = q[:, 0].unflatten(1, (shape.num_kv_heads, groups))  # [B, kv heads, groups, length]
    attend = import_torch().nn.functional.scaled_dot_product_attention
    out = attend(grouped, cache[0], cache[1], attn_mask=mask[:, None, None])
    return out.flatten(1, 2)[:, None]


def save_texts(path: Path, texts: Sequence[Text], seconds: float) -> None:
    """Write texts to one file, which appears only when complete, and how long they took."""
    partial = path.with_suffix(".partial.npz")
    np.savez(
        partial,
        seconds=seconds,
        lengths=np.array([len(text.tokens) for text in texts], np.int32),
        tokens=np.concatenate([text.tokens for text in texts]),
        kinds=np.concatenate([text.kinds for text in texts]),
        teacher_ids=np.concatenate([text.teacher_ids for text in texts]),
        teacher_logits=np.concatenate([text.teacher_logits for text in texts]),
    )
    partial.replace(path)


def load_texts(folder: Path) -> list[Text]:
    """All texts of a folder, in the order in which they were written."""
    texts: list[Text] = []
    for path in sorted(folder.glob("texts-*.npz")):
        with np.load(path) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            names = ("tokens", "kinds", "teacher_ids", "teacher_logits")
            parts = [np.split(file[name], ends) for name in names]
        texts += [Text(*values) for values in zip(*parts, strict=True)]
    return texts


def seconds_written(folder: Path) -> float:
    """How long the texts of a folder took to write."""
    total = 0.0
    for path in folder.glob("texts-*.npz"):
        with np.load(path) as file:
            total += float(file["seconds"])
    return total


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
    number = len(list(folder.glob("texts-*.npz")))
    start, saved, tokens = monotonic(), 0.0, 0
    texts: list[Text] = []
    try:
        for count, text in enumerate(writer.write(), 1):
            texts.append(text)
            tokens += len(text.tokens)
            spent = monotonic() - start
            progress(min(1.0, spent / seconds), tokens)
            is_done = spent >= seconds and count >= at_least
            if len(texts) == per_file or is_done:
                save_texts(folder / f"texts-{number:05}.npz", texts, spent - saved)
                number, texts, saved = number + 1, [], spent
            if is_done:
                break
    except KeyboardInterrupt:
        if texts:
            spent = monotonic() - start
            save_texts(folder / f"texts-{number:05}.npz", texts, spent - saved)
        raise
    return tokens
