"""What an answer has to look like, by every field that clients say it with.

`response_format` is OpenAI's, `structured_outputs` and `guided_json` and the like are vLLM's,
`json_schema` and `grammar` llama.cpp's. What can be compiled is the grammar engine's to say.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.refusal import Refusal


class AnswerForm(TypedDict, total=False):
    """Keywords of `GenerationOptions`, of which at most one is given."""

    json_schema: str
    regex: str
    grammar: str


_ANY_OBJECT = '{"type": "object"}'
_VLLM = {"json": "json_schema", "regex": "regex", "grammar": "grammar"}
_SILENT = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


def take_format(fields: Fields, limits: Limits) -> AnswerForm:
    """The form that a request asks for, if any. Raises Refusal for two of them."""
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
        raise Refusal(f"{asked[0]} and {asked[1]} cannot both be kept to", param=asked[1])
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


def schema_text(schema: Any, param: str, limits: Limits) -> str:
    """The text of a schema. Raises Refusal for one that is too large."""
    if schema is not True and not isinstance(schema, dict):
        raise Refusal(f"{param} must be an object", param=param)
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
        raise Refusal(f"{param} {problem}", param=param)
