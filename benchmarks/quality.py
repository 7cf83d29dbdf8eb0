"""What answers get right: files of one model, and two models in turns.

python benchmarks/quality.py problems SOURCE.gguf FILE.gguf ... --data FOLDER --count 40
python benchmarks/quality.py questions FILE.gguf ... [--kernels auto]
python benchmarks/quality.py turns LARGE SMALL --data gsm8k_dev.jsonl --problems 40
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from shared import run

import edgespec
from edgespec.bench.switch_calibration import Forecast, curves_of, forced_rows, sweep, trace_of
from edgespec.decode.generation import LARGE, SMALL
from edgespec.memory.device.host import cpu_name, usable_cores
from edgespec.memory.plan.options import KernelChoice
from edgespec.models.spec import ModelSpec, read_model_spec
from edgespec.prefix import common_prefix_length
from edgespec.setup.loading import load
from edgespec.switching.engine import SwitchingEngine, entropy_nats
from edgespec.switching.planning import Curves, SwitchPolicy

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
    parser = argparse.ArgumentParser("quality.py problems")
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


def asked(path: str, kernels: KernelChoice) -> tuple[int, float, str]:
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
    parser = argparse.ArgumentParser("quality.py questions")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--kernels", default="auto")
    options = parser.parse_args()
    print("| file | right | tokens/s | What is the capital of France? |\n| --- | --- | --- | --- |")
    for path in options.files:
        right, speed, first = asked(path, options.kernels)
        print(f"| {path} | {right} of {len(QUESTIONS)} | {speed:.0f} | {first[:40]} |", flush=True)


# -- turns -----------------------------------------------------------------------------------


Asked = tuple[Sequence[int], Sequence[int]]  # token ids of a prompt and of an answer


class Setting:
    """What was measured under one policy."""

    def __init__(self, expected: Forecast) -> None:
        self.policy, self.expected = expected.policy, expected
        self.answers = self.right = 0
        self.tokens = self.large = self.agreeing = self.switches = 0
        self.log_probability = 0.0
        self.decoded = 0  # tokens in `decode_s`
        self.decode_s = self.host_s = 0.0
        self.drafted_s, self.drafted = 0.0, 0

    def add(self, result: edgespec.Result) -> None:
        """Count an answer without drafts."""
        counters = result.counters
        self.answers += 1
        self.tokens += len(result.token_ids)
        self.large += round(result.large_share * len(result.token_ids))
        self.switches += counters.switches
        self.decoded += len(result.token_ids) - 1
        self.decode_s += counters.decode_s
        self.host_s += counters.decode_s - counters.step_s - counters.catch_up_s

    def add_drafted(self, result: edgespec.Result) -> None:
        """Count an answer with drafts."""
        self.drafted += len(result.token_ids) - 1
        self.drafted_s += result.counters.decode_s

    def row(self, ends: tuple[float, float]) -> dict[str, Any]:
        """All numbers; `ends` are the agreement of the small model alone and of the large one."""
        agreement = self.agreeing / self.tokens
        small, large = ends
        return {
            **self.policy.as_json(),
            "large_share": self.large / self.tokens,
            "expected_large_share": self.expected.large_share,
            "exact_match": self.right / self.answers,
            "agreement": agreement,
            "expected_quality": self.expected.quality,
            "quality": (agreement - small) / (large - small) if large > small else 1.0,
            "perplexity": float(np.exp(-self.log_probability / self.tokens)),
            "switches_per_token": self.switches / self.tokens,
            "tokens_per_s": self.decoded / self.decode_s,
            "drafted_tokens_per_s": self.drafted / self.drafted_s if self.drafted_s else None,
            "expected_tokens_per_s": 1e3 / self.expected.ms_per_token,
            "host_share": self.host_s / self.decode_s,
            "tokens": self.tokens,
        }


def turns() -> None:
    """Two models in turns: quality against speed, from the small one alone to the large one alone.

    Problems with short numeric answers, greedy, in chat format. The last problems of the file are
    read first, to choose thresholds; then each of the first ones is answered under every setting,
    in an order that changes from problem to problem. By setting:

    * large: share of the tokens that the large model wrote; `expected` is what was forecast
    * exact: answers whose last number is the right one
    * agree: tokens that are the large model's best at their place; `kept` is the part of the
      distance from the small model's agreement to the large one's
    * ppl: perplexity of the text under the large model
    * t/s: decoding without drafts; `drafted` with suffix drafts on both sides
    * host: part of the time outside both models' steps

    `found` says how good a decision could be that needs no stays and no means: of the tokens where
    the two models differ, along the texts of either, the part among the 40% that come first by a
    reading of the small model's row, and the part of all tokens that has 90% of them. The last
    lines are the same pair used losslessly: the small model drafts for the large one.
    """
    arguments = _arguments()
    problems = [json.loads(line) for line in Path(arguments.data).read_text().splitlines()]
    asked, calibrating = problems[: arguments.problems], problems[-arguments.calibrating :]
    options = {"context_size": 1024, "backend": "llamacpp", "threads": arguments.threads}
    engine = edgespec.load(arguments.large, switch=arguments.small, **options)
    assert isinstance(engine, SwitchingEngine)
    with engine:
        settings = _settings(engine, curves_of(engine), calibrating, arguments)
        identical, texts = _run(engine, settings, asked, arguments)
        found = _found(engine, texts, arguments.large_share)
    asked = asked[: settings[0].answers]
    lossless = _lossless(arguments, asked[:: arguments.drafted_every], options)
    document = {
        "large": Path(arguments.large).name,
        "small": Path(arguments.small).name,
        "machine": f"{usable_cores()} cores of {cpu_name()}",
        "problems": len(asked),
        "max_tokens": arguments.max_tokens,
        "identical_at_the_ends": identical,
        "points": _rows(settings),
        "found": found,
        "lossless": lossless,
    }
    print(_table(document))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("quality.py turns")
    parser.add_argument("large")
    parser.add_argument("small")
    data = os.environ.get("EDGESPEC_DATA")
    parser.add_argument(
        "--data",
        default=data and str(Path(data) / "gsm8k_dev.jsonl"),
        required=data is None,
        help="JSON lines with `question` and `answer`; EDGESPEC_DATA names a folder of them",
    )
    parser.add_argument("--problems", type=int, default=40)
    parser.add_argument("--calibrating", type=int, default=10, help="problems to set thresholds by")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--settings", type=int, default=10)
    parser.add_argument("--large-share", type=float, default=0.4, help="of the tokens, for `found`")
    parser.add_argument("--seconds", type=float, default=1e9, help="ask no more after this")
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--drafted-every", type=int, default=1, metavar="K", help="answer each Kth with drafts too"
    )
    parser.add_argument("--json", metavar="OUT")
    return parser.parse_args()


def _settings(
    engine: SwitchingEngine,
    curves: Curves,
    problems: Sequence[dict[str, str]],
    arguments: argparse.Namespace,
) -> list[Setting]:
    """Policies from one model alone to the other, by equal shares of the calibrating problems."""
    traces = []
    for problem in problems:
        ids = engine.encode(problem["question"])
        for model in (LARGE, SMALL):
            engine.policy = SwitchPolicy.always(model)
            text = engine.generate(ids, max_tokens=arguments.max_tokens).token_ids
            traces.append(trace_of(engine, ids, text))
    return [Setting(found) for found in sweep(traces, curves, arguments.settings)]


def _run(
    engine: SwitchingEngine,
    settings: Sequence[Setting],
    problems: Sequence[dict[str, str]],
    arguments: argparse.Namespace,
) -> tuple[dict[str, int], list[Asked]]:
    """Answer all problems; how many answers of the ends are those of the models on their own.

    With the texts that the ends wrote.
    """
    most = arguments.max_tokens
    identical = {LARGE: 0, SMALL: 0}
    written: list[Asked] = []
    deadline = perf_counter() + arguments.seconds
    for number, problem in enumerate(problems):
        if perf_counter() > deadline:
            break
        ids = engine.encode(problem["question"])
        first = number % len(settings)
        texts: dict[int, tuple[int, ...]] = {}
        for place in [*range(first, len(settings)), *range(first)]:
            setting = settings[place]
            engine.policy = setting.policy
            result = engine.generate(ids, max_tokens=most, speculate=False)
            setting.add(result)
            if number % arguments.drafted_every == 0:
                setting.add_drafted(engine.generate(ids, max_tokens=most))
            setting.right += last_number(result.text) == last_number(problem["answer"])
            for agrees, log_probability in _judged(engine, ids, result.token_ids):
                setting.agreeing += agrees
                setting.log_probability += log_probability
            texts[place] = result.token_ids
        alone = engine.small.generate(ids, max_tokens=most, speculate=False).token_ids
        identical[SMALL] += alone == texts[0]
        # The engine that both live in, without its way of taking turns.
        alone = edgespec.Engine(engine.backend).generate(ids, max_tokens=most).token_ids
        identical[LARGE] += alone == texts[len(settings) - 1]
        written += [(ids, texts[0]), (ids, texts[len(settings) - 1])]
        if (number + 1) % 5 == 0:
            print(f"{number + 1}/{len(problems)} problems", file=sys.stderr, flush=True)
    return identical, written


def _found(engine: SwitchingEngine, texts: Sequence[Asked], part: float) -> dict[str, Any]:
    """By reading of the small model's row: disagreements found, and tokens that 90% of them take.

    What the best decision by that reading alone could do, were every token decided for itself.
    """
    readings: dict[str, list[float]] = defaultdict(list)
    differs: list[bool] = []
    for ids, text in texts:
        best = [int(row.argmax()) for row in forced_rows(engine.backend, ids, text)]
        rows = forced_rows(engine.small.backend, ids, text)
        for theirs, row in zip(best, rows, strict=True):
            first, second = np.partition(row, -2)[:-3:-1]
            total = float(np.exp(row - first).sum())
            readings["entropy"].append(entropy_nats(row))
            readings["gap of logits"].append(float(second - first))
            readings["gap of probabilities"].append((float(np.exp(second - first)) - 1.0) / total)
            differs.append(int(row.argmax()) != theirs)
    wrong, found = np.array(differs), {}
    for name, values in readings.items():
        met = np.cumsum(wrong[np.argsort(-np.array(values), kind="stable")]) / max(1, wrong.sum())
        needed = int(np.searchsorted(met, 0.9)) + 1
        found[name] = {
            "share": float(met[round(part * len(met)) - 1]),
            "tokens_for_90_percent": needed / len(met),
        }
    return {"places": len(wrong), "differ": int(wrong.sum()), "large_share": part, "by": found}


def _judged(
    engine: SwitchingEngine, ids: Sequence[int], text: Sequence[int]
) -> Iterator[tuple[bool, float]]:
    """By token: whether it is the large model's best, and its log-probability there."""
    for row, token in zip(forced_rows(engine.backend, ids, text), text, strict=True):
        best = float(row.max())
        total = float(np.exp(row - best).sum())
        yield int(row.argmax()) == token, float(row[token]) - best - float(np.log(total))


def _lossless(
    arguments: argparse.Namespace, problems: Sequence[dict[str, str]], options: dict[str, Any]
) -> dict[str, float]:
    """Tokens/s of the large model, plain and with what drafts for it, in turn on every problem."""
    spent: dict[str, float] = defaultdict(float)
    tokens: dict[str, int] = defaultdict(int)
    asked = 0
    engine = edgespec.load(arguments.large, draft_model=arguments.small, **options)
    with engine:
        for number, problem in enumerate(problems):
            ids = engine.encode(problem["question"])
            ways = (("plain", False), ("suffix,model", True))
            for name, speculate in ways[:: 1 if number % 2 else -1]:
                result = engine.generate(ids, max_tokens=arguments.max_tokens, speculate=speculate)
                spent[name] += result.counters.decode_s
                tokens[name] += len(result.token_ids) - 1
                asked += result.counters.drafted_by.get("model", 0)
    return {
        "plain_tokens_per_s": tokens["plain"] / spent["plain"],
        "drafting_tokens_per_s": tokens["suffix,model"] / spent["suffix,model"],
        "tokens_drafted_by_the_model": asked,
    }


def _rows(settings: Sequence[Setting]) -> list[dict[str, Any]]:
    small, large = settings[0], settings[-1]
    ends = (small.agreeing / small.tokens, large.agreeing / large.tokens)
    return [setting.row(ends) for setting in settings]


def _table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['large']} and {document['small']}, {document['problems']} problems, "
        f"{document['machine']}",
        "large expected  exact  agree   kept    ppl    t/s drafted expected   host",
    ]
    for row in document["points"]:
        drafted = row["drafted_tokens_per_s"]
        lines.append(
            f"{row['large_share']:>5.0%} {row['expected_large_share']:>8.0%} "
            f"{row['exact_match']:>6.1%} {row['agreement']:>6.1%} {row['quality']:>6.1%} "
            f"{row['perplexity']:>6.3f} {row['tokens_per_s']:>6.1f} "
            f"{drafted or 0:>7.1f} {row['expected_tokens_per_s']:>8.1f} "
            f"{row['host_share']:>6.2%}"
        )
    same, lossless = document["identical_at_the_ends"], document["lossless"]
    lines.append(
        f"identical to the models alone: small {same[SMALL]}, large {same[LARGE]} of "
        f"{document['problems']}"
    )
    found = document["found"]
    lines.append(
        f"found: the models differ at {found['differ']} of {found['places']} places; "
        + ", ".join(
            f"by {name} {one['share']:.0%} of these are among {found['large_share']:.0%} of all, "
            f"90% among {one['tokens_for_90_percent']:.0%}"
            for name, one in found["by"].items()
        )
    )
    lines.append(
        f"losslessly: plain {lossless['plain_tokens_per_s']:.1f} t/s, the small model drafting "
        f"where it pays {lossless['drafting_tokens_per_s']:.1f} t/s "
        f"({lossless['tokens_drafted_by_the_model']} tokens drafted by it)"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    run(__doc__, problems=problems, questions=questions, turns=turns)
