"""`/v1/chat/completions`: what its answers look like."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.serve.asked import Output
from edgespec.serve.shapes import (
    Choice,
    Delta,
    ToolCall,
    fingerprint,
    new_id,
    now_s,
    sources,
    timings,
    usage,
)
from edgespec.serve.told_tokens import ToldTokens


class ChatShape:
    """Answers to one request.

    Args:
        tokens: tells logprobs, where there are any.
    """

    def __init__(self, model: str, output: Output, tokens: ToldTokens) -> None:
        self._output, self._tokens = output, tokens
        self._head = {
            "id": new_id("chatcmpl-"),
            "created": now_s(),
            "model": model,
            "system_fingerprint": fingerprint(),
        }
        self._calls = dict[str, int]()  # of the answer that is being sent: numbers by identity

    def begin(self, index: int) -> list[dict[str, Any]]:
        """The role."""
        self._calls = {}
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        values: dict[str, Any] = {}
        if delta.reasoning:
            values["reasoning_content"] = delta.reasoning
        if delta.content:
            values["content"] = delta.content
        parts = [self._part(call) for call in delta.calls]
        if parts and self._output.functions:
            values["function_call"] = parts[0]["function"]
        elif parts:
            values["tool_calls"] = parts
        more = {"sources": sources(chunks)} if self._output.sources else {}
        told = self._tokens.chat([one for chunk in chunks for one in chunk.logprobs])
        if not (values or more or told):
            return []
        return [{**self._chunk(index, values, logprobs=told), **more}]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """The reason, with the timings of this answer."""
        last = self._chunk(choice.index, {}, self._reason(choice))
        return [{**last, "timings": timings([choice])}]

    def close(self, choices: Sequence[Choice]) -> list[dict[str, Any]]:
        """The usage, where it was asked for."""
        if not self._output.usage:
            return []
        head = self._document("chat.completion.chunk", [])
        return [
            {**head, "usage": usage(choices, self._output.choices), "timings": timings(choices)}
        ]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All answers."""
        return {
            **self._document("chat.completion", [self._whole(choice) for choice in choices]),
            "usage": usage(choices, self._output.choices),
            "timings": timings(choices),
        }

    def _part(self, call: ToolCall) -> dict[str, Any]:
        """A call, or more of one: arguments alone."""
        if call.identity in self._calls:
            more = {"arguments": call.arguments}
            return {"index": self._calls[call.identity], "function": more}
        self._calls[call.identity] = len(self._calls)
        return {"index": self._calls[call.identity], **_call(call)}

    def _chunk(
        self, index: int, delta: Any, reason: str | None = None, logprobs: Any = None
    ) -> Any:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        chunk = self._document("chat.completion.chunk", [choice])
        return {**chunk, "usage": None} if self._output.usage else chunk

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": kind, "choices": choices}

    def _reason(self, choice: Choice) -> str:
        is_function = choice.is_calling and self._output.functions
        return "function_call" if is_function else choice.reason

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if choice.calls and not choice.content else choice.content,
            "refusal": None,
        }
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls and self._output.functions:
            message["function_call"] = _call(choice.calls[0])["function"]
        elif choice.calls:
            message["tool_calls"] = [_call(call) for call in choice.calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._tokens.chat(choice.result.logprobs),
            "finish_reason": self._reason(choice),
        }


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity, "type": "function", "function": function}
