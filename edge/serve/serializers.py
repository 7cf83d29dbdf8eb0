"""What answers look like, whichever interface they are for: usage, timings, reasons, logprobs."""

from __future__ import annotations

import codecs
import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from edgespec.backends.base import Tokenizer
from edgespec.decode.generation import Chunk, Counters, Result, ToolCall, joined_calls
from edgespec.sampling.chain import TokenLogprob
from edgespec.serve.parsing import ApiError, Output

_REASONS = {"stop": "stop", "length": "length", "context_full": "length"}


@dataclass(frozen=True, slots=True)
class Delta:
    """What a part of a text added to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    @staticmethod
    def of(parts: Sequence[Delta]) -> Delta:
        """What several added, one after the other."""
        content = "".join(one.content for one in parts)
        thought = "".join(one.reasoning for one in parts)
        return Delta(content, thought, joined_calls(call for one in parts for call in one.calls))


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer that is complete; `thought_tokens` are those of the thought before it."""

    index: int
    content: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    result: Result
    thought_tokens: int = 0

    @property
    def reason(self) -> str:
        """Why it ended, in OpenAI's words. Raises ApiError for one that was not completed."""
        if self.is_calling:
            return "tool_calls"
        self.check_complete()
        return _REASONS[self.result.finish_reason]

    @property
    def is_calling(self) -> bool:
        """Whether it ended with calls that can be made."""
        return bool(self.calls) and all(call.is_whole for call in self.calls)

    def check_complete(self) -> None:
        """Raise ApiError for one that was cancelled."""
        if self.result.finish_reason not in _REASONS:
            raise ApiError("the answer was cancelled", status=503, code="cancelled")


def unwritten(choice: Choice, *, may_be_cut: bool = False) -> Choice:
    """An answer of which the prompt alone was asked for, without the token that an engine writes.

    Its counters have what reading the prompt took, and nothing that was decoded. One that
    `may_be_cut` was answered even if somebody else came before all was read.
    """
    counters = choice.result.counters
    read = Counters(
        prompt_tokens=counters.prompt_tokens,
        reused_tokens=counters.reused_tokens,
        time_to_first_token_s=counters.time_to_first_token_s,
        prompt_s=counters.prompt_s,
    )
    result = replace(choice.result, text="", token_ids=(), logprobs=(), counters=read)
    if may_be_cut or result.finish_reason != "cancelled":
        result = replace(result, finish_reason="length", stop_string=None)
    return replace(choice, content="", reasoning="", calls=(), thought_tokens=0, result=result)


class Serializer(ABC):
    """One interface's way to say things. Events are documents, in the order they are sent."""

    tells_reading = False  # whether `reading` says anything
    names_events = False  # each event has a line with its type; there is no [DONE] then

    def begin(self, index: int) -> list[dict[str, Any]]:
        """Before anything of an answer is known."""
        return []

    @abstractmethod
    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """What a delta, which came of these chunks, added to an answer."""

    @abstractmethod
    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """When an answer is complete: why it ended."""

    def reading(self, progress: dict[str, int]) -> list[dict[str, Any]]:
        """While the prompt is read, where that is told; how much of it was read."""
        return []

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        return []

    def failed(self, error: ApiError) -> dict[str, Any] | None:
        """When an answer fails, where that is an event of its own: that one."""
        return None

    @abstractmethod
    def whole(self, choices: Sequence[Choice]) -> Any:
        """Everything at once, for who did not ask for a stream."""


def json_bytes(document: Any) -> bytes:
    """JSON as it is sent: without needless spaces, of which an event would have 25."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def new_id(prefix: str) -> str:
    """A name that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


@cache
def fingerprint() -> str:
    """What made an answer: the program and its version."""
    return f"edgespec-{version('edgespec')}"


def usage(choices: Sequence[Choice], of_one_prompt: int) -> dict[str, Any]:
    """Tokens read and written; a prompt counts once for its `of_one_prompt` answers."""
    counters = [choice.result.counters for choice in choices]
    prompts = Counters.total(counters[::of_one_prompt])
    generated = sum(one.generated_tokens for one in counters)
    return {
        "prompt_tokens": prompts.prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompts.prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": prompts.reused_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.thought_tokens for choice in choices)
        },
    }


def timings(choices: Sequence[Choice]) -> dict[str, Any]:
    """Speed, under the names that llama.cpp's server gives it, and where tokens came from."""
    total = Counters.total(choice.result.counters for choice in choices)
    prompt_ms, decode_ms = total.prompt_s * 1e3, total.decode_s * 1e3
    read, decoded = total.prompt_tokens - total.reused_tokens, total.accepted_tokens + total.rounds
    return {
        "cache_n": total.reused_tokens,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / read if read else 0.0,
        "prompt_per_second": read / total.prompt_s if prompt_ms else 0.0,
        "predicted_n": total.generated_tokens,
        "predicted_ms": decode_ms,
        "predicted_per_token_ms": decode_ms / decoded if decoded else 0.0,
        "predicted_per_second": total.tokens_per_s,
        "draft_n": total.drafted_tokens,
        "draft_n_accepted": total.accepted_tokens,
        "drafted_by": dict(total.drafted_by),
        "accepted_by": dict(total.accepted_by),
        "acceptance_length": total.acceptance_length,
    }


class OpenAISerializer(Serializer):
    """What chats and completions have in common.

    Args:
        kinds: of the document of an event, and of a whole answer.
        tokens: tells logprobs, where there are any.
    """

    def __init__(
        self, prefix: str, kinds: tuple[str, str], model: str, output: Output, tokens: ToldTokens
    ) -> None:
        self._kinds, self._tokens, self.tells_reading = kinds, tokens, output.progress
        self._num_choices, self._usage, self._sources = output.choices, output.usage, output.sources
        self._head = {
            "id": new_id(prefix),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint(),
        }

    def _event(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        if self._usage:
            more["usage"] = None
        return {**self._head, "object": self._kinds[0], "choices": [choice], **more}

    def reading(self, progress: dict[str, int]) -> list[dict[str, Any]]:
        told = {"choices": [], "prompt_progress": progress}
        return [{**self._head, "object": self._kinds[0], **told}]

    def _more(self, chunks: Sequence[Chunk]) -> dict[str, Any]:
        return {"sources": sources(chunks)} if self._sources else {}

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        if not self._usage:
            return []
        return [self._document(self._kinds[0], [], choices)]

    def _document(self, kind: str, told: Any, choices: Sequence[Choice]) -> dict[str, Any]:
        return {
            **self._head,
            "object": kind,
            "choices": told,
            "usage": usage(choices, self._num_choices),
            "timings": timings(choices),
        }


class ChatSerializer(OpenAISerializer):
    """Answers of a chat."""

    def __init__(self, model: str, output: Output, tokens: ToldTokens) -> None:
        kinds = "chat.completion.chunk", "chat.completion"
        super().__init__("chatcmpl-", kinds, model, output, tokens)
        self._calls = dict[str, int]()  # of the answer that is being sent: numbers by identity

    def begin(self, index: int) -> list[dict[str, Any]]:
        self._calls = {}
        return [self._event(choice_of(index, delta={"role": "assistant", "content": ""}))]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        parts: dict[str, Any] = {"reasoning_content": delta.reasoning, "content": delta.content}
        parts["tool_calls"] = [self._part(call) for call in delta.calls]
        said = {name: value for name, value in parts.items() if value}
        more = self._more(chunks)
        told = self._tokens.chat([one for chunk in chunks for one in chunk.logprobs])
        if not (said or more or told):
            return []
        return [self._event(choice_of(index, None, told, delta=said), **more)]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        last = choice_of(choice.index, choice.reason, delta={})
        return [self._event(last, timings=timings([choice]))]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return self._document(self._kinds[1], [self._whole(one) for one in choices], choices)

    def _part(self, call: ToolCall) -> dict[str, Any]:
        """A call, or more of one: arguments alone."""
        if call.id in self._calls:
            more = {"arguments": call.arguments}
            return {"index": self._calls[call.id], "function": more}
        self._calls[call.id] = len(self._calls)
        return {"index": self._calls[call.id], **_call_document(call)}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not choice.content else choice.content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [_call_document(call) for call in choice.calls]
        told = self._tokens.chat(choice.result.logprobs)
        return choice_of(choice.index, choice.reason, told, message=message)


def _call_document(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def choice_of(
    index: int, reason: str | None = None, logprobs: Any = None, **said: Any
) -> dict[str, Any]:
    """A choice of a document: a message, a delta of one, or a text."""
    return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason}


def sources(chunks: Sequence[Chunk]) -> list[list[str]]:
    """Pieces of text, each with the drafter it came from; "" is the model's own step."""
    pieces: list[list[str]] = []
    for chunk in chunks:
        start = 0
        for name, length in (*chunk.sources, ("", len(chunk.text))):
            pieces.append([chunk.text[start : start + length], name])
            start += length
    return [one for one in pieces if one[0]]


_LEAST = -9999.0  # in place of minus infinity, which JSON does not have


class ToldTokens:
    """Tokens of one vocabulary. A token that ends an answer is none of its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def entries(self, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        """As `logprobs.content` of a chat has them."""
        return [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(*pair) for pair in one.best],
            }
            for one in self._shown(logprobs)
        ]

    def chat(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """`logprobs` of a choice of a chat; None where there are none."""
        return {"content": self.entries(logprobs), "refusal": None} if logprobs else None

    def _shown(self, logprobs: Sequence[TokenLogprob]) -> list[TokenLogprob]:
        return [one for one in logprobs if not self._tokenizer.is_end(one.token)]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        text = data.decode(errors="replace") if data else self._tokenizer.token_text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(data)}

    def text_of(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._tokenizer.token_bytes, tokens)).decode(errors="replace")

    def _name(self, token: int) -> str:
        """A key: other parts of characters have other ones."""
        data = self._tokenizer.token_bytes(token)
        try:
            return data.decode() if data else self._tokenizer.token_text(token)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def columns(
        self, logprobs: Sequence[TokenLogprob], place: TextPlace, *, with_end: bool = False
    ) -> dict[str, Any]:
        """`logprobs` of a completion's choice, which go on at a place of its text.

        A first token, which has none, has nan. `with_end` also tells a token that ends the answer.
        """
        shown = list(logprobs) if with_end else self._shown(logprobs)
        return {
            "tokens": [self._name(one.token) for one in shown],
            "token_logprobs": [
                None if math.isnan(one.logprob) else _finite(one.logprob) for one in shown
            ],
            "top_logprobs": [
                None
                if math.isnan(one.logprob)
                else {self._name(token): _finite(logprob) for token, logprob in reversed(one.best)}
                for one in shown
            ],
            "text_offset": [place.pass_by(self._tokenizer.token_bytes(one.token)) for one in shown],
        }


class TextPlace:
    """How many characters were written before a token."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._passed = 0

    def pass_by(self, data: bytes) -> int:
        """Where a token of these bytes begins."""
        began = self._passed
        self._passed += len(self._decoder.decode(data))
        return began


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _LEAST
