"""Tools: what a request offers, and what a template and a grammar are told of it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from edgespec.serve.fields import Fields, shown
from edgespec.serve.limits import Limits
from edgespec.serve.schemas import schema_text

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
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

    def call_schema(self, arguments: str) -> dict[str, Any]:
        """JSON schema of a call that is required; its arguments are in the field `arguments`."""
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": one["function"]["name"]},
                    arguments: one["function"].get("parameters") or {"type": "object"},
                },
                "required": ["name", arguments],
            }
            for one in self.offered
            if one["function"]["name"] in self.required
        ]
        return calls[0] if len(calls) == 1 else {"anyOf": calls}


def take_tools(fields: Fields, limits: Limits) -> Tools:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises Refusal."""
    values = fields.list("tools", limits.tools)
    offered = tuple(
        _tool(Fields(value, f"tools[{index}]"), limits) for index, value in enumerate(values)
    )
    names = [one["function"]["name"] for one in offered]
    choice = fields.any("tool_choice", AUTO)
    parallel = fields.flag("parallel_tool_calls", True)
    if choice == NONE:
        return Tools()
    if choice in (AUTO, REQUIRED):
        if choice == REQUIRED and not names:
            fields.refuse("tool_choice", "requires a tool, and there is none")
        return Tools(offered, tuple(names) if choice == REQUIRED else (), parallel)
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
    return Tools(offered, (name,), False)


def _tool(fields: Fields, limits: Limits) -> dict[str, Any]:
    kind = fields.text("type")
    if kind != "function":
        fields.refuse("type", f"{shown(kind)} is not supported, only function")
    inner = fields.object("function") if "function" in fields else fields
    tool = take_function(inner, "parameters", limits)
    fields.end()
    return tool


def take_function(fields: Fields, schema_field: str, limits: Limits) -> dict[str, Any]:
    """A tool's name, description and schema of arguments, as templates take it. Raises Refusal."""
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        fields.refuse("name", f"must be letters, digits, _, . or -, not {shown(name)}")
    function: dict[str, Any] = {"name": name, "description": fields.text("description", "")}
    parameters = fields.any(schema_field, {"type": "object", "properties": {}})
    schema_text(parameters, fields.name(schema_field), limits)  # refuses one that is too large
    function["parameters"] = parameters
    fields.ignore("strict")
    fields.end()
    return {"type": "function", "function": function}


def instructions(tools: Sequence[dict[str, Any]]) -> str:
    """What a model is told of tools whose template knows of none: Hermes' way to call them."""
    lines = "\n".join(json.dumps(one, ensure_ascii=False) for one in tools)
    return (
        "You may call functions to help with the request. Their signatures are within <tools>:\n"
        f"<tools>\n{lines}\n</tools>\n"
        "For each call write a JSON object with name and arguments within <tool_call>:\n"
        '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>'
    )
