"""The parts of answers, however these are cut: thoughts in tags, and gpt-oss's channels."""

from __future__ import annotations

import pytest
from serving_cases import read

from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.tool_formats import HARMONY, HERMES, format_of, think_tags

THOUGHTS = [
    ("<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
    ("Yes.", "Yes.", ""),
    ("<think>Hm", "", "Hm"),
    ("<thin", "<thin", ""),
    ("\n\n<think>a </b></think>c", "c", "a </b>"),
    ("", "", ""),
]


@pytest.mark.parametrize(("text", "content", "thought"), THOUGHTS)
def test_thoughts_are_split_off(text: str, content: str, thought: str) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerReader(), pieces) == (content, thought, [])


LOOK = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
UNCLOSED = [
    (f"<think>\nI must look.\n{LOOK}", "", "I must look.", ["look"]),
    (f"<think>\nI must look.\n{LOOK}\n{LOOK}", "", "I must look.", ["look", "look"]),
    (f"<think>\nA <tool_call> it is.\n{LOOK}", "", "A <tool_call> it is.", ["look"]),
    ("<think>\nA <tool_call> it is.", "", "A <tool_call> it is.", []),
    (f"<think>\n{LOOK.replace('look', 'other')}", "", LOOK.replace("look", "other"), []),
    # What ends later was thought, also where a budget ended it within the call.
    (f"<think>\nMaybe {LOOK}?\n</think>\n\nNo.", "No.", f"Maybe {LOOK}?", []),
    (f"<think>\n{LOOK[:38]}\n</think>\n\nNo.", "No.", LOOK[:38], []),
]


@pytest.mark.parametrize(("text", "content", "thought", "names"), UNCLOSED)
@pytest.mark.parametrize("within", [False, True])
def test_a_call_ends_a_thought_that_nothing_else_ends(
    text: str, content: str, thought: str, names: list[str], within: bool
) -> None:
    text = text.removeprefix("<think>") if within else text
    for pieces in ([text], list(text)):
        reader = AnswerReader([HERMES], {"look": {}}, most=9, within=within)
        found, thoughts, calls = read(reader, pieces)
        assert (found, thoughts, [name for name, _ in calls]) == (content, thought, names)


def test_a_thought_may_have_begun_in_the_prompt() -> None:
    assert read(AnswerReader(within=True), list("Hm.</think>Yes.")) == ("Yes.", "Hm.", [])


@pytest.mark.parametrize(
    "text",
    [
        "<|START_THINKING|>Hm.<|END_THINKING|>Yes.",
        "[THINK]Hm.[/THINK]Yes.",
        "<seed:think>\nHm.\n</seed:think>\n\nYes.",
        "<mm:think>Hm.</mm:think>Yes.",
        "<|channel>thought\nHm.\n<channel|>Yes.",
        "<think>Hm.</think>Yes.",
    ],
)
def test_thoughts_stand_between_the_tags_of_the_template(text: str) -> None:
    """A template writes the tags of thoughts that it is given."""
    template = text.replace("Hm.", "{{ m.reasoning_content }}")
    tags = think_tags(template, [format_of(template)])
    for pieces in ([text], list(text)):
        assert read(AnswerReader(tags=tags), pieces) == ("Yes.", "Hm.", [])


ANSWERS = [
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     "Yes.", "Hm.", []),
    ("<|channel|>final<|message|>1 < 2 <|x", "1 < 2 <|x", "", []),
    ("<|channel|>analysis<|message|>Hm", "", "Hm", []),
    ("<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>comm", "", "Hm.", []),
    ("Plain text.", "Plain text.", "", []),
    ('{"a": 1}', '{"a": 1}', "", []),
    ("", "", "", []),
    ("<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.add <|constrain|>json<|message|>{"a": "<|end|>"}',
     "", "So.", [("add", {"a": "<|end|>"})]),
    ("<|channel|>commentary to=functions.add<|message|>", "", "", [("add", {})]),
    ("<|channel|>commentary to=functions.other<|message|>{}", "{}", "", []),
    ("to be" + " or not" * 200, "to be" + " or not" * 200, "", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "thought", "calls"), ANSWERS)
def test_an_answer_is_split_by_its_channels(
    text: str, content: str, thought: str, calls: list[tuple[str, object]]
) -> None:
    for pieces in ([text], list(text)):
        reader = AnswerReader([HARMONY], {"add": {}}, most=9)
        assert read(reader, pieces) == (content, thought, calls)


def test_a_text_that_goes_on_has_no_header() -> None:
    reader = AnswerReader([HARMONY], most=9, is_text=True)
    assert read(reader, list("to=x it is.")) == ("to=x it is.", "", [])
