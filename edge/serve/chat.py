"""`/v1/chat/completions`: from the fields of a request to generations, and its answers.

The other interfaces for conversations write the chat that theirs is, and go the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from edgespec.backends.base import AnswerFormat
from edgespec.decode.options import GenerationOptions
from edgespec.errors import ModelFileError, UnsupportedError
from edgespec.models.chat import Message, continues, in_call_order
from edgespec.models.images import KINDS as IMAGES
from edgespec.models.images import Image, images_of, joined, sent_image
from edgespec.sampling.params import ThoughtLimit
from edgespec.sampling.sampling import make_grammar
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.call_arguments import json_text, resolve_reference, sendable
from edgespec.serve.parsing import (
    ApiError,
    Fields,
    Limits,
    Output,
    ServedModel,
    api_error_of,
    note_ignored,
    parse_max_tokens,
    parse_options,
    parse_output,
    schema_text,
    shown,
    takes_prewarm,
)
from edgespec.serve.serializers import ChatSerializer, Serializer
from edgespec.serve.service import AnswerJob, Prompts, Service, Underway
from edgespec.serve.tool_formats import (
    HARMONY,
    HERMES,
    NAME_CHARS,
    THINK,
    ToolFormat,
    format_of,
    knows_tools,
    markers_in,
    pieces,
    think_tags,
)

_MOST_CALLS = 128
# Fields that change no answer here, whatever they say.
NO_EFFECT = (
    *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("store", "service_tier", "verbosity", "cache_prompt", "reasoning_format", "keep_alive"),
    *("extra_body", "provider", "transforms", "route", "usage", "include_reasoning", "plugins"),
    *("parse_tool_calls", "timings_per_token", "id_slot", "continue_final_message"),
    *("client_metadata", "truncation", "max_tool_calls", "context_management", "betas", "speed"),
    *("inference_geo", "diagnostics"),
)
# What an answer would lack, unless these are false or empty; and what to do instead.
NOT_THERE = {
    "audio": "answers are text",
    "web_search_options": "offer a tool that searches",
    "prompt_logprobs": "ask /v1/completions, with echo and logprobs",
    "image_data": "send images as parts of messages",
    "mm_processor_kwargs": "images are read as --image-max-tokens says",
    "use_beam_search": "set temperature to 0 for the likeliest tokens",
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


# -- tools ---------------------------------------------------------------------------------


_NAME = re.compile(rf"{NAME_CHARS}{{1,128}}")
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_VALUES = ("const", "enum", "default", "examples")  # of a schema: what is none itself
_SAY_TYPES = {"type", "$ref", "anyOf", "oneOf", "allOf"}


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    `offered` are their documents, as templates take them. `required` has the names of which one
    must be called; empty where the model is free. `parallel` allows several calls.
    """

    offered: tuple[dict[str, Any], ...] = ()
    required: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """Schemas of the arguments, by the names of what may be called."""
        functions = [one["function"] for one in self.offered]
        return {one["name"]: one.get("parameters") or {} for one in functions}

    def call_schema(self, name: str, arguments: str) -> dict[str, Any]:
        """JSON schema of a call that is required.

        Args:
            name: the field of the name.
            arguments: the field of the arguments.
        """
        definitions: dict[str, Any] = {}
        calls = []
        for place, tool in enumerate(self.required):
            schema = self.schemas[tool]
            own = {key: one for key, one in schema.items() if key not in _DEFINITIONS}
            inner = _inline_refs(own, schema, f"tool{place}", definitions)
            if not inner.get("properties") and set(inner) <= {"type", "properties", "$schema"}:
                inner = {"type": "object", "properties": {}, "additionalProperties": False}
            fields = {name: {"const": tool}, arguments: inner}
            calls.append({"type": "object", "properties": fields, "required": list(fields)})
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {**call, "$defs": definitions} if definitions else call


def _inline_refs(value: Any, schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> Any:
    """A part of a tool's schema for another document: what it refers to is in `definitions`."""
    if isinstance(value, list):
        return [_inline_refs(one, schema, name, definitions) for one in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, one in value.items():
        if key in _BY_NAME and isinstance(one, dict):
            made[key] = {
                item: _inline_refs(inner, schema, name, definitions) for item, inner in one.items()
            }
        else:
            made[key] = one if key in _VALUES else _inline_refs(one, schema, name, definitions)
    reference = value.get("$ref")
    if isinstance(reference, str) and (found := resolve_reference(schema, reference)) is not None:
        known = name + re.sub(r"[^A-Za-z0-9]", lambda one: f"-{ord(one[0]):x}-", reference[1:])
        if known not in definitions:
            definitions[known] = True  # before it is looked at: it may refer to itself
            definitions[known] = _inline_refs(found, schema, name, definitions)
        made["$ref"] = f"#/$defs/{known}"
    return made


def parse_tools(fields: Fields, limits: Limits) -> Tools:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError."""
    offered = []
    for one in fields.objects("tools", limits.tools):
        if (kind := one.text("type", "function")) == "function":
            offered.append(_function(one.object("function") if "function" in one else one))
        else:  # that another server would run, as a search of the web: the model does without
            note_ignored(f"tools[].type {kind[:40]}")
            one.take()
    names = [one["function"]["name"] for one in offered]
    choice = fields.pop("tool_choice", "auto")
    parallel = fields.flag("parallel_tool_calls", True)
    required: Sequence[str] = ()
    if choice == "none":
        return Tools()
    if choice == "required":
        if not names:
            fields.refuse("tool_choice", "requires a tool, and there is none")
        required = names
    elif isinstance(choice, dict):
        inner = fields.within(choice, "tool_choice")
        inner.only("type", "function")
        # Chats name the function in an object, responses beside its type.
        named = inner.object("function") if "function" in inner else inner
        if (name := named.text("name")) not in names:
            named.refuse("name", f"{shown(name)} is none of the tools")
        required, parallel = (name,), False
    elif choice != "auto":
        fields.refuse(
            "tool_choice", f"must be auto, none, required or a function, not {shown(choice)}"
        )
    tools = Tools(tuple(offered), tuple(required), parallel)
    for name in required:  # an answer has to keep to their schemas
        schema_text(tools.schemas[name], f"the schema of {name}", limits)
    return tools


def _function(fields: Fields) -> dict[str, Any]:
    """A tool's name, description and schema of arguments, as templates take it. Raises ApiError."""
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        problem = "must be up to 128 letters, digits, _, ., /, :, @ or -"
        fields.refuse("name", f"{problem}, not {shown(name)}")
    function: dict[str, Any] = {"name": name, "description": fields.text("description", "")}
    parameters = fields.pop("parameters", {}) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        fields.refuse("parameters", f"must be an object, not {shown(parameters)}")
    if not parameters.keys() & _SAY_TYPES:  # else a list would fit, too
        parameters = {"type": "object", **parameters}
    function["parameters"] = parameters
    fields.ignore("strict")
    return {"type": "function", "function": function}


# -- a request -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest(Output):
    """A request for the next message of a conversation."""

    messages: Sequence[dict[str, Any]]
    options: GenerationOptions
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    tools: Tools = field(default_factory=Tools)
    think_budget: int | None = None  # tokens of a thought; None is no limit
    writes: bool = True  # else its prompt is read, and nothing is answered


def read_chat(fields: Fields, setup: ServedModel) -> ChatRequest:
    """What a request wants. Raises ApiError for a field that is wrong or not supported."""
    messages = parse_messages(fields, setup.limits)
    output = parse_output(fields, setup.limits)
    names = "max_completion_tokens", "max_tokens"
    most = parse_max_tokens(fields, setup.defaults.max_tokens, setup.context_size, *names)
    prewarms, best = takes_prewarm(fields), None  # the best tokens to be told at each place
    if fields.flag("logprobs"):
        best = fields.whole("top_logprobs", 0, 0, setup.limits.logprobs)
    elif fields.whole("top_logprobs", 0, 0, setup.limits.logprobs):
        fields.refuse("top_logprobs", "needs logprobs: ask for them as well")
    options = parse_options(
        *(fields, setup, most),
        ahead=prewarms,
        logprobs=best,
        prediction=parse_prediction(fields),
    )
    tools = parse_tools(fields, setup.limits)
    budget, variables = _thinking(fields, setup)
    fields.only("modalities", ["text"], [])
    fields.ignore(*NO_EFFECT)
    fields.refuse_set(NOT_THERE)
    return ChatRequest(
        **output,
        messages=messages,
        options=options,
        variables=variables,
        tools=tools,
        think_budget=budget,
        writes=most > 0 and not prewarms,
    )


def parse_prediction(fields: Fields) -> str:
    """`prediction`: what the answer probably is, which is drafted."""
    if "prediction" not in fields:
        return ""
    inner = fields.object("prediction")
    inner.only("type", "content")
    return joined(_parts(inner, sees=False, may_lack=False, thoughts=[]))


# -- thoughts ------------------------------------------------------------------------------


def _thinking(fields: Fields, setup: ServedModel) -> tuple[int | None, dict[str, Any]]:
    """How many tokens a model may think for, None for no limit, and a template's variables.

    Clients say it in several ways; the fewest tokens hold.
    """
    variables = fields.pop("chat_template_kwargs", {})
    if not isinstance(variables, dict) or len(variables) > setup.limits.stops:
        fields.refuse("chat_template_kwargs", f"must be a small object, not {shown(variables)}")
    effort = _effort(fields, "reasoning_effort")
    budgets, thinks = list[int](), None
    if isinstance(fields.peek("think"), str):
        effort = _effort(fields, "think") or effort
    elif "think" in fields:
        thinks = fields.flag("think")
    for name in ("reasoning", "thinking"):
        if name in fields:
            inner = fields.object(name)
            effort = _effort(inner, "effort") or effort
            if (budget := inner.whole("budget_tokens", -1, -1, _MOST_BUDGET)) >= 0:
                budgets.append(budget)
            kind = inner.pop("type")
            if kind is not None and kind not in ("enabled", "adaptive", "disabled"):
                inner.refuse("type", f"must be enabled, adaptive or disabled, not {shown(kind)}")
            thinks = kind != "disabled" if kind is not None else thinks
            inner.ignore("summary", "generate_summary", "exclude", "display", "encrypted_content")
    said = variables.get("enable_thinking", thinks)
    if (of_effort := _EFFORTS.get(effort)) is not None:
        budgets.append(of_effort)
    most = min(budgets) if budgets else setup.defaults.think_budget
    if said is True and not budgets and most == 0:
        most = None  # a request that asks for thoughts gets them
    if said is False or most == 0:
        most, said = 0, False
    told: dict[str, Any] = {} if said is None else {"enable_thinking": said}
    # What templates that have efforts know: low, medium and high.
    known = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}.get(effort, effort)
    if known in ("low", "medium", "high"):
        told["reasoning_effort"] = known
    return most, {**told, **variables}


def _effort(fields: Fields, field: str) -> str:
    """How hard a model shall think; "" where nothing is said."""
    effort = fields.text(field, "")
    if effort and effort not in _EFFORTS:
        fields.refuse(field, f"must be one of {', '.join(_EFFORTS)}, not {shown(effort)}")
    return effort


# Kinds of parts: texts, by OpenAI's two interfaces, and thoughts of an assistant's message.
_TEXTS = ("text", "input_text", "output_text")
_THOUGHTS = ("thinking", "reasoning")
_ROLES = {one: one for one in ("system", "developer", "user", "assistant", "tool", "function")}
_ROLES |= {"developer": "system", "function": "tool"}  # by older names and newer ones


def parse_messages(fields: Fields, limits: Limits) -> list[dict[str, Any]]:
    """The field `messages`. Raises ApiError."""
    found = [_message(one, limits) for one in fields.objects("messages", limits.messages)]
    if not found:
        fields.refuse("messages", "must have at least one message")
    return found


def _parts(fields: Fields, *, sees: bool, may_lack: bool, thoughts: list[str]) -> list[str | Image]:
    """The texts of the field `content`, a text or a list of parts, and its images.

    Args:
        sees: it may have images.
        may_lack: "" where there is none, which is refused else.
        thoughts: what is thought in it is added to these.
    """
    value = fields.pop("content", "" if may_lack else None)
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        fields.refuse("content", f"must be a text or a list of text parts, not {shown(value)}")
    texts: list[str | Image] = []
    for index, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        inner = Fields(part, f"{fields.name('content')}[{index}]")
        kind = inner.text("type", "text")
        if kind in _THOUGHTS and may_lack:
            thoughts.append(inner.text(kind, "") or inner.text("text", ""))
        elif kind == "refusal" and may_lack:
            texts.append(inner.text("refusal", ""))
        elif kind in IMAGES and sees:
            texts.append(_image(inner))
        elif kind in _TEXTS:
            texts.append(inner.text("text", ""))
        else:
            inner.refuse("type", f"{shown(kind)} is not supported", code="unsupported_value")
        inner.ignore("annotations", "logprobs", "signature", "citations", "id")
        inner.end()
    return texts


def _image(part: Fields) -> Image:
    """The image of a part, in any interface's form. Raises ApiError."""
    names = (name for name in ("source", "input_audio") if name in part)
    name = next(names, "image_url")
    part.refuse_set({"file_id": "send the image itself, as a data: URL"})
    try:
        image = sent_image({name: part.pop(name)})
    except UnsupportedError as problem:
        part.refuse(name, f"is not taken: {problem}" + f" ({problem.hint})" * bool(problem.hint))
    part.ignore("detail", "prompt_cache_breakpoint")
    return image


def _message(fields: Fields, limits: Limits) -> dict[str, Any]:
    role = fields.text("role")
    if role not in _ROLES:
        fields.refuse("role", f"must be one of {', '.join(_ROLES)}, not {shown(role)}")
    message: dict[str, Any] = {"role": _ROLES[role]}
    is_answer, thoughts = role == "assistant", list[str]()
    may_lack = _ROLES[role] in ("assistant", "tool")
    parts = _parts(fields, sees=not is_answer, may_lack=may_lack, thoughts=thoughts)
    message["content"] = joined(parts)  # with marks where it shows images
    if images := [one for one in parts if isinstance(one, Image)]:
        message["images"] = images
    if is_answer:
        calls = [_call(one) for one in fields.objects("tool_calls", limits.tools)]
        if function := fields.pop("function_call"):  # as it was before there were tools
            calls.append(_call(fields.within({"function": function}, fields.path)))
        if calls:
            message["tool_calls"] = calls
        message["content"] = message["content"] or fields.text("refusal", "")
        fields.ignore("reasoning_details", "thinking_blocks", "reasoning_signature")
        # What was thought before an answer that is sent back, under any of its names.
        names = ("reasoning_content", "reasoning", "thinking")
        found = [value for name in names if isinstance(value := fields.pop(name), str)]
        if thought := next(filter(None, found), "") or "\n".join(thoughts):
            message["reasoning_content"] = thought
    if may_lack and not is_answer:
        message["tool_call_id"] = fields.text("tool_call_id", "")
    if "name" in fields:
        message["name"] = fields.text("name")
    fields.ignore("id", "annotations", "refusal", "provider_specific_fields")
    fields.refuse_set(
        {"audio": "send sounds as parts of content", "images": "send them as parts of content"}
    )
    return message


def _call(fields: Fields) -> dict[str, Any]:
    """A call of a tool; templates take its arguments as an object, clients send their text."""
    fields.only("type", "function")
    fields.ignore("index")
    identity = fields.text("id", "")
    function = fields.object("function")
    called = {"name": function.text("name"), "arguments": object_or_text(function.pop("arguments"))}
    return {"type": "function", "id": identity, "function": called}


def object_or_text(value: Any) -> dict[str, Any] | str:
    """Arguments that a client sends back: an object, or a text that is none."""
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if not isinstance(value, str):
        return json_text(value)
    try:
        found = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    is_object = isinstance(found, dict) and sendable(json.dumps(found, ensure_ascii=False))
    return found if is_object else value


# -- the prompt ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt, how it is continued, and what finds the parts of the answer."""

    text: str
    options: GenerationOptions
    make_reader: Callable[[], AnswerReader]


def conversation_of(asked: ChatRequest, prompts: Prompts, template: str) -> Conversation:
    """The prompt of a chat. Raises ApiError, also where the template refuses its messages."""
    tools, formats = asked.tools, [format_of(template)]
    messages, variables = asked.messages, dict(asked.variables)
    if knows_tools(template):
        if tools.offered:
            variables["tools"] = list(tools.offered)
    else:
        messages, formats = _without_tools(messages, tools), [HERMES, *formats]
    try:
        text = prompts.text_of(messages, variables)
    except (UnsupportedError, ModelFileError) as problem:
        raise api_error_of(problem, "messages") from problem
    tags = think_tags(template, formats)
    form = dict[str, Any]()  # of the answer
    # Whether what is continued is a thought, and no answer yet.
    within = text.rstrip().endswith(tags.opening) or (
        continues(messages)
        and bool(messages[-1].get("reasoning_content"))
        and not messages[-1]["content"]
    )
    begun, header = "", formats[0].text and formats[0].opening
    if tools.required:
        begun, schema = _required(tools, formats[0])
        text = f"{text.rstrip()}\n\n{tags.closing}\n\n" if within else text
        text += begun.removeprefix(header) if header and text.endswith(header) else begun
        form, within = {"json_schema": schema, "regex": None, "grammar": None}, False
    elif header and text.endswith(header):
        begun = header
    is_text = not begun and HARMONY in formats and not text.endswith("assistant")
    thinks = not tools.required and not is_text
    if thinks and asked.options.answer_format:
        # What a thought stands between before it; None for no thought.
        may_think = HARMONY in formats or tags.closing in template
        before = None
        if may_think and not text.rstrip().endswith(tags.closing):
            before = ("" if within else tags.opening, tags.closing + tags.after)
        marker, how = "", formats[0]  # what a call begins with
        if tools.offered and (how is HARMONY or how.text):
            raise ApiError(
                "a form of the answer is not supported beside tools with this model's chat format",
                code="unsupported_value",
            )
        if tools.offered:
            marker = (pieces(how.opening) or pieces(how.begin))[0].strip()
        form, thinks = {"think_tags": before, "free_after": marker}, before is not None
    budget = asked.think_budget if thinks else None
    # Control tokens that a reader has to see.
    markers = set[str]() if tools.required else markers_in(*THINK, *tags)
    for how in formats:
        markers |= how.markers if tools.offered or how is HARMONY else set()
    options = replace(
        asked.options,
        **form,
        images=images_of(asked.messages),
        thought=None if budget is None else ThoughtLimit(budget, within, *tags[:3]),
        markers=tuple(sorted(markers)),
    )

    if HARMONY in formats and len(tools.required) > 1:
        formats = [HERMES]  # calls are JSON alone
    elif not tools.offered:
        formats = [how for how in formats if how is HARMONY or how.text]

    def make_reader() -> AnswerReader:
        reader = AnswerReader(
            formats,
            tools.schemas,
            most=_MOST_CALLS if tools.parallel else 1,
            is_calls=bool(tools.required),
            tags=tags,
            within=within,
            is_text=is_text,
            is_marked=bool(options.free_after),
        )
        reader.push(begun)
        return reader

    return Conversation(text, options, make_reader)


def _required(tools: Tools, how: ToolFormat) -> tuple[str, str]:
    """What an answer that has to be calls begins with, and the JSON schema of its rest.

    Where the arguments of one tool are the only JSON, all before them is begun. Where the format
    has no JSON, or the name of one of several tools comes first, calls are JSON alone.
    """
    if len(tools.required) == 1 and how.kind in ("named", "harmony"):
        name = tools.required[0]
        before = how.header(name)
        if before:
            call = tools.call_schema("name", "arguments")
            inner = {"$defs": call["$defs"]} if "$defs" in call else {}
            return before, json.dumps({**call["properties"]["arguments"], **inner})
    is_json = how.kind == "json"
    fields = how.fields if is_json and all(how.fields) else HERMES.fields
    call = tools.call_schema(*fields)
    begun = how.opening if is_json and (how.closing or how.is_list) else ""
    if not is_json or not how.is_list:
        return begun, json.dumps(call)
    inner = {"$defs": call.pop("$defs")} if "$defs" in call else {}
    most = {} if tools.parallel else {"maxItems": 1}
    return begun, json.dumps({"type": "array", "items": call, "minItems": 1, **most, **inner})


def _without_tools(messages: Sequence[Message], tools: Tools) -> list[dict[str, Any]]:
    """Messages for a template that knows no tools: all of it is text."""
    made = list[dict[str, Any]]()
    for message in in_call_order(messages):
        if message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            message = {"role": "user", "content": response}
        elif calls := message.get("tool_calls"):
            texts = [json.dumps(call["function"], ensure_ascii=False) for call in calls]
            written = [f"{HERMES.opening}{text}{HERMES.closing}" for text in texts]
            content = "\n".join([message["content"], *written]).lstrip()
            message = {"role": "assistant", "content": content}
        made.append(dict(message))
    if not tools.offered:
        return made
    # What a model is told of tools whose template knows of none: Hermes' way to call them.
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools.offered)
    about = (
        "You may call functions to help with the request. Their signatures are within <tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "For each call write a JSON object with name and arguments within <tool_call>:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
    if made[0]["role"] == "system":
        made[0]["content"] += f"\n\n{about}"
        return made
    return [{"role": "system", "content": about}, *made]


# -- what is answered ----------------------------------------------------------------------


def prepare_chat(service: Service, asked: ChatRequest, request: Underway) -> AnswerJob:
    """The next message of a conversation. Raises ApiError, and as `Engine.stream`."""
    talk, ids = prompt_of(service, asked)
    serializer = ChatSerializer(service.setup.names[0], asked, service.told_tokens)
    return answer_job(service, asked, talk, ids, serializer, request)


def count_chat(service: Service, asked: ChatRequest, _request: Underway) -> dict[str, int]:
    """How many tokens the prompt of a chat has. Raises as `prepare_chat`."""
    return {"input_tokens": len(prompt_of(service, asked)[1])}


def read_template(fields: Fields, setup: ServedModel) -> ChatRequest:
    """A chat, whose template may be told to open no answer. Raises as `read_chat`."""
    opens = fields.flag("add_generation_prompt", True)
    asked = read_chat(fields, setup)
    return replace(asked, variables={**asked.variables, "add_generation_prompt": opens})


def apply_template(service: Service, asked: ChatRequest, _request: Underway) -> dict[str, str]:
    """The prompt of a chat, as a text. Raises as `prepare_chat`."""
    return {"prompt": prompt_of(service, asked)[0].text}


def prompt_of(service: Service, asked: ChatRequest) -> tuple[Conversation, list[int]]:
    """The prompt of a conversation, and its ids. Raises ApiError."""
    template = service.prompts.template(with_tools=bool(asked.tools.offered)) or ""
    talk = conversation_of(asked, service.prompts, template)
    return talk, service.prompts.ids_of(talk.text, talk.options.shown)


def answer_job(
    service: Service,
    asked: ChatRequest,
    talk: Conversation,
    ids: list[int],
    serializer: Serializer,
    request: Underway,
) -> AnswerJob:
    """The answers to a conversation, as a serializer tells them.

    Raises ApiError, and as `Engine.stream`.
    """
    try:
        generations = service.generations(request, talk.text, ids, talk.options, asked.choices)
    except UnsupportedError:
        if not asked.tools.required:
            raise
        names = " or ".join(asked.tools.required)
        for name in asked.tools.required:
            try:  # by itself, as its schema is read by who wrote it
                schema = AnswerFormat("json_schema", json.dumps(asked.tools.schemas[name]))
                make_grammar(service.engine.backend.tokenizer, schema)
            except UnsupportedError as one:
                names, problem = name, one
                break
        unsupported = UnsupportedError(
            f"a call of {names} cannot be required: {problem}", hint=problem.hint
        )
        raise api_error_of(unsupported, "tools") from problem
    return AnswerJob(generations, serializer, asked.streams, talk.make_reader, asked.writes)
