"""`/v1/chat/completions`: from the fields of a request to what it wants, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgespec.decode.generation import Chunk
from edgespec.decode.options import GenerationOptions
from edgespec.errors import UnsupportedError
from edgespec.models.images import KINDS as IMAGES
from edgespec.models.images import Image, joined, sent_image
from edgespec.serve.asked import ChatAsked, Setup, take_model, take_output
from edgespec.serve.parsing import (
    Fields,
    Limits,
    shown,
    take_format,
    take_max_tokens,
    take_sampling,
    take_stops,
    takes_prewarm,
)
from edgespec.serve.shapes import (
    Choice,
    Delta,
    OpenAIShape,
    Output,
    ToldTokens,
    ToolCall,
    timings,
)
from edgespec.serve.tools import call_arguments, take_tools

# Fields that change no answer here, whatever they say.
NO_EFFECT = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("store", "service_tier", "verbosity", "cache_prompt", "reasoning_format", "keep_alive"),
    *("extra_body", "provider", "transforms", "route", "usage", "include_reasoning", "plugins"),
    *("parse_tool_calls", "timings_per_token", "id_slot", "continue_final_message"),
)
# What an answer would lack, unless these are false or empty; and what to do instead.
NOT_THERE = {
    "audio": "answers are text",
    "web_search_options": "offer a tool that searches",
    "prompt_logprobs": "ask /v1/completions, with echo and logprobs",
    "image_data": "send images as parts of messages",
    "mm_processor_kwargs": "images are read as --image-max-tokens says",
    "use_beam_search": "set temperature to 0 for the likeliest tokens",
    "lora": "merge the adapter into the file of the model",
    "ignore_eos": "/completion has it",
    "min_tokens": "ask for the length in words",
    "stop_token_ids": "name texts in stop",
    "allowed_token_ids": "use structured_outputs",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "send a shorter prompt",
}
# Tokens that a model may think for: none at all, or a little. Others leave it the server's default.
_EFFORTS: dict[str, int | None] = {
    **{"none": 0, "minimal": 0, "low": 1024},
    **dict.fromkeys(("medium", "high", "xhigh", "max", "default", "auto")),
}
_MOST_BUDGET = 1 << 31


def read_chat(body: Any, setup: Setup) -> ChatAsked:
    """What a request wants. Raises ApiError for a field that is wrong or not supported."""
    fields = Fields(body)
    take_model(fields, setup)
    messages = take_messages(fields, setup.limits)
    output = take_output(fields, setup.limits)
    names = "max_completion_tokens", "max_tokens"
    most = take_max_tokens(fields, setup.defaults.max_tokens, setup.context_size, *names)
    prewarms = takes_prewarm(fields)
    options = GenerationOptions(
        max_tokens=max(1, most),
        ahead=prewarms,
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits),
        raw=True,
        reuse=True,
        logprobs=_logprobs(fields, setup.limits),
        prediction=take_prediction(fields),
        **take_format(fields, setup.limits),
    )
    tools = take_tools(fields, setup.limits)
    budget, variables = take_thinking(fields, setup)
    fields.only("modalities", ["text"], [])
    fields.ignore(*NO_EFFECT)
    fields.refuse_set(NOT_THERE)
    fields.end()
    return ChatAsked(messages, options, output, variables, tools, budget, most > 0 and not prewarms)


def _logprobs(fields: Fields, limits: Limits) -> int | None:
    """Best tokens to be told at each place; None for no logprobs at all."""
    is_asked = fields.flag("logprobs")
    count = fields.whole("top_logprobs", 0, 0, limits.logprobs)
    if count and not is_asked:
        fields.refuse("top_logprobs", "needs logprobs: set it to true as well")
    return count if is_asked else None


def take_prediction(fields: Fields) -> str:
    """`prediction`: what the answer probably is, which is drafted."""
    if "prediction" not in fields:
        return ""
    inner = fields.object("prediction")
    inner.only("type", "content")
    text = text_of(inner, "content")
    inner.end()
    return text


# -- thoughts ------------------------------------------------------------------------------


def take_thinking(fields: Fields, setup: Setup) -> tuple[int | None, dict[str, Any]]:
    """How many tokens a model may think for, None for no limit, and a template's variables.

    Clients say it in several ways; the fewest tokens hold.
    """
    variables = fields.any("chat_template_kwargs", {})
    if not isinstance(variables, dict) or len(variables) > setup.limits.stops:
        fields.refuse("chat_template_kwargs", f"must be a small object, not {shown(variables)}")
    effort = take_effort(fields, "reasoning_effort")
    budgets, thinks = list[int](), None
    if isinstance(fields.any_of("think"), str):
        effort = take_effort(fields, "think") or effort
    elif "think" in fields:
        thinks = fields.flag("think")
    for name in ("reasoning", "thinking"):
        if name in fields:
            inner = fields.object(name)
            effort = take_effort(inner, "effort") or effort
            if (budget := inner.whole("budget_tokens", -1, -1, _MOST_BUDGET)) >= 0:
                budgets.append(budget)
            kind = inner.any("type")
            if kind is not None and kind not in ("enabled", "adaptive", "disabled"):
                inner.refuse("type", f"must be enabled, adaptive or disabled, not {shown(kind)}")
            thinks = kind != "disabled" if kind is not None else thinks
            inner.ignore("summary", "generate_summary", "exclude", "display", "encrypted_content")
            inner.end()
    return _thinking(setup, variables, effort, budgets, thinks)


def _thinking(
    setup: Setup, variables: dict[str, Any], effort: str, budgets: list[int], thinks: bool | None
) -> tuple[int | None, dict[str, Any]]:
    said = variables.get("enable_thinking", thinks)
    of_effort = _EFFORTS.get(effort)
    if of_effort is not None:
        budgets = [*budgets, of_effort]
    budget = min(budgets) if budgets else setup.defaults.think_budget
    if said is True and not budgets and budget == 0:
        budget = None  # a request that asks for thoughts gets them
    if said is False or budget == 0:
        return 0, {"enable_thinking": False, **_told(effort), **variables}
    told = {} if said is None else {"enable_thinking": said}
    return budget, {**told, **_told(effort), **variables}


def _told(effort: str) -> dict[str, str]:
    """What templates that have efforts know: low, medium and high."""
    known = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(effort, effort)
    return {"reasoning_effort": known} if known in ("low", "medium", "high") else {}


def take_effort(fields: Fields, field: str) -> str:
    """How hard a model shall think; "" where nothing is said."""
    effort = fields.text(field, "")
    if effort and effort not in _EFFORTS:
        fields.refuse(field, f"must be one of {', '.join(_EFFORTS)}, not {shown(effort)}")
    return effort


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
    """The field `messages`. Raises ApiError."""
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
    return joined(take_parts(fields, field, kinds, may_lack=may_lack))


def take_parts(
    fields: Fields,
    field: str,
    kinds: tuple[str, ...] = ("text",),
    *,
    may_lack: bool = False,
    thoughts: list[str] | None = None,
) -> list[str | Image]:
    """The texts of a field, and its images where `kinds` has theirs.

    Thoughts are put into `thoughts`.
    """
    value = fields.any(field, "" if may_lack else None)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.refuse(field, f"must be a text or a list of text parts, not {shown(value)}")
    texts: list[str | Image] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        inner = Fields(part, f"{fields.name(field)}[{index}]")
        kind = inner.text("type", "text")
        if kind in _THOUGHTS and may_lack:
            thought = inner.text(kind, "") or inner.text("text", "")
            if thoughts is not None:
                thoughts.append(thought)
        elif kind == "refusal" and may_lack:
            texts.append(inner.text("refusal", ""))
        elif kind in IMAGES and kind in kinds:
            texts.append(take_image(inner))
        elif kind in kinds:
            texts.append(inner.text("text", ""))
        else:
            inner.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")
        inner.ignore("annotations", "logprobs", "signature", "citations", "id")
        inner.end()
    return texts


def take_image(part: Fields) -> Image:
    """The image of a part, in any interface's form. Raises ApiError."""
    names = (name for name in ("source", "input_audio") if name in part)
    name = next(names, "image_url")
    part.refuse_set({"file_id": "send the image itself, as a data: URL"})
    try:
        image = sent_image({name: part.any(name)})
    except UnsupportedError as problem:
        part.refuse(name, f"is not taken: {problem}" + f" ({problem.hint})" * bool(problem.hint))
    part.ignore("detail", "prompt_cache_breakpoint")
    return image


def content_of(parts: list[str | Image]) -> dict[str, Any]:
    """What a message says, with marks where it shows images, and these."""
    images = [one for one in parts if isinstance(one, Image)]
    return {"content": joined(parts), **({"images": images} if images else {})}


def _message(fields: Fields, limits: Limits) -> dict[str, Any]:
    role = fields.text("role")
    if role not in _ROLES:
        fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    is_answer, thoughts = role == "assistant", list[str]()
    may_lack = _ROLES[role] in ("assistant", "tool")
    kinds = ("text",) if is_answer else ("text", *IMAGES)
    parts = take_parts(fields, "content", kinds, may_lack=may_lack, thoughts=thoughts)
    message |= content_of(parts)
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
    fields.refuse_set(
        {"audio": "send sounds as parts of content", "images": "send them as parts of content"}
    )
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


class ChatShape(OpenAIShape):
    """Answers to one request."""

    def __init__(self, model: str, output: Output, tokens: ToldTokens) -> None:
        kinds = "chat.completion.chunk", "chat.completion"
        super().__init__("chatcmpl-", kinds, model, output, tokens)
        self._calls = dict[str, int]()  # of the answer that is being sent: numbers by identity

    def begin(self, index: int) -> list[dict[str, Any]]:
        """The role."""
        self._calls = {}
        return [self._event(_choice(index, {"role": "assistant", "content": ""}))]

    def add(self, index: int, delta: Delta, chunks: Sequence[Chunk]) -> list[dict[str, Any]]:
        """One event."""
        values: dict[str, Any] = {}
        if delta.reasoning:
            values["reasoning_content"] = delta.reasoning
        if delta.content:
            values["content"] = delta.content
        parts = [self._part(call) for call in delta.calls]
        if parts:
            values["tool_calls"] = parts
        more = self._more(chunks)
        told = self._tokens.chat([one for chunk in chunks for one in chunk.logprobs])
        if not (values or more or told):
            return []
        return [self._event(_choice(index, values, logprobs=told), **more)]

    def end(self, choice: Choice) -> list[dict[str, Any]]:
        """The reason, with the timings of this answer."""
        last = _choice(choice.index, {}, choice.reason)
        return [self._event(last, timings=timings([choice]))]

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """All answers."""
        return self._document(self._kinds[1], [self._whole(one) for one in choices], choices)

    def _part(self, call: ToolCall) -> dict[str, Any]:
        """A call, or more of one: arguments alone."""
        if call.identity in self._calls:
            more = {"arguments": call.arguments}
            return {"index": self._calls[call.identity], "function": more}
        self._calls[call.identity] = len(self._calls)
        return {"index": self._calls[call.identity], **_call_document(call)}

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
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._tokens.chat(choice.result.logprobs),
            "finish_reason": choice.reason,
        }


def _choice(
    index: int, delta: Any, reason: str | None = None, logprobs: Any = None
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def _call_document(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.identity, "type": "function", "function": function}
