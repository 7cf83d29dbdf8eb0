"""Prompts for the text that drafters are trained on, or that their counts are learned from.

    apt-get download dict-foldoc dict-jargon wordnet-base fortunes-de debian-handbook \\
        gimp-help-en gimp-help-de anarchism
    for package in *.deb; do dpkg -x $package FOLDER; done
    python benchmarks/training_prompts.py mixed FOLDER --not-like DEV.jsonl > prompts.jsonl
    python benchmarks/training_prompts.py code .venv/lib/python3.11/site-packages > prompts.jsonl
    edgespec draft train MODEL -o exit.gguf --data prompts.jsonl

A model that writes its own prompts writes about what it knows. `mixed` has sentences, names and
numbers that it would not have thought of, from Debian's free dictionaries and books: translations
from German, summaries and questions about passages, short questions, arithmetic, and tasks. `code`
is for models of code, from the sources of Python packages: functions are to be written from their
docstrings, and explained, tested, changed or translated; paragraphs of docstrings are to be
summarized or asked about. A prompt that has eight words in a row in common with a file of
`--not-like` is left out, so that nothing is trained on that is measured with.
"""

from __future__ import annotations

import argparse
import ast
import gzip
import html
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from shared import run

_T = TypeVar("_T")
_WORDS_IN_A_ROW = 8


MakeOf = Callable[[Path, random.Random], Callable[[], tuple[str, str]]]


def write_prompts(word: str, folder: str, count: int, make_of: MakeOf) -> None:
    """As many as are wanted, one JSON object a line, none twice or like those of a file."""
    parser = argparse.ArgumentParser(f"training_prompts.py {word}")
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--not-like", type=Path, nargs="*", default=[], metavar="FILE")
    arguments = parser.parse_args()
    make = make_of(arguments.folder, random.Random(arguments.seed))
    forbidden = {row for path in arguments.not_like for row in rows_of_words(path.read_text())}
    seen: set[str] = set()
    while len(seen) < arguments.count:
        kind, text = make()
        if text not in seen and forbidden.isdisjoint(rows_of_words(text)):
            seen.add(text)
            print(json.dumps({"category": kind, "turns": [text]}, ensure_ascii=False))


def rows_of_words(text: str) -> set[tuple[str, ...]]:
    """All rows of so many words of a text."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + _WORDS_IN_A_ROW]) for i in range(len(words) - _WORDS_IN_A_ROW + 1)}


# -- mixed -----------------------------------------------------------------------------------

_NAMES = (
    "Anna Ben Carla David Emma Felix Grace Henry Isla Jack Karen Leo Maria Nina Oscar Paula Rosa "
    "Sam Tina Uma Victor Wendy Yara Zoe Alice Bob Lucy Mike Kevin Ahmed Priya Chen Diego Fatima"
).split()
_ITEMS = (
    "apples oranges pencils books marbles stickers cookies cupcakes eggs roses tickets shirts "
    "bottles cans cards stamps balloons toys chairs pens notebooks candles coins shells plants"
).split()
_JOBS = (
    "baker farmer teacher carpenter painter librarian gardener plumber tailor doctor lawyer chef"
).split()
_TRANSLATION = [
    "Translate German to English: {german}",
    "Translate German to English: {german}",
    "Translate this sentence into English: {german}",
    "{german}\nTranslate to English.",
]
_SUMMARY = [
    "Summarize: {passage:80-400}",
    "Summarize the following text: {passage:80-400}",
    "{passage:80-400}\n\nSummarize this in a few sentences.",
    "Write a summary of this article.\n\n{passage:80-400}",
    "{passage:80-400}\nTL;DR:",
]
_QUESTION = [
    "who was {person}", "when was {person} born", "what is {person} known for",
    "where did {person} live", "where is {place} located", "what country is {place} in",
    "what is the capital of {place}", "how many people live in {place}", "who discovered {place}",
    "when was {place} founded", "when did {thing} happen", "what is {thing}", "who wrote {thing}",
    "where does the word {noun} come from", "what does {noun} mean", "who invented the {noun}",
    "what is the difference between {noun} and {noun}", "what is the largest {noun} in the world",
    "how long does it take to {verb} a {noun}", "which {noun} is found in {place}",
    "who sang the song about {noun}", "who plays {person} in the movie", "who invented {term}",
    "when was {term} first used", "who is the {one:president|king|author|leader} of {place}",
]  # fmt: skip
_ARITHMETIC = [
    "{name} has {number:5-90} {items}. {name} gives away {number:2-40} {items} and then loses "
    "{number:1-5} of them. How many are left?",
    "A {job} sells {items} for ${number:1-12} each. On {one:Monday|Tuesday|Friday} {number:5-60} "
    "{items} are sold, and on the next day twice as many. How much money is earned in total?",
    "{name} works {number:3-9} hours a day for {number:3-6} days a week and earns ${number:9-35} "
    "per hour. How much is that in {number:2-8} weeks?",
    "{name} bought {number:2-9} {items} at ${number:1-9}.{one:50|25} each and {number:2-6} {items} "
    "at ${number:2-15} each, and paid with a ${one:50|100|200} bill. How much is the change?",
    "There are {number:12-60} students in a class. {one:One third|Half|A quarter} of them are "
    "girls, and {number:2-6} of the girls wear glasses. How many girls do not?",
    "A train travels at {number:40-120} miles per hour for {number:2-6} hours, and then at "
    "{number:30-90} miles per hour for {number:1-5} hours. How far does it go altogether?",
    "{name} reads {number:10-40} pages every day. The book has {number:200-600} pages. After "
    "{number:3-9} days, how many pages are left?",
    "A recipe needs {number:2-6} cups of flour for {number:8-24} {one:cookies|muffins|pancakes}. "
    "How many cups does {name} need for {number:30-100}?",
    "{name} is {number:2-6} times as old as {name}. In {number:3-12} years, the sum of their ages "
    "will be {number:40-90}. How old is the younger one now?",
    "A tank holds {number:100-900} liters of water. It leaks {number:2-9} liters every hour, and "
    "{name} adds {number:10-50} liters once a day. How much is in it after {number:2-6} days?",
    "{name} scored {number:60-99}, {number:60-99}, and {number:60-99} on three tests. What score "
    "on the fourth test makes an average of {number:75-92}?",
    "A shirt costs ${number:15-80}. It is on sale for {one:10|15|20|25|30}% off, and {name} has a "
    "coupon for another ${number:2-9}. What do {number:2-4} shirts cost?",
    "A garden is {number:5-30} feet wide and {number:10-60} feet long. What does a fence around "
    "it cost at ${number:2-15} per foot?",
    "{name} had ${number:100-500}, spent {one:half|a third|a fifth} of it on {items} and "
    "${number:5-40} on {items}. How much money is left?",
    "In a zoo there are {number:5-30} monkeys, {number:2-4} times as many birds, and {number:3-20} "
    "fewer snakes than birds. How many animals are there?",
    "{name} runs {number:2-8} miles on weekdays and {number:5-15} miles on each day of the "
    "weekend. How many miles is that in {number:2-6} weeks?",
    "Each box holds {number:6-24} {items}. {name} has {number:4-20} boxes and gives {number:1-3} "
    "of them to {name}, who already had {number:3-30} {items}. How many does the other have now?",
    "{name} and {name} share {number:30-150} {items} so that one gets {number:2-12} more than the "
    "other. How many does each get?",
    "A phone plan costs ${number:15-50} per month and {number:5-25} cents for each message over "
    "{number:100-400}. {name} sent {number:410-700} messages in {one:May|June}. What is the bill?",
    "A car uses {number:5-12} gallons of gas for {number:120-400} miles. Gas costs ${number:2-5} "
    "per gallon. How much does a trip of {number:300-900} miles cost?",
    "{name} bakes {number:2-8} pies, each cut into {number:6-12} slices. {number:10-40} guests eat "
    "{one:one slice|two slices} each. How many slices are left over, or how many are missing?",
    "A bus starts with {number:10-50} passengers. At the first stop {number:3-9} get off and "
    "{number:2-12} get on. At the second one half of them get off. How many are on the bus now?",
    "If {number:2-9}x + {number:1-20} = {number:21-99}, what is x?",
]
_PASSAGES = [
    "Context: {notes}\n\nQuestion: what is {noted}?\nAnswer:",
    "Answer the question from these passages.\n\n{notes}\n\nwho or what is {noted}",
    "{notes}\n\nBased on the text above, what is known about {noted}?",
    "Here is some information:\n{notes}\nQuestion: what was {noted}?",
]
_TASK = [
    "Write a {one:short story|poem|blog post|letter|speech|news article|travel guide} about {topic}"
    "{one:| and {topic}| in three paragraphs}.",
    "Draft {one:a professional email|an invitation|a complaint} to a customer about {topic}.",
    "Pretend you are {person}. {one:Give advice on|Explain your view of|Describe} {topic}.",
    "You are a {job}. {one:How would you explain|What do you recommend about} {topic}?",
    "Explain {topic} {one:in simple terms|with an example|and why it matters}.",
    "What are the {one:main causes|advantages and disadvantages|key features|effects} of {topic}?",
    "Compare {topic} with {topic}.", "Describe the relationship between {topic} and {topic}.",
    "Discuss the role of {topic} in {one:history|society|science|art|politics}.",
    "Extract all {one:names|dates|places|key terms} from the following text and "
    "{one:list them|return them as JSON|put them in a table}:\n{passage:40-160}",
    "Which word does not belong: {noun}, {noun}, {noun}, {place}?",
    "Imagine a world where {noun} is {one:free|forbidden|alive}. What would happen?",
    "How do I {verb} {one:a|the|my} {noun}?", "Define {topic}.", "What is {topic}?",
    "Give me {number:3-10} {one:ideas for|tips about|facts about|questions about} {topic}.",
    "Write a quiz about {topic} with answers.",
    "Create a {one:weekly plan|checklist|timeline|budget} for {topic}.",
    "Rewrite this in a more formal way: {passage:20-50}",
]  # fmt: skip
_CODE = [
    "Write a {one:Python|C++|JavaScript|Java} function that {one:sorts a list of|counts the|finds "
    "the longest|removes duplicates from|prints all|searches for a} {noun}{one:| names| values}.",
    "Implement {one:binary search|a linked list|a stack|quick sort|a prime test|a hash table|"
    "string reversal|a simple calculator} in {one:Python|C|Java|Go} and explain it.",
    "Fix the bug in this code:\n```python\ndef {one:total|count|find}_{noun}(items):\n"
    "    result = 0\n    for item in items:\n        result = item\n    return {one:result|item}\n"
    "```",
    "Write a {one:Python|Java|C++|Go|Rust} program that "
    "{one:reads|counts|compares|renames|merges} {one:all CSV files in a folder|the lines "
    "of a log file|two JSON files|the words of a book} "
    "and {one:prints a table|writes the result to a file|reports errors|shows the ten largest}.",
    "Write a function to {one:find the shortest path in|reverse|rotate|balance|flatten|clone} a "
    "{one:graph|binary tree|matrix|linked list|nested list|queue}.",
    "Write {one:a web page in HTML|a CSS style sheet|a form with JavaScript} for {topic}.",
    "Write an SQL query that {one:lists|counts|sums up|deletes} the {noun} of each {noun}.",
    "Given an array of {one:integers|strings|intervals|points}, {one:return the indices of|count|"
    "merge|sort} those that {one:overlap|occur twice|add up to a target|are closest}. What is the "
    "time complexity?",
    "Explain what this code does:\n```python\n{one:while|if} {noun} > {number:0-9}:\n"
    "    {noun} = {noun} {one:+|-|//|%} {number:1-9}\n    print({noun})\n```",
    "Write a class in {one:Python|Java|TypeScript} that models a {noun} with {number:2-5} methods, "
    "and show how it is used.",
    "Write unit tests for a function that {one:validates|parses|formats|encrypts} a {noun}.",
]
# Of a hundred prompts.
_KINDS = {
    "translation": (_TRANSLATION, 13), "summary": (_SUMMARY, 17), "question": (_QUESTION, 14),
    "arithmetic": (_ARITHMETIC, 14), "passages": (_PASSAGES, 14), "task": (_TASK, 19),
    "code": (_CODE, 9),
}  # fmt: skip


class Sources:
    """What stands in the packages, unpacked into `folder`."""

    def __init__(self, folder: Path) -> None:
        share = folder / "usr/share"
        fortunes = share / "games/fortunes/de/zitate"
        self.german = [text for text in _fortunes(fortunes) if 30 < len(text) < 400]
        for text in _paragraphs(share / "gimp/2.0/help/de"):
            self.german += [one for one in re.split(r"(?<=[.!?]) ", text) if 50 < len(one) < 260]
        books = [*_paragraphs(share / "doc/debian-handbook/html/en-US")]
        self.prose = [text for text in books if len(text) > 250]
        self.prose += _paragraphs(share / "gimp/2.0/help/en")
        essays = _paragraphs(share / "doc/anarchism/html")
        self.prose += [text for text in essays if len(text) > 250]
        terms = re.findall(
            r"\n\n([A-Za-z][^\n]{2,40})\n\n((?:   [^\n]+\n\n?)+)", _book(share, "foldoc")
        )
        self.terms = [(term, _plain(text)) for term, text in terms if len(text) > 150]
        entries = re.findall(r"\n\n((?:    [^\n]+\n)+)", _book(share, "jargon"))
        self.prose += [_plain(text) for text in entries if len(text) > 250]
        self.people: list[tuple[str, str]] = []
        self.places: list[tuple[str, str]] = []
        self.things: list[tuple[str, str]] = []
        self.nouns: list[str] = []
        self.phrases: list[str] = []
        for line in _lines(share / "wordnet/data.noun"):
            self._add_noun(line)
        verbs = _lines(share / "wordnet/data.verb")
        self.verbs = [line.split()[4].replace("_", " ") for line in verbs]

    def _add_noun(self, line: str) -> None:
        """One line of WordNet: `@i` marks what there is one of; 18 are people and 15 places."""
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
        word, gloss = max(words, key=len), gloss.strip().split('; "')[0]
        if " @i " in head:
            kinds = {"18": self.people, "15": self.places}
            kinds.get(fields[1], self.things).append((word, gloss))
        elif " " in word:
            self.phrases.append(word)
        elif 4 < len(word) < 13:
            self.nouns.append(word)


class Fields:
    """What the fields of a template become, each time something else."""

    def __init__(self, sources: Sources, chance: random.Random) -> None:
        self._random = chance
        self._noted: list[str] = []
        self._of: dict[str, Callable[[], str]] = {
            "german": lambda: self._one(sources.german),
            "person": lambda: self._one(sources.people)[0],
            "place": lambda: self._one(sources.places)[0],
            "thing": lambda: self._one(sources.things)[0],
            "term": lambda: self._one(sources.terms)[0],
            "noun": lambda: self._one(sources.nouns),
            "verb": lambda: self._one(sources.verbs),
            "topic": self._topic,
            "name": lambda: self._one(_NAMES),
            "items": lambda: self._one(_ITEMS),
            "job": lambda: self._one(_JOBS),
            "notes": self._notes,
            "noted": lambda: self._one(self._noted),
        }
        self._sources = sources

    def filled(self, template: str) -> str:
        """The template with all its fields filled, inner ones first."""
        while (field := re.search(r"{(\w+)(?::([^{}]*))?}", template)) is not None:
            name, detail = field.groups()
            value = self._with(name, detail) if detail is not None else self._of[name]()
            template = template[: field.start()] + value + template[field.end() :]
        return template

    def prompt(self) -> tuple[str, str]:
        """A kind, as often as it is wanted, and a prompt of it."""
        weights = [weight for _, weight in _KINDS.values()]
        kind = self._random.choices(list(_KINDS), weights)[0]
        return kind, self.filled(self._one(_KINDS[kind][0]))

    def _with(self, name: str, detail: str) -> str:
        if name == "one":
            return self._one(detail.split("|"))
        low, high = map(int, detail.split("-"))
        number = self._random.randint(low, high)
        return str(number) if name == "number" else self._passage(number)

    def _one(self, values: Sequence[_T]) -> _T:
        return self._random.choice(values)

    def _topic(self) -> str:
        sources = self._sources
        named = self._one((sources.people, sources.places, sources.things, sources.terms))
        words = self._one((sources.nouns, sources.phrases))
        return self._one(words) if self._random.random() < 1 / 3 else self._one(named)[0]

    def _passage(self, num_words: int) -> str:
        words: list[str] = []
        while len(words) < num_words:
            texts = (self._one(self._sources.prose), self._one(self._sources.terms)[1])
            words += self._one(texts).split()
        return re.sub(r"[{}]", "", " ".join(words[: num_words * 7 // 5]))

    def _notes(self) -> str:
        self._noted, notes = [], []
        for _ in range(self._random.randint(2, 5)):
            sources = self._sources
            word, text = self._one(self._one((sources.people, sources.things, sources.terms)))
            self._noted.append(re.sub(r"[{}]", "", word))
            notes.append(f"{word}: {text[:500]} {self._passage(self._random.randint(10, 50))}")
        return re.sub(r"[{}]", "", "\n".join(notes))


def mixed() -> None:
    """Prompts of many kinds, to standard output."""
    where = "where the packages were unpacked"
    write_prompts(
        "mixed", where, 9000, lambda folder, chance: Fields(Sources(folder), chance).prompt
    )


def _lines(path: Path) -> Iterator[str]:
    """Entries of a file of WordNet, without its licence."""
    for line in path.read_text(errors="replace").splitlines():
        if not line.startswith("  "):
            yield line


def _fortunes(path: Path) -> Iterator[str]:
    for part in path.read_text(errors="replace").split("\n%\n"):
        yield " ".join(re.split(r"\n\s*--", part)[0].split())


def _paragraphs(folder: Path) -> Iterator[str]:
    """What stands in paragraphs of HTML files."""
    for path in sorted(folder.rglob("*.html")):
        found = re.findall(
            r"<(?:p|dd|li)[^>]*>(.*?)</(?:p|dd|li)>", path.read_text(errors="replace"), re.DOTALL
        )
        for part in found:
            text = " ".join(html.unescape(re.sub(r"<[^>]+>", "", part)).split())
            if 60 < len(text) < 1200:
                yield re.sub(r"[{}]", "", text)


def _book(share: Path, name: str) -> str:
    with gzip.open(share / f"dictd/{name}.dict.dz", "rt", errors="replace") as file:
        return file.read()


def _plain(text: str) -> str:
    return " ".join(re.sub(r"[{}]|\(\d{4}-\d\d-\d\d\)|<[a-z, /]+>", "", text).split())


# -- code ------------------------------------------------------------------------------------

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
_CODE_KINDS, _SHARES = ("write", "change", "prose"), (0.45, 0.35, 0.2)
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


def code() -> None:
    """Prompts for a model of code, to standard output."""
    write_prompts("code", "of installed packages", 700, _code_prompts)


def _code_prompts(folder: Path, chance: random.Random) -> Callable[[], tuple[str, str]]:
    found = list(functions(folder))
    prose = [text for one in found for text in paragraphs(one.doc)]
    described = [one for one in found if 40 < len(one.doc) < 500 and one.name[:2] != "__"]
    short = [one for one in found if 150 < len(one.source) < 1300]

    def prompt() -> tuple[str, str]:
        kind = chance.choices(_CODE_KINDS, _SHARES)[0]
        if kind == "prose":
            return kind, chance.choice(_PROSE).format(text=chance.choice(prose))
        one = chance.choice(described if kind == "write" else short)
        words = one._asdict() | {"doc": " ".join(one.doc.split())}
        template = chance.choice(_WRITE if kind == "write" else _CHANGE)
        return kind, template.format(**words, language=chance.choice(_LANGUAGES))

    return prompt


if __name__ == "__main__":
    run(__doc__, mixed=mixed, code=code)
