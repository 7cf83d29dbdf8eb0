"""Arguments of calls that are no JSON: Python's notation, Gemma's, and texts that a schema types.

One small parser reads them. It never runs anything, goes 32 levels deep, and raises ValueError for
what it cannot read.
"""

from __future__ import annotations

import json
import re
from ast import literal_eval
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from edgespec.serve.tool_formats import NAME_CHARS

GEMMA_QUOTE = '<|"|>'
_MOST_LEVELS = 32
WORDS: dict[str, Any] = {"True": True, "False": False, "None": None}
WORDS |= {"true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?\d[\d_]{0,40}(\.\d{0,40})?([eE][+-]?\d{1,4})?(?![\w.])")
_KEY = re.compile(r"[^\s:=,{}()\[\]\"']{1,128}")
_CALL = re.compile(rf"\s*,?\s*({NAME_CHARS}{{1,160}})\s*\(")
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)


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
    if word in WORDS or not word.startswith(("{", "[")):
        return WORDS.get(word, text)
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


# -- notations ----------------------------------------------------------------------------------


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
        return WORDS.get(word, word)

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
