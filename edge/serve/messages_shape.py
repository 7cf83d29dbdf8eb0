"""`/v1/messages`, Anthropic's interface: what its answers look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk, Result
from edgespec.serve.shapes import Choice, Delta, ToolCall, new_id

Event = dict[str, Any]
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context_full": "model_context_window_exceeded",
}
_THOUGHT, _TEXT = "thinking", "text"


class MessagesShape:
    """The answer to one request; there is only one choice.

    Args:
        prompt_tokens: what a stream begins with; what was in the cache is only known at its end.
    """

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._open = ""  # the kind of the block that is being written, or the identity of its call
        self._next = 0  # number of the next block

    def begin(self, index: int) -> list[Event]:
        """A message without content."""
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = self._message([], None, None, usage)
        return [{"type": "message_start", "message": message}]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[Event]:
        """Thoughts, text and calls, each in a block of its own."""
        events = self._write(_THOUGHT, delta.reasoning) if delta.reasoning else []
        if delta.content:
            events += self._write(_TEXT, delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def end(self, choice: Choice) -> list[Event]:
        """The reason and the usage."""
        delta = {
            "stop_reason": _reason(choice),
            "stop_sequence": choice.result.stop_string,
        }
        last = {"type": "message_delta", "delta": delta, "usage": _usage(choice.result)}
        return [*self._close_block(), last, {"type": "message_stop"}]

    def close(self, choices: Sequence[Choice]) -> list[Event]:
        """Nothing more."""
        return []

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer, for who asked for no stream."""
        choice = choices[0]
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            blocks.append({"type": _THOUGHT, "thinking": choice.reasoning, "signature": ""})
        if choice.content:
            blocks.append({"type": _TEXT, "text": choice.content})
        for call in choice.calls:
            blocks.append({**_begun(call), "input": _object(call.arguments)})
        reason, stop = _reason(choice), choice.result.stop_string
        return self._message(blocks, reason, stop, _usage(choice.result))

    def _message(
        self, content: Any, reason: str | None, stop: str | None, usage: Any
    ) -> dict[str, Any]:
        ended = {"stop_reason": reason, "stop_sequence": stop}
        return {**self._head, "content": content, **ended, "usage": usage}

    # -- blocks ----------------------------------------------------------------------------

    def _write(self, kind: str, text: str) -> list[Event]:
        events = []
        if self._open != kind:
            empty = {"type": kind, kind: ""}
            if kind == _THOUGHT:
                empty["signature"] = ""
            events = [*self._close_block(), self._started(empty)]
            self._open = kind
        return [*events, self._changed({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: ToolCall) -> list[Event]:
        events = []
        if self._open != call.identity:
            events = [*self._close_block(), self._started({**_begun(call), "input": {}})]
            self._open = call.identity
        changed = {"type": "input_json_delta", "partial_json": call.arguments}
        events.append(self._changed(changed))
        return events if call.is_open else [*events, *self._close_block()]

    def _started(self, block: dict[str, Any]) -> Event:
        return {"type": "content_block_start", "index": self._next, "content_block": block}

    def _changed(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._next, "delta": delta}

    def _close_block(self) -> list[Event]:
        if not self._open:
            return []
        self._open = ""
        self._next += 1
        return [{"type": "content_block_stop", "index": self._next - 1}]


def _begun(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.identity, "name": call.name}


def _object(text: str) -> dict[str, Any]:
    """What a model wrote as arguments; a text that is no object is an argument itself."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": text}


def _reason(choice: Choice) -> str:
    choice.check_complete()
    if choice.is_calling:
        return "tool_use"
    if choice.result.stop_string is not None:
        return "stop_sequence"
    return _REASONS[choice.result.finish_reason]


def _usage(result: Result) -> dict[str, int]:
    counters = result.counters
    return {
        "input_tokens": counters.prompt_tokens - counters.reused_tokens,
        "cache_read_input_tokens": counters.reused_tokens,
        "output_tokens": counters.generated_tokens,
    }
