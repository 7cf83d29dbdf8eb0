"""`/v1/responses`: from the fields of a request to what it wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Output, Setup, take_model
from edgespec.serve.chat_request import take_thinking
from edgespec.serve.fields import Fields, note_ignored, shown
from edgespec.serve.kept_responses import KeptResponses
from edgespec.serve.limits import Limits
from edgespec.serve.messages import text_of
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling
from edgespec.serve.schemas import AnswerForm, typed_format
from edgespec.serve.tools import call_arguments, take_tools

Items = list[dict[str, Any]]

_PARTS = ("input_text", "output_text", "summary_text", "reasoning_text", "text")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_REPEATED = (
    *("instructions", "metadata", "tools", "tool_choice", "temperature", "top_p", "reasoning"),
    *("max_output_tokens", "previous_response_id", "parallel_tool_calls", "text", "truncation"),
)
# What tools of other servers left in a conversation: nothing that this model called.
_SKIPPED = (
    *("web_search_call", "file_search_call", "image_generation_call", "code_interpreter_call"),
    *("computer_call", "computer_call_output", "local_shell_call", "local_shell_call_output"),
    *("mcp_list_tools", "mcp_call", "mcp_approval_request", "mcp_approval_response"),
    *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
    *("compaction", "tool_search_call", "tool_search_output"),
)

_NOT_THERE = {
    "background": "leave it out, and wait or read the stream",
    "conversation": "use previous_response_id",
    "prompt": "send its text as instructions",
}


@dataclass(frozen=True, slots=True)
class Told:
    """What an answer says besides its text.

    `repeats` are fields of the request, `items` the conversation up to the answer, which is kept
    with it where `keeps`. `summarises` tells thoughts as summaries.
    """

    repeats: dict[str, Any]
    items: Items
    keeps: bool
    summarises: bool


def read_response(
    body: Any, setup: Setup, kept: KeptResponses, owner: str
) -> tuple[ChatAsked, Told]:
    """What a request wants, and what its answer says of it. Raises Refusal.

    Args:
        kept: responses that it may go on from, which are those of the same `owner`.
    """
    Fields(body)
    fields = Fields({**body, "tools": _known_tools(body.get("tools"))})
    take_model(fields, setup)
    items = _items(fields, setup.limits, kept, owner)
    messages = _messages(fields, items)
    told = Told(
        {name: body.get(name) for name in _REPEATED},
        items,
        fields.flag("store", True),
        _wants_summary(fields.any_of("reasoning")),
    )
    budget, variables = take_thinking(fields, setup)
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
    _end(fields, setup.limits)
    return ChatAsked(messages, options, output, variables, tools, budget), told


def _known_tools(tools: Any) -> Any:
    """Tools without those of kinds that are not here, such as a search of the web."""
    if not isinstance(tools, list):
        return tools
    known = []
    for one in tools:
        kind = one.get("type", "function") if isinstance(one, dict) else "function"
        if kind == "function":
            known.append(one)
        else:
            note_ignored(f"tools[].type {str(kind)[:40]}")
    return known


def _wants_summary(reasoning: Any) -> bool:
    names = ("summary", "generate_summary")
    return isinstance(reasoning, dict) and any(
        reasoning.get(name) not in (None, "none") for name in names
    )


def _items(fields: Fields, limits: Limits, kept: KeptResponses, owner: str) -> Items:
    """The items of a conversation: those that are kept, and the new ones."""
    previous = fields.text("previous_response_id", "")
    found: Items = kept.items(owner, previous) if previous else []
    value = fields.any("input", [] if previous else None)
    new = [{"role": "user", "content": value}] if isinstance(value, str) else value
    if not isinstance(new, list) or not (new or found):
        fields.refuse("input", f"must be a text or a list of items, not {shown(value)}")
    if len(found) + len(new) > limits.messages:
        count = len(found) + len(new)
        fields.refuse("input", f"has {count} items, and at most {limits.messages} are taken")
    for index, item in enumerate(new):
        found.append(_resolved(Fields(item, f"input[{index}]"), item, kept, owner))
    return found


def _resolved(
    fields: Fields, item: dict[str, Any], kept: KeptResponses, owner: str
) -> dict[str, Any]:
    """An item, or the one that it refers to."""
    if item.get("type") != "item_reference":
        return item
    found = kept.item(owner, fields.text("id"))
    if found is None:
        fields.refuse("id", f"{shown(item.get('id'))} is no item that is kept here: send the item")
    return found


def _messages(fields: Fields, items: Items) -> list[dict[str, Any]]:
    instructions = fields.text("instructions", "")
    found = [{"role": "system", "content": instructions}] if instructions else []
    for index, item in enumerate(items):
        found += _item(Fields(item, f"input[{index}]"), found)
    if not found:
        fields.refuse("input", "has no message")
    return found


def _item(fields: Fields, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The message of an item; thoughts, text and calls of one answer are one message."""
    kind = fields.text("type", "message")
    fields.ignore("id", "status", "phase", "encrypted_content", "created_by")
    last = before[-1] if before and before[-1]["role"] == "assistant" else None
    if kind == "message":
        role = fields.text("role")
        if role not in _ROLES:
            fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
        content = _content(fields, role)
        fields.end()
        if role == "assistant" and last is not None and not last["content"]:
            last["content"] = content
            return []
        return [{"role": _ROLES[role], "content": content}]
    if kind == "function_call":
        call = _call(fields)
        if last is not None:
            last.setdefault("tool_calls", []).append(call)
            return []
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        identity, output = fields.text("call_id", ""), _content(fields, "tool", "output")
        fields.end()
        return [{"role": "tool", "content": output, "tool_call_id": identity}]
    if kind == "reasoning":
        return _thought(fields)
    if kind in _SKIPPED:
        note_ignored(f"input[].type {kind}")
        return []
    fields.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")


def _content(fields: Fields, role: str, field: str = "content") -> str:
    return text_of(fields, field, _PARTS, may_lack=role in ("assistant", "tool"))


def _thought(fields: Fields) -> list[dict[str, Any]]:
    """A thought in plain words; one that another server encrypted is left out."""
    content, summary = (
        text_of(fields, name, _PARTS, may_lack=True) for name in ("content", "summary")
    )
    fields.end()
    thought = content or summary
    return [{"role": "assistant", "content": "", "reasoning_content": thought}] if thought else []


def _call(fields: Fields) -> dict[str, Any]:
    function = {"name": fields.text("name"), "arguments": call_arguments(fields)}
    identity = fields.text("call_id", "")
    fields.end()
    return {"type": "function", "id": identity, "function": function}


def _format(fields: Fields, limits: Limits) -> AnswerForm:
    outer = fields.object("text")
    outer.ignore("verbosity")
    form = typed_format(outer.object("format"), limits) if "format" in outer else AnswerForm()
    outer.end()
    return form


def _end(fields: Fields, limits: Limits) -> None:
    """What changes nothing is taken; what an answer would lack is refused."""
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key", "client_metadata")
    fields.ignore("prompt_cache_retention", "service_tier", "truncation", "max_tool_calls")
    fields.ignore("context_management", "stream_options", "verbosity")
    for one in fields.list("include", limits.stops):
        if one == "message.output_text.logprobs":
            fields.refuse("include", f"{one} is not supported", code="unsupported_value")
    fields.only("top_logprobs", 0)
    fields.refuse_set(_NOT_THERE)
    fields.end()
