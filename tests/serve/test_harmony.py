"""gpt-oss's channels: thoughts, text and calls, however an answer is cut."""

from __future__ import annotations

import pytest
from serving_cases import read

from edgespec.serve.harmony import HarmonyReader

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
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "thought", "calls"), ANSWERS)
def test_an_answer_is_split_by_its_channels(
    text: str, content: str, thought: str, calls: list[tuple[str, object]]
) -> None:
    for pieces in ([text], list(text)):
        assert read(HarmonyReader(("add",), most=9), pieces) == (content, thought, calls)


def test_a_text_that_goes_on_has_no_header() -> None:
    assert read(HarmonyReader((), most=9, begun=True), list("to=x it is.")) == (
        "to=x it is.",
        "",
        [],
    )
