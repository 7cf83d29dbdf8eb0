"""Tools: what a request offers, and the arguments of calls, as the text of a JSON object.

Models write arguments in many notations. Those that are no JSON are read by one small parser. It
never runs anything, goes 32 levels deep, and raises ValueError for what it cannot read.
"""

from __future__ import annotations

import json
import math
import re
from ast import literal_eval
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from edgespec.serve.parsing import Fields, Limits, note_ignored, schema_text, shown
from edgespec.serve.serializers import ToolCall

NAME_CHARS = r"[A-Za-z0-9_./:@-]"
GEMMA_QUOTE = '<|"|>'
_MOST_LEVELS = 32
_WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
_WORDS |= {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?\d[\d_]{0,40}(\.\d{0,40})?([eE][+-]?\d{1,4})?(?![\w.])")
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_KEY = re.compile(r"[^\s:=,{}()\[\]\"']{1,128}")
_CALL = re.compile(rf"\s*,?\s*({NAME_CHARS}{{1,160}})\s*\(")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


def json_text(value: Any) -> str:
    """The JSON text of a value, in characters that can be sent."""
    text = json.dumps(value, ensure_ascii=False)
    return text if sendable(text) else json.dumps(value)


def sendable(text: str) -> bool:
    """Whether a text has no half of a character."""
    return not re.search("[\ud800-\udfff]", text)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object, as the arguments of a call have to be."""
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def call_of(name: str, arguments: Any, *, is_whole: bool = True) -> ToolCall:
    """A call with the arguments that a model wrote: a value, or the text of one.

    It is whole where these are an object.
    """
    is_none = arguments is None or arguments == ""
    text = "{}" if is_none else arguments if isinstance(arguments, str) else json_text(arguments)
    text = repaired(text)
    return ToolCall(name, text, is_whole=is_whole and is_object(text))


def repaired(text: str) -> str:
    """A JSON text without the slips that models make: see `JsonRepair`."""
    repair = JsonRepair()
    return repair.push(text) + repair.finish()


class JsonRepair:
    """Repairs JSON as it comes, where one way alone can be meant.

    Python's words and numbers, commas too many, values that are missing, escapes that JSON does not
    have, control characters and halves of characters. Numbers without an end (`NaN`, `1e999`) are
    null, as JavaScript writes them. What else is wrong stays as it is.
    """

    _TOKEN = re.compile(r'["{}\[\],:]|\s+|[^\s"{}\[\],:]+')
    _PAIR = r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    _PART = re.compile(
        rf'[^"\\\x00-\x1f\ud800-\udfff]+|{_PAIR}|\\u[0-9a-fA-F]{{4}}|\\?.', re.DOTALL
    )  # of a text
    _BEGUN = re.compile(  # what may become a pair, or another escape
        r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?))?\Z"
    )

    def __init__(self) -> None:
        self._held, self._is_text = "", False
        self._last, self._comma = "", ""  # the last token, and what waits for the next value

    def push(self, text: str, *, is_last: bool = False) -> str:
        """More of it. A word or an escape that may go on waits, and a comma for what follows it."""
        text, place, made = self._held + text, 0, list[str]()
        while found := (self._PART if self._is_text else self._TOKEN).match(text, place):
            token, end = found[0], found.end()
            if not is_last and (
                self._BEGUN.match(text, place)
                if self._is_text
                else end == len(text) and token not in '"{}[],:' and not token.isspace()
            ):
                break
            made.append(self._in_text(token) if self._is_text else self._outside(token))
            place = end
        self._held = text[place:]
        return "".join(made)

    def finish(self) -> str:
        return self.push("", is_last=True)

    def _in_text(self, token: str) -> str:
        if token == '"':
            self._is_text = False
        elif token[0] == "\\" and len(token) < 12:
            if re.match(r"\\u[dD][89a-fA-F]", token):
                return "\ufffd"
            if token[1:2] == "'":
                return "'"
            return token if token[1:2] in tuple('"\\/bfnrt') or len(token) == 6 else f"\\{token}"
        elif token < " " or not sendable(token):
            return json.dumps(token)[1:-1] if token < " " else "\ufffd"
        return token

    def _outside(self, token: str) -> str:
        if token.isspace():
            self._comma += token if self._comma else ""
            return "" if self._comma else token
        ends, last = token in ("}", "]"), self._last
        self._last = token
        before = "null" if last == ":" and (ends or token == ",") else ""
        if token == ",":
            self._comma = "" if last in ("{", "[") else ","
            return before
        before += self._comma.replace(",", "") if ends else self._comma
        self._comma, self._is_text = "", token == '"'
        return before + (token if token in '"{}[]:' else _literal(token))


def _literal(word: str) -> str:
    """A word of JSON for one of Python's, or for a number in another notation."""
    if word in _WORDS:
        return json.dumps(_WORDS[word])
    try:
        number = float(word)
    except ValueError:
        return word
    if _JSON_NUMBER.fullmatch(word) and (math.isfinite(number) or word.lstrip("-").isdecimal()):
        return word
    if not math.isfinite(number):
        return "null"
    return json.dumps(int(number) if number.is_integer() and "." not in word else number)


class OpenCall:
    """A call whose arguments are given as they are written."""

    def __init__(self, name: str, *, is_left_out: bool = False) -> None:
        self._head = ToolCall(name, "", is_whole=False, is_open=True)
        self._is_left_out = is_left_out
        self._repair, self._parts, self._given = JsonRepair(), list[str](), 0

    def write(self, text: str) -> None:
        if part := self._repair.push(text if self._parts else text.lstrip()):
            self._parts.append(part)

    def written(self) -> list[ToolCall]:
        """What was not given yet, as a part of the call."""
        text, self._given = "".join(self._parts[self._given :]), len(self._parts)
        return [replace(self._head, arguments=text)] if text and not self._is_left_out else []

    def end(self, rest: str = "", *, is_whole: bool) -> list[ToolCall]:
        """Its last part; it is whole where its arguments are an object."""
        self.write(rest)
        self._parts.append(self._repair.finish())
        if not any(self._parts):
            self._parts = ["{}"]
        is_whole = is_whole and is_object("".join(self._parts))
        text = "".join(self._parts[self._given :])
        last = replace(self._head, arguments=text, is_whole=is_whole, is_open=False)
        return [] if self._is_left_out else [last]


def read_broken_call(text: str, fields: tuple[str, str]) -> tuple[str, Any, bool] | None:
    """Of JSON that is cut off or no JSON: the name, the arguments, and whether they are whole.

    They may be whole where what is around them is not; else they are a text. None where there is no
    name.
    """
    text = repaired(text)
    name = _member(text, fields[0], "name")
    if name is None or not (named := re.match(r'"([^"\\]{1,160})"', text[name:])):
        return None
    place = _member(text, fields[1], "arguments", "parameters")
    if place is None:
        return named[1], "", False
    try:
        value, _ = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return named[1], text[place:].rstrip(), False
    return named[1], value, True


def _member(text: str, *names: str) -> int | None:
    """Where the value of the first member of some names begins."""
    allowed = "|".join(re.escape(name) for name in names if name)
    found = re.search(rf'"(?:{allowed})"\s*:\s*', text)
    return found.end() if found else None


def parse_argument(text: str, schema: Any, whole: Mapping[str, Any]) -> Any:
    """The value that a text stands for in an argument of a schema.

    Args:
        schema: of this argument.
        whole: of all arguments, where its references lead.
    """
    types = _types(schema, whole, 0)
    if "string" in types and not (text == "null" and "null" in types):
        return text
    word = text.strip()
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower() == "true"
    with suppress(ValueError, RecursionError):
        return json.loads(word, strict=False)
    if word in _WORDS or not word.startswith(("{", "[")):
        return _WORDS.get(word, text)
    reader = _Values(word + " ", 0)  # in Python's notation, which some templates show
    with suppress(ValueError, RecursionError):
        value = reader.value()
        return text if word[reader.place :] else value
    return text


def _types(schema: Any, whole: Mapping[str, Any], level: int) -> set[str]:
    """Names of the types that a schema allows; none where it does not say."""
    if not isinstance(schema, dict) or level > _MOST_LEVELS:
        return set()
    found = schema.get("type", [])
    types = {one for one in ([found] if isinstance(found, str) else found) if isinstance(one, str)}
    if types:
        return types
    if isinstance(schema.get("$ref"), str):
        return _types(resolve_reference(whole, schema["$ref"]), whole, level + 1)
    inner = [one for name in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(name))]
    values = [*_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    types |= {"string" for one in values if isinstance(one, str)}
    types |= {"null" for one in values if one is None}
    return types.union(*(_types(one, whole, level + 1) for one in inner))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def resolve_reference(document: Any, reference: str) -> Any:
    """What a reference of a JSON schema leads to within it; None for nothing."""
    place, _, path = reference.partition("#")
    if place:
        return None
    for name in path.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(document, list) and name.isdecimal() and int(name) < len(document):
            document = document[int(name)]
        elif isinstance(document, dict) and name in document:
            document = document[name]
        else:
            return None
    return document


# -- notations that are no JSON ------------------------------------------------------------


def python_calls(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and arguments of `[name(key=value, ...), ...]`, or of one call without brackets."""
    text = text.strip()
    if text.startswith("["):
        text = text.removeprefix("[").removesuffix("]")
    found, place = [], 0
    while call := _CALL.match(text, place):
        reader = _Values(text, call.end())
        found.append((call[1], reader.members(")", "=")))
        place = reader.place
    if not found or text[place:].strip(" \t\r\n,;"):
        raise ValueError("no calls alone")
    return found


def gemma_arguments(text: str) -> dict[str, Any]:
    """Arguments that are written as `{key:<|"|>text<|"|>,other:1}`."""
    reader = _Values(text, 0)
    reader.expect("{")
    return reader.members("}", ":")


@dataclass(slots=True)
class _Values:
    """Reads values of a text from a place on."""

    text: str
    place: int
    level: int = 0

    def members(self, end: str, between: str) -> dict[str, Any]:
        """Keys and values up to `end`."""
        found: dict[str, Any] = {}
        while not self._skip(end):
            key = self._string() if self._at("'", '"', GEMMA_QUOTE) else self._match(_KEY)
            self.expect(between)
            found[key] = self.value()
            self._skip(",")
        return found

    def value(self) -> Any:
        if self.level >= _MOST_LEVELS:
            raise ValueError("too deep")
        self.level += 1
        value = self._any()
        self.level -= 1
        return value

    def _any(self) -> Any:
        if self._at("'", '"', GEMMA_QUOTE):
            return self._string()
        if self._skip("{"):
            return self.members("}", ":")
        if self._skip("["):
            items = []
            while not self._skip("]"):
                items.append(self.value())
                self._skip(",")
            return items
        if number := _NUMBER.match(self.text, self.place):
            self.place = number.end()
            written = number[0].replace("_", "")
            return int(written) if written.lstrip("-").isdecimal() else float(written)
        word = self._match(_KEY)
        return _WORDS.get(word, word)

    def _string(self) -> str:
        if self._skip(GEMMA_QUOTE):
            end = self.text.find(GEMMA_QUOTE, self.place)
            if end < 0:
                raise ValueError("a text without an end")
            start, self.place = self.place, end + len(GEMMA_QUOTE)
            return self.text[start:end]
        written = self._match(_STRING)
        inner = written.replace("\r", "\\r").replace("\n", "\\n")
        try:
            return str(literal_eval(inner))
        except (SyntaxError, ValueError, MemoryError) as error:
            raise ValueError("no text") from error

    def expect(self, token: str) -> None:
        """Pass a token by, which has to come."""
        if not self._skip(token):
            raise ValueError(f"no {token}")

    def _skip(self, token: str) -> bool:
        if not self._at(token):
            return False
        self.place += len(token)
        return True

    def _at(self, *tokens: str) -> bool:
        while self.text[self.place : self.place + 1].isspace():
            self.place += 1
        if self.place >= len(self.text):
            raise ValueError("it is cut off")
        return self.text.startswith(tokens, self.place)

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.place)
        if not found:
            raise ValueError("something else")
        self.place = found.end()
        return found[0]


def object_or_text(value: Any) -> dict[str, Any] | str:
    """Arguments that a client sends back: an object, or a text that is none."""
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    if not isinstance(value, str):
        return json_text(value)
    try:
        found = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    is_object = isinstance(found, dict) and sendable(json.dumps(found, ensure_ascii=False))
    return found if is_object else value


_NAME = re.compile(rf"{NAME_CHARS}{{1,128}}")
_DEFINITIONS = ("$defs", "definitions")
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", *_DEFINITIONS)
_VALUES = ("const", "enum", "default", "examples")  # of a schema: what is none itself
_SAY_TYPES = {"type", "$ref", "anyOf", "oneOf", "allOf"}


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
            inner = _inline_refs(own, schema, f"tool{place}", definitions)
            if not inner.get("properties") and set(inner) <= {"type", "properties", "$schema"}:
                inner = {"type": "object", "properties": {}, "additionalProperties": False}
            fields = {name: {"const": tool}, arguments: inner}
            calls.append({"type": "object", "properties": fields, "required": list(fields)})
        call = calls[0] if len(calls) == 1 else {"anyOf": calls}
        return {**call, "$defs": definitions} if definitions else call


def _inline_refs(value: Any, schema: dict[str, Any], name: str, definitions: dict[str, Any]) -> Any:
    """A part of a tool's schema for another document: what it refers to is in `definitions`."""
    if isinstance(value, list):
        return [_inline_refs(one, schema, name, definitions) for one in value]
    if not isinstance(value, dict):
        return value
    made: dict[str, Any] = {}
    for key, one in value.items():
        if key in _BY_NAME and isinstance(one, dict):
            made[key] = {
                item: _inline_refs(inner, schema, name, definitions) for item, inner in one.items()
            }
        else:
            made[key] = one if key in _VALUES else _inline_refs(one, schema, name, definitions)
    reference = value.get("$ref")
    if isinstance(reference, str) and (found := resolve_reference(schema, reference)) is not None:
        known = name + re.sub(r"[^A-Za-z0-9]", lambda one: f"-{ord(one[0]):x}-", reference[1:])
        if known not in definitions:
            definitions[known] = True  # before it is looked at: it may refer to itself
            definitions[known] = _inline_refs(found, schema, name, definitions)
        made["$ref"] = f"#/$defs/{known}"
    return made


def parse_tools(fields: Fields, limits: Limits) -> Tools:
    """The fields `tools`, `tool_choice` and `parallel_tool_calls`. Raises ApiError."""
    offered = tuple(
        _function(one.object("function") if "function" in one else one)
        for one in fields.objects("tools", limits.tools)
        if _is_function(one)
    )
    names = [one["function"]["name"] for one in offered]
    choice = fields.pop("tool_choice", "auto")
    parallel = fields.flag("parallel_tool_calls", True)
    required: Sequence[str] = ()
    if choice == "none":
        return Tools()
    if choice == "required":
        if not names:
            fields.refuse("tool_choice", "requires a tool, and there is none")
        required = names
    elif isinstance(choice, dict):
        inner = fields.within(choice, "tool_choice")
        inner.only("type", "function")
        # Chats name the function in an object, responses beside its type.
        named = inner.object("function") if "function" in inner else inner
        if (name := named.text("name")) not in names:
            named.refuse("name", f"{shown(name)} is none of the tools")
        required, parallel = (name,), False
    elif choice != "auto":
        fields.refuse(
            "tool_choice", f"must be auto, none, required or a function, not {shown(choice)}"
        )
    tools = Tools(offered, tuple(required), parallel)
    for name in required:  # an answer has to keep to their schemas
        schema_text(tools.schemas[name], f"the schema of {name}", limits)
    return tools


def _is_function(fields: Fields) -> bool:
    """Whether a tool is of the kind that clients run.

    One that another server would run, such as a search of the web, is left out of a request, and
    the log names it: the model does without.
    """
    kind = fields.text("type", "function")
    if kind != "function":
        note_ignored(f"tools[].type {kind[:40]}")
        fields.take()
    return kind == "function"


def _function(fields: Fields) -> dict[str, Any]:
    """A tool's name, description and schema of arguments, as templates take it. Raises ApiError."""
    name = fields.text("name")
    if not _NAME.fullmatch(name):
        problem = "must be up to 128 letters, digits, _, ., /, :, @ or -"
        fields.refuse("name", f"{problem}, not {shown(name)}")
    function: dict[str, Any] = {"name": name, "description": fields.text("description", "")}
    parameters = fields.pop("parameters", {}) or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        fields.refuse("parameters", f"must be an object, not {shown(parameters)}")
    if not parameters.keys() & _SAY_TYPES:  # else a list would fit, too
        parameters = {"type": "object", **parameters}
    function["parameters"] = parameters
    fields.ignore("strict")
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
