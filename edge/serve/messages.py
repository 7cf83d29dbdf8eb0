"""`/v1/messages`, Anthropic's interface: the chat that a request stands for, and its answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from edgespec.decode.generation import Chunk, Result, ToolCall
from edgespec.serve.chat import ChatRequest, answer_job, prompt_of, read_chat
from edgespec.serve.parsing import Fields, ServedModel
from edgespec.serve.serializers import Choice, Delta, Serializer, new_id
from edgespec.serve.service import AnswerJob, Service, Underway

_NOT_THERE = {
    "container": "nothing is run here: offer a tool that does",
    "mcp_servers": "offer their tools in tools",
}
_CHOICES = {"any": "required"}  # of tools, where a chat has another word


def read_messages(fields: Fields, setup: ServedModel) -> ChatRequest:
    """What a request wants. Raises ApiError for a field that is wrong or not supported."""
    if "max_tokens" not in fields:
        fields.refuse("max_tokens", "is missing", code="missing_required_parameter")
    return read_counted(fields, setup)


def read_counted(fields: Fields, setup: ServedModel) -> ChatRequest:
    """The same, where only the tokens of its prompt are asked for."""
    fields.refuse_set(_NOT_THERE)
    return read_chat(fields.within(as_chat(fields.take())), setup)


def prepare_message(service: Service, asked: ChatRequest, request: Underway) -> AnswerJob:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    talk, ids = prompt_of(service, asked)
    serializer = MessagesSerializer(service.setup.names[0], len(ids))
    return answer_job(service, asked, talk, ids, serializer, request)


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The chat that a request stands for; what is wrong in it stays, for the chat's reader."""
    chat = {name: value for name, value in body.items() if name not in ("system", "n")}
    messages, tools = body.get("messages"), body.get("tools")
    if isinstance(messages, list) and messages:
        system = [{"role": "system", "content": body["system"]}] if "system" in body else []
        chat["messages"] = [*system, *(made for one in messages for made in _messages(one))]
    if isinstance(tools, list):
        chat["tools"] = [_tool(one) for one in tools]
    if isinstance(choice := body.get("tool_choice"), dict):
        kind = choice.get("type", "auto")
        chat["tool_choice"] = _CHOICES.get(str(kind), kind)
        if kind == "tool":
            chat["tool_choice"] = {"type": "function", "name": choice.get("name")}
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    chat["stop"] = chat.pop("stop_sequences", None)
    config = chat.pop("output_config", {})
    is_object = isinstance(config, dict)
    chat["reasoning_effort"] = config.get("effort") if is_object else None
    chat["response_format"] = config.get("format") if is_object else config
    return chat


def _messages(message: Any) -> list[Any]:
    """A chat's messages for one: results of tools are messages of their own."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return [message]
    found = []
    for is_result, blocks in groupby(message["content"], lambda one: _kind(one) == "tool_result"):
        if is_result:
            found += [
                {
                    "role": "tool",
                    "content": one.get("content"),
                    "tool_call_id": one.get("tool_use_id"),
                }
                for one in blocks
            ]
            continue
        said = list(blocks)
        made = {**message, "content": [one for one in said if _kind(one) not in _NO_PARTS]}
        if calls := [_call(one) for one in said if _kind(one) == "tool_use"]:
            made["tool_calls"] = calls
        found.append(made)
    return found or [{**message, "content": ""}]


_NO_PARTS = ("tool_use", "redacted_thinking")  # what was encrypted nobody here can read


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, dict) else None


def _call(block: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": block.get("name"), "arguments": block.get("input")}
    return {"type": "function", "id": block.get("id"), "function": function}


def _tool(tool: Any) -> Any:
    """A chat's tool for one; those of another kind are left, as the chat's reader skips them."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        return tool
    return {
        "type": "function",
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }


Event = dict[str, Any]
_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "context_full": "model_context_window_exceeded",
}
_THOUGHT, _TEXT = "thinking", "text"


class MessagesSerializer(Serializer):
    """The answer to one request; there is only one choice.

    Args:
        prompt_tokens: what a stream begins with; what was in the cache is only known at its end.
    """

    names_events = True

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self._open = ""  # the kind of the block that is being written, or the identity of its call
        self._next = 0  # number of the next block

    def begin(self, index: int) -> list[Event]:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        message = self._message([], None, None, usage)
        return [{"type": "message_start", "message": message}]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[Event]:
        events = self._write(_THOUGHT, delta.reasoning) if delta.reasoning else []
        if delta.content:
            events += self._write(_TEXT, delta.content)
        for call in delta.calls:
            events += self._call(call)
        return events

    def end(self, choice: Choice) -> list[Event]:
        delta = {
            "stop_reason": _reason(choice),
            "stop_sequence": choice.result.stop_string,
        }
        last = {"type": "message_delta", "delta": delta, "usage": _usage(choice.result)}
        return [*self._close_block(), last, {"type": "message_stop"}]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        choice = choices[0]
        blocks: list[dict[str, Any]] = []
        if choice.reasoning:
            blocks.append({"type": _THOUGHT, "thinking": choice.reasoning, "signature": ""})
        if choice.content:
            blocks.append({"type": _TEXT, "text": choice.content})
        for call in choice.calls:
            arguments = json.loads(call.arguments) if call.is_whole else {}
            blocks.append({**_begun(call), "input": arguments})
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
        if self._open != call.id:
            events = [*self._close_block(), self._started({**_begun(call), "input": {}})]
            self._open = call.id
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
    return {"type": "tool_use", "id": call.id, "name": call.name}


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
