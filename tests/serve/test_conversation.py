"""Prompts of chats with tools, for templates that know tools and for those that do not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from serving_cases import read

from edgespec.backends.base import AnswerFormat
from edgespec.decode.generation import joined_calls
from edgespec.decode.options import GenerationOptions
from edgespec.serve.chat import ChatRequest, Tools, conversation_of
from edgespec.serve.parsing import ApiError

TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}
OPTIONS = GenerationOptions(max_tokens=8)


class Told:
    """In place of `Prompts`: keeps what a template is told, and writes one text."""

    def __init__(self, text: str = "<user>Hi<assistant>") -> None:
        self.text = text
        self.messages: list[dict[str, Any]] = []
        self.variables: dict[str, Any] = {}

    def text_of(self, messages: Sequence[Any], variables: Mapping[str, Any]) -> str:
        self.messages, self.variables = [dict(one) for one in messages], dict(variables)
        return self.text


def conversation(told: Told, template: str, tools: Tools, *messages: Any) -> Any:
    messages = messages or ({"role": "user", "content": "Hi"},)
    asked = ChatRequest(messages=messages, options=OPTIONS, tools=tools)
    return conversation_of(asked, told, template)  # type: ignore[arg-type]


def test_a_template_that_knows_tools_is_given_them() -> None:
    told = Told()
    found = conversation(told, "{{ tools }}<tool_call>", Tools((TOOL,)))
    assert told.variables == {"tools": [TOOL]}
    assert told.messages == [{"role": "user", "content": "Hi"}]
    assert (found.text, replace(found.options, markers=())) == (told.text, OPTIONS)
    assert found.options.markers == ("</think>", "</tool_call>", "<think>", "<tool_call>")


def test_another_one_gets_them_as_a_text_in_the_system_message() -> None:
    told = Told()
    system = {"role": "system", "content": "Be brief."}
    call = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}
    said = [
        system,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    conversation(told, "{{ messages }}", Tools((TOOL,)), *said)
    first, *rest = told.messages
    assert first["content"].startswith("Be brief.\n\n") and json.dumps(TOOL) in first["content"]
    assert rest == [
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\n2\n</tool_response>"},
    ]
    assert said[0] is system and system["content"] == "Be brief."  # the request's own is left


def test_a_call_that_is_required_is_begun_in_the_prompt_behind_a_closed_thought() -> None:
    told = Told("<user>Hi<assistant><think>\n")
    found = conversation(told, "{{ tools }}<tool_call></think>", Tools((TOOL,), ("add",)))
    assert found.text == "<user>Hi<assistant><think>\n\n</think>\n\n<tool_call>\n"
    schema = json.loads(found.options.json_schema)
    assert schema["properties"]["name"] == {"const": "add"}
    assert schema["required"] == ["name", "arguments"]


def test_a_list_of_calls_has_one_where_no_more_are_wanted() -> None:
    template = "{{ tools }}[TOOL_CALLS]"
    alone = conversation(Told(), template, Tools((TOOL,), ("add",), parallel=False))
    several = conversation(Told(), template, Tools((TOOL,), ("add",)))
    assert json.loads(alone.options.json_schema)["maxItems"] == 1
    assert "maxItems" not in json.loads(several.options.json_schema)


def test_a_thought_is_no_content_whatever_the_template_says() -> None:
    reader = conversation(Told("<assistant>"), "a template without tags", Tools()).make_reader()
    found = read(reader, ["<th", "ink>Hm.</thi", "nk>Yes: <think>"])
    assert found == ("Yes: <think>", "Hm.", [])


def test_a_thought_that_the_prompt_began_is_no_content() -> None:
    found = conversation(Told("<assistant><think>\n"), "</think>", Tools())
    reader = found.make_reader()
    deltas = [reader.push("So it is.</think>\n\nYes."), reader.finish()]
    assert "".join(one.reasoning for one in deltas) == "So it is."
    assert "".join(one.content for one in deltas) == "Yes."


def test_a_thought_that_is_continued_is_no_content() -> None:
    thought = {"role": "assistant", "content": "", "reasoning_content": "So it"}
    user = {"role": "user", "content": "Hi"}
    found = conversation(Told("<assistant><think>So it"), "</think>", Tools(), user, thought)
    reader = found.make_reader()
    deltas = [reader.push(" is.</think>\n\nYes."), reader.finish()]
    assert "".join(one.reasoning for one in deltas).strip() == "is."
    assert "".join(one.content for one in deltas) == "Yes."


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("<user>Hi<assistant><think>\n", ("", "</think>")),
        ("<user>Hi<assistant>", ("<think>", "</think>")),
        ("<user>Hi<assistant><think>\n\n</think>\n\n", None),
    ],
)
def test_a_schema_is_the_answers_and_not_the_thoughts(
    text: str, tags: tuple[str, str] | None
) -> None:
    options = GenerationOptions(json_schema="{}")
    asked = ChatRequest(messages=[{"role": "user", "content": "Hi"}], options=options)
    told: Any = Told(text)
    template = "{{ messages }}<think></think>"
    assert conversation_of(asked, told, template).options.think_tags == tags
    assert conversation_of(asked, told, "{{ messages }}").options.think_tags is None


NAMED = (
    "{{ tools }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}[TOOL_CALLS]"
    "{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_one_call_that_is_required_is_begun_up_to_its_arguments() -> None:
    found = conversation(Told(), NAMED, Tools((TOOL,), ("add",)))
    assert found.text == "<user>Hi<assistant>[TOOL_CALLS]add[ARGS]"
    assert "name" not in json.loads(found.options.json_schema)["properties"]
    reader = found.make_reader()
    deltas = [*map(reader.push, "{}"), reader.finish()]
    calls = joined_calls(call for one in deltas for call in one.calls)
    assert [(call.name, call.arguments) for call in calls] == [("add", "{}")]


def test_of_several_that_are_required_one_is_json_alone_where_its_name_is_none() -> None:
    other = {"type": "function", "function": {"name": "less", "parameters": {}}}
    found = conversation(Told(), NAMED, Tools((TOOL, other), ("add", "less")))
    assert found.text == "<user>Hi<assistant>"
    reader = found.make_reader()
    deltas = [reader.push('{"name": "less", "arguments": {}}'), reader.finish()]
    assert [call.name for one in deltas for call in one.calls] == ["less"]


def test_a_template_that_is_not_told_of_tools_may_still_call_in_its_own_way() -> None:
    found = conversation(Told(), NAMED.removeprefix("{{ tools }}"), Tools((TOOL,)))
    for text in ("[TOOL_CALLS]add[ARGS]{}", '<tool_call>{"name": "add"}</tool_call>'):
        reader = found.make_reader()
        deltas = [reader.push(text), reader.finish()]
        assert [call.name for one in deltas for call in one.calls] == ["add"]


@pytest.mark.parametrize(
    ("opening", "closing", "after"),
    [
        ("<think>", "</think>", ""),
        ("<|START_THINKING|>", "<|END_THINKING|>", ""),
        ("[THINK]", "[/THINK]", ""),
        ("<seed:think>", "</seed:think>", ""),
        ("<mm:think>", "</mm:think>", ""),
        ("<|channel>thought", "<channel|>", ""),
        (
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|start|>assistant<|channel|>final<|message|>",
        ),
    ],
)
def test_a_schema_is_the_answers_in_every_way_to_think(
    opening: str, closing: str, after: str
) -> None:
    """The thought is free up to its end, the form begins then, and a budget ends the thought."""
    options = GenerationOptions(json_schema="{}")
    said = [{"role": "user", "content": "Hi"}]
    asked = ChatRequest(messages=said, options=options, think_budget=3)
    template = f"{{{{ messages }}}}{opening}{closing}"
    told: Any = Told("<user>Hi<|start|>assistant")
    found = conversation_of(asked, told, template)
    assert found.options.think_tags == (opening, closing + after)
    assert found.options.thought is not None and found.options.thought.opening == opening
    assert closing in found.options.thought.forced and after in found.options.thought.forced
    answer = read(found.make_reader(), list(f'{opening}Hm.{closing}{after}{{"a": 1}}'))
    assert answer == ('{"a": 1}', "Hm.", [])
    begun = conversation_of(asked, Told(f"<user>Hi<assistant>{opening}\n"), template)  # type: ignore[arg-type]
    if not after:  # of gpt-oss none begins in the prompt
        assert begun.options.think_tags == ("", closing)
        assert read(begun.make_reader(), list(f"Hm.{closing}{{}}")) == ("{}", "Hm.", [])


FUNCTIONARY = "{{ tools }}>>>${recipient}"


def test_a_prompt_that_ends_in_a_header_is_gone_on_with() -> None:
    found = conversation(Told("<user>Hi<assistant>>>>"), FUNCTIONARY, Tools((TOOL,)))
    expected: dict[str, Any] = {
        "all\nYes.": ("Yes.", "", []),
        "add\n{}": ("", "", [("add", {})]),
        "all\nWell.>>>add\n{}": ("Well.", "", [("add", {})]),
    }
    for answer, parts in expected.items():
        assert read(found.make_reader(), list(answer)) == parts
    alone = conversation(Told("<user>Hi<assistant>>>>"), FUNCTIONARY, Tools())
    assert read(alone.make_reader(), list("all\nYes.")) == ("Yes.", "", [])


def test_a_call_that_is_required_has_one_header() -> None:
    found = conversation(Told("<user>Hi<assistant>>>>"), FUNCTIONARY, Tools((TOOL,), ("add",)))
    assert found.text == "<user>Hi<assistant>>>>add\n"
    assert read(found.make_reader(), list("{}")) == ("", "", [("add", {})])


FORM = GenerationOptions(json_schema="{}")


def with_form(template: str, tools: Tools) -> Any:
    said = [{"role": "user", "content": "Hi"}]
    asked = ChatRequest(messages=said, options=FORM, tools=tools)
    told: Any = Told("<user>Hi<|start|>assistant")
    return conversation_of(asked, told, template)


def test_an_answer_has_its_form_unless_it_is_a_call() -> None:
    found = with_form("{{ tools }}<tool_call>", Tools((TOOL,)))
    assert found.options.answer_format == AnswerFormat("json_schema", "{}", None, "<tool_call>")
    call = '{"name": "add", "arguments": {}}'
    expected: dict[str, Any] = {
        '{"a": 1}': ('{"a": 1}', "", []),
        call: (call, "", []),
        f"<tool_call>{call}</tool_call>": ("", "", [("add", {})]),
    }
    for answer, parts in expected.items():
        assert read(found.make_reader(), list(answer)) == parts
    first = found.make_reader().push('{"a":')
    assert first.content == '{"a":', "a document of a form is not waited for"


def test_a_call_that_is_required_is_the_only_form() -> None:
    asked = ChatRequest(
        messages=[{"role": "user", "content": "Hi"}],
        options=GenerationOptions(regex="a"),
        tools=Tools((TOOL,), ("add",)),
    )
    told: Any = Told()
    options = conversation_of(asked, told, "{{ tools }}<tool_call>").options
    assert options.regex is None and options.json_schema and not options.free_after


@pytest.mark.parametrize("template", [FUNCTIONARY, "{{ tools }}<|channel|><|message|>"])
def test_a_form_beside_tools_that_have_no_marker_of_their_own_is_refused(template: str) -> None:
    with pytest.raises(ApiError, match="a form of the answer is not supported beside tools"):
        with_form(template, Tools((TOOL,)))
