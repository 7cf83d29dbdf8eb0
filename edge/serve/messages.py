"""Messages of a conversation, as chat templates take them."""

from __future__ import annotations

from typing import Any

from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.tools import call_arguments

_THOUGHTS = ("thinking", "reasoning")  # parts of an assistant's message
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


def take_messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The field `messages`. Raises Refusal."""
    values = fields.list("messages", limits.messages)
    if not values:
        fields.refuse("messages", "must have at least one message")
    return [
        _message(Fields(value, f"messages[{index}]"), limits) for index, value in enumerate(values)
    ]


def text_of(
    fields: Fields, field: str, kinds: tuple[str, ...] = ("text",), *, may_lack: bool = False
) -> str:
    """A text, or a list of parts that are texts, which become lines.

    Args:
        may_lack: "" where there is none; else that is refused.
    """
    return "\n".join(_texts(fields, field, kinds, may_lack, []))


def _texts(
    fields: Fields, field: str, kinds: tuple[str, ...], may_lack: bool, thoughts: list[str]
) -> list[str]:
    """The texts of a field; those of thoughts are put into `thoughts`."""
    value = fields.any(field, "" if may_lack else None)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.refuse(field, f"must be a text or a list of text parts, not {shown(value)}")
    texts = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        inner = Fields(part, f"{fields.name(field)}[{index}]")
        kind = inner.text("type", "text")
        if kind in _THOUGHTS and may_lack:
            thoughts.append(inner.text(kind, "") or inner.text("text", ""))
        elif kind == "refusal" and may_lack:
            texts.append(inner.text("refusal", ""))
        elif kind in kinds:
            texts.append(inner.text("text", ""))
        else:
            inner.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")
        inner.ignore("annotations", "logprobs", "signature", "citations", "id")
        inner.end()
    return texts


def _message(fields: Fields, limits: Limits) -> dict[str, Any]:
    role = fields.text("role")
    if role not in _ROLES:
        fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    is_answer, thoughts = role == "assistant", list[str]()
    may_lack = _ROLES[role] in ("assistant", "tool")
    message["content"] = "\n".join(_texts(fields, "content", ("text",), may_lack, thoughts))
    if is_answer:
        if calls := _calls(fields, limits):
            message["tool_calls"] = calls
        message["content"] = message["content"] or fields.text("refusal", "")
        if thought := _thought_of(fields) or "\n".join(thoughts):
            message["reasoning_content"] = thought
    if may_lack and not is_answer:
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if "name" in fields:
        message["name"] = fields.text("name")
    fields.ignore("id", "annotations", "refusal", "provider_specific_fields")
    fields.refuse_set(dict.fromkeys(("audio", "images"), "this model reads text alone"))
    fields.end()
    return message


def _thought_of(fields: Fields) -> str:
    """What was thought before an answer that is sent back, under any of its names."""
    fields.ignore("reasoning_details", "thinking_blocks", "reasoning_signature")
    names = ("reasoning_content", "reasoning", "thinking")
    found = [value for name in names if isinstance(value := fields.any(name), str)]
    return next(filter(None, found), "")


def _calls(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    values = fields.list("tool_calls", limits.tools)
    calls = [
        _call(Fields(value, f"{fields.name('tool_calls')}[{index}]"))
        for index, value in enumerate(values)
    ]
    if function := fields.any("function_call"):  # as it was before there were tools
        calls.append(_call(Fields({"function": function}, fields.path)))
    return calls


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
