"""`/v1/chat/completions`: from the fields of a request to what it wants."""

from __future__ import annotations

from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Setup, take_model, take_output
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.messages import take_messages
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import ANY_OBJECT, schema_text
from edgespec.serve.tools import take_tools


def read_chat(body: Any, setup: Setup) -> ChatAsked:
    """What a request wants. Raises Refusal for a field that is wrong or not supported."""
    fields = Fields(body)
    take_model(fields, setup.names)
    messages = take_messages(fields, setup.limits)
    output = take_output(fields, setup.limits)
    options = GenerationOptions(
        max_tokens=take_max_tokens(
            fields,
            setup.defaults.max_tokens,
            setup.context_size,
            "max_completion_tokens",
            "max_tokens",
        ),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits),
        raw=True,
        reuse=True,
        json_schema=take_format(fields, setup.limits),
        logprobs=_logprobs(fields, setup.limits),
    )
    tools = take_tools(fields, setup.limits)
    if tools.offered and options.json_schema is not None:
        fields.refuse("response_format", "is not supported beside tools", code="unsupported_value")
    variables = _variables(fields, setup.limits)
    refuse_others(fields)
    return ChatAsked(messages, options, output, variables, tools)


def take_format(fields: Fields, limits: Limits) -> str | None:
    """The JSON schema that an answer keeps to, by `response_format`."""
    if "response_format" not in fields:
        return None
    inner = fields.object("response_format")
    kind = inner.text("type")
    schema: str | None = None
    if kind == "json_object":
        schema = ANY_OBJECT
        if "schema" in inner:  # as llama.cpp takes it
            schema = schema_text(inner.any("schema"), inner.name("schema"), limits)
    elif kind == "json_schema":
        schema = _named_schema(inner.object("json_schema"), limits)
    elif kind != "text":
        inner.refuse("type", f"must be text, json_object or json_schema, not {shown(kind)}")
    inner.end()
    return schema


def _named_schema(fields: Fields, limits: Limits) -> str:
    fields.ignore("name", "description", "strict")  # answers always keep to it
    text = schema_text(fields.any("schema"), fields.name("schema"), limits)
    fields.end()
    return text


def _variables(fields: Fields, limits: Limits) -> dict[str, Any]:
    """What a template may be told by name, such as `enable_thinking`."""
    value = fields.any("chat_template_kwargs", {})
    if not isinstance(value, dict) or len(value) > limits.stops:
        fields.refuse("chat_template_kwargs", f"must be a small object, not {shown(value)}")
    return value


def _logprobs(fields: Fields, limits: Limits) -> int | None:
    """Best tokens to be told at each place; None for no logprobs at all."""
    is_asked = fields.flag("logprobs")
    count = fields.whole("top_logprobs", 0, 0, limits.logprobs)
    if count and not is_asked:
        fields.refuse("top_logprobs", "needs logprobs: set it to true as well")
    return count if is_asked else None


def refuse_others(fields: Fields) -> None:
    """Fields that ask for nothing are taken; those that would change the answer are refused."""
    fields.ignore("user", "metadata", "safety_identifier", "prompt_cache_key")
    fields.only("store", False)
    fields.only("service_tier", "auto", "default")
    fields.only("modalities", ["text"])
    fields.only("cache_prompt", True)
    fields.end()
