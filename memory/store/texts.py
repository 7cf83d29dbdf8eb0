"""What was generated before on this machine, kept if its owner asked for it (`--remember`).

Token ids only, the newest 32,768 of each model, in the cache directory. They seed the drafters'
tables: whoever asks for similar things again has them drafted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

from edgespec.errors import EdgespecWarning, UnsupportedError
from edgespec.memory.store import cache
from edgespec.models.writing import reason, remove_dead

_KIND = "texts"
_MOST_TOKENS = 1 << 15


@dataclass(frozen=True, slots=True)
class Remembered:
    """How much is kept of one model's texts."""

    model: str
    texts: int
    tokens: int
    file_bytes: int


def remembered_texts(fingerprint: str) -> list[list[int]]:
    """Texts that a model wrote, oldest first, as token ids."""
    return _texts_of(cache.load(_KIND, fingerprint))


def _texts_of(document: Mapping[str, Any] | None) -> list[list[int]]:
    texts = (document or {}).get("texts")
    if not isinstance(texts, list):
        return []
    return [text for text in texts if _is_text(text)]


def add_texts(fingerprint: str, model: str, texts: Iterable[Sequence[int]]) -> None:
    """Keep more texts of a model; the oldest ones go when there are too many.

    Warns (EdgespecWarning) where they cannot be kept: their owner asked for it.
    """
    more = [list(text) for text in texts if len(text) > 1]
    problem = cache.update(
        _KIND, fingerprint, lambda now: {"model": model, "texts": _newest([*_texts_of(now), *more])}
    )
    if problem is not None:
        place = cache.cache_directory()
        said = f"nothing was remembered, {place} cannot be written: {reason(problem)}"
        warn(said, EdgespecWarning, stacklevel=2)


def _newest(everything: Sequence[list[int]]) -> list[list[int]]:
    """The last tokens that there is room for, as texts."""
    kept: list[list[int]] = []
    room = _MOST_TOKENS
    for text in reversed(everything):
        if room <= 0:
            break
        kept.append(text[-room:])
        room -= len(text)
    return kept[::-1]


def remembered() -> list[Remembered]:
    """What is kept, by model."""
    found = []
    for path in sorted((cache.cache_directory() / _KIND).glob("*.json")):
        try:
            document = json.loads(path.read_text())
            texts = [text for text in document["texts"] if _is_text(text)]
            size = path.stat().st_size
        except (OSError, ValueError, LookupError, TypeError):
            continue
        tokens = sum(len(text) for text in texts)
        found.append(Remembered(str(document.get("model", "")), len(texts), tokens, size))
    return found


def forget() -> int:
    """Delete all of it; how many models' texts there were.

    Raises UnsupportedError where something cannot be deleted.
    """
    folder = cache.cache_directory() / _KIND
    with cache.locked():
        remove_dead(folder)  # what was being written when its process was killed
        paths = list(folder.glob("*.json"))
        try:
            for path in paths:
                path.unlink(missing_ok=True)
        except OSError as problem:
            raise UnsupportedError(
                f"cannot delete {problem.filename}: {reason(problem)}", hint="delete it yourself"
            ) from problem
    return len(paths)


def _is_text(text: object) -> bool:
    return isinstance(text, list) and all(type(token) is int and token >= 0 for token in text)
