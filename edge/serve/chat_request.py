"""`/v1/chat/completions`: from the fields of a request to what it wants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import ChatAsked, Setup, take_model, take_output
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.messages import take_messages, text_of
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import take_format
from edgespec.serve.tools import take_tools

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
    "image_data": "this model reads text alone",
    "mm_processor_kwargs": "this model reads text alone",
    "use_beam_search": "set temperature to 0 for the likeliest tokens",
    "lora": "merge the adapter into the file of the model",
    "ignore_eos": "/completion has it",
    "min_tokens": "ask for the length in words",
    "stop_token_ids": "name texts in stop",
    "allowed_token_ids": "use guided_regex or guided_choice",
    "bad_words": "use logit_bias",
    "truncate_prompt_tokens": "send a shorter prompt",
}
# Tokens that a model may think for: none at all, or a little. Others leave it the server's default.
_EFFORTS: dict[str, int | None] = {
    **{"none": 0, "minimal": 0, "low": 1024},
    **dict.fromkeys(("medium", "high", "xhigh", "max", "default", "auto")),
}
_BUDGETS = (
    "thinking_budget",
    "thinking_budget_tokens",
    "thinking_token_budget",
    "reasoning_budget",
)
_MOST_BUDGET = 1 << 31
_OLD_NAMES = ("functions", "function_call")


def read_chat(body: Any, setup: Setup) -> ChatAsked:
    """What a request wants. Raises Refusal for a field that is wrong or not supported."""
    fields = Fields(_of_today(body))
    fields.ignore(*_OLD_NAMES)  # where there are tools, or none
    take_model(fields, setup)
    messages = take_messages(fields, setup.limits)
    output = take_output(fields, setup.limits)
    output = replace(output, functions=_has_functions(body))
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
        prediction=take_prediction(fields),
        **take_format(fields, setup.limits),
    )
    tools = take_tools(fields, setup.limits)
    if tools.offered and options.answer_format is not None:
        fields.refuse("response_format", "is not supported beside tools", code="unsupported_value")
    budget, variables = take_thinking(fields, setup)
    fields.only("modalities", ["text"], [])
    fields.ignore(*NO_EFFECT)
    fields.refuse_set(NOT_THERE)
    fields.end()
    return ChatAsked(messages, options, output, variables, tools, budget)


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


def _of_today(body: Any) -> Any:
    """The same request with `tools` for `functions`, as they were called before."""
    if not _has_functions(body):
        return body
    rest = {name: body[name] for name in body if name not in _OLD_NAMES}
    choice = body.get("function_call")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    functions = [{"type": "function", "function": one} for one in body["functions"]]
    return {**rest, "tools": functions, "tool_choice": choice, "parallel_tool_calls": False}


def _has_functions(body: Any) -> bool:
    if not isinstance(body, dict) or body.get("tools"):
        return False
    functions = body.get("functions")
    return isinstance(functions, list) and bool(functions)


# -- thoughts ------------------------------------------------------------------------------


def take_thinking(fields: Fields, setup: Setup) -> tuple[int | None, dict[str, Any]]:
    """How many tokens a model may think for, None for no limit, and a template's variables.

    Clients say it in several ways; the fewest tokens hold.
    """
    variables = fields.any("chat_template_kwargs", {})
    if not isinstance(variables, dict) or len(variables) > setup.limits.stops:
        fields.refuse("chat_template_kwargs", f"must be a small object, not {shown(variables)}")
    effort = take_effort(fields, "reasoning_effort")
    budgets = [_budget(fields, name) for name in _BUDGETS if name in fields]
    thinks = fields.flag("enable_thinking") if "enable_thinking" in fields else None
    if isinstance(fields.any_of("think"), str):
        effort = take_effort(fields, "think") or effort
    elif "think" in fields:
        thinks = fields.flag("think")
    for name in ("reasoning", "thinking"):
        if name in fields:
            inner = fields.object(name)
            effort = take_effort(inner, "effort") or effort
            budgets += [
                _budget(inner, one) for one in ("max_tokens", "budget_tokens") if one in inner
            ]
            thinks = inner.flag("enabled") if "enabled" in inner else thinks
            kind = inner.any("type")
            if kind is not None and kind not in ("enabled", "adaptive", "disabled"):
                inner.refuse("type", f"must be enabled, adaptive or disabled, not {shown(kind)}")
            thinks = kind != "disabled" if kind is not None else thinks
            inner.ignore("summary", "generate_summary", "exclude", "display", "encrypted_content")
            inner.end()
    return _thinking(setup, variables, effort, [one for one in budgets if one is not None], thinks)


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


def _budget(fields: Fields, field: str) -> int | None:
    """Tokens; None where it is -1, which is no limit."""
    found = fields.whole(field, -1, -1, _MOST_BUDGET)
    return None if found < 0 else found
