"""How often drafts hold, learned from recorded answers: what a drafter begins with.

python benchmarks/prior.py record MODEL --out smollm2.jsonl [--count 240]
python benchmarks/prior.py record MODEL --prompts FILE --temperature 0.8 --out sampled.jsonl
python benchmarks/prior.py learn smollm2.jsonl sampled.jsonl --out edge/drafting/priors.json
python benchmarks/prior.py compare smollm2.jsonl qwen.jsonl --on DEV_RECORDING --first 39
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import random
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from time import perf_counter
from typing import Any

from replay import _curve, _replay
from shared import run

from edgespec.backends.llama.batch import Batch
from edgespec.backends.llama.context import LlamaContext, LlamaSettings
from edgespec.drafting.calibration import Calibration, Counts
from edgespec.drafting.drafters import suffix
from edgespec.drafting.drafters.combined import CombinedDrafter
from edgespec.drafting.drafters.suffix import VERSION, SuffixDrafter, cautious
from edgespec.memory.device.host import usable_cores
from edgespec.models.chat import prompt_text
from edgespec.models.spec import read_model_spec
from edgespec.sampling.params import SamplingParams
from edgespec.sampling.sampling import Sampler

# -- learn and compare -----------------------------------------------------------------------

_MOST = 1000.0  # tries of a cell that are written: more say no more
_LEAST = 2.0


class Watched(Calibration):
    """Counts that keep what was counted, and how likely it had seemed."""

    counted: list[tuple[int, bool, float]]

    def count(self, cell: int, hit: bool) -> None:
        chance = min(max(self.probability(cell), 1e-3), 1 - 1e-3)
        self.counted.append((cell, hit, -math.log(chance if hit else 1 - chance)))
        super().count(cell, hit)


def _drafter(known: Counts) -> tuple[CombinedDrafter, Watched]:
    """A new drafter that begins with these counts."""
    watched = suffix.new_calibration(known, Watched)
    assert isinstance(watched, Watched)
    watched.counted = []
    drafter = SuffixDrafter()
    drafter._calibration = watched
    return CombinedDrafter([drafter]), watched


def _rows(path: Path) -> list[dict[str, Any]]:
    """Answers of two tokens and more, in an order in which categories take turns."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(rows)
    by_category: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if len(row["output"]) > 1:
            by_category[row["category"]].append(row)
    turns = [
        (place, category, row)
        for category, some in by_category.items()
        for place, row in enumerate(some)
    ]
    return [row for _, _, row in sorted(turns, key=lambda turn: turn[:2])]


def counts_of(paths: Sequence[Path], curve: str) -> Counts:
    """Hits and tries by cell."""
    hits: Counter[int] = Counter()
    tries: Counter[int] = Counter()
    for path in paths:
        drafter, watched = _drafter({})
        for row in _rows(path):
            _replay(row, drafter, _curve(curve), Counter())
        for cell, hit, _ in watched.counted:
            hits[cell] += hit
            tries[cell] += 1
    return {cell: (float(hits[cell]), float(tries[cell])) for cell in sorted(tries)}


def learn() -> None:
    """Replay recordings and write the counts of the suffix drafter's cells, all together."""
    parser = _parser("learn")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    cells = {}
    for cell, (hits, tries) in counts_of(arguments.recordings, arguments.curve).items():
        part = min(1.0, _MOST / tries)
        if tries >= _LEAST:
            cells[str(cell)] = [round(part * hits), round(part * tries)]
    document = {"version": VERSION, "suffix": {"num_cells": suffix.NUM_CELLS, "cells": cells}}
    arguments.out.write_text(json.dumps(document, separators=(",", ":")) + "\n", encoding="utf-8")
    print(f"{len(cells)} cells, {sum(tries for _, tries in cells.values())} tries")


def compare() -> None:
    """What counts of recordings are worth on one that is not among them, of another model.

    The mean log-loss of the probabilities, and the speed by replay, with nothing known and with
    the counts. Learn from prompts of `record`, compare on others.
    """
    parser = _parser("compare")
    parser.add_argument("--on", type=Path, required=True)
    parser.add_argument("--first", type=int, default=None)
    arguments = parser.parse_args()
    known = counts_of(arguments.recordings, arguments.curve)
    rows = _rows(arguments.on)[: arguments.first]
    for name, counts in (("nothing known", {}), ("with the counts", cautious(known))):
        drafter, watched = _drafter(counts)
        times = [_replay(row, drafter, _curve(arguments.curve), Counter()) for row in rows]
        ratios = sorted(plain / drafted for plain, drafted in times)
        plain_ms, drafted_ms = (sum(column) for column in zip(*times, strict=True))
        losses = [loss for _, _, loss in watched.counted]
        print(
            f"{name:<16} {len(rows)} answers: log-loss {sum(losses) / len(losses):.4f} of "
            f"{len(losses)}, speed {plain_ms / drafted_ms:.3f}, "
            f"a tenth of the answers below {ratios[len(ratios) // 10]:.3f}"
        )


def _parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(f"prior.py {command}")
    parser.add_argument("recordings", nargs="+", type=Path)
    parser.add_argument("--curve", default="cpu2-smollm2-q4_0-kernels")
    return parser


# -- record ----------------------------------------------------------------------------------

_BATCH = 128


@dataclass(slots=True)
class _Answer:
    """A prompt that is being answered in one sequence of the cache."""

    category: str
    prompt: list[int]
    sampler: Sampler
    output: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        return {"category": self.category, "prompt": self.prompt, "output": self.output}


class Recorder:
    """A model that writes several answers at a time."""

    def __init__(self, path: Path, at_once: int, threads: int, context: int) -> None:
        self._spec = read_model_spec(path)
        self._at_once, self._context_size = at_once, context
        settings = LlamaSettings(context * at_once, _BATCH, at_once, 1, threads, kernels=True)
        self._context = LlamaContext(settings)
        self._context.open(str(path), None, self._adjust)
        self._batch = Batch(self._context.lib, _BATCH, 1, None, self._context.width)

    def _adjust(self, params: Any) -> None:
        params.n_seq_max = self._at_once
        params.kv_unified = False  # no sequence walks over the cells of the others

    def encode(self, text: str) -> list[int]:
        """Token ids of one user message in the model's chat format."""
        tokenizer = self._context.tokenizer
        template, bos, eos = self._spec.chat_template, tokenizer.bos_text, tokenizer.eos_text
        return tokenizer.encode(prompt_text(text, template, bos_token=bos, eos_token=eos))

    def answers(
        self, prompts: Sequence[tuple[str, str]], max_tokens: int, sampling: SamplingParams
    ) -> Iterator[dict[str, Any]]:
        """A row for each prompt that is not too long, in the order in which answers end."""
        waiting = list(enumerate(prompts))[::-1]
        live: dict[int, _Answer] = {}
        while waiting or live:
            for place in set(range(self._at_once)) - live.keys():
                answer = self._next(waiting, max_tokens, sampling)
                if answer is not None:
                    self._read(place, answer)
                    live[place] = answer
            self._step(live)
            for place, answer in list(live.items()):
                last = answer.output[-1]
                if len(answer.output) >= max_tokens or self._context.tokenizer.is_end(last):
                    self._context.lib.llama_memory_seq_rm(self._context.memory, place, -1, -1)
                    yield live.pop(place).row()

    def _next(
        self,
        waiting: list[tuple[int, tuple[str, str]]],
        max_tokens: int,
        sampling: SamplingParams,
    ) -> _Answer | None:
        """An answer to the next prompt that fits."""
        tokenizer = self._context.tokenizer
        while waiting:
            number, (category, text) = waiting.pop()
            ids = self.encode(text)
            if len(ids) + max_tokens <= self._context_size:
                params = SamplingParams(temperature=sampling.temperature, seed=number)
                sampler = Sampler(params, tokenizer.vocab_size, ids, tokenizer.token_bytes)
                return _Answer(category, ids, sampler)
        return None

    def _read(self, place: int, answer: _Answer) -> None:
        """The prompt, and the first token of the answer."""
        for start in range(0, len(answer.prompt), _BATCH):
            piece = answer.prompt[start : start + _BATCH]
            count = len(piece)
            self._batch.put(0, piece)
            self._batch.positions[:count] = range(start, start + count)
            self._batch.ids[:count, 0] = place
            self._batch.outputs[:count] = 0
            self._batch.outputs[count - 1] = 1
            self._context.decode(self._batch, count)
        self._pick([answer])

    def _step(self, live: dict[int, _Answer]) -> None:
        """One more token of each."""
        for row, (place, answer) in enumerate(live.items()):
            self._batch.put(row, answer.output[-1:])
            self._batch.positions[row] = len(answer.prompt) + len(answer.output) - 1
            self._batch.ids[row, 0] = place
            self._batch.outputs[row] = 1
        if live:
            self._context.decode(self._batch, len(live))
            self._pick(list(live.values()))

    def _pick(self, answers: Sequence[_Answer]) -> None:
        rows = self._context.rows(len(answers))[:, : self._context.tokenizer.vocab_size]
        for answer, logits in zip(answers, rows, strict=True):
            answer.output.append(answer.sampler.pick(logits))

    def close(self) -> None:
        self._context.close()


def _prompts(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    if arguments.prompts is None:
        return prior_prompts(arguments.count, arguments.seed)
    lines = arguments.prompts.read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // arguments.count)
    questions = [json.loads(line) for line in lines[::step][: arguments.count]]
    return [(question["category"], question["turns"][0]) for question in questions]


def record() -> None:
    """Record a model's answers to many prompts at once: the text that drafts are counted on.

    Each line of the recording has `category`, `prompt` and `output` (token ids), as `replay.py`
    reads them. Answers share the model's steps, which makes them several times as fast as one by
    one; how they round plays no part for counts. Without `--prompts` they are made from texts that
    every Python installation has: passages are descriptions of installed packages and docstrings,
    code is functions of the standard library, and what people ask beside them comes from short
    lists. None of them are prompts of a benchmark.
    """
    parser = argparse.ArgumentParser("prior.py record")
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--context", type=int, default=2048, help="of a prompt and its answer")
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    recorder = Recorder(arguments.model, arguments.at_once, arguments.threads, arguments.context)
    start, tokens = perf_counter(), 0
    sampling = SamplingParams(temperature=arguments.temperature)
    with arguments.out.open("w", encoding="utf-8") as out:
        for row in recorder.answers(_prompts(arguments), arguments.max_tokens, sampling):
            out.write(json.dumps(row) + "\n")
            out.flush()
            tokens += len(row["output"])
    recorder.close()
    print(f"{tokens} tokens in {perf_counter() - start:.0f} s")


# -- prompts ----------------------------------------------------------------------------------

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


if __name__ == "__main__":
    run(__doc__, record=record, learn=learn, compare=compare)
