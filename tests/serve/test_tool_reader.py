"""What is a call in the text of an answer and what is none, however it is cut.

Whole answers of each family of models are in `test_tool_formats`.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_cases import read

from edgespec.serve.answer_reader import AnswerReader
from edgespec.serve.tool_formats import HERMES, LLAMA, MISTRAL, ToolFormat

NAMES: dict[str, dict[str, object]] = {"weather": {}, "time": {}}


ROME = ("weather", {"city": "Rome"})
CASES: list[tuple[ToolFormat, str, str, list[tuple[str, object]]]] = [
    (HERMES, "Hello.", "Hello.", []),
    (HERMES, '<tool_call>{"name": "time", "arguments": {}}', "", [("time", {})]),
    (HERMES, "a <tool_call> b </tool_call> c", "a <tool_call> b </tool_call> c", []),
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
    (LLAMA, '{"a": 1} is JSON', '{"a": 1} is JSON', []),
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
        assert read(AnswerReader([how], NAMES, most=9), pieces) == (content, "", calls)


TIME = '{"name": "time", "arguments": {}}'
TWICE = [
    (HERMES, f"<tool_call>{TIME}</tool_call>\n" * 2, ""),
    (HERMES, f"Both.\n<tool_call>{TIME}</tool_call> <tool_call>{TIME}", "Both."),
    (HERMES, f"<tool_call>{TIME}</tool_call><tool_call>{TIME[:32]}", ""),  # cut off
    (HERMES, f"{TIME}\n{TIME}", ""),
    (HERMES, f"<tool_call>[{TIME}, {TIME}]</tool_call> Done.", "Done."),
    (MISTRAL, f"[TOOL_CALLS][{TIME}, {TIME}]", ""),
    (LLAMA, f"<|python_tag|>{TIME}; {TIME}", ""),
]


@pytest.mark.parametrize(("how", "text", "content"), TWICE, ids=range(len(TWICE)))
def test_calls_beyond_those_that_may_be_made_are_left_out(
    how: ToolFormat, text: str, content: str
) -> None:
    for pieces in ([text], list(text)):
        found, _, calls = read(AnswerReader([how], NAMES, most=1), pieces)
        assert (found.strip(), calls) == (content, [("time", {})])


@given(st.text(alphabet="ab<>{}[]_ `\n", max_size=40), st.integers(1, 7))
def test_a_text_without_calls_is_kept(text: str, size: int) -> None:
    """But for white space before what is no call."""
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    content, _, calls = read(AnswerReader([HERMES], NAMES, most=9), pieces)
    assert calls == [] and content == text
