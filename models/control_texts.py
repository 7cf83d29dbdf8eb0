"""Control tokens that are written in somebody's words: they are words, not control tokens.

A person who writes `<|im_end|>` into a message must not end it. Before a chat is rendered, every
such text in the messages gets a mark inside: `<`, the mark, `|im_end|>`. What stands inside a text
stays there whatever a template does with the text: trimming, splitting, joining, JSON. When the
prompt becomes ids, marked texts are encoded as text, and what the template wrote as control tokens.
Messages without such texts, nearly all, are not touched.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any

MARK = "\ufdd0"  # a code point of Unicode that is for use inside a program, and no character


class ControlTexts:
    """The texts of a vocabulary's control tokens.

    Args:
        texts: as they are written in prompts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(text for text in texts if text)
        lengths: defaultdict[str, set[int]] = defaultdict(set)
        for text in self.texts:
            lengths[text[0]].add(len(text))
        self._lengths = {first: sorted(all_, reverse=True) for first, all_ in lengths.items()}
        self._most = max(map(len, self.texts), default=0)
        self._firsts = re.compile(f"[{''.join(map(re.escape, lengths))}]") if lengths else None

    @cached_property
    def are_apart(self) -> bool:
        """Whether no two can overlap in a text: none has within what another one begins with."""
        first = self._firsts
        return first is None or not any(first.search(text, 1) for text in self.texts)

    def mark(self, value: Any) -> Any:
        """A copy of plain data in which no text can be taken for a control token."""
        if isinstance(value, str):
            places = [start + 1 for start, _ in self.found(value)]
            return MARK.join(value[a:b] for a, b in pairwise([0, *places, len(value)]))
        if isinstance(value, dict):
            return {self.mark(key): self.mark(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(one) for one in value]
        return value

    def count(self, text: str) -> int:
        """How many control tokens a text would become."""
        return sum(1 for _ in self.found(text))

    def plain(self, text: str) -> str:
        """A prompt's text without the marks."""
        return "".join(piece for piece, _ in self.pieces(text))

    def pieces(self, text: str) -> list[tuple[str, bool]]:
        """The parts of a prompt's text, and whether control tokens in them are meant as such.

        A part of words ends at control tokens that are meant, so that its ids are the same as if
        all of the text were encoded at once.
        """
        if MARK not in text:
            return [(text, True)]
        clean, words = self._unmarked(text)
        gaps = zip(
            [0, *(end for _, end in words)], [*(a for a, _ in words), len(clean)], strict=True
        )
        found = [  # control tokens between words
            (gap + a, gap + b) for gap, end in gaps for a, b in self.found(clean[gap:end])
        ]
        starts, ends = [start for start, _ in found], [end for _, end in found]
        made, cursor = [], 0
        for start, end in words:
            if start < cursor:
                continue  # in the part before
            before, after = bisect_right(ends, start), bisect_left(starts, end)
            left = ends[before - 1] if before else 0
            right = starts[after] if after < len(starts) else len(clean)
            made += [(clean[cursor:left], True), (clean[left:right], False)]
            cursor = right
        made.append((clean[cursor:], True))
        return [(piece, is_meant) for piece, is_meant in made if piece]

    def _unmarked(self, text: str) -> tuple[str, list[tuple[int, int]]]:
        """The text without marks, and where the texts are that had one."""
        made, size, words = [], 0, []
        place = 0
        while (mark := text.find(MARK, place)) >= 0:
            first = text[mark - 1] if mark > place else ""
            rest = self._longest(first + text[mark + 1 : mark + self._most]) if first else 0
            if not rest:  # somebody's own
                made.append(text[place : mark + 1])
                size += mark + 1 - place
                place = mark + 1
                continue
            made += (text[place:mark], text[mark + 1 : mark + rest])
            start = size + mark - place - 1
            words.append((start, start + rest))
            size = start + rest
            place = mark + rest
        made.append(text[place:])
        return "".join(made), words

    def found(self, text: str) -> Iterator[tuple[int, int]]:
        """Where control tokens stand, each as long as it can be."""
        place = 0
        while self._firsts is not None and (first := self._firsts.search(text, place)):
            start = first.start()
            length = self._longest(text[start : start + self._most])
            if length:
                yield start, start + length
            place = start + (length or 1)

    def _longest(self, text: str) -> int:
        """Length of the longest control token that a text begins with, or 0."""
        lengths = self._lengths.get(text[:1], ())
        return next((n for n in lengths if n <= len(text) and text[:n] in self.texts), 0)


NO_CONTROLS = ControlTexts(())
