"""The texts that drafters are trained on: their tokens, the target's opinions, their files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgespec.errors import UnsupportedError
from edgespec.models.writing import whole_file

TEACHER = 32  # tokens of the target's distribution that are kept
_HELD_OUT = 20  # every so many-th text is never trained on
# Why a token stands in a text.
FORCED, USER, ANSWER = 0, 1, 2


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
        with whole_file(states_path(path, layer)) as partial, partial.open("wb") as file:
            np.save(file, np.concatenate([text.states[layer] for text in texts]))
    with whole_file(path) as partial, partial.open("wb") as file:
        np.savez(
            file,
            seconds=seconds,
            lengths=np.array([len(text.tokens) for text in texts], np.int32),
            tokens=np.concatenate([text.tokens for text in texts]),
            kinds=np.concatenate([text.kinds for text in texts]),
            teacher_ids=np.concatenate([text.teacher_ids for text in texts]),
            teacher_logits=np.concatenate([text.teacher_logits for text in texts]),
        )


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
            names = ("tokens", "kinds", "teacher_ids", "teacher_logits")
            parts = [np.split(file[name], ends) for name in names]
        texts += [TrainingText(*values) for values in zip(*parts, strict=True)]
    return texts


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other processes from writing texts and checkpoints of the same names.

    Raises UnsupportedError where one is at it.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UnsupportedError(
            f"another `edgespec draft train` is at work in {folder}",
            hint="wait for it, or give another file with --output",
        ) from None
    try:
        yield
    finally:
        lock.release()


def written(folder: Path) -> tuple[int, float]:
    """How many texts a folder holds, and the seconds they took to write."""
    count, seconds = 0, 0.0
    for path in text_files(folder):
        with np.load(path) as file:
            count += len(file["lengths"])
            seconds += float(file["seconds"])
    return count, seconds


def is_held_out(number: int) -> bool:
    """Whether this one of a folder's texts is for judging, not for training."""
    return number % _HELD_OUT == 0
