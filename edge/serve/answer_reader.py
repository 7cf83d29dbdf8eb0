"""The parts of an answer: thoughts, text and calls of tools, found in what a model writes.

All interfaces read answers with this one reader; each tells the parts in its own words. What ends
an answer is the engine's to say.

A call is complete when its arguments are, not where its end marker first stands: a text in them may
have it. What does not turn out to be a call of a tool that was offered is given back as text, so
nothing a model writes is lost. Only calls beyond those that may be made are left out.

Behind a marker, the name of such a tool and the beginning of its arguments make a call, whatever
comes then: from there on arguments in JSON are given as they are written. Other notations (tags,
Python's, Gemma's), and answers that are JSON without a marker, are given when they are complete.

A reader is a generator that goes on with every piece of text: where a step needs more, it yields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from edgespec.decode.generation import Chunk, Result, ToolCall, joined_calls
from edgespec.serve.call_arguments import (
    JsonRepair,
    gemma_arguments,
    is_object,
    json_text,
    parse_argument,
    python_calls,
)
from edgespec.serve.serializers import Choice, Delta, new_id
from edgespec.serve.tool_formats import (
    HARMONY,
    NAME,
    NAME_CHARS,
    THINK,
    ThinkTags,
    ToolFormat,
    first_piece,
    followed_by,
    header_pattern,
    literal_pattern,
    once,
    openings,
    pieces,
    safe_length,
)

T = TypeVar("T")
Steps: TypeAlias = Generator[None, None, T]
TEXT, THOUGHT = "text", "thought"  # kinds of what is said
_FENCE, _JSON_FENCE, _CODE_FENCE = "```", "```json", "```tool_code"
_BETWEEN = re.compile(rf"(?:[\s;,]|{_JSON_FENCE}|{_FENCE}(?!t))*")
_ITEMS_END = re.compile(r"[\s,\]]*")  # of a list whose first call was given
_STRAYS = re.compile(r"[\s}\]]*")
_COMMAS = re.compile(r"[\s,]*")
_TEXT = r'"(?:[^"\\]|\\.){0,160}"'
_MOST_MEMBERS = 8  # of a call, before its arguments
_SPACE = re.compile(r"\s*")
# gpt-oss's messages, each with a header, and a prompt that ends with <|start|>assistant:
#     <|channel|>analysis<|message|>a thought<|end|><|start|>assistant
#     <|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>
#     <|channel|>final<|message|>the answer
# Text without any header is the answer.
_MESSAGE, _CHANNEL = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|start|>", "<|call|>", "<|return|>", _CHANNEL)
_HEADER_STARTS = ("<|", "to=", "assistant")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<>|]{1,160})")
_LONGEST_HEADER = 512  # characters, from the marker of a call to its arguments as well


@dataclass(frozen=True, slots=True)
class _Notation:
    """What counts where the end of a value is looked for."""

    outside: re.Pattern[str]  # brackets, quotes, and what can only stand in a text
    inside: Mapping[str, re.Pattern[str]]  # by quote, its end and what is none though it looks so
    size: int  # characters of the longest of these


_QUOTE_ENDS = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in ('"', "'")}
_JSON = _Notation(re.compile(r"[\"{}\[\]<`]"), _QUOTE_ENDS, 2)
_PYTHON = _Notation(re.compile(r"[\"'{}\[\]()`]"), _QUOTE_ENDS, 2)
_GEMMA = _Notation(re.compile(r'<\|"\|>|[{}\[\]]'), {'<|"|>': re.compile(r'<\|"\|>')}, 5)


@dataclass(eq=False)
class AnswerReader:
    """Reads one answer; without any arguments all of it but a thought is text.

    An answer that begins with JSON is looked at when it is complete: calls alone, or a text. So is
    one that is a block of code with JSON, as Qwen2.5 Coder writes its calls.
    """

    formats: Sequence[ToolFormat] = ()  # the ways calls are written
    # Of the arguments of the tools that were offered, by their names.
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    most: int = 0  # calls that are taken; further ones are left out
    is_calls: bool = False  # and nothing else, as its grammar makes it: it has no thought
    tags: ThinkTags = THINK  # of a thought, with which an answer may begin
    within: bool = False  # the prompt ended within a thought
    is_text: bool = False  # the prompt goes on in the text of an answer, where others have a header
    is_marked: bool = False  # what is JSON alone is no call

    def __post_init__(self) -> None:
        # The first one of several formats that begin alike.
        self._openings = {text: how for how in reversed(self.formats) for text in openings(how)}
        self._text, self._place = "", 0  # what is held, and how much of it was dealt with
        self._is_whole = False  # no more text comes
        self._said: dict[str, list[str]] = {TEXT: [], THOUGHT: []}
        self._calls = list[ToolCall]()
        self._found = 0  # calls, those left out as well
        self._open: OpenCall | None = None  # whose arguments are being written
        self._sent = 0  # how much of the text was given as these
        self._steps = self._read()
        self._deltas = list[Delta]()  # all that was found so far
        self._thinks = self.within
        self._num_tokens = self._thought_tokens = 0

    def read(self, chunks: Sequence[Chunk]) -> Delta:
        """What chunks of an answer added; tokens before the end of a thought are the thought's."""
        deltas = []
        for chunk in chunks:
            deltas.append(self.push(chunk.text))
            self._num_tokens += len(chunk.token_ids)
            self._thought_tokens = self._num_tokens if self._thinks else self._thought_tokens
        return Delta.of(deltas)

    def push(self, text: str) -> Delta:
        """What more text added."""
        self._text = self._text + text
        return self._advance()

    def finish(self) -> Delta:
        """What is left: calls without an end, or text."""
        self._is_whole = True
        return self._advance()

    def choice(self, index: int, result: Result) -> Choice:
        """The answer, which is complete."""
        found = Delta.of(self._deltas)
        parts = found.content, found.reasoning, found.calls
        return Choice(index, *parts, result, self._thought_tokens)

    def _advance(self) -> Delta:
        next(self._steps, None)
        if self._open is not None:
            self._calls += self._open.written()
        delta = Delta(
            "".join(self._said[TEXT]), "".join(self._said[THOUGHT]), joined_calls(self._calls)
        )
        self._said, self._calls = {TEXT: [], THOUGHT: []}, []
        if delta:
            self._deltas.append(delta)
        return delta

    def _read(self) -> Steps[None]:
        if HARMONY in self.formats:  # messages, each on its channel
            kind: str = TEXT if self.is_text else (yield from self._header())
            self._thinks = kind == THOUGHT
            while (marker := (yield from self._until(_ENDS, kind))) is not None:
                self._place = yield from self._skip(self._place)
                self._place += 0 if marker == _CHANNEL else len(marker)
                kind = yield from self._header()
                self._thinks = kind == THOUGHT
            return
        if not self.is_calls:
            yield from self._thought()
        if self.schemas and not self.is_marked:
            yield from self._alone()
        while True:
            self._forget()
            opening = yield from self._until(list(self._openings))
            if opening is None:
                return
            if not (yield from self._called(self._openings[opening], opening)):
                self._say((yield from self._skip(self._place)) + len(opening))

    # -- text ------------------------------------------------------------------------------

    def _say(self, end: int, kind: str = TEXT) -> None:
        """Give what is held up to a place as text, or as a thought."""
        self._said[kind].append(self._text[self._place : end])
        self._place = end

    def _forget(self) -> None:
        """Hold no longer what was dealt with."""
        self._text, self._place = self._text[self._place :], 0

    def _until(self, markers: Sequence[str], kind: str = TEXT) -> Steps[str | None]:
        """Give text up to the first of some markers; None at the end of the answer."""
        while True:
            found = [(at, one) for one in markers if (at := self._text.find(one, self._place)) >= 0]
            if found:
                place, marker = min(found)
                self._say(max(self._place, len(self._text[:place].rstrip())), kind)
                return marker
            held = self._text[self._place :]
            if self._is_whole:
                if not self._found or held.strip():
                    self._say(len(self._text), kind)
                return None
            sizes = [safe_length(held, one) for one in markers]
            self._say(self._place + min(sizes, default=len(held)), kind)
            self._forget()
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
            # More text may be more of what it matches, as of a fence.
            fence = _FENCE if self._text.endswith(_FENCE, 0, end) else ""
            rest = fence + self._text[end : end + len(_JSON_FENCE)]
            may_go_on = pattern is _BETWEEN and _JSON_FENCE.startswith(rest)
            if self._is_whole or not (end == len(self._text) or may_go_on):
                return end
            yield

    def _pass(self, markers: str, place: int) -> Steps[int]:
        """The place after markers, of which each may be missing."""
        for marker in pieces(markers):
            start = yield from self._skip(place)
            if (yield from self._has(marker.strip(), start)):
                place = start + len(marker.strip())
        return place

    def _match(self, pattern: str, place: int) -> Steps[re.Match[str] | None]:
        compiled = re.compile(once(pattern))
        while True:
            found = compiled.match(self._text, place, place + 2 * _LONGEST_HEADER)
            if found or self._is_whole or len(self._text) - place > _LONGEST_HEADER:
                return found
            yield

    def _find(self, marker: str, place: int) -> Steps[int]:
        """Where a marker begins; -1 for nowhere."""
        while True:
            found = self._text.find(marker, place)
            if found >= 0 or self._is_whole:
                return found
            place = max(place, len(self._text) - len(marker) + 1)
            yield

    def _balanced(self, place: int, notation: _Notation, *, gives: bool = False) -> Steps[int]:
        """The place after what a bracket begins; for what is broken the complement of where.

        Where `gives` is set, it is given as arguments as it comes.
        """
        depth, quote = 0, ""
        while True:
            pattern = notation.inside[quote] if quote else notation.outside
            found = pattern.search(self._text, place)
            if found is None:
                if self._is_whole:
                    return ~len(self._text)
                place = max(place, len(self._text) - notation.size + 1)
                if gives:
                    self._write_to(place)
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
        self._calls += calls[: max(0, self.most - self._found)]
        self._found += len(calls)

    def _begin(self, name: str, place: int) -> OpenCall:
        """A call whose arguments are given as they are written, from a place on."""
        self._open, self._sent = OpenCall(name, is_left_out=self._found >= self.most), place
        self._found += 1
        return self._open

    def _write_to(self, place: int) -> None:
        """Give arguments in JSON up to a place."""
        assert self._open is not None
        if place > self._sent:
            self._open.write(self._text[self._sent : place])
            self._sent = place

    def _end(self, rest: str = "", *, is_whole: bool = True) -> None:
        assert self._open is not None
        self._calls += self._open.end(rest, is_whole=is_whole)
        self._open = None

    def _known(self, name: str) -> str | None:
        """The name of an offered tool that a model means."""
        short = name.removeprefix("functions.")
        return next(
            (one for one in (name, short, re.sub(r":\d+$", "", short)) if one in self.schemas),
            None,
        )

    def _alone(self) -> Steps[None]:
        """An answer that is calls alone, without markers."""
        start = yield from self._skip(0)
        for opening in self._openings:
            if (yield from self._has(opening, start)):
                return
        if self.is_calls and self._text[start : start + 1] in ("{", "["):
            self._place = yield from self._json_calls(replace(self.formats[0], closing=""), start)
            return
        is_python = yield from self._has(_CODE_FENCE, start)
        is_fenced = not is_python and (yield from self._has(_JSON_FENCE, start))
        place = yield from self._skip(start + len(_CODE_FENCE if is_python else ""))
        if is_fenced:
            place = yield from self._skip(start, _BETWEEN)
        if not is_python and (yield from self._has("[", place)):
            inner = yield from self._skip(place + 1)
            if re.match(r"[A-Za-z_]", self._text[inner : inner + 1]):
                names = rf"{NAME}\(|.{{161}}|{NAME_CHARS}*[^(]"
                found = yield from self._match(names, inner)
                is_python = found is not None and self._known(found["name"] or "") is not None
        calls = list[ToolCall]()
        if is_python:
            end = yield from self._find(_FENCE, place)
            end = end if end >= 0 else len(self._text)
            if not self._text[max(end, place) :].strip().strip("`"):
                calls = self._of_python(self._text[place:end])
        else:
            while self._text[place : place + 1] in ("{", "["):
                end = yield from self._balanced(place, _JSON)
                more = self._of_document(self._text[place:end], ("name", "arguments"))
                if end < 0 or not more:
                    return
                calls += more
                place = yield from self._skip(end, _BETWEEN)
            if place < len(self._text):
                return
        if calls:
            self._give(calls)
            self._place = len(self._text)

    def _called(self, how: ToolFormat, opening: str) -> Steps[bool]:
        """Take calls that begin with an opening; whether there are any."""
        start = yield from self._skip(self._place)
        if how.text and (yield from self._has(how.text, start)):
            self._place = start + len(how.text)
            return True
        rest = how.opening.strip().removeprefix(opening) if how.kind == "json" else ""
        inner = yield from self._pass(rest, start + len(opening))
        inner = yield from self._skip(inner, _BETWEEN)
        is_json = how.kind == "json" or (
            how.kind != "python" and self._text[inner : inner + 1] in ("{", "[")
        )
        before, place = self._found, self._place
        if is_json:
            place = yield from self._json_calls(how, inner)
        elif how.kind == "python":
            if (yield from self._has("[", inner)):
                end = yield from self._balanced(inner, _PYTHON)
            else:
                end = yield from self._find(how.closing or _FENCE, inner)
            end = end if end >= 0 else len(self._text)
            self._give(calls := self._of_python(self._text[inner:end]))
            place = (yield from self._pass(how.closing, end)) if calls else inner
        else:
            place = yield from self._headed_calls(how, start)
        if self._found == before:
            return False
        self._place = place
        return True

    def _json_calls(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after calls in JSON."""
        is_list = False
        while self._text[place : place + 1] in ("{", "["):
            begins_list = self._text[place] == "["
            item = (yield from self._skip(place + 1)) if begins_list else place
            is_given = yield from self._given(how, item)
            if is_given and begins_list:
                place, is_list = item, True
            end = yield from self._balanced(place, _JSON)
            if end < 0 and is_given:  # it is not valid, or was cut off
                closed = yield from self._closed(how, place, ~end)
                return closed + len(first_piece(how.closing)) if closed >= 0 else len(self._text)
            if not is_given:
                calls = self._of_document(self._text[place:end], how.fields) if end >= 0 else []
                if not calls:  # what is broken before its arguments is text
                    return place
                self._give(calls)
            place = yield from self._past_strays(how, end)
            after = yield from self._skip(place, _ITEMS_END if is_list else _BETWEEN)
            if how.closing and (yield from self._has(how.closing.strip(), after)):
                return after + len(how.closing.strip())
            if self._text[after : after + 1] in ("{", "["):
                place = after
            elif is_list:
                return after
        return place

    def _given(self, how: ToolFormat, place: int) -> Steps[bool]:
        """Give the arguments of a call in JSON as they come; False where that cannot be done."""
        found = yield from self._arguments(how, place)
        if found is None:
            return False
        self._begin(*found)
        end = yield from self._balanced(found[1], _JSON, gives=True)
        if end >= 0:
            self._write_to(end)
            self._end()
        else:
            closed = yield from self._closed(how, place, ~end)
            stop = closed if closed >= 0 else len(self._text)
            rest = self._text[self._sent : stop].rstrip()
            self._end(rest.removesuffix("}") if closed >= 0 else rest, is_whole=closed >= 0)
        return True

    def _arguments(self, how: ToolFormat, place: int) -> Steps[tuple[str, int] | None]:
        """The name of a call in JSON and where its arguments begin; None if not in this order."""
        name, place = None, place + len("{")
        if self._text[place - 1 : place] != "{":
            return None
        for _ in range(_MOST_MEMBERS):
            place = yield from self._skip(place, _COMMAS)
            key, place = yield from self._string(place)
            place = yield from self._skip(place)
            if key is None or not (yield from self._has(":", place)):
                return None
            place = yield from self._skip(place + len(":"))
            if (yield from self._has("{", place)):
                if key == "function" and name is None:
                    place += len("{")
                    continue
                is_named = key in (how.fields[1], "arguments", "parameters")
                known = name if is_named else None if how.fields[0] else self._known(key)
                if known is None:
                    return None
                inner = yield from self._skip(place + len("{"))
                opens = self._text[inner : inner + 1] in ('"', "}")  # a key, or the end
                return (known, place) if opens else None
            value, place = yield from self._string(place)
            if value is None:
                return None
            if key in (how.fields[0], "name"):
                name = self._known(value)
        return None

    def _past_strays(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after brackets too many, which end a call or the answer."""
        end = yield from self._skip(place, _STRAYS)
        is_end = self._is_whole and end == len(self._text)
        marker = first_piece(how.closing)
        has_marker = bool(marker) and (yield from self._has(marker, end))
        return end if is_end or has_marker else place

    def _string(self, place: int) -> Steps[tuple[str | None, int]]:
        """A short text in JSON and the place after it; None for anything else."""
        if not (yield from self._has('"', place)):
            return None, place
        found = yield from self._match(_TEXT, place)
        try:
            value = json.loads(found[0], strict=False) if found else None
        except ValueError:
            value = None
        return value, found.end() if found else place

    def _closed(self, how: ToolFormat, place: int, broken: int) -> Steps[int]:
        """Where the marker after a value stands that is broken at a place; -1 for nowhere.

        In a value that was cut off it stands for itself, unless it is the last of the answer.
        """
        marker = first_piece(how.closing)
        found = (yield from self._find(marker, broken)) if marker else -1
        if found < 0:
            while not self._is_whole:
                yield
            last = self._text.rfind(marker, place) if marker else -1
            return last if not self._text[last + len(marker) :].strip() else -1
        return found

    def _of_document(self, text: str, fields: tuple[str, str]) -> list[ToolCall]:
        """The calls that are all of a text; none where it is not that."""
        try:
            document = json.loads(JsonRepair().push(text, is_last=True))
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
        return call_of(known, arguments) if known else None

    def _of_python(self, text: str) -> list[ToolCall]:
        try:
            found = python_calls(text)
        except (ValueError, RecursionError):
            return []
        named = [(self._known(name), arguments) for name, arguments in found]
        calls = [call_of(name, arguments) for name, arguments in named if name]
        return calls if len(calls) == len(named) else []

    def _headed_calls(self, how: ToolFormat, place: int) -> Steps[int]:
        """The place after calls whose names stand before their arguments."""
        header, follows = header_pattern(how, first=True), followed_by(how)
        while True:
            found = yield from self._match(f"{header}(?={follows})", place)
            pattern = re.compile(once(header))
            found = found or pattern.match(self._text, place, place + 2 * _LONGEST_HEADER)
            name = self._known(found["name"]) if found else None
            if found is None or name is None:
                return place
            read = self._tagged if how.kind == "tags" else self._braced
            end = yield from read(how, name, found.end())
            place = yield from self._pass(how.closing, end)
            start = yield from self._skip(place)
            if how.last and (yield from self._has(how.last, start)):
                return start + len(how.last)
            if not how.begin or not (yield from self._has(first_piece(how.begin), start)):
                return place
            header = header_pattern(how, first=False)

    def _braced(self, how: ToolFormat, name: str, place: int) -> Steps[int]:
        """The place after arguments in braces."""
        if not (yield from self._has("{", place)):
            self._give([call_of(name, None)])
            return place
        is_gemma = how.kind == "gemma"
        if not is_gemma:
            self._begin(name, place)
        end = yield from self._balanced(place, _GEMMA if is_gemma else _JSON, gives=not is_gemma)
        closed = end if end >= 0 else (yield from self._closed(how, place, ~end))
        stop = closed if closed >= 0 else len(self._text)
        if not is_gemma:
            self._end(self._text[self._sent : stop].rstrip(), is_whole=closed >= 0)
            return (yield from self._past_strays(how, stop))
        text = self._text[place:stop].strip()
        with suppress(ValueError, RecursionError):  # what cannot be read stays as it is
            text = json_text(gemma_arguments(text))
        self._give([call_of(name, text, is_whole=closed >= 0)])
        return stop

    def _tagged(self, how: ToolFormat, name: str, place: int) -> Steps[int]:
        """The place after a call whose arguments stand between tags."""
        schema = self.schemas[name]
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        arguments, is_whole = dict[str, Any](), True
        while is_whole:
            start = yield from self._skip(place)
            if not (yield from self._has(how.key, start)):
                is_whole = yield from self._has(first_piece(how.closing), start)
                break
            key = yield from self._match(
                rf"{literal_pattern(how.key)}(?P<key>[^<>\n]{{1,160}}?){literal_pattern(how.value.rstrip())}",
                start,
            )
            if key is None:
                is_whole = False
                break
            text, place, is_whole = yield from self._value(how, key.end())
            written = key["key"].strip()
            arguments[written] = parse_argument(text, known.get(written), schema)
        self._give([call_of(name, arguments, is_whole=is_whole)])
        return place

    def _value(self, how: ToolFormat, place: int) -> Steps[tuple[str, int, bool]]:
        """A value, the place after its end, and whether it has one.

        It ends where the next one, or the end of the call, follows: a value may have the marker.
        """
        marker, is_wrapped = how.value_end.strip(), how.value.endswith("\n")
        if is_wrapped and (yield from self._has("\n", place)):  # templates write one around each
            place += len("\n")
        start = place

        def value(end: int) -> str:
            text = self._text[place:end]
            return text.removesuffix("\n") if is_wrapped else text

        while (found := (yield from self._find(marker, start))) >= 0:
            after = found + len(marker)
            start = yield from self._skip(after)
            for one in (how.key, first_piece(how.closing)):
                if start == len(self._text) or (yield from self._has(one, start)):
                    return value(found), after, True
            start = found + 1
        return value(len(self._text)), len(self._text), False

    # -- thoughts --------------------------------------------------------------------------

    def _thought(self) -> Steps[None]:
        """A thought at the beginning, without the white space around it."""
        place = yield from self._skip(0)
        if not self.within:
            if not (yield from self._has(self.tags.opening, place)):
                return
            place += len(self.tags.opening)
        self._thinks = True
        self._place = yield from self._skip(place)
        closing, markers = self.tags.closing, list(self._openings) if self.schemas else []
        while marker := (yield from self._until([closing, *markers], THOUGHT)):
            place = self._text.index(marker, self._place)
            # Some models forget the tag before a call. In a thought that ends later it is thought.
            end = place if marker == closing else (yield from self._find(closing, place))
            if end >= 0:
                self._thinks = False
                self._say(len(self._text[:end].rstrip()), THOUGHT)
                self._place = yield from self._skip(end + len(closing))
                break
            if (yield from self._called(self._openings[marker], marker)):
                break
            self._say(self._text.index(marker, self._place) + len(marker), THOUGHT)
        self._thinks = False
        self._forget()

    # -- harmony ---------------------------------------------------------------------------

    def _header(self) -> Steps[str]:
        """Pass the header of a message by, or its call; what it is a message of."""
        self._forget()
        while _MESSAGE not in self._text:
            if not self._may_be_header(self._text) or self._is_whole:
                return self._no_header()
            yield
        header = self._text.partition(_MESSAGE)[0]
        if not self._may_be_header(header):
            return self._no_header()
        self._place = len(header) + len(_MESSAGE)
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1] in self.schemas:
            start = yield from self._skip(self._place)
            self._place = yield from self._braced(HARMONY, recipient[1], start)
            return TEXT
        return THOUGHT if f"{_CHANNEL}analysis" in header else TEXT

    @staticmethod
    def _may_be_header(text: str) -> bool:
        start = text.lstrip()
        begins = any(start.startswith(one) or one.startswith(start) for one in _HEADER_STARTS)
        return begins and len(text) <= _LONGEST_HEADER + len(_MESSAGE)

    def _no_header(self) -> str:
        """A text without a header; a header that was cut off is nothing."""
        if self._may_be_header(self._text):
            is_markup = _CHANNEL in self._text or self._text.lstrip().startswith(("<|", "to="))
            self._place = len(self._text) if is_markup else 0
        elif self._text.startswith(_CHANNEL):
            self._say(len(_CHANNEL))
        return TEXT


# -- arguments in JSON -------------------------------------------------------------------------


def call_of(name: str, arguments: Any, *, is_whole: bool = True) -> ToolCall:
    """A call with the arguments that a model wrote: a value, or the text of one.

    It is whole where these are an object.
    """
    is_none = arguments is None or arguments == ""
    text = "{}" if is_none else arguments if isinstance(arguments, str) else json_text(arguments)
    text = JsonRepair().push(text, is_last=True)
    return ToolCall(new_id("call_"), name, text, is_whole and is_object(text))


class OpenCall:
    """A call whose arguments are given as they are written."""

    def __init__(self, name: str, *, is_left_out: bool = False) -> None:
        self._head = ToolCall(new_id("call_"), name, "", is_whole=False, is_open=True)
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
        self._parts.append(self._repair.push("", is_last=True))
        if not any(self._parts):
            self._parts = ["{}"]
        is_whole = is_whole and is_object("".join(self._parts))
        text = "".join(self._parts[self._given :])
        last = replace(self._head, arguments=text, is_whole=is_whole, is_open=False)
        return [] if self._is_left_out else [last]
