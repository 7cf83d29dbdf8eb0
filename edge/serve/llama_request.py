"""`/completion` and `/infill`, llama.cpp's own: from the fields of a request to what it wants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import CompletionAsked, Output, Setup, take_model
from edgespec.serve.completion_request import take_prompts
from edgespec.serve.fields import Fields
from edgespec.serve.filling import Gap
from edgespec.serve.sampling_fields import take_max_tokens, take_sampling, take_stops
from edgespec.serve.schemas import take_format

_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")
# What asks for nothing, by its values. Contexts are never shifted here, so how is no question.
_NOTHING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("cache_prompt", (True,)),
    ("id_slot", (-1, 0)),
    ("ignore_eos", (False,)),
    ("image_data", ([],)),
    ("lora", ([],)),
    ("min_keep", (0,)),
    ("n_indent", (0,)),
    ("n", (1,)),
    ("n_cmpl", (1,)),
    ("penalize_nl", (False,)),
    ("post_sampling_probs", (False,)),
    ("response_fields", ([],)),
    ("return_progress", (False,)),
    ("slot_id", (-1, 0)),
    ("t_max_predict_ms", (-1, 0)),
    ("tfs_z", (1, 1.0)),
    ("timings_per_token", (False,)),
    ("verbose", (False,)),
)
_IGNORED = ("n_keep", "n_discard", "n_cache_reuse", "sse_ping_interval", "backend_sampling")


@dataclass(frozen=True, slots=True)
class LlamaAsked:
    """What is continued, or filled in, and how its answers are told."""

    completion: CompletionAsked
    gap: Gap | None = None  # in place of the prompts
    returns_tokens: bool = False


def read_llama(body: Any, setup: Setup) -> LlamaAsked:
    """What `/completion` is asked for. Raises Refusal."""
    fields = Fields(body)
    prompts = take_prompts(fields, setup.limits)
    return _asked(fields, setup, prompts, None)


def read_infill(body: Any, setup: Setup) -> LlamaAsked:
    """What `/infill` is asked for. Raises Refusal."""
    fields = Fields(body)
    prefix, suffix = fields.text("input_prefix"), fields.text("input_suffix")
    files = [
        _file(Fields(value, f"input_extra[{index}]"))
        for index, value in enumerate(fields.list("input_extra", setup.limits.messages))
    ]
    gap = Gap(prefix + fields.text("prompt", ""), suffix, files)
    return _asked(fields, setup, [], gap)


def _file(fields: Fields) -> tuple[str, str]:
    found = fields.text("filename", ""), fields.text("text")
    fields.ignore("time")  # which llama.vscode adds
    fields.end()
    return found


def _asked(
    fields: Fields, setup: Setup, prompts: list[str | list[int]], gap: Gap | None
) -> LlamaAsked:
    take_model(fields, setup.names)
    output = Output(streams=fields.flag("stream"))
    count_field = "n_probs" if "n_probs" in fields else "logprobs"
    count = fields.whole(count_field, 0, 0, setup.limits.logprobs)
    options = GenerationOptions(
        max_tokens=take_max_tokens(
            fields, setup.defaults.max_tokens, setup.context_size, *_MAX_TOKENS
        ),
        sampling=take_sampling(fields, setup.defaults.sampling, setup.limits),
        stop=take_stops(fields, setup.limits),
        raw=True,
        reuse=True,
        logprobs=count or None,
        **take_format(fields, setup.limits),
    )
    returns_tokens = fields.flag("return_tokens")
    for name, values in _NOTHING:
        fields.only(name, *values)
    fields.ignore(*_IGNORED)
    fields.end()
    return LlamaAsked(CompletionAsked(prompts, options, output), gap, returns_tokens)
