"""`/v1/messages`, Anthropic's interface: from the fields of a request to what it wants."""

from __future__ import annotations

from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Output, Setup, take_model
from edgespec.serve.chat_request import take_effort, take_thinking
from edgespec.serve.fields import Fields, note_ignored, shown
from edgespec.serve.limits import Limits
from edgespec.serve.messages import text_of
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import AnswerForm, typed_format
from edgespec.serve.tools import Tools, checked, take_function

Messages = list[dict[str, Any]]
_NOT_THERE = {
    "container": "nothing is run here: offer a tool that does",
    "mcp_servers": "offer their tools in tools",
}


def read_messages(body: Any, setup: Setup, *, counts: bool = False) -> ChatAsked:
    """What a request wants. Raises Refusal for a field that is wrong or not supported.

    Args:
        counts: only the tokens of its prompt are asked for.
    """
    fields = Fields(body)
    take_model(fields, setup)
    messages = _messages(fields, setup.limits)
    if not counts and "max_tokens" not in fields:
        fields.refuse("max_tokens", "is missing", code="missing_required_parameter")
    budget, variables = _thinking(fields, setup)
    options = GenerationOptions(
        max_tokens=take_max_tokens(fields, None, setup.context_size, "max_tokens"),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits, "stop_sequences"),
        raw=True,
        reuse=True,
        **_format(fields, setup.limits),
    )
    tools = _tools(fields, setup.limits)
    if tools.offered and options.answer_format is not None:
        fields.refuse("output_config", "is not supported beside tools", code="unsupported_value")
    output = Output(streams=fields.flag("stream"))
    fields.ignore("metadata", "service_tier", "context_management", "betas")
    fields.ignore("speed", "inference_geo", "diagnostics")
    fields.refuse_set(_NOT_THERE)
    fields.end()
    return ChatAsked(messages, options, output, variables, tools, budget)


# -- messages ------------------------------------------------------------------------------


def _messages(fields: Fields, limits: Limits) -> Messages:
    found: Messages = []
    if "system" in fields:
        found.append({"role": "system", "content": text_of(fields, "system", may_lack=True)})
    values = fields.list("messages", limits.messages)
    if not values:
        fields.refuse("messages", "must have at least one message")
    for index, value in enumerate(values):
        found += _message(Fields(value, f"messages[{index}]"), limits)
    return found


def _message(fields: Fields, limits: Limits) -> Messages:
    role = fields.text("role")
    if role not in ("user", "assistant", "system"):
        fields.refuse("role", f"must be user or assistant, not {shown(role)}")
    content = fields.any("content")
    fields.end()
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        fields.refuse("content", f"must be a text or a list of blocks, not {shown(content)}")
    if len(content) > limits.messages:
        fields.refuse("content", f"has {len(content)} blocks, and {limits.messages} are the limit")
    blocks = [
        Fields(block, f"{fields.name('content')}[{index}]") for index, block in enumerate(content)
    ]
    return [_of_assistant(blocks)] if role == "assistant" else _of_user(blocks, role)


def _of_user(blocks: list[Fields], role: str) -> Messages:
    """Results of tools are messages of their own; texts between them are one each."""
    found: Messages = []
    for block in blocks:
        kind = _kind(block, "text", "tool_result")
        if kind == "tool_result":
            identity = block.text("tool_use_id", "")
            block.flag("is_error")  # its text says what went wrong
            text = text_of(block, "content", may_lack=True)
            found.append({"role": "tool", "content": text, "tool_call_id": identity})
        elif found and found[-1]["role"] == role:
            found[-1]["content"] += "\n" + block.text("text")
        else:
            found.append({"role": role, "content": block.text("text")})
        block.ignore("citations")
        block.end()
    return found or [{"role": role, "content": ""}]


def _of_assistant(blocks: list[Fields]) -> dict[str, Any]:
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
        block.end()
    return message


def _call(block: Fields) -> dict[str, Any]:
    identity, name, arguments = block.text("id", ""), block.text("name"), block.any("input", {})
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
    values = fields.list("tools", limits.tools)
    offered = []
    for index, value in enumerate(values):
        inner = Fields(value, f"tools[{index}]")
        kind = inner.text("type", "custom")
        if kind != "custom":  # a tool of the other server's: the model does without
            note_ignored(f"tools[].type {kind}")
            continue
        inner.ignore("eager_input_streaming", "input_examples", "defer_loading", "allowed_callers")
        offered.append(take_function(inner, "input_schema"))
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
    choice.end()
    if kind in ("any", "tool") and (not names or not set(required) <= set(names)):
        fields.refuse("tool_choice", "requires a tool that is not there")
    if kind == "none":
        return Tools()
    return checked(Tools(tuple(offered), required, parallel), limits)


def _format(fields: Fields, limits: Limits) -> AnswerForm:
    outer = fields.object("output_config")
    outer.ignore("effort", "task_budget")
    form = typed_format(outer.object("format"), limits) if "format" in outer else AnswerForm()
    outer.end()
    return form


def _thinking(fields: Fields, setup: Setup) -> tuple[int | None, dict[str, Any]]:
    """As `take_thinking`; the effort is a part of how to answer here."""
    value = fields.any_of("output_config")
    config = Fields(value if value is not None else {}, "output_config")
    effort = take_effort(config, "effort")
    thinking = fields.any("thinking")
    told = {"thinking": thinking, "reasoning_effort": effort or None}
    return take_thinking(Fields(told), setup)
