"""Prompts to measure with, two for each of ten tasks, because drafts pay differently by task.

Written for this project. Acceptance depends on how much an answer repeats: of its prompt (edit,
extract, summarize), of itself (lists, code), or of nothing (stories).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from edgespec.errors import UnsupportedError
from edgespec.paths import read_text


class TaskPrompt(NamedTuple):
    """One user message and the task it stands for."""

    task: str
    text: str


_MINUTES = (
    "Minutes of the allotment society, 4 March. Present: Ada Birk, Tomas Lind, Wen Zhao, Rosa "
    "Iglesias, and nine members. 1. The water main to plots 12 to 30 froze in January and burst "
    "near plot 17. Tomas Lind obtained two offers: Kessler Pipes asks 1,840 euros and can start in "
    "April, Nordwerk asks 1,520 euros and can start in June. The members voted for Kessler Pipes, "
    "seven to four with two abstentions, because seedlings need water in May. 2. Rosa Iglesias "
    "reported that the tool shed was broken into twice. A new lock costs 96 euros and was "
    "approved. 3. Wen Zhao offered to hold a course on composting on 21 April at ten in the "
    "morning, free for members, five euros for guests. 4. The summer fair will take place on 12 "
    "July. Ada Birk looks for helpers for the cake stand. The meeting ended at 21:10."
)
_CODE = (
    "class Account:\n"
    "    def __init__(self, owner, balance=0):\n"
    "        self.owner = owner\n"
    "        self.balance = balance\n\n"
    "    def deposit(self, amount):\n"
    "        self.balance = self.balance + amount\n"
    "        return self.balance\n\n"
    "    def withdraw(self, amount):\n"
    "        self.balance = self.balance - amount\n"
    "        return self.balance\n"
)

PROMPTS: tuple[TaskPrompt, ...] = (
    TaskPrompt("writing", "Write a short story about a lighthouse keeper who finds a letter."),
    TaskPrompt("summarize", f"Summarize these minutes in four sentences.\n\n{_MINUTES}"),
    TaskPrompt(
        "edit",
        "Add a docstring to every method and raise ValueError when an amount is negative. Give "
        f"the whole class.\n\n{_CODE}",
    ),
    TaskPrompt("code", "Write a Python function that merges two sorted lists, with a docstring."),
    TaskPrompt(
        "extract",
        "List every date, every person and every sum of money in this text, one on a line.\n\n"
        f"{_MINUTES}",
    ),
    TaskPrompt("question", "Why does bread rise, and why does it stop rising in the oven?"),
    TaskPrompt(
        "reason",
        "A baker makes 12 loaves an hour for 7 hours and sells 61 of them at 3 euros. How many "
        "are left, and how much did she take? Show the steps.",
    ),
    TaskPrompt(
        "translate",
        "Translate into French: The train leaves at nine, but the station is far away, so we "
        "should call a taxi before breakfast.",
    ),
    TaskPrompt(
        "format",
        "Write a JSON list of six fruits with the keys name, colour, sweetness (1 to 5) and "
        "season.",
    ),
    TaskPrompt("advise", "What should I pack for three days of hiking in the rain?"),
    TaskPrompt("writing", "Describe a market square at six in the morning, in the present tense."),
    TaskPrompt(
        "summarize",
        f"What was decided at this meeting? Answer as a numbered list.\n\n{_MINUTES}",
    ),
    TaskPrompt(
        "edit",
        "Rename balance to cents everywhere in this class, add a method transfer(other, amount), "
        f"and give the whole class.\n\n{_CODE}",
    ),
    TaskPrompt("code", "Write a SQL schema for a small library with books, members and loans."),
    TaskPrompt(
        "extract",
        f"Who promised to do what, and by when? Make a table in Markdown.\n\n{_MINUTES}",
    ),
    TaskPrompt("question", "How does a bicycle stay upright? Explain it to a child of ten."),
    TaskPrompt(
        "reason",
        "Three friends share a bill of 87 euros. Ada pays twice as much as Tomas, and Wen pays 7 "
        "euros more than Tomas. How much does each pay? Show the steps.",
    ),
    TaskPrompt(
        "translate",
        "Translate into Spanish: My neighbour grows tomatoes on his balcony and gives us a basket "
        "of them every Sunday in August.",
    ),
    TaskPrompt("format", "Write a weekly meal plan as a Markdown table with seven rows."),
    TaskPrompt("advise", "How can I make a small kitchen feel larger without moving walls?"),
)


def read_prompts(path: Path) -> list[TaskPrompt]:
    """Prompts of a file as Spec-Bench has it: JSON lines with `category` and `turns`.

    The first turn of each is taken.

    Raises:
        UnsupportedError: the file cannot be read, or a line is something else.
    """
    hint = 'each line should be like {"category": "writing", "turns": ["Write a poem."]}'
    lines = read_text(path).split("\n")  # texts may hold other separators
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            question = json.loads(line)
            task, text = question["category"], question["turns"][0]
            text.encode()  # half a surrogate pair is no text
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise UnsupportedError(f"line {number} of {path} is no prompt", hint=hint) from problem
        if not (isinstance(task, str) and isinstance(text, str) and text.strip()):
            raise UnsupportedError(f"line {number} of {path} is no prompt", hint=hint)
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
