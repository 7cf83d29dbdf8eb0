"""What files of one model get right: problems with numbers, and answers beside the source's.

    python benchmarks/tasks.py SOURCE.gguf FILE.gguf ... --data FOLDER --count 40

The folder holds `gsm8k_dev.jsonl` (`question`, `answer`) and `spec_bench_dev.jsonl` (`turns`).
`gsm8k_exact` is the share of problems whose last number is right; `spec_bench_agreement` the share
of the source's greedy answer that is the same up to where both part, over all prompts.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.prefix import common_prefix_length
from edgespec.setup.loading import load

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="the source first")
    parser.add_argument("--data", type=Path, required=True, help="folder of both files")
    parser.add_argument("--count", type=int, default=40, help="problems of each kind")
    arguments = parser.parse_args()
    problems = {kind: read_problems(kind, arguments.data, arguments.count) for kind in _ANSWER}
    answers: dict[str, Any] = {}
    for file in arguments.files:
        found = ask(read_model_spec(file), problems, answers)
        print(json.dumps({"file": file.name, "count": arguments.count, **found}))


if __name__ == "__main__":
    main()
