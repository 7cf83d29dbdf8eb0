"""Prompts for learning how often drafts hold, from texts that every Python installation has.

Passages are descriptions of installed packages and docstrings; code is functions of the standard
library. None of them are prompts of a benchmark. What people ask beside them (stories, advice,
sums, translations) is made from short lists.
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from importlib.metadata import distributions
from pathlib import Path

_TOPICS = (
    "a lighthouse keeper who collects storms",
    "moving to a small town",
    "the first day at a new job",
    "a garden on a balcony",
    "how bread is made",
    "the water cycle",
    "learning to play the violin at fifty",
    "black holes",
    "the French Revolution",
    "a city without cars",
    "vaccines and how they work",
    "why languages die out",
    "a train journey across mountains",
    "saving money as a student",
    "the history of chess",
    "photosynthesis",
    "recycling of batteries",
    "a robot that learns to paint",
)
_TASKS = (
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Explain {topic} to a ten-year-old.",
    "Write an email to a friend about {topic}.",
    "You are a grumpy old sailor. Tell me about {topic}.",
    "Pretend to be a professor of history and give a talk about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "List five questions that somebody may have about {topic}, with answers.",
    "Make a table of facts about {topic}.",
    "Give me a plan of a week for {topic}, day by day.",
)
_QUESTIONS = (
    "what is the tallest mountain in South America",
    "who painted the ceiling of the Sistine Chapel",
    "how many bones are there in a human hand",
    "when did the Berlin Wall fall",
    "what is the boiling point of ethanol",
    "which planet has the most moons",
    "who wrote the novel Middlemarch",
    "why do cats purr",
    "what does a notary do",
    "where does the river Danube end",
)
_SUMS = (
    "{name} has {a} {things}, buys {b} more and gives {c} away. How many are left?",
    "A box holds {a} {things} and costs ${b}. {name} buys {c} boxes. What does each one cost?",
    "{name} walks {a} minutes to school and {b} minutes back, {c} days a week. How long is that?",
    "Solve for x: {a}x + {b} = {c}. Show your steps.",
    "What is {a} percent of {b}{c}? Show the calculation.",
)
_SENTENCES = (
    "Der Zug nach Hamburg hat heute eine halbe Stunde Verspätung .",
    "Die Stadt will im nächsten Jahr drei neue Schulen bauen .",
    "Wir haben gestern Abend lange über das Wetter gesprochen .",
    "Le musée est fermé le lundi et les jours de fête .",
    "Mes parents habitent une petite maison près de la mer .",
    "El médico me dijo que bebiera más agua cada día .",
    "La biblioteca abre a las nueve y cierra a las ocho .",
    "I left my umbrella on the bus this morning.",
    "The committee will meet again at the end of the month.",
    "She asked whether the shop was open on Sundays.",
)
_LANGUAGES = ("English", "German", "French", "Spanish")
_ABOUT_PASSAGES = (
    "Summarize the following text.\n\n{passage}",
    "{passage}\n\nTL;DR:",
    "Rewrite this text in simpler words:\n\n{passage}",
    "Correct the grammar of this text and print it again:\n\n{passage}",
    "Context: {passage}\n\nQuestion: What is this text about, and whom is it for?\nAnswer:",
    "Read these passages.\n\n{passage}\n\n{passage}\n\nWhat do they have in common?",
    "List all names, numbers and places in this text as JSON.\n\n{passage}",
)
_ABOUT_CODE = (
    "Add type hints to this function and print it whole:\n\n```python\n{code}\n```",
    "Explain what this code does, line by line:\n\n{code}",
    "Rename the first argument to `value` in this code:\n\n```python\n{code}\n```",
    "Write unit tests for this function:\n\n{code}",
    "Find the bug in this code, if there is one:\n\n{code}",
    "Write a Python function like this one that also logs its arguments:\n\n{code}",
)
_NAMES = ("Anna", "Ben", "Chen", "Diego", "Fatima", "Priya")
_THINGS = ("apples", "pencils", "stamps", "candles", "tickets")
_PASSAGE = (300, 2400)  # characters
_CODE = (200, 1600)


def prior_prompts(count: int, seed: int) -> list[tuple[str, str]]:
    """Some (kind, prompt), every kind as often."""
    draw = random.Random(seed)
    passages, code = list(_passages()), list(_functions())
    draw.shuffle(passages)
    draw.shuffle(code)
    makers = {
        "task": lambda: draw.choice(_TASKS).format(topic=draw.choice(_TOPICS)),
        "question": lambda: draw.choice(_QUESTIONS),
        "sum": lambda: _sum(draw),
        "translation": lambda: _translation(draw),
        "passage": lambda: _filled(draw, _ABOUT_PASSAGES, "{passage}", passages),
        "code": lambda: _filled(draw, _ABOUT_CODE, "{code}", code),
    }
    kinds = list(makers)
    return [(kind, makers[kind]()) for kind in (kinds[i % len(kinds)] for i in range(count))]


def _sum(draw: random.Random) -> str:
    a, b, c = (draw.randint(2, 60) for _ in range(3))
    names = {"name": draw.choice(_NAMES), "things": draw.choice(_THINGS)}
    return draw.choice(_SUMS).format(a=a, b=b, c=c, **names)


def _translation(draw: random.Random) -> str:
    return f"Translate to {draw.choice(_LANGUAGES)}: {draw.choice(_SENTENCES)}"


def _filled(draw: random.Random, forms: Sequence[str], hole: str, texts: list[str]) -> str:
    """A form whose holes hold one text each, none of them used again."""
    form = draw.choice(forms)
    while hole in form:
        form = form.replace(hole, texts.pop(), 1)
    return form


def _passages() -> Iterator[str]:
    """A few paragraphs of prose at a time."""
    low, high = _PASSAGE
    for distribution in sorted(distributions(), key=lambda one: one.metadata["Name"] or ""):
        *_, text = (distribution.read_text("METADATA") or "").partition("\n\n")
        prose = [" ".join(part.split()) for part in text.split("\n\n")]
        prose = [part for part in prose if len(part) > 80 and not re.search(r"[<>|`{}=]", part)]
        for first in range(0, len(prose), 5):
            passage = "\n\n".join(prose[first : first + 5])[:high]
            if len(passage) >= low:
                yield passage


def _functions() -> Iterator[str]:
    """Functions of the standard library."""
    low, high = _CODE
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        source = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(source)):
            code = ast.get_source_segment(source, node) or "" if _is_function(node) else ""
            if low <= len(code) <= high:
                yield code


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)
