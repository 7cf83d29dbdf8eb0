"""Finds calls of tools in the text of an answer, as it comes.

A call is complete when its arguments are, not where its end marker first stands: a text in them may
have it. What does not turn out to be a call of a tool that was offered is given back as text, so
nothing a model writes is lost. Only calls beyond those that may be made are left out.

A reader is a generator that goes on with every piece of text: where a step needs more, it yields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from edgespec.serve.shapes import Delta, ToolCall
from edgespec.serve.tool_formats import ANY, ToolFormat, pieces
from edgespec.serve.tool_values import (
    NAME_CHARS,
    arguments_text,
    gemma_arguments,
    json_text,
    mended,
    python_calls,
    tidied,
    typed,
)

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
_LONGEST_HEADER = 512  # characters from the marker of a call to its arguments
_SHORTEST_OPENING = 8  # of a marker that begins a call where the one before it was left out
_NAME = rf"(?P<name>{NAME_CHARS}{{1,160}})"
_FENCE, _JSON_FENCE, _CODE_FENCE = "```", "```json", "```tool_code"
_BETWEEN = re.compile(rf"(?:[\s;,]|{_JSON_FENCE}|{_FENCE}(?!t))*")
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True, slots=True)
class _Notation:
    """What counts where the end of a value is looked for.

    Args:
        outside: brackets, quotes, and what can only stand in a text.
        inside: by quote, its end and what is none though it looks like it.
        size: characters of the longest of these.
    """

    outside: re.Pattern[str]
    inside: Mapping[str, re.Pattern[str]]
    size: int


_ENDS = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'")}
_JSON = _Notation(re.compile(r"[\"{}\[\]<`]"), _ENDS, 2)
_PYTHON = _Notation(re.compile(r"[\"'{}\[\]()`]"), _ENDS, 2)
_GEMMA = _Notation(re.compile(r'<\|"\|>|[{}\[\]]'), {'<|"|>': re.compile(r'<\|"\|>')}, 5)


class ToolReader:
    """Reads an answer with calls.

    An answer that begins with JSON is looked at when it is complete: calls alone, or a text. So is
    one that is a block of code with JSON, as Qwen2.5 Coder writes its calls.

    Args:
        formats: the ways calls are written.
        schemas: of the arguments of the tools that were offered, by their names.
        most: calls that are taken; further ones are left out.
    """

    def __init__(
        self,
        formats: Sequence[ToolFormat],
        schemas: Mapping[str, Mapping[str, Any]],
        *,
        most: int,
    ) -> None:
        self._schemas, self._most = schemas, most
        self._openings = [(text, how) for how in formats for text in _openings(how)]
        self._text, self._place = "", 0  # what is held, and how much of it was dealt with
        self._is_whole = False  # no more text comes
        self._content = list[str]()
        self._calls = list[ToolCall]()
        self._found = 0  # calls, those left out as well
        self._steps = self._read()

    def push(self, text: str) -> Delta:
        """What more text added."""
        self._text = self._text + text
        return self._advance()

    def finish(self) -> Delta:
        """What is left: calls without an end, or text."""
        self._is_whole = True
        return self._advance()

    def _advance(self) -> Delta:
        next(self._steps, None)
        delta = Delta("".join(self._content), calls=tuple(self._calls))
        self._content, self._calls = [], []
        return delta

    def _read(self) -> Steps[None]:
        yield from self._alone()
        while True:
            self._text, self._place = self._text[self._place :], 0
            found = yield from self._words()
            if found is None:
                return
            opening, how = found
            if not (yield from self._called(how, opening)):
                self._say(self._place + len(opening))

    # -- text ------------------------------------------------------------------------------

    def _say(self, end: int) -> None:
        """Give what is held up to a place as text."""
        self._content.append(self._text[self._place : end])
        self._place = end

    def _words(self) -> Steps[tuple[str, ToolFormat] | None]:
        """Give out text up to where a call may begin; None at the end of the answer."""
        while True:
            found = [
                (place, text, how)
                for text, how in self._openings
                if (place := self._text.find(text, self._place)) >= 0
            ]
            if found:
                place, text, how = min(found, key=lambda one: one[0])
                self._say(len(self._text[:place].rstrip()))
                return text, how
            if self._is_whole:
                if not self._found or self._text[self._place :].strip():
                    self._say(len(self._text))
                return None
            held = self._text[self._place :]
            self._say(
                self._place + min((settled(held, text) for text, _ in self._openings), default=0)
            )
            self._text, self._place = self._text[self._place :], 0
            yield

    def _has(self, marker: str, place: int) -> Steps[bool]:
        """Whether a marker stands at a place."""
        while not self._text.startswith(marker, place):
            if self._is_whole or not marker.startswith(self._text[place : place + len(marker)]):
                return False
            yield
        return True

    def _skip(self, place: int, pattern: re.Pattern[str] = _SPACE) -> Steps[int]:
        """The place after what a pattern matches."""
        while True:
            found = pattern.match(self._text, place)
            end = found.end() if found else place
            if self._is_whole or not self._may_go_on(end, pattern):
                return end
            yield

    def _may_go_on(self, end: int, pattern: re.Pattern[str]) -> bool:
        """Whether a pattern that ends here may have more with more text."""
        if end == len(self._text):
            return True
        fence = _FENCE if self._text.endswith(_FENCE, 0, end) else ""
        rest = fence + self._text[end : end + len(_JSON_FENCE)]
        return pattern is _BETWEEN and _JSON_FENCE.startswith(rest)

    def _pass(self, markers: str, place: int) -> Steps[int]:
        """The place after markers, of which each may be missing."""
        for marker in pieces(markers):
            start = yield from self._skip(place)
            if (yield from self._has(marker.strip(), start)):
                place = start + len(marker.strip())
        return place

    def _match(self, pattern: str, place: int) -> Steps[re.Match[str] | None]:
        compiled = re.compile(_once(pattern))
        while True:
            found = compiled.match(self._text, place, place + 2 * _LONGEST_HEADER)
            if found or self._is_whole or len(self._text) - place > _LONGEST_HEADER:
                return found
            yield

    def _rest(self) -> Steps[None]:
        """Wait for all that comes."""
        while not self._is_whole:
            yield

    def _find(self, marker: str, place: int) -> Steps[int]:
        """Where a marker begins; -1 for nowhere."""
        while True:
            found = self._text.find(marker, place)
            if found >= 0 or self._is_whole:
                return found
            place = max(place, len(self._text) - len(marker) + 1)
            yield

    def _balanced(self, place: int, notation: _Notation) -> Steps[int]:
        """The place after what a bracket begins; for what is broken the complement of where."""
        depth, quote = 0, ""
        while True:
            pattern = notation.inside[quote] if quote else notation.outside
            found = pattern.search(self._text, place)
            if found is None:
                if self._is_whole:
                    return ~len(self._text)
                place = max(place, len(self._text) - notation.size + 1)
                yield
                continue
            place, token = found.end(), found[0]
            if quote:
                quote = "" if token == quote else quote
            elif token in notation.inside:
                quote = token
            elif token in "<`":
                return ~found.start()
            else:
                depth += 1 if token in "{[(" else -1
                if depth == 0:
                    return place

    # -- calls -----------------------------------------------------------------------------

    def _give(self, calls: Sequence[ToolCall]) -> None:
        self._calls += calls[: max(0, self._most - self._found)]
        self._found += len(calls)

    def _known(self, name: str) -> str | None:
        """The name of an offered tool that a model means."""
        short = name.removeprefix("functions.")
        return next(
            (one for one in (name, short, re.sub(r":\d+$", "", short)) if one in self._schemas),
            None,
        )

    def _alone(self) -> Steps[None]:
        """An answer that is calls alone, without markers."""
        start = yield from self._skip(0)
        for opening, _ in self._openings:
            if (yield from self._has(opening, start)):
                return
        is_code = yield from self._has(_CODE_FENCE, start)
        is_fenced = not is_code and (yield from self._has(_JSON_FENCE, start))
        place = yield from self._skip(start + len(_CODE_FENCE if is_code else ""), _SPACE)
        if is_fenced:
            place = yield from self._skip(start, _BETWEEN)
        if is_code or (yield from self._names_call(place)):
            calls = yield from self._python_alone(place)
        else:
            calls = yield from self._json_alone(place)
        if calls:
            self._give(calls)
            self._place = len(self._text)

    def _names_call(self, place: int) -> Steps[bool]:
        """Whether there is a call in Python's notation."""
        if not (yield from self._has("[", place)):
            return False
        place = yield from self._skip(place + 1)
        if not re.match(r"[A-Za-z_]", self._text[place : place + 1]):
            return False
        found = yield from self._match(rf"{_NAME}\(|.{{161}}|{NAME_CHARS}*[^(]", place)
        return found is not None and self._known(found["name"] or "") is not None

    def _json_alone(self, place: int) -> Steps[list[ToolCall]]:
        calls = list[ToolCall]()
        while self._text[place : place + 1] in ("{", "["):
            end = yield from self._balanced(place, _JSON)
            more = self._of_document(self._text[place:end], ("name", "arguments"))
            if end < 0 or not more:
                return []
            calls += more
            place = yield from self._skip(end, _BETWEEN)
        return [] if place < len(self._text) else calls

    def _python_alone(self, place: int) -> Steps[list[ToolCall]]:
        end = yield from self._find(_FENCE, place)
        rest = self._text[max(end, place) :] if end >= 0 else ""
        if rest.strip().strip("`"):
            return []
        return self._of_python(self._text[place : end if end >= 0 else len(self._text)])

    def _called(self, how: ToolFormat, opening: str) -> Steps[bool]:
        """Take calls that begin with an opening; whether there are any."""
        start = yield from self._skip(self._place)
        inner = yield from self._skip(start + len(opening), _BETWEEN)
        is_json = how.kind == "json" or (
            how.kind != "python" and self._text[inner : inner + 1] in ("{", "[")
        )
        before, place = self._found, self._place
        if is_json:
            place = yield from self._json_calls(how, inner)
        elif how.kind == "python":
            place = yield from self._python_calls(how, inner)
        else:
            place = yield from self._headed_calls(how, start)
        if self._found == before:
            return False
        self._place = place
        return True

    def _json_calls(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after calls in JSON."""
        while self._text[place : place + 1] in ("{", "["):
            end = yield from self._balanced(place, _JSON)
            if end < 0:
                return (yield from self._broken(how, place, ~end))
            calls = self._of_document(self._text[place:end], how.fields)
            if not calls:
                return place
            self._give(calls)
            place = end
            after = yield from self._skip(place, _BETWEEN)
            if how.closing and (yield from self._has(how.closing.strip(), after)):
                return after + len(how.closing.strip())
            if self._text[after : after + 1] in ("{", "["):
                place = after
        return place

    def _closed(self, how: ToolFormat, place: int, broken: int) -> Steps[int]:
        """Where the marker after a value stands that is broken at a place; -1 for nowhere.

        In a value that was cut off it stands for itself, unless it is the last of the answer.
        """
        marker = _start(how.closing)
        found = (yield from self._find(marker, broken)) if marker else -1
        if found < 0:
            yield from self._rest()
            last = self._text.rfind(marker, place) if marker else -1
            return last if not self._text[last + len(marker) :].strip() else -1
        return found

    def _broken(self, how: ToolFormat, place: int, broken: int) -> Steps[int]:
        """The place after a call whose JSON is not valid, or was cut off."""
        end = yield from self._closed(how, place, broken)
        found = mended(self._text[place : end if end >= 0 else len(self._text)], how.fields)
        name = found and self._known(found[0])
        if not found or not name:
            return place
        text = found[1] if found[2] or end < 0 else found[1].removesuffix("}")
        self._give([ToolCall(name, text, is_whole=found[2] or end >= 0)])
        return end + len(_start(how.closing)) if end >= 0 else len(self._text)

    def _of_document(self, text: str, fields: tuple[str, str]) -> list[ToolCall]:
        """The calls that are all of a text; none where it is not that."""
        try:
            document = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return []
        items = document if isinstance(document, list) else [document]
        calls = [call for one in items if (call := self._tool_call(one, fields))]
        return calls if len(calls) == len(items) else []

    def _tool_call(self, item: Any, fields: tuple[str, str]) -> ToolCall | None:
        if not isinstance(item, dict):
            return None
        inner = item.get("function", item)
        inner = inner if isinstance(inner, dict) else item
        if not fields[0] and len(inner) == 1:  # the name is the key
            ((name, arguments),) = inner.items()
        else:
            name = next((inner[one] for one in (fields[0], "name") if one in inner), None)
            named = (fields[1], "arguments", "parameters")
            arguments = next((inner[one] for one in named if one in inner), {})
        known = self._known(name) if isinstance(name, str) else None
        return ToolCall(known, arguments_text(arguments)) if known else None

    def _of_python(self, text: str) -> list[ToolCall]:
        try:
            found = python_calls(text)
        except (ValueError, RecursionError):
            return []
        named = [(self._known(name), arguments) for name, arguments in found]
        calls = [ToolCall(name, json_text(arguments)) for name, arguments in named if name]
        return calls if len(calls) == len(named) else []

    def _python_calls(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after calls in Python's notation."""
        if (yield from self._has("[", place)):
            end = yield from self._balanced(place, _PYTHON)
        else:
            end = yield from self._find(how.closing or _FENCE, place)
        end = end if end >= 0 else len(self._text)
        calls = self._of_python(self._text[place:end])
        self._give(calls)
        return (yield from self._pass(how.closing, end)) if calls else place

    def _headed_calls(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after calls whose names stand before their arguments."""
        header = _header(how, first=True)
        while True:
            end = yield from self._headed_call(how, header, place)
            if end is None:
                return place
            place = yield from self._pass(how.closing, end)
            start = yield from self._skip(place)
            if how.last and (yield from self._has(how.last, start)):
                return start + len(how.last)
            if not how.begin or not (yield from self._has(_start(how.begin), start)):
                return place
            header = _header(how, first=False)

    def _headed_call(self, how: ToolFormat, header: str, place: int) -> Steps[int | None]:
        """The place after the arguments of a call; None where there is no call."""
        follows = _follows(how)
        found = yield from self._match(f"{header}(?={follows})", place)
        header = _once(header)
        found = found or re.compile(header).match(self._text, place, place + 2 * _LONGEST_HEADER)
        name = self._known(found["name"]) if found else None
        if found is None or name is None:
            return None
        if how.kind == "tags":
            arguments, end, is_whole = yield from self._tagged(how, name, found.end())
            self._give([ToolCall(name, json_text(arguments), is_whole=is_whole)])
            return end
        return (yield from self._braced(how, name, found.end()))

    def _braced(self, how: ToolFormat, name: str, place: int) -> Steps[int]:
        """The place after arguments in braces."""
        if not (yield from self._has("{", place)):
            self._give([ToolCall(name, "{}")])
            return place
        is_gemma = how.kind == "gemma"
        end = yield from self._balanced(place, _GEMMA if is_gemma else _JSON)
        closed = end if end >= 0 else (yield from self._closed(how, place, ~end))
        stop = closed if closed >= 0 else len(self._text)
        text = self._text[place:stop].strip()
        if is_gemma:
            try:
                text = json_text(gemma_arguments(text))
            except (ValueError, RecursionError):
                pass  # as it is
        self._give([ToolCall(name, tidied(text), is_whole=closed >= 0)])
        return stop

    def _tagged(
        self, how: ToolFormat, name: str, place: int
    ) -> Steps[tuple[dict[str, Any], int, bool]]:
        """Arguments between tags, the place after them, and whether they have their end."""
        schema = self._schemas[name]
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        found: dict[str, Any] = {}
        while True:
            start = yield from self._skip(place)
            if not (yield from self._has(how.key, start)):
                closed = yield from self._has(_start(how.closing), start)
                return found, place, closed
            key = yield from self._match(
                rf"{_literal(how.key)}(?P<key>[^<>\n]{{1,160}}?){_literal(how.value.rstrip())}",
                start,
            )
            if key is None:
                return found, place, False
            value, place, is_whole = yield from self._value(how, key.end())
            written = key["key"].strip()
            found[written] = typed(value, known.get(written), schema)
            if not is_whole:
                return found, place, False

    def _value(self, how: ToolFormat, place: int) -> Steps[tuple[str, int, bool]]:
        """A value, the place after its end, and whether it has one.

        It ends where the next one, or the end of the call, follows: a value may have the marker.
        """
        marker, start = how.value_end.strip(), place
        while (found := (yield from self._find(marker, start))) >= 0:
            after = found + len(marker)
            start = yield from self._skip(after)
            for one in (how.key, _start(how.closing)):
                if start == len(self._text) or (yield from self._has(one, start)):
                    return _unwrapped(self._text[place:found], how), after, True
            start = found + 1
        return _unwrapped(self._text[place:], how), len(self._text), False


def _unwrapped(value: str, how: ToolFormat) -> str:
    """A value without the new lines that the template writes around each."""
    if not how.value.endswith("\n"):
        return value
    return value.removeprefix("\n").removesuffix("\n")


def _openings(how: ToolFormat) -> list[str]:
    """Markers that calls begin with: the first one, or a second one where it was left out."""
    first, *others = (one.strip() for one in pieces(how.opening))
    is_own = how.kind == "tags" and others and len(others[-1]) >= _SHORTEST_OPENING
    return [first, others[-1]] if is_own else [first]


def _start(markers: str) -> str:
    """The first of several markers."""
    return next((one.strip() for one in pieces(markers)), "").partition(ANY)[0]


def _header(how: ToolFormat, *, first: bool) -> str:
    """A pattern of what comes before the arguments of a call."""
    name = rf"(?:call:)?{_NAME}" if how.kind == "gemma" else _NAME
    before = [*pieces(how.opening), *pieces(how.begin)] if first else pieces(how.begin)
    optional = len(before) > 1 and how.kind == "tags"
    texts = [rf"(?:{_literal(one)})?" if optional and not i else _literal(one) for i, one in
             enumerate(before)]  # fmt: skip
    return rf"\s*{''.join(texts)}\s*{name}{_literal(how.after)}\s*"


def _follows(how: ToolFormat) -> str:
    """A pattern of what shows that a header is whole."""
    ends = [how.key, _start(how.closing)] if how.kind == "tags" else ["{", _start(how.closing)]
    return "|".join(re.escape(one) for one in ends if one)


def _literal(marker: str) -> str:
    """A pattern of a marker, with any white space where it has some."""
    parts = [rf"{re.escape(one)}" for one in re.split(r"(\s+|…)", marker)]
    made = [
        r"[^<>\n]{0,80}?" if part == re.escape(ANY) else re.sub(r"^(?:\\?\s)+$", r"\\s*", part)
        for part in parts
    ]
    return "".join(made) + r"\s*"


def _once(pattern: str) -> str:
    """A pattern without white space twice in a row, whose ways to match would multiply."""
    return re.sub(r"(?:\\s\*)+", r"\\s*", pattern)


def settled(text: str, marker: str) -> int:
    """How much of `text` is neither the beginning of `marker` nor white space before one."""
    most = min(len(text), len(marker) - 1)
    kept = next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
    return len(text[: len(text) - kept].rstrip())
