"""`/v1/completions`: from the fields of a request to what it wants."""

from __future__ import annotations

from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import CompletionAsked, Output, Setup, take_model, take_output
from edgespec.serve.chat_request import NO_EFFECT, NOT_THERE, take_prediction
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import take_format

_MAX_TOKENS = 16  # OpenAI's


def read_completion(body: Any, setup: Setup) -> CompletionAsked:
    """What a request wants. Raises Refusal for a field that is wrong or not supported."""
    fields = Fields(body)
    take_model(fields, setup)
    prompts = take_prompts(fields, setup.limits)
    output = take_output(fields, setup.limits)
    if output.choices * len(prompts) > setup.limits.choices:
        fields.refuse("n", f"asks for more than {setup.limits.choices} answers, prompts counted")
    most = setup.defaults.max_tokens or _MAX_TOKENS
    writes = not fields.takes_zero("max_tokens")
    options = GenerationOptions(
        max_tokens=take_max_tokens(fields, most, setup.context_size, "max_tokens"),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits),
        raw=True,
        reuse=True,
        logprobs=_logprobs(fields, setup.limits),
        prediction=take_prediction(fields),
        **take_format(fields, setup.limits),
    )
    echo = fields.flag("echo")
    if echo and options.logprobs is not None:
        _check_scored(fields, options, output)
    suffix = fields.text("suffix", "")
    if suffix and (echo or not all(isinstance(prompt, str) for prompt in prompts)):
        fields.refuse("suffix", "needs prompts that are texts, without echo")
    if not writes and not echo:
        fields.refuse("max_tokens", "must be at least 1 without echo")
    fields.ignore(*NO_EFFECT)
    fields.only("best_of", 0, 1, output.choices)
    fields.refuse_set(NOT_THERE)
    fields.end()
    return CompletionAsked(prompts, options, output, echo, suffix, writes)


def _check_scored(fields: Fields, options: GenerationOptions, output: Output) -> None:
    """Refuse what makes no sense beside logprobs of a prompt."""
    if output.streams or output.choices > 1 or options.stop or options.answer_format:
        fields.refuse(
            "logprobs",
            "of a prompt are told alone: leave out stream, n, stop and the form of the answer",
            code="unsupported_value",
        )


def _logprobs(fields: Fields, limits: Limits) -> int | None:
    """Best tokens to be told at each place; None for no logprobs at all."""
    if "logprobs" not in fields:
        return None
    if fields.only_false("logprobs"):
        return None
    return fields.whole("logprobs", 0, 0, limits.logprobs)


def take_prompts(fields: Fields, limits: Limits) -> list[str | list[int]]:
    """The field `prompt`: a text, several, token ids, or several lists of them. Raises Refusal."""
    value = fields.any("prompt")
    if isinstance(value, str) or _is_ids(value):
        return [value]
    if isinstance(value, list) and value and all(isinstance(o, str) or _is_ids(o) for o in value):
        if len(value) > limits.choices:
            fields.refuse("prompt", f"has {len(value)} prompts, and {limits.choices} are the limit")
        return value
    fields.refuse("prompt", f"must be text or token ids, or a list of them, not {shown(value)}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)
