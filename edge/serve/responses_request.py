"""`/v1/responses`: from the fields of a request to what it wants. Nothing is kept between two."""

from __future__ import annotations

from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Output, Setup, take_model
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.messages import text_of
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling
from edgespec.serve.schemas import AnswerForm, typed_format
from edgespec.serve.tools import call_arguments, take_tools

_PARTS = ("input_text", "output_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_response(body: Any, setup: Setup) -> tuple[ChatAsked, dict[str, Any]]:
    """What a request wants, and what its answer repeats of it. Raises Refusal."""
    fields = Fields(body)
    take_model(fields, setup.names)
    messages = _messages(fields, setup.limits)
    told = {name: body.get(name) for name in ("instructions", "metadata", "tools", "tool_choice")}
    options = GenerationOptions(
        max_tokens=take_max_tokens(
            fields, setup.defaults.max_tokens, setup.context_size, "max_output_tokens"
        ),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        raw=True,
        reuse=True,
        **_format(fields, setup.limits),
    )
    tools = take_tools(fields, setup.limits)
    if tools.offered and options.answer_format is not None:
        fields.refuse("text", "is not supported beside tools", code="unsupported_value")
    output = Output(streams=fields.flag("stream"))
    _refuse_others(fields)
    return ChatAsked(messages, options, output, {}, tools), told


def _messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    instructions = fields.text("instructions", "")
    value = fields.any("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        fields.refuse("input", f"must be a text or a list of items, not {shown(value)}")
    if len(items) > limits.messages:
        fields.refuse("input", f"has {len(items)} items, and at most {limits.messages} are taken")
    found = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        found += _item(Fields(item, f"input[{index}]"), found)
    return found


def _item(fields: Fields, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The message of an item; calls join the message of the model before them."""
    kind = fields.text("type", "message")
    fields.ignore("id", "status")
    if kind == "message":
        role = fields.text("role")
        if role not in _ROLES:
            fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
        made = {"role": _ROLES[role], "content": text_of(fields, "content", _PARTS)}
        fields.end()
        return [made]
    if kind == "function_call":
        call = _call(fields)
        last = before[-1] if before else {}
        if last.get("role") == "assistant":
            last.setdefault("tool_calls", []).append(call)
            return []
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        identity, output = fields.text("call_id", ""), text_of(fields, "output", _PARTS)
        fields.end()
        return [{"role": "tool", "content": output, "tool_call_id": identity}]
    if kind == "reasoning":
        return []  # of an answer before; templates leave it out
    fields.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")


def _call(fields: Fields) -> dict[str, Any]:
    function = {"name": fields.text("name"), "arguments": call_arguments(fields)}
    identity = fields.text("call_id", "")
    fields.end()
    return {"type": "function", "id": identity, "function": function}


def _format(fields: Fields, limits: Limits) -> AnswerForm:
    outer = fields.object("text")
    outer.only("verbosity", "medium")
    form = typed_format(outer.object("format"), limits) if "format" in outer else AnswerForm()
    outer.end()
    return form


def _refuse_others(fields: Fields) -> None:
    """What asks for nothing is taken; what would need a memory of answers is refused."""
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key")
    fields.only("store", False)
    fields.only("background", False)
    fields.only("truncation", "disabled")
    fields.only("include", [])
    fields.only("top_logprobs", 0)
    fields.only("service_tier", "auto", "default")
    fields.end()
