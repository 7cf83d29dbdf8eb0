"""Arguments of calls: in JSON that needs mending, Python's notation, Gemma's, or typed by a schema.

One small parser reads what is no JSON. It never runs anything, goes 32 levels deep, and raises
ValueError for what it cannot read.
"""

from __future__ import annotations

import json
import math
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
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
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
    if word in WORDS:
        return json.dumps(WORDS[word])
    try:
        number = float(word)
    except ValueError:
        return word
    if _JSON_NUMBER.fullmatch(word) and (math.isfinite(number) or word.lstrip("-").isdecimal()):
        return word
    if not math.isfinite(number):
        return "null"
    return json.dumps(int(number) if number.is_integer() and "." not in word else number)
