"""What a generation hands out: chunks, their text as far as it is decided, and the result."""

from __future__ import annotations

import codecs
import json
from collections.abc import (
    Callable,
    Sequence,
)
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from edgespec.decode.stats import LARGE, Counters, ModelTurn
from edgespec.errors import UnsupportedError
from edgespec.models.chat import ChatMessage
from edgespec.sampling.logprobs import TokenLogprob

FinishReason: TypeAlias = Literal["stop", "length", "context_full", "cancelled"]


class StepOutput(NamedTuple):
    """What a step wrote for a request, ids first; the first token comes of the prompt's logits."""

    tokens: list[int]
    sources: tuple[str, ...]  # who drafted its first tokens
    logprobs: tuple[TokenLogprob, ...]  # of each token, where they were asked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool that the model calls, or in a `Chunk` a part of that, with more of its arguments.

    `arguments` is the text of a JSON object; where `is_whole` is False they were cut off.
    """

    id: str
    name: str
    arguments: str
    is_whole: bool = True

    @property
    def values(self) -> dict[str, Any]:
        """The arguments by their names. Raises ValueError where they are not whole."""
        found = json.loads(self.arguments)
        if not isinstance(found, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments[:80]}")
        return found

    def result(self, value: object) -> ChatMessage:
        """The message that tells the model what the call gave: a text, or what JSON can hold."""
        content = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return {"role": "tool", "tool_call_id": self.id, "content": content}


class Parts(Protocol):
    """What a part of an answer adds: to its text, to the thought before it, and to calls."""

    @property
    def content(self) -> str: ...

    @property
    def reasoning(self) -> str: ...

    @property
    def calls(self) -> Sequence[Any]: ...


class PartReader(Protocol):
    """Finds thoughts and calls of tools in an answer while it is written."""

    def push(self, text: str) -> Parts:
        """What is known with more of the text."""

    def finish(self) -> Parts:
        """What was held back."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added: text that is safe to show, and the ids behind it."""

    text: str
    token_ids: tuple[int, ...]
    # How many of the ids, and how much of the text, came from drafts; they come first.
    num_drafted: int = field(default=0, compare=False)
    drafted_chars: int = field(default=0, compare=False)
    # Of each drafted id: who drafted it, and how much of the text it brought.
    sources: tuple[tuple[str, int], ...] = field(default=(), compare=False)
    model: str = field(default="", compare=False)  # which one wrote it, where there are two
    # Of each id, where they were asked for.
    logprobs: tuple[TokenLogprob, ...] = field(default=(), compare=False)
    # Where tools were offered: what was thought, and parts of calls; neither is in the text.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of an answer, `token_ids[start:end]`, that one model wrote."""

    model: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation.

    `finish_reason` is "stop" (the model ended, or a stop string came), "length" (max_tokens),
    "context_full" or "cancelled". `spans` say which model wrote what, where there are two; `turns`
    have 0 tokens besides where the small one handed back at once. `logprobs` has one of each token,
    where they were asked for: of the model's own logits, also for tokens that were drafted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    counters: Counters
    spans: tuple[Span, ...] = ()
    turns: tuple[ModelTurn, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_string: str | None = None  # which came
    reasoning: str = ""  # what was thought before, where tools were offered
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> ChatMessage:
        """The answer as a message of a conversation, with the calls in it."""
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in self.tool_calls
        ]
        message: ChatMessage = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    @property
    def large_share(self) -> float:
        """Part of the tokens that the large model wrote: all, where there is only one."""
        other = sum(span.end - span.start for span in self.spans if span.model != LARGE)
        return 1.0 - other / len(self.token_ids) if self.token_ids else 1.0


def chunk_of(written: StepOutput, pieces: Sequence[str], model: str) -> Chunk:
    """A step's tokens as far as their text goes."""
    tokens, names, logprobs = written
    used, text = len(pieces), "".join(pieces)
    ids, logprobs = tuple(tokens[:used]), logprobs[:used]
    drafted = min(used, len(tokens) - 1)  # the last one is the target's own
    if not drafted:
        return Chunk(text, ids, model=model, logprobs=logprobs)
    sizes = [len(piece) for piece in pieces[:drafted]]
    sources = tuple(zip(names, sizes, strict=False))
    return Chunk(text, ids, drafted, sum(sizes), sources, model, logprobs)


class TextStream:
    """Text of one answer, as far as it may be shown: incremental UTF-8 and stop strings.

    Held back until they are decided are bytes of an unfinished character, and text that may be the
    beginning of a stop string. Where the stop is depends on the text alone, not on how tokens cut
    it: the first character that completes a stop string ends the text. If it completes several at
    once, the one that began earliest is removed: with the stops "bcd" and "abcde" the text "xabcde"
    becomes "xa".

    `token_bytes` gives the bytes of a token, `b""` for one that is not shown. Bytes that are no
    UTF-8 become U+FFFD, as in `bytes.decode(errors="replace")`. Raises `UnsupportedError` for an
    empty stop string.

        tokens "I", " like", "#", "##", "#"; stop "###"
        pushes give "I", " like", "", "" -> `stopped`, `text` "I like"
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        self._token_bytes = token_bytes
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        self._matchers = [_Matcher(text) for text in stops]
        self._held = ""  # whole characters that are not given out: a stop string may have begun
        self._emitted: list[str] = []
        self._finished = False
        self.stopped = False  # True from the token on that completed a stop string
        self.stop_string: str | None = None  # this one

    @property
    def text(self) -> str:
        """Everything given out so far."""
        return "".join(self._emitted)

    def push(self, token: int) -> str:
        """Text that has become safe to show, often `""`.

        Tokens after the one that completed a stop string are ignored.
        """
        assert not self._finished
        if self.stopped:
            return ""
        return self._add(self._decode(self._token_bytes(token)))

    def finish(self) -> str:
        """The rest, now that no more tokens come: an unfinished character is one U+FFFD."""
        if self._finished or self.stopped:
            return ""
        self._finished = True
        shown = self._add(self._decode(b"", final=True))
        rest, self._held = self._held, ""
        self._emitted.append(rest)
        return shown + rest

    def _add(self, new_text: str) -> str:
        if not self._matchers:
            self._emitted.append(new_text)
            return new_text
        text = self._held + new_text
        length = len(self._held)
        for character in new_text:
            length += 1
            completed = [m.text for m in self._matchers if m.completes(character)]
            if completed:
                self.stopped, self.stop_string = True, max(completed, key=len)
                return self._emit(text[: length - len(self.stop_string)], held="")
        num_held = max(m.num_matched for m in self._matchers)
        cut = len(text) - num_held
        return self._emit(text[:cut], held=text[cut:])

    def _emit(self, shown: str, *, held: str) -> str:
        self._held = held
        self._emitted.append(shown)
        return shown


class _Matcher:
    """One stop string, and how much of it the text seen so far ends with (Knuth-Morris-Pratt).

    A character costs a constant number of steps on average, however long the stop string is.
    """

    def __init__(self, text: str) -> None:
        if not text:
            raise UnsupportedError(
                "a stop string must not be empty: it would stop before the first token",
                hint="leave the stop string out",
            )
        self.text = text
        self.num_matched = 0
        self._fallback = _fallbacks(text)

    def completes(self, character: str) -> bool:
        """Read one character; True if the stop string ends with it."""
        matched = self.num_matched
        while matched and self.text[matched] != character:
            matched = self._fallback[matched]
        self.num_matched = matched + (self.text[matched] == character)
        return self.num_matched == len(self.text)


def _fallbacks(text: str) -> list[int]:
    """At n: the length of the longest proper prefix of `text` that ends `text[:n]`.

    "abab!" gives [0, 0, 0, 1, 2, 0].
    """
    fallbacks = [0, 0]
    matched = 0
    for character in text[1:]:
        while matched and text[matched] != character:
            matched = fallbacks[matched]
        matched += text[matched] == character
        fallbacks.append(matched)
    return fallbacks
