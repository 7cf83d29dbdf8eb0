"""What was asked and answered on this machine, kept if its owner asked for it (`--remember`).

Token ids only, the newest 32,768 of each model, in the cache directory, in a file that its owner
alone can read. They seed the drafters' tables: whoever asks for similar things again has them
drafted. Each text is of a history, and drafts for that alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from warnings import warn

from edgespec.errors import EdgespecWarning
from edgespec.memory.store import cache
from edgespec.models.writing import reason, remove_dead

_KIND = "texts"

# The history that a text is of, and its token ids.
KeptText = tuple[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Remembered:
    """How much is kept of one model's texts."""

    model: str
    texts: int
    tokens: int
    file_bytes: int


def remembered_texts(fingerprint: str) -> list[KeptText]:
    """Texts that a model read and wrote, oldest first."""
    return _texts_of(cache.load(_KIND, fingerprint))


def _texts_of(document: Mapping[str, Any] | None) -> list[KeptText]:
    texts = (document or {}).get("texts")
    return [text for one in texts if (text := _text_of(one))] if isinstance(texts, list) else []


def _text_of(kept: object) -> KeptText | None:
    """A text as it is stored; None from anything else."""
    # Earlier versions kept answers alone, as lists.
    one = kept if isinstance(kept, dict) else {"history": "", "tokens": kept}
    history, tokens = one.get("history"), one.get("tokens")
    if not isinstance(history, str) or not isinstance(tokens, list):
        return None
    return (history, tokens) if all(type(id_) is int and id_ >= 0 for id_ in tokens) else None


def add_texts(fingerprint: str, model: str, texts: Iterable[KeptText]) -> None:
    """Keep more texts of a model, each once; the oldest ones go when there are too many.

    Warns (EdgespecWarning) where they cannot be kept: their owner asked for it.
    """
    more = [(history, list(tokens)) for history, tokens in texts if len(tokens) > 1]

    def change(now: dict[str, Any] | None) -> dict[str, Any]:
        everything = [*(text for text in _texts_of(now) if text not in more), *more]
        newest, room = list[dict[str, Any]](), 1 << 15  # tokens
        for history, tokens in reversed(everything):
            if room > 0:
                newest.append({"history": history, "tokens": tokens[-room:]})
            room -= len(tokens)
        return {"model": model, "texts": newest[::-1]}

    problem = cache.update(_KIND, fingerprint, change)
    if problem is not None:
        place = cache.cache_directory()
        said = f"nothing was remembered, {place} cannot be written: {reason(problem)}"
        warn(said, EdgespecWarning, stacklevel=2)


def remembered() -> list[Remembered]:
    """What is kept, by model."""
    found = []
    for document in cache.documents(_KIND):
        try:
            size = cache.path_of(_KIND, document["key"]).stat().st_size
        except (OSError, KeyError, AttributeError):
            continue
        texts = _texts_of(document)
        tokens = sum(len(text) for _, text in texts)
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
        cache.delete(paths)
    return len(paths)
