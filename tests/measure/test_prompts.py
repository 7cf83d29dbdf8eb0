"""Prompts in the form of Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgespec.errors import UnsupportedError
from edgespec.measure.prompts import PROMPTS, TaskPrompt, first_of_each_task, read_prompts


def test_prompts_in_the_form_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"question_id": 1, "category": "qa", "turns": ["Who?", "And then?"]},
        {"category": "qa", "turns": ["Where?"]},
        {"category": "math", "turns": ["1 + 1?"]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    prompts = read_prompts(path)
    assert prompts == [TaskPrompt("qa", "Who?"), TaskPrompt("qa", "Where?"),
                       TaskPrompt("math", "1 + 1?")]  # fmt: skip
    assert first_of_each_task(prompts, 1) == [prompts[0], prompts[2]]


def test_only_line_ends_end_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    text = "one\u2028two\x85three"
    path.write_bytes(
        json.dumps({"category": "qa", "turns": [text]}, ensure_ascii=False).encode() + b"\r\n"
    )
    assert read_prompts(path) == [TaskPrompt("qa", text)]


@pytest.mark.parametrize(
    "line", ["nonsense", "[]", '{"category": "qa"}', '{"category": 1, "turns": ["x"]}',
             '{"category": "qa", "turns": ["half \\ud800"]}',
             '{"category": "qa", "turns": []}', '{"category": "qa", "turns": [" "]}']
)  # fmt: skip
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "qa", "turns": ["Who?"]}\n' + line)
    with pytest.raises(UnsupportedError, match="line 2") as caught:
        read_prompts(path)
    assert "category" in caught.value.hint


def test_lists_of_other_programs_are_read(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"category": "qa", "turns": ["Wo?"]}\r\n', encoding="utf-16", newline="")
    assert read_prompts(path) == [TaskPrompt("qa", "Wo?")]


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")


def test_the_built_in_prompts_are_two_of_each_task_in_halves() -> None:
    half = len(PROMPTS) // 2
    first, second = ([prompt.task for prompt in part] for part in (PROMPTS[:half], PROMPTS[half:]))
    assert first == second and len(set(first)) == 10
    assert len({prompt.text for prompt in PROMPTS}) == 20
