# ruff: noqa: RUF001 - texts of many scripts
"""Tokenizers that have nothing in common, and models that recite a text in their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from fake_backend import FakeBackend
from frozen_times import Frozen
from lossless_cases import Witness

from edgespec.drafting.translated import TranslatingDrafter, Translation
from edgespec.models.control_texts import ControlTexts

INF = float("inf")
Model = Callable[[tuple[int, ...]], Sequence[float]]


class LongestMatch:
    """A tokenizer that takes the longest of its `words`, and bytes where none begins.

    The ids are those of the bytes, of the words, of its control tokens, whose last one ends a text.
    With `adds_space` a text gets one before it, as SentencePiece does.
    """

    bos_text = ""

    def __init__(
        self,
        words: Iterable[str],
        controls: Sequence[str] = ("<end>",),
        *,
        adds_space: bool = False,
    ) -> None:
        self._pieces = [bytes([one]) for one in range(256)] + [one.encode() for one in words]
        self._ids = {piece: token for token, piece in enumerate(self._pieces)}
        self._longest = max(map(len, self._pieces))
        self._names = list(controls)
        self._adds_space = adds_space
        self.control_texts = ControlTexts(controls)
        self.eos_text = controls[-1]
        self.end = len(self._pieces) + len(controls) - 1
        self.vocab_size = self.end + 1

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids: list[int] = []
        for piece, is_meant in self.control_texts.pieces(text):
            data = piece.encode()
            if self._adds_space and not ids:
                data = b" " + data
            while data:
                names = (name for name in self._names if data.startswith(name.encode()))
                if is_meant and (name := next(names, "")):
                    ids.append(len(self._pieces) + self._names.index(name))
                    data = data[len(name.encode()) :]
                    continue
                sizes = range(min(self._longest, len(data)), 0, -1)
                size = next(size for size in sizes if data[:size] in self._ids)
                ids.append(self._ids[data[:size]])
                data = data[size:]
        return ids

    def token_bytes(self, token: int) -> bytes:
        return self._pieces[token] if token < len(self._pieces) else b""

    def token_text(self, token: int) -> str:
        if token < len(self._pieces):
            return self._pieces[token].decode(errors="replace")
        return self._names[token - len(self._pieces)]

    def is_end(self, token: int) -> bool:
        return token == self.end


TEXTS = {
    "english": "The universe is a very large place until you reach the end of the street.",
    "code": "def f(x):\n    return {'a': x + 1}\n\n\nfor i in range(9):\n    put(f(i), end=',')\n",
    "chinese": "天空是蓝色的，因为空气散射阳光。所以我们看到蓝色。",
    "mixed": "Ünïcode naïve café — Привет мир, γειά σου κόσμε, שלום עולם, مرحبا بالعالم",
    "emoji": "Well 👩‍👩‍👧‍👦 done 🇩🇪🎉 and 🏳️‍🌈 flags 𝄞",
    "controls": "A text says <end> or <|im_end|> or </s> as words, <mid> of it.",
    "digits": "3.14159 2,718,281 1000000 0xFF 12:34:56 2026-11-27",
    "spaces": "a  b   c\t\td\n\n\n   e \n f ",
}
_WORDS = sorted({f" {word}" for text in TEXTS.values() for word in text.split()})
TOKENIZERS: dict[str, LongestMatch] = {
    "bytes": LongestMatch(()),
    "words": LongestMatch([*_WORDS, "\n\n", "    ", "天空", "蓝色", "的，"], ("<mid>", "<end>")),
    "syllables": LongestMatch(
        [
            "un",
            "til",
            " un",
            "verse",
            " u",
            "ni",
            "th",
            " th",
            "e ",
            "re",
            "天",
            "空是",
            "👩",
            "\n ",
        ],
        ("</s>", "<|im_end|>"),
    ),
    "across spaces": LongestMatch(
        [
            "of the",
            " of the ",
            "is a very",
            "e u",
            "x + 1",
            " a ",
            "d e",
            "\n\n\n",
            ", end",
            "mир, ",
        ]
    ),
    "byte fallback": LongestMatch(
        [*(word for word in _WORDS if word.isascii()), " ", "  ", "   "], adds_space=True
    ),
}


def recites(tokenizer: LongestMatch, text: str) -> Model:
    """A model that goes on with a text wherever the context has come to in it, then ends."""
    data = text.encode()
    tokens = _behind(tokenizer, text)
    starts = [0, *accumulate(len(tokenizer.token_bytes(one)) for one in tokens)]
    token_at = dict(zip(starts, tokens, strict=False))
    rows: list[list[float]] = (np.eye(tokenizer.vocab_size) * 20.0).tolist()

    def next_logits(context: tuple[int, ...]) -> Sequence[float]:
        said = b"".join(map(tokenizer.token_bytes, context))[-len(data) :]
        done = next(size for size in range(len(said), -1, -1) if said.endswith(data[:size]))
        if done == len(data):
            return rows[tokenizer.end]
        return rows[token_at.get(done, data[done])]

    return next_logits


def _behind(tokenizer: LongestMatch, text: str) -> list[int]:
    """Tokens of a text behind other text: no space is added."""
    marked = tokenizer.control_texts.mark("\n" + text)
    tokens = tokenizer.encode(marked, add_special=False)
    skipped = 0
    while not tokenizer.token_bytes(tokens[skipped]).endswith(b"\n"):
        skipped += 1
    first = tokenizer.token_bytes(tokens[skipped])
    rest = tokens[skipped + 1 :]
    return rest if first.strip(b" ") == b"\n" else [*first[1:], *rest]


def scatters(tokenizer: LongestMatch, seed: int) -> Model:
    """A model of random rows by the last token."""
    size = tokenizer.vocab_size
    rows = np.random.default_rng(seed).normal(0.0, 2.5, (size, size))

    def next_logits(context: tuple[int, ...]) -> Sequence[float]:
        row: Sequence[float] = rows[context[-1]].tolist()
        return row

    return next_logits


def loaded(model: Model, tokenizer: LongestMatch, **options: int) -> Witness:
    """A fake backend with a model and a tokenizer."""
    backend = Witness(model, tokenizer.vocab_size, **options)
    backend.tokenizer = tokenizer  # type: ignore[assignment]
    return backend


def translating(
    target: LongestMatch, draft: FakeBackend, templates: Sequence[str | None] = (None, None)
) -> TranslatingDrafter:
    """A draft model whose steps take a hundredth of the target's."""
    translation = Translation(target, draft.tokenizer, *templates)
    return TranslatingDrafter(draft, Frozen([INF, *[0.01] * 16]), translation)
