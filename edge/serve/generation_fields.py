"""The fields that say how an answer is generated, which all interfaces share.

How tokens are picked, and what the answer has to look like, by every field that clients say it
with: `response_format` is OpenAI's, `structured_outputs`, `guided_json` and the like are vLLM's,
`json_schema` and `grammar` llama.cpp's. What can be compiled is the grammar engine's to say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from edgespec.sampling.params import ORDER, SAMPLER_WORDS, SamplingParams
from edgespec.serve.api_error import ApiError
from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits

_MOST_SEED = (1 << 63) - 1
_LEAST_TOP_P = 1e-9  # the best token alone, as 0 means
_LARGE, _MOST_COUNT = 1e6, 1 << 20
# How many tokens before the next one are looked at by penalties; -1 is all.
_LAST_N = ("repeat_last_n", -1, _MOST_COUNT)
# llama.cpp's other samplers, by its names; `SamplingParams` knows their ranges.
_NUMBERS = (
    *("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dynatemp_range"),
    *("dynatemp_exponent", "dry_multiplier", "dry_base", "mirostat_tau", "mirostat_eta"),
)
_COUNTS = ("dry_allowed_length", "dry_penalty_last_n", "mirostat")
# llama.cpp's letters for its samplers. What "infill" would pick at the end of a gap's filling is
# left to the model here.
_INFILL = "infill"
_LETTERS = dict(zip("edskypmxti", (*ORDER, _INFILL), strict=True))


def take_sampling(fields: Fields, defaults: SamplingParams, limits: Limits) -> SamplingParams:
    """How tokens are picked. Raises ApiError."""
    penalty = "repetition_penalty" if "repetition_penalty" in fields else "repeat_penalty"
    if penalty == "repetition_penalty":
        fields.refuse_set({"repeat_penalty": "repetition_penalty is there, too"})
    seed = fields.whole("seed", -1 if defaults.seed is None else defaults.seed, -1, _MOST_SEED)
    biases = _biases(fields, limits.biases) if "logit_bias" in fields else defaults.logit_bias
    name, low, high = _LAST_N
    more: dict[str, Any] = {
        field: fields.number(field, getattr(defaults, field), -_LARGE, _LARGE)
        for field in _NUMBERS
        if field in fields
    }
    for field in _COUNTS:
        if field in fields:
            more[field] = fields.whole(field, 0, -1, _MOST_COUNT)
    if "dry_sequence_breakers" in fields:
        more["dry_sequence_breakers"] = _texts(fields, "dry_sequence_breakers", limits)
    if "samplers" in fields:
        more["samplers"] = _samplers(fields, limits)
    return replace(
        defaults,
        temperature=fields.number("temperature", defaults.temperature, 0.0, 100.0),
        top_p=max(_LEAST_TOP_P, fields.number("top_p", defaults.top_p, 0.0, 1.0)),
        top_k=max(0, fields.whole("top_k", defaults.top_k, -1, 1 << 31)),
        min_p=fields.number("min_p", defaults.min_p, 0.0, 1.0),
        repetition_penalty=fields.number(penalty, defaults.repetition_penalty, 1e-3, 1e3),
        presence_penalty=fields.number("presence_penalty", defaults.presence_penalty, -100, 100),
        frequency_penalty=fields.number("frequency_penalty", defaults.frequency_penalty, -100, 100),
        penalty_last_n=fields.whole(name, defaults.penalty_last_n, low, high),
        logit_bias=biases,
        seed=None if seed < 0 else seed,
        **more,
    )


def biases_by_id(body: Any, ids_of: Callable[[str], Sequence[int]]) -> Any:
    """A body whose biases of texts, as llama.cpp takes them, are those of all their tokens."""
    given = body.get("logit_bias") if isinstance(body, dict) else None
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not isinstance(pairs, list) or not all(_is_pair(one) for one in pairs):
        return body
    made: list[list[Any]] = []
    for token, bias in pairs:
        is_text = isinstance(token, str) and not (token.isascii() and token.isdigit())
        made += [[one, bias] for one in (ids_of(token) if is_text else [token])]
    return {**body, "logit_bias": made}


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2


def seed_of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Of several answers to one request each has a seed of its own."""
    return (
        params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)
    )


def take_stops(fields: Fields, limits: Limits, field: str = "stop") -> tuple[str, ...]:
    """Texts that end an answer: one, or a list."""
    return _texts(fields, field, limits)


def _samplers(fields: Fields, limits: Limits) -> tuple[str, ...]:
    """Names of samplers in order; or a text of their letters, or of names between semicolons."""
    value = fields.any("samplers")
    if isinstance(value, str):
        is_letters = set(value) <= _LETTERS.keys()
        value = [_LETTERS[one] for one in value] if is_letters else value.split(";")
    names = _texts(Fields({"samplers": value}, fields.path), "samplers", limits)
    known = (name.replace("-", "_") for name in names)
    return tuple(SAMPLER_WORDS.get(name, name) for name in known if name != _INFILL)


def _texts(fields: Fields, field: str, limits: Limits) -> tuple[str, ...]:
    value = fields.any(field, [])
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        fields.refuse(field, f"must be a text or a list of texts, not {shown(value)}")
    if len(texts) > limits.stops:
        fields.refuse(field, f"has {len(texts)} texts, and at most {limits.stops} are taken")
    if any(len(text) > limits.stop_chars for text in texts):
        fields.refuse(field, f"has a text of more than {limits.stop_chars} characters")
    return tuple(text for text in texts if text)


def take_max_tokens(fields: Fields, default: int | None, context: int, *names: str) -> int:
    """Most tokens of an answer, by the first of `names` that is there.

    -1, as some clients write it, goes on to the end of the context.
    """
    found = [name for name in names if name in fields]
    values = [fields.whole(name, -1, -1, 1 << 31) for name in found]
    for name, value in zip(found, values, strict=True):
        if value == 0:
            fields.refuse(name, "must be at least 1")
    most = values[0] if values else default
    return context if most is None or most < 0 else most


def _biases(fields: Fields, most: int) -> tuple[tuple[int, float], ...]:
    value = fields.any("logit_bias")
    if isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value):
        # llama.cpp's way: pairs, and false for never.
        value = {str(token): -math.inf if bias is False else bias for token, bias in value}
    if not isinstance(value, dict):
        fields.refuse("logit_bias", f"must be an object, not {shown(value)}")
    if len(value) > most:
        fields.refuse("logit_bias", f"has {len(value)} tokens, and at most {most} are taken")
    pairs = []
    for token, bias in value.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not (token.isascii() and token.isdigit() and len(token) < 10 and is_number):
            fields.refuse("logit_bias", "must name token ids, each with a number")
        if not -100 <= bias <= 100 and bias != -math.inf:
            fields.refuse("logit_bias", f"must be -100 to 100, not {shown(bias)}")
        pairs.append((int(token), float(bias)))
    return tuple(pairs)


class AnswerForm(TypedDict, total=False):
    """Keywords of `GenerationOptions`, of which at most one is given."""

    json_schema: str
    regex: str
    grammar: str


_ANY_OBJECT = '{"type": "object"}'
_VLLM = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
_SILENT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def take_format(fields: Fields, limits: Limits) -> AnswerForm:
    """The form that a request asks for, if any. Raises ApiError for two of them."""
    found: dict[str, AnswerForm] = {}
    if "response_format" in fields:
        found["response_format"] = typed_format(fields.object("response_format"), limits)
    if "structured_outputs" in fields:
        inner = fields.object("structured_outputs")
        found |= _vllm(inner, limits, "")
        if inner.flag("json_object"):
            found[inner.name("json_object")] = {"json_schema": _ANY_OBJECT}
        inner.ignore(*_SILENT)
        inner.refuse_set({"structural_tag": "use json, regex, choice or grammar"})
        inner.end()
    found |= _vllm(fields, limits, "guided_")
    if "json_schema" in fields:
        found["json_schema"] = {"json_schema": _schema(fields, "json_schema", limits)}
    if "grammar" in fields and (grammar := _text(fields, "grammar", limits)):
        found["grammar"] = {"grammar": grammar}
    asked = [name for name, form in found.items() if form]
    if len(asked) > 1:
        raise ApiError(f"{asked[0]} and {asked[1]} cannot both be kept to", param=asked[1])
    return found[asked[0]] if asked else {}


def typed_format(fields: Fields, limits: Limits) -> AnswerForm:
    """The form that an object with a type asks for: text, json_object or json_schema."""
    kind, form = fields.text("type"), AnswerForm()
    if kind == "json_object":
        form["json_schema"] = _ANY_OBJECT
        if "schema" in fields:  # as llama.cpp takes it
            form["json_schema"] = _schema(fields, "schema", limits)
    elif kind == "json_schema":
        named = fields.object("json_schema") if "json_schema" in fields else fields
        named.ignore("name", "description", "strict")  # answers always keep to it
        form["json_schema"] = _schema(named, "schema", limits)
        named.end()
    elif kind != "text":
        fields.refuse("type", f"must be text, json_object or json_schema, not {shown(kind)}")
    fields.end()
    return form


def format_within(fields: Fields, field: str, limits: Limits) -> AnswerForm:
    """The form that the field `format` of an object asks for."""
    outer = fields.object(field)
    outer.ignore("effort", "task_budget", "verbosity")
    form = typed_format(outer.object("format"), limits) if "format" in outer else AnswerForm()
    outer.end()
    return form


def schema_text(schema: Any, param: str, limits: Limits) -> str:
    """The text of a schema. Raises ApiError for one that is too large."""
    if schema is not True and not isinstance(schema, dict):
        raise ApiError(f"{param} must be an object", param=param)
    text = json.dumps(schema)
    _check_size(text, param, limits)
    return text


def _vllm(fields: Fields, limits: Limits, prefix: str) -> dict[str, AnswerForm]:
    """vLLM's fields, whose names have a prefix in requests for its older versions."""
    found: dict[str, AnswerForm] = {}
    for name, keyword in _VLLM.items():
        field = prefix + name
        if field in fields:
            read = _schema if name == "json" else _text
            found[fields.name(field)] = {keyword: read(fields, field, limits)}  # type: ignore[misc]
    if f"{prefix}choice" in fields:
        field = f"{prefix}choice"
        found[fields.name(field)] = {"regex": _choice(fields, field, limits)}
    return found


def _schema(fields: Fields, field: str, limits: Limits) -> str:
    """A schema, or the text of one."""
    value = fields.any(field)
    if not isinstance(value, str):
        return schema_text(value, fields.name(field), limits)
    _check_size(value, fields.name(field), limits)
    return value


def _text(fields: Fields, field: str, limits: Limits) -> str:
    value = fields.text(field)
    _check_size(value, fields.name(field), limits)
    return value


def _choice(fields: Fields, field: str, limits: Limits) -> str:
    """A regular expression of some texts, of which one is the answer."""
    values = fields.list(field, limits.format_choices)
    if not values or not all(isinstance(one, str) for one in values):
        fields.refuse(field, "must be a list of texts, with one at least")
    expression = "|".join("".join(map(_literal, one)) for one in values)
    _check_size(expression, fields.name(field), limits)
    return expression


def _literal(character: str) -> str:
    if character.isascii() and character.isalnum():
        return character
    return f"\\x{{{ord(character):x}}}"


def _check_size(text: str, param: str, limits: Limits) -> None:
    size = len(text)
    if size > limits.format_chars:
        problem = f"has {size:,} characters, and {limits.format_chars:,} are the most"
        raise ApiError(f"{param} {problem}", param=param)
