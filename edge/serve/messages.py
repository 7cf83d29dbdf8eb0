"""Messages of a conversation, as chat templates take them."""

from __future__ import annotations

from typing import Any

from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.tools import call_arguments

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


def take_messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The field `messages`. Raises Refusal."""
    values = fields.list("messages", limits.messages)
    if not values:
        fields.refuse("messages", "must have at least one message")
    return [
        _message(Fields(value, f"messages[{index}]"), limits) for index, value in enumerate(values)
    ]


def text_of(fields: Fields, field: str, kinds: tuple[str, ...] = ("text",)) -> str:
    """A text, or a list of parts that are texts."""
    value = fields.any(field)
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        fields.refuse(field, f"must be a text or a list of text parts, not {shown(value)}")
    texts = []
    for index, part in enumerate(value):
        inner = Fields(part, f"{fields.name(field)}[{index}]")
        kind = inner.text("type")
        if kind not in kinds:
            inner.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")
        texts.append(inner.text("text"))
        inner.ignore("annotations", "logprobs")  # of an answer that is sent back
        inner.end()
    return "".join(texts)


def _message(fields: Fields, limits: Limits) -> dict[str, Any]:
    role = fields.text("role")
    if role not in _ROLES:
        fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    calls = _calls(fields, limits) if role == "assistant" else []
    if "content" in fields or not calls:
        message["content"] = text_of(fields, "content")
    else:
        message["content"] = ""
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and "reasoning_content" in fields:
        message["reasoning_content"] = fields.text("reasoning_content")
    if role == "tool":
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if "name" in fields:
        message["name"] = fields.text("name")
    fields.only("refusal", "")
    fields.only("annotations", [])
    fields.end()
    return message


def _calls(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    values = fields.list("tool_calls", limits.tools)
    return [
        _call(Fields(value, f"{fields.name('tool_calls')}[{index}]"))
        for index, value in enumerate(values)
    ]


def _call(fields: Fields) -> dict[str, Any]:
    """A call of a tool; templates take its arguments as an object, clients send their text."""
    fields.only("type", "function")
    fields.ignore("index")
    identity = fields.text("id", "")
    function = fields.object("function")
    name, arguments = function.text("name"), call_arguments(function)
    function.end()
    fields.end()
    return {
        "type": "function",
        "id": identity,
        "function": {"name": name, "arguments": arguments},
    }
