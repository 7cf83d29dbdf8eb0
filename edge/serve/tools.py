"""Tools: what a request offers, and what a template and a grammar are told of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.serve.fields import Fields, shown
from edgespec.serve.generation_fields import schema_text
from edgespec.serve.limits import Limits
from edgespec.serve.tool_values import NAME_CHARS, object_or_text, resolved

_NAME = re.compile(rf"{NAME_CHARS}{{1,128}}")
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_VALUES = ("const", "enum", "default", "examples")  # of a schema: what is none itself
AUTO, REQUIRED, NONE = "auto", "required", "none"


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
    def names(self) -> frozenset[str]:
        """What may be called."""
        return frozenset(one["function"]["name"] for one in self.offered)

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
            inner = _moved(own, schema, f"tool{place}", definitions)
            if not inner.get("properties") and set(inner) <= {"type", "properties", "$schema"}:
                inner = {"type": "object", "properties": {}, "additionalProperties": False}
            fields = {name: {"const": tool}, arguments: inner}
            calls.append({"type": "object", "properties": fields, "required": list(fields)})
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {**call, "$defs": definitions} if definitions else call


def _moved(value: Any, schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> Any:
    """A part of a tool's schema for another document: what it refers to is in `definitions`."""
    if isinstance(value, list):
        return [_moved(one, schema, name, definitions) for one in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, one in value.items():
        if key in _BY_NAME and isinstance(one, dict):
            made[key] = {
                item: _moved(inner, schema, name, definitions) for item, inner in one.items()
            }
        else:
            made[key] = one if key in _VALUES else _moved(one, schema, name, definitions)
    reference = value.get("$ref")
    if isinstance(reference, str) and (found := resolved(schema, reference)) is not None:
        known = name + re.sub(r"[^A-Za-z0-9]", lambda one: f"-{ord(one[0]):x}-", reference[1:])
        if known not in definitions:
            definitions[known] = True  # before it is looked at: it may refer to itself
            definitions[known] = _moved(found, schema, name, definitions)
        made["$ref"] = f"#/$defs/{known}"
    return made


def take_tools(fields: Fields, limits: Limits) -> Tools:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError."""
    values = fields.list("tools", limits.tools)
    offered = tuple(_tool(Fields(value, f"tools[{index}]")) for index, value in enumerate(values))
    names = [one["function"]["name"] for one in offered]
    choice = fields.any("tool_choice", AUTO)
    parallel = fields.flag("parallel_tool_calls", True)
    if choice == NONE:
        return Tools()
    if choice in (AUTO, REQUIRED):
        if choice == REQUIRED and not names:
            fields.refuse("tool_choice", "requires a tool, and there is none")
        tools = Tools(offered, tuple(names) if choice == REQUIRED else (), parallel)
        return checked(tools, limits)
    if not isinstance(choice, dict):
        fields.refuse(
            "tool_choice", f"must be auto, none, required or a function, not {shown(choice)}"
        )
    inner = Fields(choice, "tool_choice")
    inner.only("type", "function")
    # Chats name the function in an object, responses beside its type.
    name = inner.object("function").text("name") if "function" in inner else inner.text("name")
    if name not in names:
        inner.refuse("function.name", f"{shown(name)} is none of the tools")
    inner.end()
    return checked(Tools(offered, (name,), False), limits)


def checked(tools: Tools, limits: Limits) -> Tools:
    """The same. Raises ApiError where a schema that an answer has to keep to is too large."""
    for name in tools.required:
        schema_text(tools.schemas[name], f"the schema of {name}", limits)
    return tools


def _tool(fields: Fields) -> dict[str, Any]:
    kind = fields.text("type")
    if kind != "function":
        fields.refuse("type", f"{shown(kind)} is not supported, only function")
    inner = fields.object("function") if "function" in fields else fields
    tool = take_function(inner, "parameters")
    fields.end()
    return tool


def take_function(fields: Fields, schema_field: str) -> dict[str, Any]:
    """A tool's name, description and schema of arguments, as templates take it. Raises ApiError."""
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        problem = "must be up to 128 letters, digits, _, ., /, :, @ or -"
        fields.refuse("name", f"{problem}, not {shown(name)}")
    function: dict[str, Any] = {"name": name, "description": fields.text("description", "")}
    parameters = fields.any(schema_field, {}) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        fields.refuse(schema_field, f"must be an object, not {shown(parameters)}")
    function["parameters"] = parameters
    fields.ignore("strict")
    fields.end()
    return {"type": "function", "function": function}


def call_arguments(fields: Fields) -> dict[str, Any] | str:
    """The field `arguments` of a call that is sent back, as templates take it.

    An object where it is one, or the text of one. What a model wrote instead stays a text.
    """
    return object_or_text(fields.any("arguments"))


def instructions(tools: Sequence[dict[str, Any]]) -> str:
    """What a model is told of tools whose template knows of none: Hermes' way to call them."""
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    return (
        "You may call functions to help with the request. Their signatures are within <tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "For each call write a JSON object with name and arguments within <tool_call>:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
