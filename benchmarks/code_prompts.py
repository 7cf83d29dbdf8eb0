"""Prompts for the training text of a code model's drafter, from the sources of Python packages.

    python benchmarks/code_prompts.py .venv/lib/python3.11/site-packages --count 700 \\
        --not-like spec_bench_dev.jsonl > prompts.jsonl
    edgespec draft train model.gguf --data prompts.jsonl

Functions are to be written from their docstrings, and explained, tested, changed or translated;
paragraphs of docstrings are to be summarized or asked about. A prompt that has eight words in a row
in common with a file of `--not-like` is left out.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from exit_prompts import arguments_of, write_prompts

_WRITE = (
    "Write a Python function that does the following: {doc}",
    'Implement this in Python:\n\n{head}\n    """{doc}"""',
    'Complete the following function:\n```python\n{head}\n    """{doc}"""\n```',
    "How would you write a function `{name}` in {language}? {doc}",
    "Write a {language} function `{name}`: {doc}",
    "Write unit tests with pytest for a function described as: {doc}",
)
_CHANGE = (
    "Explain what this code does:\n```python\n{source}\n```",
    "Write a docstring for this function:\n```python\n{source}\n```",
    "Write pytest tests for this:\n```python\n{source}\n```",
    "Refactor this code and explain the changes:\n```python\n{source}\n```",
    "Translate this Python code to {language}:\n```python\n{source}\n```",
    "Is there a bug in this code?\n```python\n{source}\n```",
    "Add type hints to this function:\n```python\n{source}\n```",
    "Rewrite this function to be faster:\n```python\n{source}\n```",
)
_PROSE = (
    "Summarize the following text:\n{text}",
    "What is the main point of this text?\n{text}",
    "Rewrite this in simple words: {text}",
    "{text}\n\nQuestion: what should a user do?",
    "Translate into German: {text}",
    "Give three questions about this text: {text}",
)
_KINDS, _SHARES = ("write", "change", "prose"), (0.45, 0.35, 0.2)
_OTHERS = ("JavaScript", "Go", "Rust", "Java", "C++", "C", "TypeScript", "Bash")
_LANGUAGES = (*6 * ("Python",), *_OTHERS)
_LARGEST_FILE = 300_000  # bytes: larger ones are data


class Function(NamedTuple):
    """One of a package, whose `head` is its first line."""

    name: str
    head: str
    doc: str
    source: str


def functions(folder: Path) -> Iterator[Function]:
    """All in the Python files of a folder, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        try:
            text = path.read_text() if path.stat().st_size < _LARGEST_FILE else ""
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                head = f"def {node.name}({ast.unparse(node.args)}):"
                yield Function(node.name, head, ast.get_docstring(node) or "", source)


def paragraphs(doc: str) -> Iterator[str]:
    """Those of a docstring that are prose."""
    for part in re.split(r"\n\s*\n", doc):
        text = " ".join(part.split())
        if 200 < len(text) < 1200 and text[0].isupper() and ">>>" not in text:
            yield text


def main() -> None:
    """Write prompts to standard output."""
    arguments = arguments_of(__doc__, "of installed packages", 700)
    chance = random.Random(arguments.seed)
    found = list(functions(arguments.folder))
    prose = [text for one in found for text in paragraphs(one.doc)]
    described = [one for one in found if 40 < len(one.doc) < 500 and one.name[:2] != "__"]
    short = [one for one in found if 150 < len(one.source) < 1300]

    def prompt() -> str:
        kind = chance.choices(_KINDS, _SHARES)[0]
        if kind == "prose":
            return chance.choice(_PROSE).format(text=chance.choice(prose))
        one = chance.choice(described if kind == "write" else short)
        words = one._asdict() | {"doc": " ".join(one.doc.split())}
        template = chance.choice(_WRITE if kind == "write" else _CHANGE)
        return template.format(**words, language=chance.choice(_LANGUAGES))

    write_prompts(prompt, arguments)


if __name__ == "__main__":
    main()
