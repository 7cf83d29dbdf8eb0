"""Calls of tools and thoughts in the texts of answers, however they are cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgespec.serve.answer_text import PlainReader, Reader
from edgespec.serve.reasoning import ReasoningReader
from edgespec.serve.shapes import Delta
from edgespec.serve.tool_formats import HERMES, LLAMA, MISTRAL, ToolFormat, format_of
from edgespec.serve.tool_reader import ToolReader

NAMES = ("weather", "time")


def read(reader: Reader, pieces: list[str]) -> tuple[str, str, list[tuple[str, object]]]:
    """Content, reasoning and calls."""
    deltas: list[Delta] = [reader.push(piece) for piece in pieces]
    deltas.append(reader.finish())
    calls = [(call.name, json.loads(call.arguments)) for one in deltas for call in one.calls]
    return "".join(d.content for d in deltas), "".join(d.reasoning for d in deltas), calls


ROME = ("weather", {"city": "Rome"})
CASES: list[tuple[ToolFormat, str, str, list[tuple[str, object]]]] = [
    (HERMES, "Hello.", "Hello.", []),
    (
        HERMES,
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "",
        [ROME],
    ),
    (
        HERMES,
        'Let me look.\n<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>\n'
        '<tool_call>{"name": "time", "arguments": {}}</tool_call>',
        "Let me look.",
        [ROME, ("time", {})],
    ),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [("time", {})]),
    (HERMES, "a <tool_call> b </tool_call> c", "a<tool_call> b </tool_call> c", []),
    (HERMES, "1 < 2 and <tool", "1 < 2 and <tool", []),
    (HERMES, '{"name": "weather", "arguments": {"city": "Rome"}}', "", [ROME]),
    (HERMES, '{"name": "unknown", "arguments": {}}', '{"name": "unknown", "arguments": {}}', []),
    (
        HERMES,
        '```json\n{"name": "weather", "arguments": {"city": "Rome"}}\n```',
        "",
        [ROME],
    ),
    (HERMES, '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    (HERMES, "```python\nprint()\n```", "```python\nprint()\n```", []),
    (HERMES, "``", "``", []),
    (LLAMA, '{"name": "weather", "parameters": {"city": "Rome"}}', "", [ROME]),
    (
        LLAMA,
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Rome"}}; '
        '{"name": "time", "parameters": {}}',
        "",
        [ROME, ("time", {})],
    ),
    (LLAMA, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
    (MISTRAL, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}]', "", [ROME]),
    (MISTRAL, '[{"name": "time", "arguments": {}, "id": "x"}]', "", [("time", {})]),
    (MISTRAL, "[1] is a footnote", "[1] is a footnote", []),
    (
        LLAMA,
        '{"type": "function", "function": {"name": "time", "parameters": {}}}',
        "",
        [("time", {})],
    ),
]


@pytest.mark.parametrize(("how", "text", "content", "calls"), CASES)
def test_calls_are_found_whole_and_character_by_character(
    how: ToolFormat, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    for pieces in ([text], list(text)):
        assert read(ToolReader(how, NAMES, most=9), pieces) == (content, "", calls)


def test_no_more_calls_than_are_wanted() -> None:
    text = '<tool_call>{"name": "time", "arguments": {}}</tool_call>' * 2
    content, _, calls = read(ToolReader(HERMES, NAMES, most=1), [text])
    assert calls == [("time", {})]
    assert content == '<tool_call>{"name": "time", "arguments": {}}</tool_call>'


@given(st.text(alphabet="ab<>{}[]_ `\n", max_size=40), st.integers(1, 7))
def test_a_text_without_calls_is_kept(text: str, size: int) -> None:
    """But for white space before what is no call."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    content, _, calls = read(ToolReader(HERMES, NAMES, most=9), pieces)
    assert calls == [] and content == text


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
        found = read(ReasoningReader(PlainReader(), within=False), pieces)
        assert found == (content, thought, [])


def test_a_thought_may_have_begun_in_the_prompt() -> None:
    found = read(ReasoningReader(PlainReader(), within=True), list("Hm.</think>Yes."))
    assert found == ("Yes.", "Hm.", [])


def test_formats_are_known_by_their_templates() -> None:
    assert format_of("... <tool_call> ...") is HERMES
    assert format_of("[AVAILABLE_TOOLS] [TOOL_CALLS]") is MISTRAL
    assert format_of("<|start_header_id|>") is LLAMA
    assert format_of("{{ messages }}") is HERMES
