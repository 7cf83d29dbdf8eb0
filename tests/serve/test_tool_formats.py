"""Families of tool calls: a template of each one's shape, and an answer cut in every way."""

from __future__ import annotations

import json
import random
from typing import Any, NamedTuple

import pytest
from serving_cases import read

from edgespec.decode.generation import joined_calls
from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.tool_formats import HARMONY, HERMES, ToolFormat, format_of, knows_tools

SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "more": {"$ref": "#/$defs/more"},
        },
        "$defs": {"more": {"type": "object"}},
    },
    "time": {"type": "object", "properties": {}},
}
# A text that has every end marker of the family in it, and a number that is a text.
ROME = {"city": '7 "hills" END\n{[', "days": 3, "more": {"a": [1, True, None]}}


class Family(NamedTuple):
    template: str  # of an assistant's message, without what is the same in all
    answer: str
    content: str = ""
    calls: tuple[tuple[str, Any], ...] = (("weather", ROME), ("time", {}))
    kind: str = "json"


_EACH = "{% for c in m.tool_calls %}{% set f = c.function %}"
_ARGUMENTS = "{{ f.arguments | tojson }}"
_PAIRS = "{% for k, v in f.arguments.items() %}"
_VALUE = "{{ v if v is string else v | tojson }}"
_TEMPLATE = (
    "{%% if tools %%}{{ tools | tojson }}{%% endif %%}"
    "{%% for m in messages %%}<|turn|>{{ m.role }}\n"
    "{%% if m.tool_calls %%}%s{%% else %%}{{ m.content }}{%% endif %%}<|stop|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|turn|>assistant\n{%% endif %%}"
)
_NAME = "{{ f.name }}"
_END = "{% endfor %}"
_CITY = '7 "hills" END\n{['


def _text(end: str) -> str:
    """The arguments of a call whose text has an end marker."""
    return json.dumps({**ROME, "city": _CITY.replace("END", end)}, ensure_ascii=False)


def _rome(end: str) -> tuple[tuple[str, Any], ...]:
    return ("weather", {**ROME, "city": _CITY.replace("END", end)}), ("time", {})


_BAR = "\uff5c"
_DEEP = {
    one: f"<{_BAR}tool▁{one.replace(' ', '▁')}{_BAR}>"
    for one in ("calls begin", "call begin", "sep", "call end", "calls end")
}
_GEMMA = '{city:<|"|>7 "hills" }<|"|>,days:3,more:{a:[1,true,null]}}'
_QWEN = (
    '<parameter=city>\n7 "hills" </parameter>\n{[\n</parameter>\n<parameter=days>\n3\n'
    '</parameter>\n<parameter=more>\n{"a": [1, true, null]}\n</parameter>\n'
)
_GLM = (
    '<arg_key>city</arg_key>\n<arg_value>7 "hills" </arg_value>\n{[</arg_value>\n'
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n"
    '<arg_value>{"a": [1, true, null]}</arg_value>\n'
)
_INVOKE = (
    '<param name="city" text="true">7 "hills" </param>\n{[</param>\n'
    '<param name="days" text="false">3</param>\n'
    '<param name="more" text="false">{"a": [1, true, null]}</param>\n'
)
FAMILIES = {
    "hermes": Family(
        f'{_EACH}<tool_call>\n{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}\n</tool_call>'
        "{% endfor %}",
        f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {_text("</tool_call>")}}}\n'
        '</tool_call>\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "Let me see.",
        _rome("</tool_call>"),
    ),
    "qwen3-coder": Family(
        f"{_EACH}<tool_call>\n<function={_NAME}>\n{_PAIRS}<parameter={{{{ k }}}}>\n{_VALUE}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
        f"I look.\n<tool_call>\n<function=weather>\n{_QWEN}</function>\n</tool_call>\n"
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "I look.",
        _rome("</parameter>"),
        "tags",
    ),
    "llama": Family(
        f'<|python_tag|>{_EACH}{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}{_END}',
        f'<|python_tag|>{{"name": "weather", "parameters": {_text("; <|python_tag|>")}}}; '
        '{"name": "time", "parameters": {}}',
        "",
        _rome("; <|python_tag|>"),
    ),
    "llama, bare": Family(
        f'{_EACH}{{"name": "{_NAME}", "parameters": {_ARGUMENTS}}}{_END}{{# <|python_tag|> #}}',
        f'{{"name": "weather", "parameters": {_text("}}")}}}',
        "",
        _rome("}}")[:1],
    ),
    "mistral": Family(
        f'[TOOL_CALLS][{_EACH}{{"name": "{_NAME}", "arguments": {_ARGUMENTS}, '
        '"id": "{{ c.id }}"}{{ "" if loop.last else ", " }}{% endfor %}]',
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {_text("]")}, "id": "a"}}, '
        '{"name": "time", "arguments": {}}]',
        "",
        _rome("]"),
    ),
    "mistral, new": Family(
        f"{_EACH}[TOOL_CALLS]{_NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{_ARGUMENTS}{_END}",
        f"Well.[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{_text('[TOOL_CALLS]')}"
        "[TOOL_CALLS]time[CALL_ID]c3[ARGS]{}",
        "Well.",
        _rome("[TOOL_CALLS]"),
        "named",
    ),
    "gemma": Family(
        _EACH + "<|tool_call>call:{{ f.name }}{{ '{' }}" + _PAIRS + "{{ k }}:{% if v is string %}"
        '<|"|>{{ v }}<|"|>{% else %}{{ v }}{% endif %}{{ "" if loop.last else "," }}'
        "{% endfor %}{{ '}' }}<tool_call|>{% endfor %}",
        f"<|tool_call>call:weather{_GEMMA}<tool_call|><|tool_call>call:time{{}}<tool_call|>",
        "",
        (("weather", {**ROME, "city": '7 "hills" }'}), ("time", {})),
        "gemma",
    ),
    "glm": Family(
        f"{_EACH}<tool_call>{_NAME}\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_VALUE}"
        "</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
        f"Yes.\n<tool_call>weather\n{_GLM}</tool_call>\n<tool_call>time\n</tool_call>",
        "Yes.",
        _rome("</arg_value>"),
        "tags",
    ),
    "deepseek": Family(
        f"{_DEEP['calls begin']}{_EACH}{_DEEP['call begin']}function{_DEEP['sep']}"
        f"{_NAME}\n```json\n{_ARGUMENTS}\n```{_DEEP['call end']}{_END}"
        f"{_DEEP['calls end']}",
        f"{_DEEP['calls begin']}{_DEEP['call begin']}function{_DEEP['sep']}weather\n```json\n"
        f"{_text('```')}\n```{_DEEP['call end']}\n{_DEEP['call begin']}function{_DEEP['sep']}time"
        f"\n```json\n{{}}\n```{_DEEP['call end']}{_DEEP['calls end']}",
        "",
        _rome("```"),
        "named",
    ),
    "deepseek 3.1": Family(
        f"{_DEEP['calls begin']}{_EACH}{_DEEP['call begin']}{_NAME}{_DEEP['sep']}"
        f"{_ARGUMENTS}{_DEEP['call end']}{_END}{_DEEP['calls end']}",
        f"Hm.\n\n{_DEEP['calls begin']}{_DEEP['call begin']}weather{_DEEP['sep']}"
        f"{_text(_DEEP['call end'])}{_DEEP['call end']}{_DEEP['call begin']}time{_DEEP['sep']}{{}}"
        f"{_DEEP['call end']}{_DEEP['calls end']}",
        "Hm.",
        _rome(_DEEP["call end"]),
        "named",
    ),
    "deepseek 3.2": Family(
        f'<calls>\n{_EACH}<invoke name="{_NAME}">\n{_PAIRS}<param name="{{{{ k }}}}" '
        'text="{{ "true" if v is string else "false" }}">' + _VALUE + "</param>\n{% endfor %}"
        "</invoke>\n{% endfor %}</calls>",
        f'<calls>\n<invoke name="weather">\n{_INVOKE}</invoke>\n<invoke name="time">\n</invoke>\n'
        "</calls>",
        "",
        _rome("</param>"),
        "tags",
    ),
    "granite": Family(
        '{{ m.content }}{# the system message: "answer with <|tool_call|> and a list" #}',
        f'<|tool_call|>[{{"name": "weather", "arguments": {_text("<|tool_call|>")}}}, '
        '{"name": "time", "arguments": {}}]',
        "",
        _rome("<|tool_call|>"),
    ),
    "lfm": Family(
        f"<|tool_call_start|>[{_EACH}{_NAME}({_PAIRS}{{{{ k }}}}='{{{{ v }}}}'"
        "{{ '' if loop.last else ', ' }}{% endfor %}){{ '' if loop.last else ', ' }}"
        "{% endfor %}]<|tool_call_end|>",
        "<|tool_call_start|>[weather(city='7 \"hills\" ])<|tool_call_end|>\\n{[', days=3, "
        "more={'a': [1, True, None]}), time()]<|tool_call_end|>Done.",
        "Done.",
        _rome("])<|tool_call_end|>"),
        "python",
    ),
    "kimi": Family(
        f"<|tool_calls_section_begin|>{_EACH}<|tool_call_begin|>{{{{ c.id }}}}"
        f"<|tool_call_argument_begin|>{_ARGUMENTS}<|tool_call_end|>{_END}"
        "<|tool_calls_section_end|>",
        "Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
        f"<|tool_call_argument_begin|>{_text('<|tool_call_end|>')}<|tool_call_end|>"
        "<|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "Sure.",
        _rome("<|tool_call_end|>"),
        "named",
    ),
    "harmony": Family(
        f"{_EACH} to=functions.{_NAME}<|channel|>commentary json<|message|>{_ARGUMENTS}<|call|>"
        "{% endfor %}",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather <|constrain|>json<|message|>{_text('<|call|>')}<|call|>"
        "<|start|>assistant to=functions.time<|channel|>commentary json<|message|>{}",
        "I look.",
        _rome("<|call|>"),
        "harmony",
    ),
    "gigachat": Family(
        f"{_EACH}<|message_sep|>\n\nfunction call<|role_sep|>\n"
        f'{{"name": "{_NAME}", "arguments": {_ARGUMENTS}}}{_END}',
        "One moment.<|message_sep|>\n\nfunction call<|role_sep|>\n"
        f'{{"name": "weather", "arguments": {_text("<|message_sep|>")}}}<|message_sep|>\n\n'
        'function call<|role_sep|>\n{"name": "time", "arguments": {}}',
        "One moment.",
        _rome("<|message_sep|>"),
    ),
    "command": Family(
        "{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}"
        "{% set told = k + v.description %}{% endfor %}{% endfor %}"
        f"Action:\n```json\n[\n{_EACH}{{\n"
        f'    "tool_name": "{_NAME}",\n    "parameters": {_ARGUMENTS}\n}}'
        "{{ '' if loop.last else ',\n' }}{% endfor %}\n]```\n",
        'I look.\nAction: ```json\n[\n{"tool_name": "weather", "parameters": '
        f'{_text("]```")}}},\n{{"tool_name": "time", "parameters": {{}}}}\n]```\n',
        "I look.",
        _rome("]```"),
    ),
    "functionary": Family(
        f"{{# >>>${{recipient}} #}}{_EACH}>>>{_NAME}\n{{{{ f.arguments | string }}}}{_END}",
        f">>>all\nI see.\n>>>weather\n{_text('>>>time')}>>>time\n{{}}",
        "I see.",
        _rome(">>>time"),
        "named",
    ),
    "another one": Family(
        f'<<CALLS>>{_EACH}{{"tool": "{_NAME}", "input": {_ARGUMENTS}}}{_END}<</CALLS>>',
        f'<<CALLS>>{{"tool": "weather", "input": {_text("<</CALLS>>")}}}'
        '{"tool": "time", "input": {}}<</CALLS>>',
        "",
        _rome("<</CALLS>>"),
    ),
    "another one, by names": Family(
        f'{_EACH}<do name="{_NAME}">{_ARGUMENTS}</do>{_END}',
        f'One moment. <do name="weather">{_text("</do>")}</do><do name="time"></do>',
        "One moment.",
        _rome("</do>"),
        "named",
    ),
}
EVERY = pytest.mark.parametrize("name", FAMILIES)


def _format(name: str) -> ToolFormat:
    return format_of(_TEMPLATE % FAMILIES[name].template)


def _reader(how: ToolFormat, most: int = 9) -> Any:
    return AnswerReader([how], SCHEMAS, most=most)


@EVERY
def test_a_family_is_read_out_of_its_template(name: str) -> None:
    assert knows_tools(_TEMPLATE % FAMILIES[name].template)
    assert _format(name).kind == FAMILIES[name].kind


@EVERY
def test_an_answer_has_the_same_calls_however_it_is_cut(name: str) -> None:
    """Nothing of the markup is text, whether it comes by characters or in pieces."""
    family, how = FAMILIES[name], _format(name)
    answer, expected = family.answer, (family.content, "", list(family.calls))
    cuts = [[answer[:place], answer[place:]] for place in range(len(answer) + 1)]
    dice = random.Random(7)
    for _ in range(20):
        places = sorted(dice.sample(range(len(answer)), 9))
        cuts.append([answer[a:b] for a, b in zip([0, *places], [*places, None], strict=True)])
    for pieces in [[answer], list(answer), *cuts]:
        assert read(_reader(how), pieces) == expected, pieces


@EVERY
def test_calls_beyond_the_first_one_are_left_out_where_one_is_wanted(name: str) -> None:
    family = FAMILIES[name]
    content, _, calls = read(_reader(_format(name), most=1), list(family.answer))
    assert (content, calls) == (family.content, list(family.calls[:1]))


@EVERY
def test_a_text_that_has_the_marker_alone_is_a_text(name: str) -> None:
    how = _format(name)
    if how is HARMONY:
        return  # whose markers are control tokens
    text = f"They write {how.opening.strip()} before it, then {{1}} or [2]."
    for pieces in ([text], list(text)):
        assert read(_reader(how), pieces) == (text, "", [])


@EVERY
def test_a_call_that_is_cut_off_is_told_as_one_that_cannot_be_made(name: str) -> None:
    family, how = FAMILIES[name], _format(name)
    if how.kind == "python" or name.endswith("bare"):
        return  # whose end shows what they are
    cut = family.answer[: family.answer.index("3") + 1]
    reader = _reader(how)
    deltas = [*map(reader.push, cut), reader.finish()]
    calls = joined_calls(call for one in deltas for call in one.calls)
    assert "".join(one.content for one in deltas) == family.content
    assert [(call.name, call.is_whole) for call in calls] == [("weather", False)]
    assert "hills" in calls[0].arguments


def test_what_is_no_jinja_or_has_no_calls_is_known_by_its_texts() -> None:
    assert format_of("... <tool_call> ...") == HERMES
    assert format_of("{{ messages }}") == HERMES
    assert format_of("{% for %}[TOOL_CALLS]").name == "mistral"
    assert format_of("<|start_header_id|>").fields == ("name", "parameters")
    assert not knows_tools("{% set xml_tools = 1 %}{{ messages[0].content }}")


@EVERY
def test_what_models_may_write_is_read_alike_in_one_piece_and_by_characters(name: str) -> None:
    """Parts of answers in any order: no error, and never another answer for another cut."""
    how, answer = _format(name), FAMILIES[name].answer
    dice = random.Random(name)
    for _ in range(60):
        parts = []
        for _ in range(dice.randrange(1, 6)):
            start = dice.randrange(len(answer))
            parts.append(answer[start : start + dice.randrange(1, 60)])
        text = "".join([*parts, *dice.choices(["", "{", "[", "```json", '"', " \n", "é"], k=2)])
        assert _told(_reader(how), [text]) == _told(_reader(how), list(text)), text


def _told(reader: Any, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    deltas = [*map(reader.push, pieces), reader.finish()]
    found = joined_calls(call for one in deltas for call in one.calls)
    calls = [(call.name, call.arguments) for call in found]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


@EVERY
def test_hostile_answers_take_a_time_that_grows_with_their_length(name: str) -> None:
    """A pattern that tries all ways, or a reader that goes round, would not end."""
    how, answer = _format(name), FAMILIES[name].answer
    for place in (answer.index("w"), answer.index("3")):
        for more in (" ", "{", '"', "\\", "<", "`"):
            reader = _reader(how)
            for piece in [answer[:place], *[more * 500] * 20]:
                reader.push(piece)
            reader.finish()


WHOLE = ("gemma", "python", "tags")
_IN_PARTS = [name for name, family in FAMILIES.items() if family.kind not in WHOLE]
_IN_PARTS.remove("llama, bare")  # which has no marker: what is JSON alone may be a text


@pytest.mark.parametrize("name", _IN_PARTS)
def test_arguments_are_given_as_they_are_written(name: str) -> None:
    """A text in them is given before it has its end, in parts that go on with each other."""
    answer, reader = FAMILIES[name].answer, _reader(_format(name))
    begun = answer.index("hills") + len("hills ")
    early = [part for piece in answer[:begun] for part in reader.push(piece).calls]
    assert "hi" in "".join(part.arguments for part in early)
    assert all(part.is_open and part.name == "weather" for part in early)
    late = [part for piece in answer[begun:] for part in reader.push(piece).calls]
    parts = [*early, *late, *reader.finish().calls]
    of_first = [part for part in parts if part.id == early[0].id]
    assert len(of_first) > 12 and len({part.id for part in parts}) == 2
    assert [part.is_open for part in of_first] == [True] * (len(of_first) - 1) + [False]
