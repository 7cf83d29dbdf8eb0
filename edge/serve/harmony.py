"""Answers in gpt-oss's format, harmony: messages on channels, each with a header.

<|channel|>analysis<|message|>a thought<|end|><|start|>assistant
<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
<|channel|>final<|message|>the answer

A prompt ends with `<|start|>assistant`. Text without any header is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum

from edgespec.serve.shapes import Delta
from edgespec.serve.tool_reader import settled
from edgespec.serve.tool_values import OpenCall

_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>", _CHANNEL)
# What opens a thought and closes it, and what begins the answer where it has to end.
HARMONY_THOUGHT = (
    "<|channel|>analysis<|message|>",
    "<|end|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<>|]{1,160})")
_LONGEST_HEADER = 512


class _Part(Enum):
    """What is being read."""

    HEADER, THOUGHT, TEXT, CALL = range(4)


class HarmonyReader:
    """Splits an answer into thoughts, text and calls.

    Args:
        names: of the tools that were offered.
        most: calls that are taken; further ones are left out.
        begun: the prompt goes on in the text of an answer.
    """

    def __init__(self, names: Collection[str], *, most: int, begun: bool = False) -> None:
        self._names, self._most = names, most
        self._held = ""
        self._call, self._given = OpenCall(""), 0  # what is held that was given as its arguments
        self._part = _Part.TEXT if begun else _Part.HEADER
        self._found = 0  # calls, those left out as well
        self._tried = 0  # of the arguments: no marker before ends them

    def push(self, text: str) -> Delta:
        """What more text added."""
        self._held += text
        made = Delta()
        while (one := self._next()) is not None:
            made = _sum(made, one)
        return made

    def finish(self) -> Delta:
        """What is left."""
        held, self._held = self._held, ""
        if self._part is _Part.HEADER:
            is_markup = _CHANNEL in held or held.lstrip().startswith(("<|", "to="))
            return Delta("" if is_markup else held)
        if self._part is _Part.CALL:
            return self._end_call(held, is_whole=_is_object(held))
        return self._shown(held)

    def _next(self) -> Delta | None:
        """What a step of reading added; None where more has to come first."""
        if self._part is _Part.HEADER:
            return self._read_header()
        if self._part is _Part.CALL:
            return self._read_call()
        places = [(place, end) for end in _ENDS if (place := self._held.find(end)) >= 0]
        if not places:
            size = min(settled(self._held, end) for end in _ENDS)
            shown, self._held = self._held[:size], self._held[size:]
            return self._shown(shown) if shown else None
        place, end = min(places)
        said = self._shown(self._held[:place].rstrip())
        self._begin_header(place, end)
        return said

    def _begin_header(self, place: int, end: str) -> None:
        after = place if end == _CHANNEL else place + len(end)
        self._held, self._part = self._held[after:], _Part.HEADER

    def _read_header(self) -> Delta | None:
        header, found, rest = self._held.partition(_MESSAGE)
        start, markers = self._held.lstrip(), ("<|", "to=", "assistant")
        is_header = not start or any(start.startswith(m) or m.startswith(start) for m in markers)
        if not is_header or len(header) > _LONGEST_HEADER:
            self._part = _Part.TEXT
            size = len(_CHANNEL) if self._held.startswith(_CHANNEL) else 0
            shown, self._held = self._held[:size], self._held[size:]
            return Delta(shown)
        if not found:
            return None
        self._held, self._tried = rest, 0
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self._names:
            self._call = OpenCall(recipient[1], is_left_out=self._found >= self._most)
            self._part, self._given = _Part.CALL, 0
            self._found += 1
        else:
            self._part = _Part.THOUGHT if f"{_CHANNEL}analysis" in header else _Part.TEXT
        return Delta()

    def _read_call(self) -> Delta | None:
        """Arguments as they come, up to a marker; one in a text of theirs does not end them."""
        while True:
            found = [(at, end) for end in _ENDS if (at := self._held.find(end, self._tried)) >= 0]
            if not found:
                self._tried = max(self._tried, len(self._held) - len(_CHANNEL))
                self._write_to(min(settled(self._held, end) for end in _ENDS))
                written = self._call.written()
                return Delta(calls=tuple(written)) if written else None
            place, end = min(found)
            if _is_object(self._held[:place]):
                break
            self._tried = place + len(end)
        call = self._end_call(self._held[:place], is_whole=True)
        self._begin_header(place, end)
        return call

    def _write_to(self, place: int) -> None:
        if place > self._given:
            self._call.write(self._held[self._given : place])
            self._given = place

    def _end_call(self, text: str, *, is_whole: bool) -> Delta:
        return Delta(calls=tuple(self._call.end(text[self._given :].rstrip(), is_whole=is_whole)))

    def _shown(self, text: str) -> Delta:
        return Delta(reasoning=text) if self._part is _Part.THOUGHT else Delta(text)


def _is_object(text: str) -> bool:
    """Whether a text is all of a JSON object, or nothing."""
    try:
        return not text.strip() or isinstance(json.loads(text, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def _sum(one: Delta, other: Delta) -> Delta:
    return Delta(
        one.content + other.content, one.reasoning + other.reasoning, one.calls + other.calls
    )
