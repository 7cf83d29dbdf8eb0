"""The parts of an answer: thoughts, text and calls of tools, found in what a model writes.

All interfaces read answers with this one reader; each tells the parts in its own words. What ends
an answer is the engine's to say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from edgespec.decode.generation import Chunk, Result
from edgespec.serve.shapes import Choice, Delta, joined
from edgespec.serve.tool_formats import HARMONY, ToolFormat
from edgespec.serve.tool_reader import TEXT, THOUGHT, Steps, ToolReader


class ThinkTags(NamedTuple):
    """What a thought stands between.

    `forced` is written for the model to end one that takes too long; `after` has to come between a
    thought and the answer.
    """

    opening: str
    closing: str
    forced: str
    after: str = ""


def _tags(opening: str, closing: str) -> ThinkTags:
    return ThinkTags(opening, closing, f"\n{closing}\n\n")


_FINAL = "<|start|>assistant<|channel|>final<|message|>"
THINK = _tags("<think>", "</think>")
_HARMONY_TAGS = ThinkTags("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{_FINAL}", _FINAL)
_OTHER_TAGS = (
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("[THINK]", "[/THINK]"),
    _tags("<seed:think>", "</seed:think>"),
    _tags("<mm:think>", "</mm:think>"),
    _tags("<|channel>thought", "<channel|>"),
)


def think_tags(template: str, formats: Sequence[ToolFormat]) -> ThinkTags:
    """How a template's model thinks; <think> where it says nothing."""
    if HARMONY in formats:
        return _HARMONY_TAGS
    return next((one for one in _OTHER_TAGS if one.closing in template), THINK)


# gpt-oss's messages, each with a header, and a prompt that ends with <|start|>assistant:
#     <|channel|>analysis<|message|>a thought<|end|><|start|>assistant
#     <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
#     <|channel|>final<|message|>the answer
# Text without any header is the answer.
_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>", _CHANNEL)
_HEADER_STARTS = ("<|", "to=", "assistant")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<>|]{1,160})")
_LONGEST_HEADER = 512
_TEXTS = ("content", "reasoning")


class AnswerReader(ToolReader):
    """Reads one answer; without any arguments all of it but a thought is text.

    Args:
        formats: as of `ToolReader`.
        schemas: as of `ToolReader`.
        most: as of `ToolReader`.
        is_calls: as of `ToolReader`; the answer has no thought then.
        tags: of a thought, with which an answer may begin.
        within: the prompt ended within a thought.
        is_marked: what is JSON alone is no call.
        is_text: the prompt goes on in the text of an answer, where others have a header.
    """

    def __init__(
        self,
        formats: Sequence[ToolFormat] = (),
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        most: int = 0,
        is_calls: bool = False,
        tags: ThinkTags = THINK,
        within: bool = False,
        is_text: bool = False,
        is_marked: bool = False,
    ) -> None:
        super().__init__(formats, schemas or {}, most=most, is_calls=is_calls)
        self._tags, self._within, self._is_text = tags, within, is_text
        self._is_marked = is_marked
        self._read_so_far: list[Delta] = []
        self._thinks = within
        self._num_tokens = self._thought_tokens = 0

    def read(self, chunks: Sequence[Chunk]) -> Delta:
        """What chunks of an answer added; tokens before the end of a thought are the thought's."""
        deltas = []
        for chunk in chunks:
            deltas.append(self.push(chunk.text))
            self._num_tokens += len(chunk.token_ids)
            self._thought_tokens = self._num_tokens if self._thinks else self._thought_tokens
        content, thought = ("".join(getattr(one, name) for one in deltas) for name in _TEXTS)
        return Delta(content, thought, joined(call for one in deltas for call in one.calls))

    def push(self, text: str) -> Delta:
        """What more text added."""
        return self._kept(super().push(text))

    def finish(self) -> Delta:
        """What is left: calls without an end, or text."""
        return self._kept(super().finish())

    def choice(self, index: int, result: Result) -> Choice:
        """The answer, which is complete."""
        deltas = self._read_so_far
        content, thought = ("".join(getattr(one, name) for one in deltas) for name in _TEXTS)
        calls = joined(call for one in deltas for call in one.calls)
        return Choice(index, content, thought, calls, result, self._thought_tokens)

    def _kept(self, delta: Delta) -> Delta:
        if delta:
            self._read_so_far.append(delta)
        return delta

    def _read(self) -> Steps[None]:
        if HARMONY in self._formats:
            return (yield from self._channels())
        if not self._is_calls:
            yield from self._thought()
        yield from super()._read()

    def _alone(self) -> Steps[None]:
        if not self._is_marked:
            yield from super()._alone()

    def _thought(self) -> Steps[None]:
        """A thought at the beginning, without the white space around it."""
        place = yield from self._skip(0)
        if not self._within:
            if not (yield from self._has(self._tags.opening, place)):
                return
            place += len(self._tags.opening)
        self._thinks = True
        self._place = yield from self._skip(place)
        closing, markers = self._tags.closing, list(self._openings) if self._schemas else []
        while marker := (yield from self._until([closing, *markers], THOUGHT)):
            place = self._text.index(marker, self._place)
            # Some models forget the tag before a call. In a thought that ends later it is thought.
            end = place if marker == closing else (yield from self._find(closing, place))
            if end >= 0:
                self._thinks = False
                self._say(len(self._text[:end].rstrip()), THOUGHT)
                self._place = yield from self._skip(end + len(closing))
                break
            if (yield from self._called(self._openings[marker], marker)):
                break
            self._say(self._text.index(marker, self._place) + len(marker), THOUGHT)
        self._thinks = False
        self._forget()

    # -- harmony ---------------------------------------------------------------------------

    def _channels(self) -> Steps[None]:
        """Messages, each on its channel."""
        kind: str = TEXT if self._is_text else (yield from self._header())
        self._thinks = kind == THOUGHT
        while (marker := (yield from self._until(_ENDS, kind))) is not None:
            self._place = yield from self._skip(self._place)
            self._place += 0 if marker == _CHANNEL else len(marker)
            kind = yield from self._header()
            self._thinks = kind == THOUGHT

    def _header(self) -> Steps[str]:
        """Pass the header of a message by, or its call; what it is a message of."""
        self._forget()
        while _MESSAGE not in self._text:
            if not self._may_be_header(self._text) or self._is_whole:
                return self._no_header()
            yield
        header = self._text.partition(_MESSAGE)[0]
        if not self._may_be_header(header):
            return self._no_header()
        self._place = len(header) + len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self._schemas:
            start = yield from self._skip(self._place)
            self._place = yield from self._braced(HARMONY, recipient[1], start)
            return TEXT
        return THOUGHT if f"{_CHANNEL}analysis" in header else TEXT

    @staticmethod
    def _may_be_header(text: str) -> bool:
        start = text.lstrip()
        begins = any(start.startswith(one) or one.startswith(start) for one in _HEADER_STARTS)
        return begins and len(text) <= _LONGEST_HEADER + len(_MESSAGE)

    def _no_header(self) -> str:
        """A text without a header; a header that was cut off is nothing."""
        if self._may_be_header(self._text):
            is_markup = _CHANNEL in self._text or self._text.lstrip().startswith(("<|", "to="))
            self._place = len(self._text) if is_markup else 0
        elif self._text.startswith(_CHANNEL):
            self._say(len(_CHANNEL))
        return TEXT
