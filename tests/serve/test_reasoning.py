"""Thoughts at the beginning of answers, however these are cut."""

from __future__ import annotations

import pytest
from serving_cases import read

from edgespec.serve.answer_text import PlainReader
from edgespec.serve.reasoning import ReasoningReader

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
