"""What files of one model get right: problems with numbers, and plain questions.

python benchmarks/tasks.py problems SOURCE.gguf FILE.gguf ... --data FOLDER --count 40
python benchmarks/tasks.py questions FILE.gguf ... [--kernels auto]
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from shared import run

import edgespec
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.prefix import common_prefix_length
from edgespec.setup.loading import load

# -- problems --------------------------------------------------------------------------------


_CONTEXT = 1024
_ANSWER = {"gsm8k": 200, "spec_bench": 96}  # tokens
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_problems(kind: str, folder: Path, count: int) -> list[dict[str, Any]]:
    """Some problems from all over a file of them."""
    lines = (folder / f"{kind}_dev.jsonl").read_text(encoding="utf-8").splitlines()
    step = max(1, len(lines) // count)
    return [json.loads(line) for line in lines[::step][:count]]


def ask(
    spec: ModelSpec, problems: dict[str, list[dict[str, Any]]], answers: dict[str, Any]
) -> dict[str, float]:
    """Both shares, of one file. Answers of the first file asked are left in `answers`."""
    right, shared = 0, []
    with load(spec.path, drafter="none", context_size=_CONTEXT) as engine:
        for problem in problems["gsm8k"]:
            result = engine.generate(problem["question"], max_tokens=_ANSWER["gsm8k"])
            right += last_number(result.text) == last_number(problem["answer"])
        for problem in problems["spec_bench"]:
            prompt = problem["turns"][0]
            if len(engine.encode(prompt)) > _CONTEXT - _ANSWER["spec_bench"] - 8:
                continue
            ids = engine.generate(prompt, max_tokens=_ANSWER["spec_bench"]).token_ids
            theirs = answers.setdefault(prompt, ids)
            same = common_prefix_length(ids, theirs)
            shared.append(1.0 if ids == theirs else same / max(1, len(theirs)))
    return {
        "gsm8k_exact": right / len(problems["gsm8k"]),
        "spec_bench_agreement": sum(shared) / max(1, len(shared)),
    }


def last_number(text: str) -> float | None:
    """The last number of a text, thousands separators removed; None without any."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def problems() -> None:
    """What files of one model get right: problems with numbers, and answers beside the source's.

    The folder holds `gsm8k_dev.jsonl` (`question`, `answer`) and `spec_bench_dev.jsonl`
    (`turns`). `gsm8k_exact` is the share of problems whose last number is right;
    `spec_bench_agreement` the share of the source's greedy answer that is the same up to where
    both part, over all prompts.
    """
    parser = argparse.ArgumentParser("tasks.py problems")
    parser.add_argument("files", type=Path, nargs="+", help="the source first")
    parser.add_argument("--data", type=Path, required=True, help="folder of both files")
    parser.add_argument("--count", type=int, default=40, help="problems of each kind")
    arguments = parser.parse_args()
    problems = {kind: read_problems(kind, arguments.data, arguments.count) for kind in _ANSWER}
    answers: dict[str, Any] = {}
    for file in arguments.files:
        found = ask(read_model_spec(file), problems, answers)
        print(json.dumps({"file": file.name, "count": arguments.count, **found}))


# -- questions -------------------------------------------------------------------------------


QUESTIONS = {
    "What is the capital of France?": "paris",
    "What is the capital of Italy?": "rome",
    "What is the capital of Japan?": "tokyo",
    "What is the capital of Germany?": "berlin",
    "What is the capital of Spain?": "madrid",
    "What is the capital of England?": "london",
    "What is the capital of Russia?": "moscow",
    "What is the capital of China?": "beijing",
    "What is the largest planet in our solar system?": "jupiter",
    "Which planet is known as the red planet?": "mars",
    "How many days are in a week?": r"\b7\b|seven",
    "How many months are in a year?": r"\b12\b|twelve",
    "What color is the sky on a clear day?": "blue",
    "What is the opposite of hot?": "cold",
    "What do bees make?": "honey",
    "What is the chemical formula of water?": "h2o|h₂o",
    "Who wrote Romeo and Juliet?": "shakespeare",
    "Who painted the Mona Lisa?": "leonardo|da vinci",
    "What is 2 + 2?": r"\b4\b|four",
    "What is the largest ocean on Earth?": "pacific",
    "What is the freezing point of water in degrees Celsius?": r"\b0\b|zero",
    "How many legs does a spider have?": r"\b8\b|eight",
    "What gas do plants absorb from the air?": "carbon dioxide|co2",
    "What is the tallest mountain in the world?": "everest",
}


def asked(path: str, kernels: str) -> tuple[int, float, str]:
    """Right answers, tokens/s, and the first answer."""
    right, tokens, seconds, first = 0, 0, 0.0, ""
    with edgespec.load(path, context_size=512, kernels=kernels, drafter="none") as engine:
        for question, answer in QUESTIONS.items():
            result = engine.generate(question, max_tokens=32)
            first = first or result.text
            right += re.search(answer, result.text.lower()) is not None
            tokens += len(result.token_ids) - 1
            seconds += result.counters.decode_s
    return right, tokens / seconds, " ".join(first.split())


def questions() -> None:
    """How many plain questions files of one model answer, and how fast they decode plainly.

    24 questions with short answers; an answer counts as right where the word stands in its
    first 32 tokens. Greedy, without drafts. Files are asked one after the other, not in turns:
    speeds say which is faster by a lot, and no more.
    """
    parser = argparse.ArgumentParser("tasks.py questions")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    print("| file | right | tokens/s | What is the capital of France? |\n| --- | --- | --- | --- |")
    for path in options.files:
        right, speed, first = asked(path, options.kernels)
        print(f"| {path} | {right} of {len(QUESTIONS)} | {speed:.0f} | {first[:40]} |", flush=True)


if __name__ == "__main__":
    run(__doc__, problems=problems, questions=questions)
