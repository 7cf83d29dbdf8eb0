"""The text that a drafter is trained on: the target writes it, many conversations at once.

Each conversation is a user turn and an answer. The user turn is sampled after the chat template's
user header, often from the first words of some task and a random word of the vocabulary, at a
temperature that makes turns differ; some begin with a task and passages from earlier answers, so
that long contexts occur. Most answers are greedy, some sampled. Beside each token, read or written,
the target's likeliest next tokens and their logits are kept: what a drafter is trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgespec.backends.base import Tokenizer
from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext
from edgespec.backends.llama.hidden_rows import LayerRows, Rows
from edgespec.backends.llama.tokenizer import open_tokenizer
from edgespec.errors import DoesNotFitError, ModelFileError, UnsupportedError
from edgespec.exits.target import import_torch
from edgespec.memory.bytes.config import RunConfig
from edgespec.memory.device import host
from edgespec.models.chat import render_chat
from edgespec.models.heads import layers_to_read
from edgespec.models.spec import ModelSpec
from edgespec.models.writing import whole_file
from edgespec.paths import read_text
from edgespec.progress import Progress
from edgespec.quantize.texts import ANSWER, FORCED, USER, Chat, Row

OPENINGS = (
    "Write a short story about", "Write a poem about", "Write an email to", "Compose a blog post",
    "Write an article about", "Write a news report about", "Write a paragraph about",
    "Write a Python function that", "Write a function in C++", "Fix this code:", "Explain",
    "Explain to a child", "What is", "What is the", "What are", "What was", "Why", "Why is",
    "How do I", "How does", "How many", "How much", "Who was", "Who is the", "Who wrote",
    "When did", "When was the", "Where is", "Where was", "Which", "Can you", "Give me a list of",
    "List", "Compare", "Summarize the following text:", "Summarize:", "Translate into German:",
    "Translate into English:", "Translate to French:", "Translate German to English: Die",
    "Translate German to English: Der", "Translate German to English: Ich",
    "Translate German to English: Wir haben", "Translate from German: Es ist",
    "Translate from Spanish: El", "Translate from French: Le", "Rewrite this sentence:",
    "Given the following context, answer the question. Context:", "Extract all names from:",
    "Solve:", "A train", "A shop sells", "A farmer has", "John has", "Mary buys", "There are",
    "If a man has", "Tom and his sister", "Every day,", "Calculate", "Let", "Find the",
    "Describe", "Imagine you are", "Act as", "Pretend to be", "Tell me", "Discuss", "Analyze",
    "Evaluate the following", "Answer in JSON:", "Design", "Plan a", "Classify", "The", "I",
    "My", "In",
)  # fmt: skip
# Before and after passages; where the end is open, the turn goes on.
PASSAGE_TASKS = (
    ("Summarize: ", ""), ("Summarize the following text in two sentences:\n", ""),
    ("Write a short summary of this article:\n\n", ""), ("", "\n\nSummarize the text above."),
    ("", "\nTL;DR"), ("What is the main idea of this text?\n", ""),
    ("Answer the question from the context.\nContext: ", "\nQuestion:"),
    ("Context:\n", "\n\nUsing only the context, answer:"),
    ("Use these notes to answer the question below.\n\n", "\n\nQ:"),
    ("Read this: ", "\nNow tell me"), ("", "\n\nWhat"), ("", "\n\nWho"), ("", "\n\nWhy"),
    ("Translate into German: ", ""), ("Rewrite this in simple words: ", ""),
    ("Correct the grammar:\n", ""), ("Continue: ", ""), ("List the key points of\n", ""),
    ("Extract all names and dates from the text: ", ""),
)  # fmt: skip
_MARK = "\u2402user\u2402"  # in place of the user's words

_SHORTEST_WORD = 4
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
TEACHER = 32  # tokens of the target's distribution that are kept
_HELD_OUT = 20  # every so many-th text is never trained on
_ARRAYS = ("tokens", "kinds", "teacher_ids", "teacher_logits")  # of a text, that are in its file
_MOST_AT_ONCE = 128  # tokens, or as many as there are places
_F16 = 2  # bytes
_PLACES, _LEAST_PLACES = 128, 4  # conversations written at once
_MOST_MEMORY = 0.8  # of what is free
_LEAST_S = 1.0  # of writing, where only prompts are missing
_LEAST_TEXTS, _PER_FILE = 64, 256


# -- what they begin with ----------------------------------------------------------------


def chat_of(spec: ModelSpec, tokenizer: Tokenizer) -> Chat:
    """The chat format of a model; without a template, texts just begin."""
    before, between = tokenizer.bos_text, "\n"
    if spec.chat_template:
        message = {"role": "user", "content": _MARK}
        text = render_chat(
            spec.chat_template,
            [message],
            bos_token=tokenizer.bos_text,
            eos_token=tokenizer.eos_text,
        )
        before, found, between = text.partition(_MARK)
        if not found:
            raise ModelFileError(f"{spec.path.name}: the chat template changes the user's words")
    start = next((token for token in (spec.bos_id, spec.eos_id) if token is not None), 0)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False) if text else []

    everything = range(tokenizer.vocab_size)
    return Chat(
        before=tokenizer.encode(before) or [start],
        between=encode(between),
        ends=frozenset(token for token in everything if tokenizer.is_end(token)),
        openings=[encode(text) for text in OPENINGS],
        words=[  # a space and some letters
            token
            for token, text in enumerate(map(tokenizer.token_bytes, everything))
            if len(text) > _SHORTEST_WORD and text[:1] == b" " and text[1:].isalpha()
        ],
        tasks=[(encode(first), encode(last)) for first, last in PASSAGE_TASKS],
    )


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Sequence[int]]:
    """Prompts of a file, one a line: plain text, or JSON with "prompt", "text" or "turns".

    Raises UnsupportedError for what is no text.
    """
    lines = read_text(path).split("\n")
    texts = [text for line in lines if line.strip() for text in _texts(line)]
    return [tokenizer.encode(text, add_special=False) for text in texts]


def _texts(line: str) -> list[str]:
    if not line.lstrip().startswith("{"):
        return [line]
    try:
        document = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    for key in ("prompt", "text", "question"):
        if isinstance(document.get(key), str):
            return [document[key]]
    turns = document.get("turns")
    return [turn for turn in turns if isinstance(turn, str)] if isinstance(turns, list) else []


# -- their files ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TrainingText:
    """One conversation of T tokens; row t of the teacher's says what may follow token t.

    `kinds[t]` says why the token after token t stands there. `states` are the target's rows after
    so many of its blocks, as the bits of bfloat16; a text that was read from its file has none.
    """

    tokens: NDArray[np.int32]  # [T]
    kinds: NDArray[np.uint8]  # [T]
    teacher_ids: NDArray[np.int32]  # [T, TEACHER]
    teacher_logits: NDArray[np.float16]  # [T, TEACHER]
    states: Mapping[int, NDArray[np.uint16]] = field(default_factory=dict)  # [T, width] each


def save_training_texts(path: Path, texts: Sequence[TrainingText], seconds: float) -> None:
    """Write texts to one file, which appears only when complete, and how long they took.

    Their states come before it and lie beside it, a file for each number of blocks.
    """
    for layer in texts[0].states:
        save_states(path, layer, np.concatenate([text.states[layer] for text in texts]))
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(text, name) for text in texts]) for name in _ARRAYS
    }
    lengths = np.array([len(text.tokens) for text in texts], np.int32)
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(file, seconds=seconds, lengths=lengths, **arrays)


def save_states(texts: Path, layer: int, bits: NDArray[np.uint16]) -> None:
    """Keep states after so many blocks, [T, width] of all texts of a file."""
    with whole_file(states_path(texts, layer)) as partial, partial.open("wb") as file:
        np.save(file, bits)


def states_path(texts: Path, layer: int) -> Path:
    """Where the states after so many blocks are, of the texts in a file."""
    return texts.with_name(f"{texts.stem}-states-{layer}.npy")


def text_files(folder: Path) -> list[Path]:
    """The files of a folder's texts, in the order in which they were written."""
    return sorted(folder.glob("texts-*.npz"))


def load_training_texts(path: Path) -> list[TrainingText]:
    """All texts of a file, or of a folder's files, in the order in which they were written."""
    texts: list[TrainingText] = []
    for file_path in text_files(path) if path.is_dir() else [path]:
        with np.load(file_path) as file:
            ends = np.cumsum(file["lengths"])[:-1]
            parts = [np.split(file[name], ends) for name in _ARRAYS]
        texts += [TrainingText(*values) for values in zip(*parts, strict=True)]
    return texts


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing texts and checkpoints of the same names.

    Raises UnsupportedError where one is at it.
    """
    from filelock import FileLock, Timeout

    try:
        held = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise UnsupportedError(
            f"another `edgespec draft train` is at work in {folder}",
            hint="wait for it, or give another file with --output",
        ) from None
    with held:
        yield


def written(folder: Path) -> tuple[int, float]:
    """How many texts a folder holds, and the seconds they took to write."""
    count, seconds = 0, 0.0
    for path in text_files(folder):
        with np.load(path) as file:
            count += len(file["lengths"])
            seconds += float(file["seconds"])
    return count, seconds


def work_s() -> float:
    """Seconds of work since some moment: waiting while others have the cores does not count."""
    return process_time() / host.usable_cores()


def is_held_out(number: int) -> bool:
    """Whether this one of a folder's texts is for judging, not for training."""
    return number % _HELD_OUT == 0


# -- the model that writes ---------------------------------------------------------------


class Seen(NamedTuple):
    """What a model knew after each of n tokens."""

    ids: NDArray[np.int32]  # [n, CANDIDATES]: the likeliest next tokens, the best one first
    logits: NDArray[np.float32]  # [n, CANDIDATES]
    states: Mapping[int, NDArray[np.uint16]]  # [n, width] each, as TrainingText has them


class Places:
    """The model of `spec`, `places` texts of at most `length` tokens at once.

    The states behind so many blocks as `layers` say are kept. Raises as `LlamaContext.open`.
    """

    def __init__(
        self, spec: ModelSpec, *, places: int, length: int, layers: Sequence[int], threads: int
    ) -> None:
        self.places, self.length = places, length
        most = self._most = max(places, _MOST_AT_ONCE)
        settings = RunConfig(
            length,
            batch_size=most,
            max_nodes=most,
            threads=threads,
            gpu_layers=-1,
            kernels=True,
            tied=spec.tied_embeddings,
            users=places,
            cells=places * length,
            exact=True,
            captured_layers=layers_to_read(spec, layers),
        )
        self._context = LlamaContext(settings)
        self._layers = sorted(set(layers))
        try:
            self._context.open(str(spec.path), None, lambda _params: None)
            self._kept = LayerRows(self._context, self._layers) if layers else None
        except BaseException:
            self._context.close()
            raise
        self._batch = Batch(self._context.lib, most, 1, None, self._context.width)

    def begin(self, place: int, tokens: Sequence[int]) -> Iterator[Seen]:
        """Read the first tokens of a new text in a place; what was there is forgotten."""
        self._context.remove(place, 0)
        for start in range(0, len(tokens), self._most):
            part = tokens[start : start + self._most]
            yield self._seen(part, range(start, start + len(part)), [place] * len(part))

    def step(self, first: int, tokens: Sequence[int], positions: Sequence[int]) -> Seen:
        """Read one token more of each text in so many places from `first` on."""
        for place, position in enumerate(positions, first):
            if position == 0:
                self._context.remove(place, 0)
        return self._seen(tokens, positions, range(first, first + len(tokens)))

    def _seen(self, tokens: Sequence[int], positions: Sequence[int], places: Sequence[int]) -> Seen:
        batch, count = self._batch, len(tokens)
        batch.put(0, tokens)
        batch.positions[:count] = positions
        batch.ids[:count, 0] = places
        self._context.decode(batch, count)
        rows = import_torch().from_numpy(self._context.rows(count))
        best = rows.topk(min(CANDIDATES, rows.shape[1]))
        ids = best.indices.numpy().astype(np.int32)
        return Seen(ids, best.values.numpy(), self._states(count))

    def _states(self, count: int) -> dict[int, NDArray[np.uint16]]:
        if self._kept is None:
            return {}
        rows = np.empty((count, self._kept.width), np.float32)
        self._kept.copy(0, rows)
        parts = np.split(_bits(rows), len(self._layers), 1)
        return dict(zip(self._layers, parts, strict=True))

    def close(self) -> None:
        """Free the model; safe to call twice."""
        self._context.close()


def _bits(rows: Rows) -> NDArray[np.uint16]:
    """The bits of rows in bfloat16, rounded to the nearest."""
    half: NDArray[np.uint16] = (((rows.view(np.uint32) >> 15) + 1) >> 1).astype(np.uint16)
    return half


# -- writing -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Row(Row):
    """One conversation being written, with what the model knew after each of its tokens."""

    user_temperature: float = 1.0
    answer_temperature: float = 0.0
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    logits: list[NDArray[np.float16]] = field(default_factory=list)
    states: dict[int, list[NDArray[np.uint16]]] = field(default_factory=dict)

    def note(self, seen: Seen, those: slice = slice(None)) -> None:
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


class TextWriter:
    """Writes conversations with the target, one in each of its places, token by token."""

    def __init__(
        self,
        target: Places,
        chat: Chat,
        *,
        seed: int,
        written: int = 0,  # texts that there are already
        prompts: Sequence[Sequence[int]] = (),  # user turns that are answered first
    ) -> None:
        self._target, self._chat = target, chat
        self._written, self._prompts = written, list(prompts)
        self._random = np.random.default_rng(seed)
        self._passages: list[Sequence[int]] = []
        # Those of one length take their steps together, as none should wait for longer ones.
        many = int(target.places * LONG_PART) if chat.tasks else 0
        parts = (
            (range(many), min(LONG_LENGTH, target.length)),
            (range(many, target.places), LENGTH),
        )
        self._lanes = [places for places, _ in parts if places]
        self._rows = [_Row([], length, _USER_LENGTH) for places, length in parts for _ in places]

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
            pick = partial(self._pick, row, seen.logits[number], seen.ids[number])
            if not row.advance(pick, self._chat):
                self._rows[place] = _Row([], row.length, _USER_LENGTH)
                # What is held out from training must not come back as part of another text.
                if not is_held_out(self._written):
                    self._keep_passage(row)
                self._written += 1
                yield row.text()

    def _pick(self, row: _Row, logits: NDArray[np.float32], candidates: NDArray[np.int32]) -> int:
        """The best of a row's candidates, or one that is drawn."""
        temperature = row.answer_temperature
        if row.phase == USER:
            temperature = row.user_temperature if row.written else _FIRST_TEMPERATURE
        if temperature == 0.0:
            return int(candidates[0])
        noise = self._random.gumbel(size=len(logits))  # the largest sum is a sample
        return int(candidates[np.argmax(logits / temperature + noise)])

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
            length,
            _USER_LENGTH,
            USER if is_open else ANSWER,
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
        for seen in self._target.begin(place, row.tokens):
            row.note(seen)
        row.append(*last)


def write_texts(
    writer: TextWriter,
    folder: Path,
    *,
    seconds: float,
    at_least: int,
    progress: Callable[[float, int], None],
) -> None:
    """Write for some time, and so many texts, into files of `folder`.

    What is done is kept, also at Ctrl-C.
    """
    number = len(text_files(folder))
    start, saved, tokens = work_s(), 0.0, 0
    texts: list[TrainingText] = []

    def save() -> None:
        nonlocal number, saved, texts
        spent = work_s() - start
        save_training_texts(folder / f"texts-{number:05}.npz", texts, spent - saved)
        number, saved, texts = number + 1, spent, []

    try:
        for count, text in enumerate(writer.write(), 1):
            texts.append(text)
            tokens += len(text.tokens)
            spent = work_s() - start
            progress(min(1.0, spent / seconds), tokens)
            if spent >= seconds and count >= at_least:
                texts += writer.unfinished()
                break
            if len(texts) >= _PER_FILE:
                save()
    finally:
        if texts:
            save()


def write_training_texts(
    spec: ModelSpec,
    folder: Path,
    seconds: float,
    *,
    data: Path | None,
    layers: Sequence[int],
    progress: Progress,
) -> None:
    """Write text into `folder` until that took so many seconds, earlier runs included.

    Prompts of `data` are answered first. The states after so many blocks as `layers` say are kept
    beside the texts.
    """
    num_written, spent = written(folder)
    missing = seconds - spent
    if missing <= 0 and data is None:
        return
    with open_tokenizer(spec.path) as tokenizer:
        chat = chat_of(spec, tokenizer)
        prompts = read_prompts(data, tokenizer) if data else []
    digest = blake2b(json.dumps(prompts).encode(), digest_size=4).hexdigest()
    answered = folder / f"answered-{digest}"
    if answered.exists():
        prompts = []
    if missing <= 0 and not prompts:
        return
    places, threads = places_of(spec), host.usable_cores()
    with closing(
        Places(spec, places=places, length=LONG_LENGTH, layers=layers, threads=threads)
    ) as target:
        seed = len(text_files(folder))
        writer = TextWriter(target, chat, seed=seed, written=num_written, prompts=prompts)
        write_texts(
            writer,
            folder,
            seconds=max(missing, _LEAST_S),
            at_least=max(_LEAST_TEXTS, len(prompts)),
            progress=lambda part, tokens: progress(f"writing text, {tokens} tokens", part),
        )
    if prompts:
        answered.touch()


def places_of(spec: ModelSpec) -> int:
    """As many conversations at once as fit. Raises DoesNotFitError where too few do."""
    weights = spec.file_bytes
    free = int(_MOST_MEMORY * host.available_bytes()) - weights
    fitting = int(free / (_F16 * LONG_LENGTH * spec.kv_values_per_token))
    if fitting < _LEAST_PLACES:
        raise DoesNotFitError(
            f"writing text with {spec.path.name} takes its weights, {weights >> 20} MiB, and the "
            f"caches of {_LEAST_PLACES} conversations, which is more than is free",
            hint="train on a machine with more memory; the drafter's file runs on this one",
        )
    return min(_PLACES, fitting)
