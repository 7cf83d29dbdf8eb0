"""`/completion` and `/infill`, llama.cpp's own: from the fields of a request to what it wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.decode.options import GenerationOptions
from edgespec.serve.asked import Setup, take_model
from edgespec.serve.fields import Fields, shown
from edgespec.serve.filling import Gap
from edgespec.serve.limits import Limits
from edgespec.serve.sampling_fields import take_sampling, take_stops
from edgespec.serve.schemas import take_format

Prompt = str | list[int | str]  # texts between token ids are one prompt with them
_MAX_TOKENS = ("n_predict", "max_completion_tokens", "max_tokens")
_MOST = 1 << 31
_MOST_PATHS, _MOST_PATH_CHARS = 64, 256  # of `response_fields`
# What would change an answer, by the values that ask for nothing.
_NOTHING: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("adaptive_target", (-1, -1.0)),
    ("grammar_lazy", (False,)),
    ("image_data", ([],)),
    ("lora", ([],)),
    ("min_keep", (0,)),
    ("penalize_nl", (False,)),
    ("post_sampling_probs", (False,)),
    ("tfs_z", (1, 1.0)),
)
# What changes no token: where the cache is, how contexts are shifted (they never are here), what
# else is told. `n_indent` and `t_max_prompt_ms`, which editors send, would only stop sooner.
_IGNORED = (
    *("id_slot", "slot_id", "n_cache_reuse", "n_keep", "n_discard", "n_indent", "t_max_prompt_ms"),
    *("adaptive_decay", "backend_sampling", "grammar_triggers", "preserved_tokens", "chat_format"),
    *("sse_ping_interval", "verbose", "stream_options", "user"),
    *("speculative.n_max", "speculative.n_min", "speculative.p_min", "speculative.type"),
)


@dataclass(frozen=True, slots=True)
class LlamaAsked:
    """What is continued, or filled in, and how its answers are told."""

    options: GenerationOptions
    prompts: Sequence[Prompt]
    gap: Gap | None  # in place of the prompts
    choices: int  # answers to each prompt
    streams: bool
    never_ends: bool  # the model may not end an answer itself
    only_reads: bool  # the prompt goes into the cache, and nothing is written
    most_s: float | None  # for an answer, once it has a whole line
    returns_tokens: bool  # whether an answer that is not streamed has its ids
    tells_times: bool  # with each event
    tells_progress: bool  # of the prompt, while it is read
    paths: Sequence[str]  # what alone is told; all of it where there are none


def read_llama(body: Any, setup: Setup) -> LlamaAsked:
    """What `/completion` is asked for. Raises Refusal."""
    fields = Fields(body)
    return _asked(fields, setup, _prompts(fields, setup.limits), None)


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


def _prompts(fields: Fields, limits: Limits) -> list[Prompt]:
    """The field `prompt`: one, or a list of several."""
    value = fields.any("prompt")
    one = _prompt(fields, value, limits)
    if one is not None:
        return [one]
    several = [_prompt(fields, each, limits) for each in value] if isinstance(value, list) else []
    found = [each for each in several if each is not None]
    if len(found) > limits.choices:
        fields.refuse("prompt", f"has {len(found)} prompts, and {limits.choices} are the limit")
    if not found or len(found) < len(several):
        fields.refuse("prompt", f"must be text or token ids, or a list of them, not {shown(value)}")
    return found


def _prompt(fields: Fields, value: Any, limits: Limits) -> Prompt | None:
    """A text, `{"prompt_string": text}`, or a list of token ids and texts; None for others."""
    if isinstance(value, dict):
        inner = Fields(value, fields.name("prompt"))
        text = inner.text("prompt_string")
        inner.only("multimodal_data", [])
        inner.end()
        return text
    if isinstance(value, str):
        return value
    kinds = Counter(map(type, value)) if isinstance(value, list) else Counter()
    if not kinds[int] or kinds.keys() - {int, str}:
        return None
    if kinds[str] > limits.messages:
        fields.refuse("prompt", f"has {kinds[str]} texts, and {limits.messages} are the limit")
    return list(value)


def _asked(fields: Fields, setup: Setup, prompts: list[Prompt], gap: Gap | None) -> LlamaAsked:
    take_model(fields, setup)
    limits = setup.limits
    count = fields.whole("n_probs" if "n_probs" in fields else "logprobs", 0, 0, limits.logprobs)
    most = _most_tokens(fields, setup)
    most_ms = fields.whole("t_max_predict_ms", -1, -1, _MOST)
    options = GenerationOptions(
        max_tokens=max(1, most),
        sampling=take_sampling(fields, setup.defaults.sampling, limits),
        stop=take_stops(fields, limits),
        raw=True,
        reuse=fields.flag("cache_prompt", True),
        logprobs=count or None,
        **take_format(fields, setup.limits),
    )
    asked = LlamaAsked(
        options,
        prompts,
        gap,
        choices=fields.whole("n_cmpl" if "n_cmpl" in fields else "n", 1, 1, limits.choices),
        streams=fields.flag("stream"),
        never_ends=fields.flag("ignore_eos"),
        only_reads=most == 0,
        most_s=most_ms / 1e3 if most_ms > 0 else None,
        returns_tokens=fields.flag("return_tokens"),
        tells_times=fields.flag("timings_per_token"),
        tells_progress=fields.flag("return_progress"),
        paths=_paths(fields),
    )
    for name, values in _NOTHING:
        fields.only(name, *values)
    fields.ignore(*_IGNORED)
    fields.end()
    return asked


def _most_tokens(fields: Fields, setup: Setup) -> int:
    """Most tokens of an answer; what is below 0 goes on to the end of the context."""
    found = [fields.whole(name, -1, -2, _MOST) for name in _MAX_TOKENS if name in fields]
    most = found[0] if found else setup.defaults.max_tokens
    return setup.context_size if most is None or most < 0 else most


def _paths(fields: Fields) -> list[str]:
    """`response_fields`, such as "content" and "timings/predicted_n"."""
    paths = fields.list("response_fields", _MOST_PATHS)
    if not all(isinstance(path, str) and len(path) <= _MOST_PATH_CHARS for path in paths):
        fields.refuse("response_fields", "must be a list of names")
    return paths
