"""`/v1/messages`, Anthropic's interface: from a request to what it wants, and its answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from edgespec.decode.generation import Chunk, Result
from edgespec.models.images import KINDS as IMAGES
from edgespec.models.images import Image
from edgespec.serve.chat import (
    ChatRequest,
    answer_job,
    content_of,
    parse_effort,
    parse_image,
    parse_parts,
    parse_thinking,
    prompt_of,
    text_of,
)
from edgespec.serve.parsing import (
    Fields,
    Limits,
    Output,
    ServedModel,
    format_within,
    parse_max_tokens,
    parse_model,
    parse_options,
    shown,
    takes_prewarm,
)
from edgespec.serve.serializers import Choice, Delta, Serializer, ToolCall, new_id
from edgespec.serve.service import AnswerJob, Service, Task
from edgespec.serve.tools import Tools, check_schemas, is_kind, parse_function

Messages = list[dict[str, Any]]
_NOT_THERE = {
    "container": "nothing is run here: offer a tool that does",
    "mcp_servers": "offer their tools in tools",
}


def read_messages(fields: Fields, setup: ServedModel, *, counts: bool = False) -> ChatRequest:
    """What a request wants. Raises ApiError for a field that is wrong or not supported.

    Args:
        counts: only the tokens of its prompt are asked for.
    """
    parse_model(fields, setup)
    messages = _messages(fields, setup.limits)
    if not counts and "max_tokens" not in fields:
        fields.refuse("max_tokens", "is missing", code="missing_required_parameter")
    budget, variables = _thinking(fields, setup)
    most = parse_max_tokens(fields, None, setup.context_size, "max_tokens")
    prewarms = takes_prewarm(fields)
    form = format_within(fields, "output_config", setup.limits)
    options = parse_options(fields, setup, most, stop="stop_sequences", ahead=prewarms, **form)
    tools = _tools(fields, setup.limits)
    output = Output(streams=fields.flag("stream"))
    fields.ignore("metadata", "service_tier", "context_management", "betas")
    fields.ignore("speed", "inference_geo", "diagnostics")
    fields.refuse_set(_NOT_THERE)
    return ChatRequest(
        messages, options, output, variables, tools, budget, most > 0 and not prewarms
    )


def prepare_message(service: Service, asked: ChatRequest, task: Task) -> AnswerJob:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    talk, ids = prompt_of(service, asked)
    serializer = MessagesSerializer(service.setup.names[0], len(ids))
    return answer_job(service, asked, talk, ids, serializer, task, names_events=True)


# -- messages ------------------------------------------------------------------------------


def _messages(fields: Fields, limits: Limits) -> Messages:
    found: Messages = []
    if "system" in fields:
        found.append({"role": "system", "content": text_of(fields, "system", may_lack=True)})
    said = [_message(one, limits) for one in fields.objects("messages", limits.messages)]
    if not said:
        fields.refuse("messages", "must have at least one message")
    return [*found, *chain(*said)]


def _message(fields: Fields, limits: Limits) -> Messages:
    role = fields.text("role")
    if role not in ("user", "assistant", "system"):
        fields.refuse("role", f"must be user or assistant, not {shown(role)}")
    content = fields.peek("content")
    if isinstance(content, str):
        return [{"role": role, "content": fields.text("content")}]
    if not isinstance(content, list):
        fields.refuse("content", f"must be a text or a list of blocks, not {shown(content)}")
    blocks = fields.objects("content", limits.messages)
    return [_of_assistant(blocks)] if role == "assistant" else _of_user(blocks, role)


def _of_user(blocks: Iterable[Fields], role: str) -> Messages:
    """Results of tools are messages of their own; what is between them is one each."""
    found: list[tuple[dict[str, Any], list[str | Image]]] = []
    for block in blocks:
        kind = _kind(block, "text", "image", "tool_result")
        if kind == "tool_result":
            identity = block.text("tool_use_id", "")
            block.flag("is_error")  # its text says what went wrong
            parts = parse_parts(block, "content", ("text", *IMAGES), may_lack=True)
            found.append(({"role": "tool", "tool_call_id": identity}, parts))
        else:
            if not found or found[-1][0]["role"] != role:
                found.append(({"role": role}, []))
            found[-1][1].append(parse_image(block) if kind == "image" else block.text("text"))
        block.ignore("citations")
    made = [{**message, **content_of(parts)} for message, parts in found]
    return made or [{"role": role, "content": ""}]


def _of_assistant(blocks: Iterable[Fields]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        kind = _kind(block, "text", "tool_use", "thinking", "redacted_thinking")
        if kind == "text":
            text = block.text("text")
            message["content"] += f"\n{text}" if message["content"] else text
            block.ignore("citations")
        elif kind == "thinking":
            thought = message.get("reasoning_content", "") + block.text("thinking")
            message["reasoning_content"] = thought
            block.ignore("signature")
        elif kind == "redacted_thinking":
            block.ignore("data")  # nobody here can read it
        else:
            message.setdefault("tool_calls", []).append(_call(block))
    return message


def _call(block: Fields) -> dict[str, Any]:
    identity, name, arguments = block.text("id", ""), block.text("name"), block.pop("input", {})
    if not isinstance(arguments, dict):
        block.refuse("input", f"must be an object, not {shown(arguments)}")
    block.ignore("caller")
    function = {"name": name, "arguments": arguments}
    return {"type": "function", "id": identity, "function": function}


def _kind(block: Fields, *kinds: str) -> str:
    kind = block.text("type")
    if kind not in kinds:
        block.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")
    return kind


# -- how to answer -------------------------------------------------------------------------


def _tools(fields: Fields, limits: Limits) -> Tools:
    offered = []
    for inner in fields.objects("tools", limits.tools):
        if not is_kind(inner, "custom"):
            continue
        inner.ignore("eager_input_streaming", "input_examples", "defer_loading", "allowed_callers")
        offered.append(parse_function(inner, "input_schema"))
    choice = fields.object("tool_choice")
    kind, names = choice.text("type", "auto"), [one["function"]["name"] for one in offered]
    parallel = not choice.flag("disable_parallel_tool_use")
    required: tuple[str, ...] = ()
    if kind == "any":
        required = tuple(names)
    elif kind == "tool":
        required, parallel = (choice.text("name"),), False
    elif kind not in ("auto", "none"):
        choice.refuse("type", f"must be auto, any, tool or none, not {shown(kind)}")
    if kind in ("any", "tool") and (not names or not set(required) <= set(names)):
        fields.refuse("tool_choice", "requires a tool that is not there")
    if kind == "none":
        return Tools()
    return check_schemas(Tools(tuple(offered), required, parallel), limits)


def _thinking(fields: Fields, setup: ServedModel) -> tuple[int | None, dict[str, Any]]:
    """As `parse_thinking`; the effort is a part of how to answer here."""
    value = fields.peek("output_config")
    config = Fields(value if value is not None else {}, "output_config")
    effort = parse_effort(config, "effort")
    thinking = fields.pop("thinking")
    told = {"thinking": thinking, "reasoning_effort": effort or None}
    return parse_thinking(fields.within(told), setup)


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

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The answer, for who asked for no stream."""
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
