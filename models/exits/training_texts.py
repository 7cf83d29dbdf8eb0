"""The texts that an early exit is trained on: their tokens, the target's opinions, their files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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

    `kinds[t]` says why the token after token t stands there.
    """

    tokens: NDArray[np.int32]  # [T]
    kinds: NDArray[np.uint8]  # [T]
    teacher_ids: NDArray[np.int32]  # [T, TEACHER]
    teacher_logits: NDArray[np.float16]  # [T, TEACHER]


def save_training_texts(path: Path, texts: Sequence[TrainingText], seconds: float) -> None:
    """Write texts to one file, which appears only when complete, and how long they took."""
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


def load_training_texts(folder: Path) -> list[TrainingText]:
    """All texts of a folder, in the order in which they were written."""
    texts: list[TrainingText] = []
    for path in sorted(folder.glob("texts-*.npz")):
        with np.load(path) as file:
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
    for path in folder.glob("texts-*.npz"):
        with np.load(path) as file:
            count += len(file["lengths"])
            seconds += float(file["seconds"])
    return count, seconds


def is_held_out(number: int) -> bool:
    """Whether this one of a folder's texts is for judging, not for training."""
    return number % _HELD_OUT == 0
