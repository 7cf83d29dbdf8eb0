"""Prompts to measure with, two for each of ten tasks, because drafts pay differently by task.

Those of `prompts.jsonl` were written for this project. Acceptance depends on how much an answer
repeats: of its prompt (edit, extract, summarize), of itself (lists, code), or of nothing (stories).
"""

from __future__ import annotations

import json
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import UnsupportedError
from edgespec.paths import read_text


class TaskPrompt(NamedTuple):
    """One user message and the task it stands for."""

    task: str
    text: str


def read_prompts(path: Path) -> list[TaskPrompt]:
    """Prompts of a file as Spec-Bench has it: JSON lines with `category` and `turns`.

    The first turn of each is taken.

    Raises:
        UnsupportedError: the file cannot be read, or a line is something else.
    """
    return _prompts_of(read_text(path), str(path))


def _prompts_of(document: str, name: str) -> list[TaskPrompt]:
    hint = 'each line should be like {"category": "writing", "turns": ["Write a poem."]}'
    lines = document.split("\n")  # texts may hold other separators
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            task, text = question["category"], question["turns"][0]
            text.encode()  # half a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise UnsupportedError(f"line {number} of {name} is no prompt", hint=hint) from problem
        if not (isinstance(task, str) and isinstance(text, str) and text.strip()):
            raise UnsupportedError(f"line {number} of {name} is no prompt", hint=hint)
        prompts.append(TaskPrompt(task, text))
    return prompts


def first_of_each_task(prompts: list[TaskPrompt], most: int) -> list[TaskPrompt]:
    """At most `most` prompts of each task, in the order they come in."""
    taken: Counter[str] = Counter()
    kept = []
    for prompt in prompts:
        taken[prompt.task] += 1
        if taken[prompt.task] <= most:
            kept.append(prompt)
    return kept


_BUILT_IN = "prompts.jsonl"
PROMPTS = tuple(
    _prompts_of(files(__package__).joinpath(_BUILT_IN).read_text(encoding="utf-8"), _BUILT_IN)
)
