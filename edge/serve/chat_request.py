"""`/v1/chat/completions`: from the fields of a request to what it wants."""

from __future__ import annotations

from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Setup, take_model, take_output
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.messages import take_messages
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import take_format
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
        logprobs=_logprobs(fields, setup.limits),
        **take_format(fields, setup.limits),
    )
    tools = take_tools(fields, setup.limits)
    if tools.offered and options.answer_format is not None:
        fields.refuse("response_format", "is not supported beside tools", code="unsupported_value")
    variables = _variables(fields, setup.limits)
    refuse_others(fields)
    return ChatAsked(messages, options, output, variables, tools)


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
