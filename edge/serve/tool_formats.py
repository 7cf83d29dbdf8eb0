"""How models write calls of tools, and thoughts: read out of their chat templates.

A template is given a conversation with calls whose names and arguments are marks, and what stands
around the marks is how its model was taught to call. So a template that nobody here has seen works
as far as its calls are of one of these kinds:

json      <tool_call>{"name": ..., "arguments": {...}}</tool_call>; one, several, or a list
named     [TOOL_CALLS]name[ARGS]{...}; the name outside of the JSON text of the arguments
tags      <function=name><parameter=key>value</parameter></function>; values are texts
python    <|tool_call_start|>[name(key="value")]<|tool_call_end|>
gemma     <|tool_call>call:name{key:<|"|>value<|"|>}<tool_call|>
harmony   <|channel|>commentary to=functions.name<|message|>{...}; texts and thoughts have channels

Templates that leave out calls, or tell of them in words alone, are known by a text in them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from edgespec.errors import EdgespecError
from edgespec.models.chat import render_chat
from edgespec.models.processes import GuestEndedError
from edgespec.prefix import common_prefix_length

NAME_CHARS = r"[A-Za-z0-9_./:@-]"
ANY = "…"  # in a marker: a few characters that differ from call to call
NAME = rf"(?P<name>{NAME_CHARS}{{1,160}})"  # a pattern
_SHORTEST_OPENING = 8  # of a marker that begins a call where the one before it was left out
_MARKER = re.compile(r"<[^<>\s…]{1,60}>|\[[A-Z_/]{2,40}\]")
_PIECE = re.compile(r"(?<!<)(?=<)|(?=\[[A-Z_/]{2,40}\])")  # before a marker


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls; white space at the ends of markers is as good as none."""

    name: str  # of the family, or of the kind where it was read out of a template
    kind: str  # see above
    opening: str  # what comes before a call, or before the first one of several
    begin: str = ""  # what comes before each call besides
    after: str = ""  # what stands between the name and the arguments
    key: str = ""  # what comes before the key of an argument
    value: str = ""  # what stands between key and value
    value_end: str = ""  # what comes after a value
    closing: str = ""  # what comes after each call
    last: str = ""  # what comes after the last call besides
    # Of the name and of the arguments, in JSON; the name itself is a key where "".
    fields: tuple[str, str] = ("name", "arguments")
    is_list: bool = False  # calls in JSON are the items of one list
    text: str = ""  # what comes before a text, where one has a header as calls have

    @property
    def markers(self) -> frozenset[str]:
        """Texts in it that may be control tokens of a vocabulary."""
        own = (self.opening, self.begin, self.after, self.key, self.value, self.value_end)
        found = markers_in(*own, self.closing, self.last)
        return frozenset([*found, *_MORE_MARKERS.get(self.kind, ())])

    def header(self, name: str) -> str:
        """What comes before the arguments of a call; "" where that cannot be said beforehand."""
        if self.kind == "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        text = f"{self.opening}{self.begin}{name}{self.after}"
        return "" if ANY in text else text


_MORE_MARKERS = {
    "gemma": ('<|"|>',),
    "harmony": (
        *("<|channel|>", "<|message|>", "<|start|>", "<|end|>"),
        *("<|constrain|>", "<|call|>", "<|return|>"),
    ),
}
HERMES = ToolFormat("hermes", "json", "<tool_call>\n", closing="\n</tool_call>")
LLAMA = ToolFormat("llama", "json", "<|python_tag|>", fields=("name", "parameters"))
MISTRAL = ToolFormat("mistral", "json", "[TOOL_CALLS]", is_list=True)
HARMONY = ToolFormat("harmony", "harmony", "<|channel|>", closing="<|call|>")


def _marker(what: str) -> str:
    """One of DeepSeek's, between bars of full width."""
    return f"<\uff5ctool▁{what}\uff5c>"


_DEEPSEEK = ToolFormat(
    "deepseek",
    "named",
    _marker("calls▁begin"),
    _marker("call▁begin") + "function" + _marker("sep"),
    after="\n```json\n",
    closing="\n```" + _marker("call▁end"),
    last=_marker("calls▁end"),
)
_KIMI = ToolFormat(
    "kimi",
    "named",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    after="<|tool_call_argument_begin|>",
    closing="<|tool_call_end|>",
    last="<|tool_calls_section_end|>",
)
_LFM = ToolFormat("lfm", "python", "<|tool_call_start|>", closing="<|tool_call_end|>")
_GRANITE = ToolFormat("granite", "json", "<|tool_call|>", is_list=True)
_FUNCTIONARY = ToolFormat("functionary", "named", ">>>", after="\n", text=">>>all\n")
# What templates have in them whose calls cannot be read out, the surest texts first.
_KNOWN = (
    (">>>${recipient}", _FUNCTIONARY),
    ("<|tool_calls_section_begin|>", _KIMI),
    (_marker("calls▁begin"), _DEEPSEEK),
    ("<|tool_list_start|>", _LFM),
    ("List of tools: [", _LFM),
    ("<|tool_call_start|>", _LFM),
    ("<|tool_call|>", _GRANITE),
    ("<tool_call>", HERMES),
    ("[TOOL_CALLS]", MISTRAL),
    ("<|python_tag|>", LLAMA),
    ("<|start_header_id|>", LLAMA),
)


def markers_in(*texts: str) -> set[str]:
    """Parts of texts that may be control tokens."""
    return set(_MARKER.findall("\n".join(texts)))


@lru_cache(maxsize=8)
def format_of(template: str) -> ToolFormat:
    """The way that a template's model was taught. Raises ModelFileError for one without an end."""
    if "<|channel|>" in template and "<|message|>" in template:
        return HARMONY
    known = next((how for text, how in _KNOWN if text in template), HERMES)
    if known in (_KIMI, _FUNCTIONARY):
        return known  # of the one newer templates write ids in which the names are
    found = _found(template)
    if found is None:
        return known
    # Llama's calls begin with a marker or without, and its template writes none.
    return found if found.opening.strip() else replace(known, fields=found.fields)


@lru_cache(maxsize=8)
def knows_tools(template: str) -> bool:
    """Whether a template writes the tools of a request into its prompt. Raises as `format_of`."""
    if "tools" not in template:
        return False
    text = _rendered(template, {"role": "assistant", "content": _SAID}, whole=True)
    return text is None or _NAMES[0] in text


class ThinkTags(NamedTuple):
    """What a thought stands between.

    `forced` is written for the model to end one that takes too long; `after` has to come between a
    thought and the answer.
    """

    opening: str
    closing: str
    forced: str
    after: str = ""


def _tags(opening: str, closing: str) -> ThinkTags:
    return ThinkTags(opening, closing, f"\n{closing}\n\n")


_FINAL = "<|start|>assistant<|channel|>final<|message|>"
THINK = _tags("<think>", "</think>")
_HARMONY_TAGS = ThinkTags("<|channel|>analysis<|message|>", "<|end|>", f"<|end|>{_FINAL}", _FINAL)
_OTHER_TAGS = (
    _tags("<|START_THINKING|>", "<|END_THINKING|>"),
    _tags("[THINK]", "[/THINK]"),
    _tags("<seed:think>", "</seed:think>"),
    _tags("<mm:think>", "</mm:think>"),
    _tags("<|channel>thought", "<channel|>"),
)


def think_tags(template: str, formats: Sequence[ToolFormat]) -> ThinkTags:
    """How a template's model thinks; <think> where it says nothing."""
    if HARMONY in formats:
        return _HARMONY_TAGS
    return next((one for one in _OTHER_TAGS if one.closing in template), THINK)


# -- marks in a template -------------------------------------------------------------------

_NAMES, _KEYS = ("xqfuna", "xqfunb"), ("xqargc", "xqargd")
_TEXT, _OTHER, _NUMBER = "xqtexte", "xqtextf", 7919
_SAID, _ASKED = "xqsaid", "xqasked"
_FENCE = re.compile(r"(?<=\S)\s*```(json)?\s*$")  # which models may leave out
_THOUGHT_ENDS = ("</think>", "<|END_THINKING|>", "[/THINK]", "</seed:think>", "</mm:think>")


def _found(template: str) -> ToolFormat | None:
    """The way to call by what a template writes; None where it writes no calls."""
    both = {_KEYS[0]: _TEXT, _KEYS[1]: _NUMBER}
    said = _rendered(template, {"role": "assistant", "content": _SAID})
    one = _rendered(template, _calling((_NAMES[0], both)))
    if said is None or one is None or _NAMES[0] not in one:
        return None
    two = _rendered(
        template, _calling((_NAMES[0], {_KEYS[0]: _TEXT}), (_NAMES[1], {_KEYS[0]: _OTHER}))
    )
    start = common_prefix_length(said, one)
    ended = common_prefix_length(said[::-1], one[::-1])
    end = len(one) - ended
    # What either place is within is a marker as a whole.
    if (first := one.rfind("<", 0, start)) > one.rfind(">", 0, start):
        start = first
    if one.rfind("<", 0, end) > one.rfind(">", 0, end) and (last := one.find(">", end)) >= 0:
        end = last + 1
    call = _after_thought(one[start:end])
    several = _after_thought(two[start:]) if two and _NAMES[1] in two else ""
    if _KEYS[0] not in call:  # the marks are in what both begin with
        return None
    return _of_json(call) or _of_named(call, several) or _of_tags(call, several)


def _rendered(template: str, answer: dict[str, Any], *, whole: bool = False) -> str | None:
    kinds = {_KEYS[0]: "string", _KEYS[1]: "integer"}
    properties = {name: {"type": kind, "description": ""} for name, kind in kinds.items()}
    schema = {"type": "object", "properties": properties, "required": []}
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        for name in _NAMES
    ]
    messages = [{"role": "user", "content": _ASKED}, answer]
    try:
        text = render_chat(
            template, messages, add_generation_prompt=False, variables={"tools": tools}
        )
    except EdgespecError as problem:
        if isinstance(problem.__cause__, GuestEndedError):
            raise  # a request waits for a template without an end once
        return None
    return text if whole else text[text.rfind(_ASKED) :]  # the tools are told before


def _calling(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {
            "type": "function",
            "id": f"xqcall{place:03}",
            "function": {"name": name, "arguments": arguments},
        }
        for place, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def _after_thought(text: str) -> str:
    end = max((text.rfind(tag) + len(tag) for tag in _THOUGHT_ENDS if tag in text), default=0)
    return re.sub(r"xqcall\d{3}", ANY, text[end:]).lstrip()


def _of_json(call: str) -> ToolFormat | None:
    """Calls whose name is within JSON."""
    places = [one.start() for one in re.finditer(r"[\[{]", call[: call.find(_NAMES[0])])]
    for place in places:
        found = _json_at(call, place)
        if found is None:
            continue
        document, end = found
        item = document[0] if isinstance(document, list) and document else document
        fields = _fields(item)
        if fields:
            opening, closing = _FENCE.sub("", call[:place]), _first(call[end:])
            is_list = isinstance(document, list)
            return ToolFormat(
                "json", "json", opening, closing=closing, fields=fields, is_list=is_list
            )
    return None


def _json_at(text: str, place: int) -> tuple[Any, int] | None:
    try:
        return json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None


def _fields(item: Any) -> tuple[str, str] | None:
    """Names of the fields of a call."""
    if not isinstance(item, dict):
        return None
    if _NAMES[0] in item:
        return "", ""
    inner = item.get("function")
    if isinstance(inner, dict):
        return _fields(inner)
    name = next((key for key, value in item.items() if value == _NAMES[0]), None)
    arguments = next((key for key, value in item.items() if isinstance(value, dict)), None)
    return None if name is None or arguments is None else (name, arguments)


def _of_named(call: str, several: str) -> ToolFormat | None:
    """Calls whose name stands before JSON, and those in Python's notation."""
    first = call.find(_KEYS[0])
    name = call.rfind(_NAMES[0], 0, first)
    if name < 0:
        return None
    if call.startswith(f"{_NAMES[0]}({_KEYS[0]}=", name):
        opening = call[:name].rstrip().removesuffix("[")
        closing = call[call.rfind(")") + 1 :].strip().removeprefix("]")
        return ToolFormat("python", "python", opening, closing=_first(closing))
    if call.startswith(f"{_NAMES[0]}{{{_KEYS[0]}:", name):
        opening = call[:name].rstrip().removesuffix("call:")
        return ToolFormat("gemma", "gemma", opening, closing=_first(call[call.rfind("}") + 1 :]))
    brace = call.find("{", name)
    found = _json_at(call, brace)
    if found is None or brace > first:
        return None
    rest = several and _json_at(several, several.find("{", several.find(_NAMES[0])))
    made = ToolFormat("named", "named", "", after=_numbered(call[name + len(_NAMES[0]) : brace]))
    return _framed(made, call[:name], call[found[1] :], several[rest[1] :] if rest else "")


def _numbered(after: str) -> str:
    """What follows a name, without the number of the call."""
    return re.sub(r"\d+", ANY, after, count=1)


def _first(text: str) -> str:
    """The first marker of what follows calls; what comes then may be the end of the turn."""
    return "".join(pieces(text.strip())[:1]).strip()


def _framed(how: ToolFormat, before: str, rest: str, between: str) -> ToolFormat:
    """The same with what stands before and after calls.

    Args:
        before: up to the first name.
        rest: after the last arguments.
        between: after the first arguments, where there are two calls.
    """
    repeated = _NAMES[1] in between
    middle = between.partition(_NAMES[1])[0] if repeated else ""
    ended, middles = pieces(rest), pieces(middle)
    count = _same(ended, middles)
    begun, next_ = pieces(before), middles[count:]
    each = _same(begun[::-1], next_[::-1]) if repeated else len(begun)
    opening, begin = begun[: len(begun) - each], "".join(begun[len(begun) - each :])
    closing = ended[:count] if repeated else ended
    return replace(
        how,
        opening="".join(opening) or begin,
        begin=begin if opening else "",
        closing="".join(closing).strip(),
        last=_first("".join(ended[len(closing) :])),
    )


def pieces(text: str) -> list[str]:
    """A marker or several, cut before every marker."""
    return [piece for piece in _PIECE.split(text) if piece]


def _same(some: Sequence[str], others: Sequence[str]) -> int:
    """How many pieces both begin with."""
    pairs = zip(some, others, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a.strip() != b.strip()),
        min(len(some), len(others)),
    )


def _of_tags(call: str, several: str) -> ToolFormat | None:
    """Calls whose arguments are between tags."""
    key, other = call.find(_KEYS[0]), call.rfind(_KEYS[1])
    name, text = call.rfind(_NAMES[0], 0, key), call.find(_TEXT, key)
    number = call.find(str(_NUMBER), other)
    if not 0 <= name < key < text < other < number:
        return None
    between = call[text + len(_TEXT) : other]
    rest = call[number + len(str(_NUMBER)) :]
    ends, between_pieces = pieces(rest), pieces(between)
    count = _same(ends, between_pieces)
    value_end, key_begin = "".join(ends[:count]), "".join(between_pieces[count:])
    before_key = call[name + len(_NAMES[0]) : key]
    if not value_end.strip() or not key_begin.strip() or not before_key.endswith(key_begin):
        return None
    values = call[key + len(_KEYS[0]) : text], call[other + len(_KEYS[1]) : number]
    made = ToolFormat(
        "tags",
        "tags",
        "",
        after=_numbered(before_key.removesuffix(key_begin).strip()),
        key=key_begin.strip(),
        value=_merged(*values),
        value_end=value_end,
    )
    later = several.partition(_TEXT)[2]
    later = "".join(pieces(later)[count:]) if later else ""
    before = call[:name].rpartition(_NAMES[0])[2]
    return _framed(made, before, "".join(ends[count:]), later)


def _merged(one: str, other: str) -> str:
    """What two texts have in common at their beginnings and ends, and anything between."""
    if one == other:
        return one
    start = common_prefix_length(one, other)
    end = common_prefix_length(one[start:][::-1], other[start:][::-1])
    return f"{one[:start]}{ANY}{one[len(one) - end :]}"


# -- what a reader looks for ---------------------------------------------------------------


def openings(how: ToolFormat) -> list[str]:
    """Markers that calls begin with: the first one, or a second one where it was left out."""
    first, *others = (one.strip() for one in pieces(how.opening))
    is_own = how.kind == "tags" and others and len(others[-1]) >= _SHORTEST_OPENING
    return [first, others[-1]] if is_own else [first]


def first_piece(markers: str) -> str:
    """The first of several markers."""
    return next((one.strip() for one in pieces(markers.strip())), "").partition(ANY)[0]


def header_pattern(how: ToolFormat, *, first: bool) -> str:
    """A pattern of what comes before the arguments of a call."""
    name = rf"(?:call:)?{NAME}" if how.kind == "gemma" else NAME
    before = [*pieces(how.opening), *pieces(how.begin)] if first else pieces(how.begin)
    texts = [literal_pattern(one) for one in before]
    if len(before) > 1 and how.kind == "tags":
        texts[0] = f"(?:{texts[0]})?"
    return rf"\s*{''.join(texts)}\s*{name}{literal_pattern(how.after)}\s*"


def followed_by(how: ToolFormat) -> str:
    """A pattern of what shows that a header is whole."""
    begins = how.key if how.kind == "tags" else "{"
    ends = [begins, first_piece(how.closing)]
    return "|".join(re.escape(one) for one in ends if one)


def literal_pattern(marker: str) -> str:
    """A pattern of a marker, with any white space where it has some."""
    parts = [rf"{re.escape(one)}" for one in re.split(r"(\s+|…)", marker)]
    made = [
        r"[^<>\n]{0,80}?" if part == re.escape(ANY) else re.sub(r"^(?:\\?\s)+$", r"\\s*", part)
        for part in parts
    ]
    return "".join(made) + r"\s*"


def once(pattern: str) -> str:
    """A pattern without white space twice in a row, whose ways to match would multiply."""
    return re.sub(r"(?:\\s\*)+", r"\\s*", pattern)


def safe_length(text: str, marker: str) -> int:
    """How much of `text` is neither the beginning of `marker` nor white space before one."""
    most = min(len(text), len(marker) - 1)
    kept = next((size for size in range(most, 0, -1) if text.endswith(marker[:size])), 0)
    return len(text[: len(text) - kept].rstrip())
