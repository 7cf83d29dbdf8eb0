"""JSON schemas as llguidance takes them, and where in one of them is what it does not take.

Objects are closed as a model's answers are, formats are said in words that it knows, and what it
does not count is bounded: multiples, references.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from itertools import combinations
from time import monotonic
from typing import Any
from urllib.parse import unquote

from edgespec.errors import UnsupportedError

_MOST_MULTIPLE = 20_000  # states of a number that is a multiple of it: 20 ms for 10,000
# One layout: that of Python's json.dumps, which models write by themselves.
_LAYOUT: Any = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
}
_IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")  # what else the same value has to fit
_CHOICES = ("anyOf", "oneOf")
_SAYS_OTHERWISE = (
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("minProperties", "$dynamicRef", "$recursiveRef", "not", "if", "dependentSchemas"),
)
_OF_ANY_NAME = ("patternProperties", "additionalProperties")  # which named ones may have, too
_OF_ITEMS = ("items", "additionalItems", "prefixItems")
_MOST_STEPS = 200_000
_DEEPEST_PROOF = 4  # levels at which it is looked for what tells branches apart
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# A large float may be an integer.
_TYPE_OF: dict[type, str] = {
    **{type(None): "null", bool: "boolean", int: "integer", float: "integer"},
    **{str: "string", list: "array", dict: "object"},
}
_LITERAL = ("const", "enum", "default", "examples")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# Formats that llguidance has, and one that it refuses by name. JSON Schema lets a reader pass over
# all others.
_FORMATS = {
    *("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"),
    "regex",
}
# What is written for formats that it lacks: texts of ASCII that are all of the format.
_ALIKE = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri"}
# A number of words, as (?:\S+\s+){0,49}\S+ says it. \S+(?:\s+\S+){0,49} are the same texts, and a
# mask of it takes a quarter of the time where the length is bounded, too.
_PART = r"(?:\\[dDsSwW]|\[[^\]\\]{0,80}\]|[\w ,.-])[*+?]?"
_WORDS = re.compile(rf"(?<!\\)\((\?:)?({_PART})({_PART})\)(\{{\d+(?:,\d*)?\}}|[*+?])\2(?![*+?{{])")
_NO_CONSTRAINT = (
    *("$defs", "definitions", "title", "description", "default", "examples", "$id", "$schema"),
    *("$comment", "deprecated", "readOnly", "writeOnly"),
)


def closed_schema(text: str) -> dict[str, Any]:
    """A JSON schema as answers keep to it. Raises UnsupportedError for what is none."""
    try:
        return _closed(text)
    except (ValueError, RecursionError) as problem:
        raise _unusable_schema(text, problem) from None


def schema_document(text: str) -> str:
    """llguidance's document of a JSON schema. Raises UnsupportedError for what is none."""
    try:
        return _document(text)
    except (ValueError, RecursionError) as problem:
        raise _unusable_schema(text, problem) from None


def _closed(text: str) -> dict[str, Any]:
    schema = json.loads(text, parse_float=_number)
    schema = {} if schema is True else schema
    if not isinstance(schema, dict):
        raise ValueError(f"it is an object, not {text.strip()[:40]}")
    schema.pop("x-guidance", None)  # llguidance's options: there is one layout here
    _check_multiples(schema, text)
    for one in _schemas(schema):
        name = one.get("format")
        if isinstance(name, str) and name not in _FORMATS:  # in words that llguidance knows, or not
            del one["format"]
            if name in _ALIKE:
                one["format"] = _ALIKE[name]
        if isinstance(one.get("pattern"), str):
            one["pattern"] = _WORDS.sub(r"\2(?:\3\2)\4", one["pattern"])
    references = _References(schema)
    _Closing(references).close(schema)
    for one in list(_schemas(schema)):
        references.coerce_one_of(one)
    return schema


def _document(text: str) -> str:
    from llguidance import LLMatcher

    return LLMatcher.grammar_from_json_schema(json.dumps(_closed(text)), overrides=_LAYOUT)


def _number(digits: str) -> float:
    """Numbers that are equal, alike: 2 for 2.0, which llguidance takes for no length."""
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= 2**53 else value


def _check_multiples(schema: dict[str, Any], text: str) -> None:
    """Refuse multiples of large numbers: llguidance has a state for each remainder."""
    values = (one.get("multipleOf") for one in _schemas(schema))
    found = [abs(x) for x in values if isinstance(x, int | float) and math.isfinite(x)]
    coefficients = {_coefficient(number) for number in found}
    merges = any(f'"{name}"' in text for name in ("allOf", "$ref"))
    most = math.lcm(*coefficients) if merges else max(coefficients, default=0)
    if most > _MOST_MULTIPLE:
        raise ValueError(
            f"multipleOf {max(found)} has {most:,} remainders, {_MOST_MULTIPLE:,} are the most"
        )


def _coefficient(number: float) -> int:
    """The digits of a number, without its point: 25 of 2.5. At least 1."""
    digits = Decimal(repr(number)).normalize()
    exponent = digits.as_tuple().exponent
    assert isinstance(exponent, int)
    if exponent > 18:
        return 10**18  # large enough to be refused
    return max(1, int(digits.scaleb(-min(exponent, 0))))


def _schemas(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas in one; not what stands for a value itself."""
    waiting = [root]
    while waiting:
        schema = waiting.pop()
        yield schema
        waiting += [inner for _, inner in _parts(schema)]


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within one, each with its place: "properties.a", "anyOf[0]"."""
    for name, value in schema.items():
        if name in _LITERAL:
            continue
        inner = {name: value}
        if name in _MAPPINGS and isinstance(value, dict):
            inner = {f"{name}.{key}": one for key, one in value.items()}
        for place, one in inner.items():
            if isinstance(one, list):
                yield from ((f"{place}[{i}]", x) for i, x in enumerate(one) if isinstance(x, dict))
            elif isinstance(one, dict):
                yield place, one


class _References:
    """What the schemas of a document say in place of each other.

    Its work is bounded: ValueError where parts refer to each other too often.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self._steps = 0

    def step(self, count: int = 1) -> None:
        """Count work."""
        self._steps += count
        if self._steps > _MOST_STEPS:
            raise ValueError("its parts refer to each other too often")

    def target(self, reference: Any) -> Any:
        """What a reference within the document names; None for others, which are not followed."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found: Any = self.root
        for name in filter(None, unquote(reference[1:]).split("/")):
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def coerce_one_of(self, schema: dict[str, Any]) -> None:
        """Say `anyOf` where no value fits two branches; llguidance sees less of that."""
        pairs = combinations(_list(schema, "oneOf"), 2)
        if (
            "oneOf" not in schema
            or "anyOf" in schema
            or not all(self._differ(one, other, schema.get("type")) for one, other in pairs)
        ):
            return
        renamed = {("anyOf" if name == "oneOf" else name): value for name, value in schema.items()}
        schema.clear()
        schema.update(renamed)

    def _differ(self, one: Any, other: Any, outer: Any = None, depth: int = 0) -> bool:
        """Whether it can be shown that no value fits both; `outer` is the type of both."""
        self.step()
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        if depth > _DEEPEST_PROOF or not isinstance(one, dict) or not isinstance(other, dict):
            return False
        types, values = [_types(x) for x in (one, other)], [_values(x) for x in (one, other)]
        if types[0].isdisjoint(types[1]):
            return True
        if values[0] is not None and values[1] is not None:
            return values[0].isdisjoint(values[1])
        if {"object"} not in (*types, _types({"type": outer})):
            return False
        names = {*_required(one), *_required(other)}
        properties = {name: (_property(one, name), _property(other, name)) for name in names}
        # A document of one branch does not have what the other one requires, and the other way.
        if any(properties[name][0] is False for name in _required(other)) and any(
            properties[name][1] is False for name in _required(one)
        ):
            return True
        return any(
            False not in pair and self._differ(*pair, None, depth + 1)
            for pair in properties.values()
        )

    def _resolved(self, schema: Any) -> Any:
        """What a schema that is a reference alone stands for."""
        for _ in range(_DEEPEST_PROOF):
            if not isinstance(schema, dict) or set(schema) - set(_NO_CONSTRAINT) != {"$ref"}:
                break
            schema = self.target(schema["$ref"])
        return schema


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that its values may have."""
    values = _values(schema)
    if values is not None:
        return {_TYPE_OF[type(json.loads(value))] for value in values}
    named = schema.get("type")
    listed = {one for one in _list(schema, "type") if isinstance(one, str)}
    found = {named} if isinstance(named, str) else listed
    return found | {"integer"} if "number" in found else found or set(_TYPES)


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The texts of its values, where they are listed."""
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list):
        return None
    return {json.dumps(value, sort_keys=True) for value in found}


def _property(schema: dict[str, Any], name: str) -> Any:
    """The schema of a property: True for any value, False for one that it may not have."""
    if "patternProperties" in schema:
        return True
    return _mapping(schema, "properties").get(name, schema.get("additionalProperties", True))


class _Closing:
    """Closes objects that name properties and say nothing of others.

    What several schemas say of the same value is put together first: no branch of an `allOf` may
    forbid what the other one names. Definitions that are used in such places stay as they are, and
    so do values that two branches describe.
    """

    def __init__(self, references: _References) -> None:
        self._references = references
        self._done: set[int] = set()
        beside = [
            one
            for schema in _schemas(references.root)
            if _merges(schema)
            for one in self._direct(schema)
        ]
        self._merged = {id(part) for part in self._with_branches(beside)}

    def close(self, schema: Any) -> None:
        """Close a schema that stands alone for a value, and those of the values within."""
        if not isinstance(schema, dict) or id(schema) in self._done:
            return
        self._done.add(id(schema))
        if any(name in schema for name in _IN_PLACE) and not _merges(schema):
            for branch in self._direct(schema):
                if id(branch) not in self._merged:
                    self.close(branch)
            return
        parts = self._with_branches([schema])
        values = [pair for part in parts for pair in _values_within(part)]
        self._close_one(schema, parts)
        self._done.update(map(id, parts))
        places = Counter(place for place, _ in values)
        is_open = len(places) > 1 and any(place in places for place in _OF_ANY_NAME)
        for place, value in values:
            if places[place] == 1 and not (is_open and place not in _OF_ITEMS):
                self.close(value)

    def _close_one(self, schema: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        says_otherwise = any(name in part for part in parts for name in _SAYS_OTHERWISE)
        if says_otherwise or not any("properties" in part for part in parts):
            return
        own = _mapping(schema, "properties")
        names = [
            name for part in parts for name in (*_mapping(part, "properties"), *_required(part))
        ]
        own = {**own, **{name: True for name in names if name not in own}}
        rest = {name: value for name, value in schema.items() if name != "properties"}
        schema.clear()  # what comes first says in which order properties are written
        schema.update({"properties": own, **rest, "additionalProperties": False})

    def _with_branches(self, schemas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Schemas, and all that is said of the same value by what they have in place."""
        found, seen, waiting = [], set[int](), schemas[::-1]
        while waiting:
            one = waiting.pop()
            if id(one) not in seen:
                seen.add(id(one))
                found.append(one)
                waiting += self._direct(one)[::-1]
        self._references.step(len(found))
        return found

    def _direct(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """The schemas that another one has in place."""
        found = [one for name in ("allOf", *_CHOICES) for one in _list(schema, name)]
        if "$ref" in schema:
            found.append(self._references.target(schema["$ref"]))
        return [one for one in found if isinstance(one, dict)]


def _merges(schema: dict[str, Any]) -> bool:
    """Whether it says something of a value, and other schemas in place of it do, too."""
    constraints = [name for name in schema if name not in _NO_CONSTRAINT]
    return len(constraints) > 1 or len(_list(schema, "allOf")) > 1


def _mapping(schema: dict[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}


def _list(schema: dict[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _required(schema: dict[str, Any]) -> list[str]:
    return [name for name in _list(schema, "required") if isinstance(name, str)]


def _values_within(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Schemas of the values within a value, with their places."""
    for name, value in _mapping(schema, "properties").items():
        yield f"properties {name}", value
    for value in _mapping(schema, "patternProperties").values():
        yield "patternProperties", value
    for value in _list(schema, "prefixItems") + _list(schema, "items"):
        yield "prefixItems", value
    for name in ("items", "additionalItems", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield name, schema[name]


# -- what cannot be used -----------------------------------------------------------------------

_LOOKING_S = 0.2  # for the place; a part takes below a millisecond, as a rule
_LONGEST_PLACE = 200  # characters


def unusable(what: str, reason: str, place: str = "") -> UnsupportedError:
    """One sentence out of what llguidance says, which may be many lines; `place` is in a schema."""
    reason = reason.partition("<non-verbose/>")[0]
    _, error, last = reason.rpartition("\nerror: ")  # of a regular expression, which it shows
    reason = " ".join((last.partition("\n")[0] if error else reason).split())
    if reason.startswith("NoExtension"):
        reason = "no text fits it"
    elif reason.startswith("oneOf"):
        reason = "its oneOf has branches that may both fit, as those of anyOf may"
    elif reason.startswith("Unimplemented keys: "):
        keywords = reason.partition("[")[2].replace('"', "").rstrip("]")
        reason = f"unsupported keywords {keywords}"
    return UnsupportedError(
        f"the {what} cannot be used{place and f' at {place}'}: {reason.rstrip('.')[:300]}",
        hint="docs/serve.md lists what schemas may have",
    )


def _unusable_schema(text: str, problem: ValueError | RecursionError) -> UnsupportedError:
    if isinstance(problem, RecursionError):
        return unusable("JSON schema", "it is nested too deeply")
    return unusable("JSON schema", str(problem), unusable_place(text))


def unusable_place(text: str) -> str:
    """Where the smallest part of a schema is that fails for the reason for which all of it does.

    As a path, "properties.a.items"; empty where that is the whole, or takes too long to find.
    """
    try:
        part = json.loads(text)
    except ValueError:
        return ""
    until, places = monotonic() + _LOOKING_S, list[str]()
    reason = _reason(part)
    named = {name: part[name] for name in ("$defs", "definitions") if reason and name in part}
    while reason:
        # What is referred to by its name is named where it stands.
        parts = sorted(_parts(part), key=lambda one: one[0].partition(".")[0] not in named)
        for place, inner in parts:
            if monotonic() > until:
                return ""
            if _reason({**named, **inner}) == reason:
                places.append(place)
                part = inner
                break
        else:
            break
    return ".".join(places)[:_LONGEST_PLACE]


def _reason(schema: Any) -> str:
    """Why a schema cannot be compiled; empty where it can, and where it is nested too deeply."""
    from llguidance import LLMatcher

    try:
        return str(LLMatcher.validate_grammar(_document(json.dumps(schema))))
    except ValueError as problem:
        return str(problem) if isinstance(schema, dict) else ""
    except RecursionError:
        return ""
